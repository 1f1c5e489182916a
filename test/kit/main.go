// Package kit holds what the tests of several packages share. No production
// package imports it.
package kit

import (
	"fmt"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/nfsrdmad/nfsrdmad/internal/selfcheck"
)

// Main runs the tests of a package and exits. Main fails when a goroutine, a file descriptor, or a
// resource that selfcheck tracks (MR, QP, CQ, PD, slot, buffer, connection) remains after the
// tests. Main also turns the invariant checks of package verify on.
func Main(m *testing.M, opts ...goleak.Option) {
	selfcheck.Enable()
	before := openDescriptors()
	code := m.Run()
	if code == 0 {
		code = checkLeaks(before, opts, leakTimeout)
	}
	os.Exit(code)
}

// leakTimeout is how long checkLeaks waits for goroutines to end. On a busy host that takes a
// while, and the runtime closes their descriptors a little later.
const leakTimeout = 30 * time.Second

func checkLeaks(fdsBefore int, opts []goleak.Option, timeout time.Duration) int {
	for deadline := time.Now().Add(timeout); ; time.Sleep(20 * time.Millisecond) {
		goroutines, resources, fds := goleak.Find(opts...), selfcheck.Leaks(), openDescriptors()
		if goroutines == nil && resources == "" && fds <= fdsBefore {
			return 0
		}
		if time.Now().Before(deadline) {
			continue
		}
		if goroutines != nil {
			fmt.Fprintln(os.Stderr, "leak check:", goroutines)
		}
		if resources != "" {
			fmt.Fprintln(os.Stderr, "leak check: not released by the tests:", resources)
		}
		if fds > fdsBefore {
			fmt.Fprintf(os.Stderr, "leak check: %d descriptors open, %d before the tests\n", fds, fdsBefore)
		}
		return 1
	}
}

// openDescriptors counts the open descriptors, except those of the runtime's poller, which the
// runtime never closes.
func openDescriptors() int {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0
	}
	n := 0
	for _, e := range entries {
		target, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err != nil || target == "anon_inode:[eventpoll]" || target == "anon_inode:[eventfd]" {
			continue
		}
		n++
	}
	return n
}
