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

// cutLengths are how long the link is cut, one after the other, and cutPause is how long it works
// before each. cutsWanted is what must have happened before the storm is over: one of each length.
var cutLengths = []time.Duration{300 * time.Millisecond, 10 * time.Second, 300 * time.Millisecond, 10 * time.Second}

const (
	cutPause   = 300 * time.Millisecond
	cutsWanted = 2
)

const (
	// guestAddr is a guest's own address, where it is on no link.
	guestAddr = "10.0.2.15"
	// wireReady says to the client's guest that the server's is ready for TestWire.
	wireReady = "/share/wire-ready"
	// runLimit is how long one test program may run in the guest.
	runLimit = 12 * time.Minute
)

// A target is a device of the kernel's, and the rules of the conformance suite that it breaks by
// itself, whoever uses it. Each was seen with the stock kernels of the lab; none can be made good
// from a program.
type target struct {
	provider string
	broken   []string
	// what tests themselves skip for want of a capability of it: these, all of them, and nothing
	// else
	skipped []string
}

var targets = []target{
	{lab.RXE, []string{
		// A window that is not bound is invalidated through a nil pointer, and the kernel panics,
		// also when it is the peer that asks.
		"TestConformance/BadRemoteInvalidate$",
		// The peer's Send With Invalidate may name any window.
		"TestConformance/SharedPDOtherKey/SendWithInv",
		// A window lets the peer reach all of the region that it is bound to: its own bounds are
		// not looked at.
		"TestConformance/AccessRefused/(write,_after_the_end|write,_before|write,_across_the_end|read,_across_the_end|read,_before)$",
		// A Read that was begun goes on when its window is invalidated, and a packet of a Write
		// that was let in is placed after it.
		"TestConformance/(LocalInvFences|DeregFences|ReadFence)$",
	}, []string{
		"TestAttacks/invalidation_of_a_key_of_another_connection", "TestAttacks/overlong_read,_in_time", "TestAttacks/write_beyond_the_end,_in_time",
		"TestConformance/ForeignResources", "TestConformance/Gaps",
	}},
	{lab.SIW, []string{
		// A message of a few octets across a page boundary arrives changed.
		"TestConformance/ReadSizes$",
		// A Read without the right is neither answered nor refused.
		"TestConformance/AccessRefused/(read,_no_right|read,_local_right_alone)$",
		// Deregistration does not wait for what is being placed or sent.
		"TestConformance/(LocalInvFences|DeregFences|ReadFence)$",
	}, []string{
		"TestAttacks/read_of_a_write_chunk,_in_time", "TestWire/refused/read,_no_right",
		"TestConformance/BadRemoteInvalidate", "TestConformance/ForeignResources", "TestConformance/Gaps", "TestConformance/STags",
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
// another guest's, and the conformance suite, which has both ends in one process and so in one
// guest.
func TestDevices(t *testing.T) {
	lab.SkipUnwanted(t)
	dir := t.TempDir()
	build(t, dir, "provider.test", "github.com/nfsrdmad/nfsrdmad/pkg/verbs/rdmacore")
	build(t, dir, "mount.test", "github.com/nfsrdmad/nfsrdmad/test/lab/rdmacore")
	for _, kernel := range lab.Tested() {
		for _, c := range targets {
			t.Run(kernel+"-"+c.provider, func(t *testing.T) { testDevice(t, kernel, c, dir) })
		}
	}
}

func testDevice(t *testing.T, kernel string, c target, dir string) {
	os.Remove(filepath.Join(dir, filepath.Base(wireReady))) // of the device before
	link := lab.NewLink(t)
	guests := lab.StartAll(t,
		lab.Options{Name: "client", Kernel: kernel, Provider: c.provider, Link: link, Share: dir},
		lab.Options{Name: "server", Kernel: kernel, Provider: c.provider, Link: link, Share: dir, CPUs: 1})
	client, server := guests[0], guests[1]
	own, other := fmt.Sprintf("NFSRDMAD_RDMACORE_GUEST=%v ", client.Linked), fmt.Sprintf(
		"NFSRDMAD_RDMACORE_GUEST=%v ", server.Linked)
	var parts atomic.Int32 // that were run
	var skips sync.Map     // names of tests
	// run runs a command in a guest, which runs these tests; none may be missing, or be skipped,
	// nor any part of one but as the device is known for.
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
				t.Errorf("%s was skipped", skip[1])
			}
		}
		for _, name := range tests {
			if !strings.Contains(out, "--- PASS: "+name+" (") {
				t.Errorf("the guest does not say that %s has passed", name)
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
	// The mounts first: the suite leaves devices as it finds them, but not their kernels.
	t.Run("own server", func(t *testing.T) {
		parts.Add(1)
		mounts(t, own, "TestMainJob", "TestStorm", "TestAttacks")
	})
	t.Run("another guest", func(t *testing.T) {
		parts.Add(1)
		client.MustRun(fmt.Sprintf("modprobe -a nfs nfsv3 && mount -t nfs -o tcp,vers=3,nolock,noac,mountport=20048,mountproto=tcp %v:/export /mnt", server.Linked))
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
		over := make(chan struct{})
		go func() {
			server.Run("until [ -s /export/storm0 ]; do sleep 0.1; done") // it has begun
			done <- cuts(link, over)
		}()
		mounts(t, other, "TestStorm")
		close(over)
		n := <-done
		t.Logf("the link was cut %d times", n)
		if n < cutsWanted {
			t.Errorf("the storm was over before the link was cut %d times", cutsWanted)
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
			t.Errorf("%s was not skipped: the device can do it now", name)
		}
	}
}

// cuts cuts a link a few times: for less time than a device goes on sending what nobody
// acknowledges, and for more. It returns how often, early if it is over.
func cuts(link *lab.Link, over <-chan struct{}) int {
	wait := func(d time.Duration) bool {
		select {
		case <-over:
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
