package rdmacore

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

// headers are what the provider is built from; a host without them cannot build it.
var headers = []string{"/usr/include/infiniband/verbs.h", "/usr/include/rdma/rdma_cma.h"}

const (
	// guestAddr is a guest's own address.
	guestAddr = "10.0.2.15"
	// runLimit is how long one test program may run in the guest.
	runLimit = 12 * time.Minute
)

// A target is a device of the kernel's, and the rules of the conformance suite that it breaks by itself, whoever uses it. Each was seen with the
// stock kernels of the lab; none can be made good from a program.
type target struct {
	provider string
	broken   []string
}

var targets = []target{
	{lab.RXE, []string{
		// A window that is not bound is invalidated through a nil pointer, and the kernel panics, also when it is the peer that asks.
		"TestConformance/BadRemoteInvalidate$",
		// The peer's Send With Invalidate may name any window.
		"TestConformance/SharedPDOtherKey/SendWithInv",
		// A window lets the peer reach all of the region that it is bound to: its own bounds are not looked at.
		"TestConformance/AccessRefused/(write,_behind|write,_before|write,_over_the_end|read,_over_the_end|read,_before)$",
		// A Read that was begun goes on when its window is invalidated.
		"TestConformance/ReadFence$",
	}},
	{lab.SIW, []string{
		// A message of a few octets across a page boundary arrives changed.
		"TestConformance/ReadSizes$",
		// A Read without the right is neither answered nor refused.
		"TestConformance/AccessRefused/(read,_no_right|read,_local_right_alone)$",
		// Deregistration does not wait for what is being placed or sent.
		"TestConformance/(LocalInvFences|DeregFences|ReadFence)$",
	}},
}

// build compiles the test program of a package into dir.
func build(t *testing.T, dir, name, pkg string) {
	t.Helper()
	for _, h := range headers {
		if _, err := os.Stat(h); err != nil {
			if os.Getenv("NFSRDMAD_LAB") == "1" {
				t.Fatalf("%v; install libibverbs-dev and librdmacm-dev (make deps)", err)
			}
			t.Skipf("THE LAB DID NOT RUN: %v; install libibverbs-dev and librdmacm-dev", err)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "go", "test", "-c", "-tags", "rdmacore", "-o", filepath.Join(dir, name), pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", cmd.Args, err, out)
	}
}

// TestDevices runs the conformance suite, the main job and the storm on each device.
func TestDevices(t *testing.T) {
	if os.Getenv("NFSRDMAD_LAB") == "0" {
		t.Skip("no virtual machines are wanted: NFSRDMAD_LAB=0")
	}
	dir := t.TempDir()
	build(t, dir, "provider.test", "github.com/nfsrdmad/nfsrdmad/pkg/verbs/rdmacore")
	build(t, dir, "mount.test", "github.com/nfsrdmad/nfsrdmad/test/lab/rdmacore")
	for _, c := range targets {
		t.Run(c.provider, func(t *testing.T) {
			g := lab.Start(t, lab.Options{Provider: c.provider, Share: dir})
			run := func(name, command string) {
				t.Run(name, func(t *testing.T) {
					out, err := g.RunFor("cd /tmp && "+command+" 2>&1", runLimit)
					if err != nil {
						t.Errorf("%v\n%s", err, out)
						return
					}
					t.Logf("%s", out)
				})
			}
			// The mount first: the suite leaves devices as it finds them, but not their kernels.
			run("mount", "NFSRDMAD_RDMACORE_GUEST="+guestAddr+" /share/mount.test -test.v -test.run 'TestMainJob|TestStorm'")
			run("conformance", "NFSRDMAD_RDMACORE_ADDR="+guestAddr+":0 /share/provider.test -test.v -test.run 'TestConformance|TestDevices' -test.skip '"+strings.Join(c.broken, "|")+"'")
		})
	}
}
