// Package testutil holds what the tests of several packages share. No production
// package imports it.
package testutil

import (
	"fmt"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/nfsrdmad/nfsrdmad/internal/leakcheck"
	"github.com/nfsrdmad/nfsrdmad/internal/verify"
)

// Main runs the tests of a package and fails when a goroutine, a file descriptor, or any resource
// that verbs tracks (MR, QP, CQ, PD, slot, buffer, connection) is left at their end.
func Main(m *testing.M, opts ...goleak.Option) {
	verify.Enable()
	before := openDescriptors()
	code := m.Run()
	if code == 0 {
		code = checkLeaks(before, opts, leakTimeout)
	}
	os.Exit(code)
}

// leakTimeout is what is left gets to end: on a busy host goroutines take their time, and the
// runtime closes their descriptors a little later.
const leakTimeout = 30 * time.Second

func checkLeaks(fdsBefore int, opts []goleak.Option, timeout time.Duration) int {
	for over := time.Now().Add(timeout); ; time.Sleep(20 * time.Millisecond) {
		goroutines, left, fds := goleak.Find(opts...), leakcheck.Report(), openDescriptors()
		if goroutines == nil && left == "" && fds <= fdsBefore {
			return 0
		}
		if time.Now().Before(over) {
			continue
		}
		if goroutines != nil {
			fmt.Fprintln(os.Stderr, "leak check:", goroutines)
		}
		if left != "" {
			fmt.Fprintln(os.Stderr, "leak check: left at the end of the tests:", left)
		}
		if fds > fdsBefore {
			fmt.Fprintf(os.Stderr, "leak check: %d descriptors open, %d before the tests\n", fds, fdsBefore)
		}
		return 1
	}
}

// openDescriptors counts descriptors other than the poller's own, which the runtime opens once and
// keeps.
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
