package rdmacore

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

// cutLengths are the durations for which the link is cut, and cutPause is the pause before each
// cut. cutsWanted is the minimum number of cuts during the storm, one of each duration.
var cutLengths = []time.Duration{300 * time.Millisecond, 10 * time.Second, 300 * time.Millisecond, 10 * time.Second}

const (
	cutPause   = 300 * time.Millisecond
	cutsWanted = 2
)

const (
	// guestAddr is the address of a guest that is on no link.
	guestAddr = "10.0.2.15"
	// wireReady is a file that the server's guest creates when it is ready for TestWire.
	wireReady = "/share/wire-ready"
	// runLimit bounds one test program in the guest.
	runLimit = 12 * time.Minute
)

// A target is a soft device of the kernel, and the rules of the conformance suite that it breaks
// whatever the provider does. All of them were seen with the stock kernels of the lab; no program
// can correct them.
type target struct {
	provider string
	broken   []string
	// skipped are all tests and subtests that skip because the device lacks a capability.
	skipped []string
}

var targets = []target{
	{lab.RXE, []string{
		// Invalidating an unbound window, locally or by the peer, dereferences a nil pointer, and
		// the kernel panics.
		"TestConformance/BadRemoteInvalidate$",
		// The kernel accepts any window in the peer's Send With Invalidate.
		"TestConformance/SharedPDOtherKey/SendWithInv",
		// The device does not check the bounds of a window: the peer can access the complete
		// region.
		"TestConformance/AccessRefused/" +
			"(write,_after_the_end|write,_before|write,_across_the_end|read,_across_the_end|read,_before)$",
		// A pending Read continues after the invalidation of its window, and the data of an
		// accepted Write packet is placed after it.
		"TestConformance/(LocalInvFences|DeregFences|ReadFence)$",
	}, []string{
		"TestAttacks/invalidation_of_a_key_of_another_connection",
		"TestAttacks/overlong_read,_in_time", "TestAttacks/write_beyond_the_end,_in_time",
		"TestConformance/ForeignResources", "TestConformance/Gaps",
	}},
	{lab.SIW, []string{
		// A message of a few bytes that crosses a page boundary arrives corrupted.
		"TestConformance/ReadSizes$",
		// A Read without the access right is neither answered nor refused.
		"TestConformance/AccessRefused/(read,_no_right|read,_local_right_alone)$",
		// Deregistration does not wait for data that is being placed or sent.
		"TestConformance/(LocalInvFences|DeregFences|ReadFence)$",
	}, []string{
		"TestAttacks/read_of_a_write_chunk,_in_time", "TestWire/refused/read,_no_right",
		"TestConformance/BadRemoteInvalidate", "TestConformance/ForeignResources",
		"TestConformance/Gaps", "TestConformance/STags",
		"TestConformance/SendWithInvalidate", "TestConformance/SharedPDOtherKey",
	}},
}

var skipLine = regexp.MustCompile(`--- SKIP: (\S+) \(`)

// build compiles the test program of a package into dir.
func build(t *testing.T, dir, name, pkg string) {
	t.Helper()
	lab.BuildRDMA(t, "test", "-c", "-o", filepath.Join(dir, name), pkg)
}

// TestDevices runs the main job and the storm on each device, against the guest's own server and
// another guest's. It also runs the conformance suite, which has both ends in one process.
func TestDevices(t *testing.T) {
	lab.SkipIfDisabled(t)
	dir := t.TempDir()
	build(t, dir, "provider.test", "github.com/nfsrdmad/nfsrdmad/pkg/verbs/rdmacore")
	build(t, dir, "mount.test", "github.com/nfsrdmad/nfsrdmad/test/lab/rdmacore")
	for _, kernel := range lab.TestedKernels() {
		for _, c := range targets {
			t.Run(kernel+"-"+c.provider, func(t *testing.T) { testDevice(t, kernel, c, dir) })
		}
	}
}

