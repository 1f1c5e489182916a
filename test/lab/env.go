package lab

import (
	"context"
	"os"
	"os/exec"
	"testing"
	"time"
)

// labEnv is the environment variable that selects how much of the lab a test run uses. With "0" the
// tests that need a guest are skipped. With "1" these tests fail if the lab cannot run. With "all"
// they also run the cases that a routine run omits. Without it they skip if there are no images.
const labEnv = "NFSRDMAD_LAB"

// SkipIfDisabled skips or fails a test as Start does, if virtual machines are disabled or have no
// image. A test calls it before it does other work.
func SkipIfDisabled(t testing.TB) {
	t.Helper()
	requireImage(t, Kernels[0])
}

// FullRun reports whether the tests should cover every kernel and every device, however long this
// takes.
func FullRun() bool { return os.Getenv(labEnv) == "all" }

// TestedKernels returns the kernels to test on: the newest, or all of them in a full run.
func TestedKernels() []string {
	if FullRun() {
		return Kernels
	}
	return Kernels[:1]
}

// skipOrFail skips a test for want of err's object, or fails it if labEnv requires the lab.
func skipOrFail(t testing.TB, err error) {
	t.Helper()
	if want := os.Getenv(labEnv); want == "1" || want == "all" {
		t.Fatal(err)
	}
	t.Skipf("THE LAB DID NOT RUN: %v", err)
}

// rdmaHeader is a header that the build of the rdma-core provider needs.
const rdmaHeader = "/usr/include/rdma/rdma_cma.h"

// buildLimit bounds a build; it is far longer than a build takes.
const buildLimit = 10 * time.Minute

// BuildRDMA runs the go command "build" or "test" with the rdma-core provider. The resulting
// program needs the libraries of the guest in which it runs.
func BuildRDMA(t testing.TB, command string, args ...string) {
	t.Helper()
	if _, err := os.Stat(rdmaHeader); err != nil {
		skipOrFail(t, err) // "make deps" installs libibverbs-dev and librdmacm-dev
	}
	goCommand(t, "CGO_ENABLED=1", append([]string{command, "-tags", "rdmacore"}, args...)...)
}

// BuildPure runs a go command without cgo. The resulting program needs nothing of its guest.
func BuildPure(t testing.TB, command string, args ...string) {
	t.Helper()
	goCommand(t, "CGO_ENABLED=0", append([]string{command}, args...)...)
}

func goCommand(t testing.TB, env string, args ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), buildLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Env = append(os.Environ(), env)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", cmd.Args, err, out)
	}
}
