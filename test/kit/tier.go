package kit

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"testing"

	"go.uber.org/goleak"
)

// Tests belong to one of two tiers:
//
//   - "make check" runs go test -short. The tier promises only Go: no root, no FUSE, no
//     Debian packages.
//   - "make test" promises root, /dev/fuse and the Debian packages that the Makefile installs.
//
// A test that needs more than Go calls one of the functions below. With -short the test is skipped,
// because it belongs to the other tier. Without -short the test fails if something is missing: a
// skip would hide that it did not run.

// NeedsRoot marks a test that needs root privileges.
func NeedsRoot(tb testing.TB) {
	tb.Helper()
	inTestTier(tb)
	if os.Geteuid() != 0 {
		tb.Fatal("this test needs root; run make test as root, or make check without it")
	}
}

// NeedsFUSE marks a test that mounts a file system: it needs root and /dev/fuse.
func NeedsFUSE(tb testing.TB) {
	tb.Helper()
	NeedsRoot(tb)
	if _, err := os.Stat("/dev/fuse"); err != nil {
		tb.Fatalf("this test needs FUSE: %v; run modprobe fuse", err)
	}
}

// NeedsPrograms marks a test that runs programs of Debian packages.
func NeedsPrograms(tb testing.TB, names ...string) {
	tb.Helper()
	inTestTier(tb)
	for _, name := range names {
		if _, err := exec.LookPath(name); err != nil {
			tb.Fatalf("this test needs %s: %v; run make deps", name, err)
		}
	}
}

// Long marks a test that takes more than a few seconds.
func Long(tb testing.TB) {
	tb.Helper()
	inTestTier(tb)
}

// CountsAllocations marks a test that compares the allocations of a call with a number. Such a test
// is skipped under the race detector, with which sync.Pool drops items at random. `make test` also
// runs these tests without it.
func CountsAllocations(tb testing.TB) {
	tb.Helper()
	if Race {
		tb.Skip("sync.Pool drops items at random under the race detector; run without -race")
	}
}

// Allocations returns the allocations of f, as testing.AllocsPerRun. It repeats the measurement
// while other goroutines of the process, for example timers, may have added to it.
func Allocations(runs int, f func(), want float64) (n float64) {
	for range allocationTries {
		if n = testing.AllocsPerRun(runs, f); n <= want {
			break
		}
	}
	return n
}

const allocationTries = 5

// MainNeedsRoot is [Main] for packages whose tests all need root. With -short it runs no test.
func MainNeedsRoot(m *testing.M, opts ...goleak.Option) {
	flag.Parse()
	if testing.Short() {
		return
	}
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "the tests of this package need root; run make test as root, or make check without it")
		os.Exit(1)
	}
	Main(m, opts...)
}

func inTestTier(tb testing.TB) {
	tb.Helper()
	if testing.Short() {
		tb.Skip("belongs to make test")
	}
}