func testDevice(t *testing.T, kernel string, c target, dir string) {
	os.Remove(filepath.Join(dir, filepath.Base(wireReady))) // left by the previous device
	link := lab.NewLink(t)
	guests := lab.StartAll(t,
		lab.Options{Name: "client", Kernel: kernel, Provider: c.provider, Link: link, Share: dir},
		lab.Options{Name: "server", Kernel: kernel, Provider: c.provider, Link: link, Share: dir, CPUs: 1})
	client, server := guests[0], guests[1]
	own, other := fmt.Sprintf("NFSRDMAD_RDMACORE_GUEST=%v ", client.Linked), fmt.Sprintf(
		"NFSRDMAD_RDMACORE_GUEST=%v ", server.Linked)
	var parts atomic.Int32 // subtests that ran
	var skips sync.Map     // names of skipped tests
	// run runs a command in a guest, which runs these tests. All of them must pass, and only the
	// skips that are known for the device are permitted.
	run := func(t *testing.T, g *lab.Guest, command string, tests ...string) {
		t.Helper()
		out, err := g.RunFor("cd /tmp && "+command+" 2>&1", runLimit)
		if err != nil {
			t.Errorf("%v\n%s", err, out)
			return
		}
		t.Logf("%s", out)
		for _, skip := range skipLine.FindAllStringSubmatch(out, -1) {
			skips.Store(skip[1], true)
			if !slices.Contains(c.skipped, skip[1]) {
				t.Errorf("got unexpected skip of %s", skip[1])
			}
		}
		for _, name := range tests {
			if !strings.Contains(out, "--- PASS: "+name+" (") {
				t.Errorf("guest did not report that %s passed", name)
			}
		}
	}
	program := func(name, skip string, tests ...string) string {
		return "/share/" + name + " -test.v -test.run '^(" + strings.Join(tests, "|") + ")$' -test.skip '" + skip + "'"
	}
	mounts := func(t *testing.T, env string, tests ...string) {
		t.Helper()
		run(t, client, env+program("mount.test", "", tests...), tests...)
	}
	// Run the mounts first: the suite restores the devices, but not the kernels.
	t.Run("own server", func(t *testing.T) {
		parts.Add(1)
		mounts(t, own, "TestMainJob", "TestStorm", "TestAttacks")
	})
	t.Run("another guest", func(t *testing.T) {
		parts.Add(1)
		client.MustRun(fmt.Sprintf("modprobe -a nfs nfsv3 && "+
			"mount -t nfs -o tcp,vers=3,nolock,noac,mountport=20048,mountproto=tcp %v:/export /mnt", server.Linked))
		mounts(t, other+"NFSRDMAD_RDMACORE_EXPORT=/mnt ", "TestMainJob", "TestStorm")
		client.MustRun("umount /mnt")
	})
	t.Run("wire", func(t *testing.T) {
		parts.Add(1)
		var peer sync.WaitGroup
		peer.Go(func() { run(t, server, other+program("mount.test", "", "TestPeer"), "TestPeer") })
		mounts(t, "for i in $(seq 600); do [ -e "+wireReady+" ] && break; sleep 0.2; done; "+other, "TestWire")
		peer.Wait()
	})
	t.Run("a link that is cut", func(t *testing.T) {
		parts.Add(1)
		server.MustRun("rm -f /export/storm*")
		done := make(chan int)
		stop := make(chan struct{})
		go func() {
			server.Run("until [ -s /export/storm0 ]; do sleep 0.1; done") // the storm has started
			done <- cuts(link, stop)
		}()
		mounts(t, other, "TestStorm")
		close(stop)
		n := <-done
		t.Logf("%d cuts of the link", n)
		if n < cutsWanted {
			t.Errorf("the storm ended before %d cuts of the link", cutsWanted)
		}
	})
	t.Run("conformance", func(t *testing.T) {
		parts.Add(1)
		tests := []string{"TestConformance", "TestDevices"}
		run(t, client, own+"NFSRDMAD_RDMACORE_ADDR="+client.Linked.String()+":0 "+
			program("provider.test", strings.Join(c.broken, "|"), tests...), tests...)
	})
	if t.Failed() || parts.Load() < 5 {
		return
	}
	for _, name := range c.skipped {
		if _, ok := skips.Load(name); !ok {
			t.Errorf("got no skip of %s: remove it from skipped", name)
		}
	}
}

// cuts cuts a link several times, for less and for more time than a device retransmits. It returns
// the number of cuts, early if stop is closed.
func cuts(link *lab.Link, stop <-chan struct{}) int {
	wait := func(d time.Duration) bool {
		select {
		case <-stop:
			return false
		case <-time.After(d):
			return true
		}
	}
	for n, length := range cutLengths {
		if !wait(cutPause) {
			return n
		}
		link.Cut()
		wait(length)
		link.Restore()
	}
	return len(cutLengths)
}
