package selfcheck

import (
	"fmt"
	"os"
	"sync/atomic"
)

// The environment variable Env with the value All turns the checks on.
const (
	Env = "NFSRDMAD_VERIFY"
	All = "all"
)

var on atomic.Bool

func init() { on.Store(os.Getenv(Env) == All) }

// On reports whether the checks are on. On is one atomic load, so a hot path may call it.
func On() bool { return on.Load() }

// Enable turns the checks on in this process and in processes that it starts later.
func Enable() {
	on.Store(true)
	os.Setenv(Env, All)
}

// Failf panics with a description of the broken invariant.
func Failf(format string, args ...any) {
	panic("invariant broken: " + fmt.Sprintf(format, args...))
}
