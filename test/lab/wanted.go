package lab

import (
	"context"
	"os"
	"os/exec"
	"testing"
	"time"
)

// wantEnv is the environment variable that says how much of the lab is wanted: "0" makes tests skip
// everywhere, "1" makes them fail where it cannot run, and "all" has them run what a routine run
// leaves out, too. Otherwise they skip where there are no images.
const wantEnv = "NFSRDMAD_LAB"

// SkipUnwanted skips a test where no virtual machines are wanted. Start does it by itself.
func SkipUnwanted(t testing.TB) {
	t.Helper()
	if os.Getenv(wantEnv) == "0" {
		t.Skipf("no virtual machines are wanted: %s=0", wantEnv)
	}
}

// Whole reports whether everything is to be run, on every kernel and every device, whatever time it
// takes.
func Whole() bool { return os.Getenv(wantEnv) == "all" }

// Tested are the kernels to test on: the newest, or all.
func Tested() []string {
	if Whole() {
		return Kernels
	}
	return Kernels[:1]
}

// missing skips a test that the lab has not what it needs for, or fails it where the lab is wanted.
func missing(t testing.TB, err error) {
	t.Helper()
	if want := os.Getenv(wantEnv); want == "1" || want == "all" {
		t.Fatal(err)
	}
	t.Skipf("THE LAB DID NOT RUN: %v", err)
}

// rdmaHeader is what the rdma-core provider is built from; a host without it cannot build it.
const rdmaHeader = "/usr/include/rdma/rdma_cma.h"

// buildLimit is far above what a build takes.
const buildLimit = 10 * time.Minute

// BuildRDMA runs a command of go, "build" or "test", with the rdma-core provider. What it makes
// needs the libraries of its guest.
func BuildRDMA(t testing.TB, command string, args ...string) {
	t.Helper()
	if _, err := os.Stat(rdmaHeader); err != nil {
		missing(t, err) // libibverbs-dev and librdmacm-dev, of "make deps"
	}
	goCommand(t, "CGO_ENABLED=1", append([]string{command, "-tags", "rdmacore"}, args...)...)
}

// BuildPure runs a command of go without cgo. What it makes needs nothing of its guest.
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
