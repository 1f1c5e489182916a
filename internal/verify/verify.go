// Package verify is the switch of the invariant checks: NFSRDMAD_VERIFY=all turns them on in a
// daemon, and every test main turns them on. A breach stops the process where it is seen: after it
// nothing that the daemon says about its memory could be trusted.
package verify

import (
	"fmt"
	"os"
	"sync/atomic"
)

// Env is the variable that turns the checks on, All the value that does it.
const (
	Env = "NFSRDMAD_VERIFY"
	All = "all"
)

var on atomic.Bool

func init() { on.Store(os.Getenv(Env) == All) }

// On reports whether the checks are on. Cheap enough for the hot path.
func On() bool { return on.Load() }

// Enable turns the checks on, here and in processes started from here.
func Enable() {
	on.Store(true)
	os.Setenv(Env, All)
}

// Failf reports a broken invariant. It does not return.
func Failf(format string, args ...any) {
	panic("invariant broken: " + fmt.Sprintf(format, args...))
}
