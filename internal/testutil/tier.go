package testutil

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
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

// NeedsURing marks a test that uses FUSE over io_uring. `make test` switches it on where the kernel
// has it. On other kernels the test is skipped.
func NeedsURing(tb testing.TB) {
	tb.Helper()
	NeedsFUSE(tb)
	const parameter = "/sys/module/fuse/parameters/enable_uring"
	b, err := os.ReadFile(parameter)
	switch {
	case errors.Is(err, os.ErrNotExist):
		tb.Skip("the kernel has no FUSE over io_uring; use Linux 6.14 or later")
	case err != nil:
		tb.Fatal(err)
	case b[0] != 'Y' && unix.Access(parameter, unix.W_OK) == unix.EROFS:
		tb.Skip("FUSE over io_uring is off, and /sys is read-only")
	case b[0] != 'Y':
		tb.Fatalf("FUSE over io_uring is off; run make test, or write Y to %s", parameter)
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
