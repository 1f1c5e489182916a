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

// A target is a soft device of the kernel, and the rules of the conformance suite that the device
// breaks with every provider. These violations were seen with the stock kernels of the lab; no
// program can correct them.
type target struct {
	provider string
	broken   []string
	// skipped are all tests and subtests that skip because the device, or rdma-core, lacks a
	// capability.
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
		"TestAttacks/read_beyond_the_end,_call_pending", "TestAttacks/write_beyond_the_end,_call_pending",
		"TestConformance/ForeignResources", "TestConformance/Gaps", "TestConformance/Withdraw",
	}},
	{lab.SIW, []string{
		// A message of a few bytes that crosses a page boundary arrives corrupted.
		"TestConformance/ReadSizes$",
		// A Read without the access right is neither answered nor refused.
		"TestConformance/AccessRefused/(read,_no_right|read,_local_right_alone)$",
		// Deregistration does not wait for data that is being placed or sent.
		"TestConformance/(LocalInvFences|DeregFences|ReadFence)$",
	}, []string{
		"TestAttacks/read_of_a_write_chunk,_call_pending", "TestWire/refused/read,_no_right",
		"TestConformance/BadRemoteInvalidate", "TestConformance/ForeignResources",
		"TestConformance/Gaps", "TestConformance/STags",
		"TestConformance/SendWithInvalidate", "TestConformance/SharedPDOtherKey", "TestConformance/Withdraw",
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

// A deviceTest runs test programs in a pair of guests with the same device.
type deviceTest struct {
	target
	link           *lab.Link
	client, server *lab.Guest
	// environment for tests against the client's own server, and the other
	own, other string
	parts      atomic.Int32 // subtests that ran
	skips      sync.Map     // names of skipped tests
}

func testDevice(t *testing.T, kernel string, c target, dir string) {
	os.Remove(filepath.Join(dir, filepath.Base(wireReady))) // left by the previous device
	d := &deviceTest{target: c, link: lab.NewLink(t)}
	guests := lab.StartAll(t,
		lab.Options{Name: "client", Kernel: kernel, Provider: c.provider, Link: d.link, Share: dir},
		lab.Options{Name: "server", Kernel: kernel, Provider: c.provider, Link: d.link, Share: dir, CPUs: 1})
	d.client, d.server = guests[0], guests[1]
	d.own = fmt.Sprintf("NFSRDMAD_RDMACORE_GUEST=%v ", d.client.Linked)
	d.other = fmt.Sprintf("NFSRDMAD_RDMACORE_GUEST=%v ", d.server.Linked)
	// Run the mounts first: the suite restores the devices, but not the kernels.
	parts := []struct {
		name string
		run  func(t *testing.T)
	}{
		{"own server", d.ownServer},
		{"another guest", d.anotherGuest},
		{"wire", d.wire},
		{"a link that is cut", d.cutLink},
		{"conformance", d.conformance},
	}
	for _, part := range parts {
		t.Run(part.name, func(t *testing.T) {
			d.parts.Add(1)
			part.run(t)
		})
	}
	if t.Failed() || int(d.parts.Load()) < len(parts) {
		return
	}
	for _, name := range c.skipped {
		if _, ok := d.skips.Load(name); !ok {
			t.Errorf("got no skip of %s: remove it from skipped", name)
		}
	}
}

// run runs a command in a guest, which runs these tests. All of them must pass, and only the skips
// that are known for the device are permitted.
func (d *deviceTest) run(t *testing.T, g *lab.Guest, command string, tests ...string) {
	t.Helper()
	out, err := g.RunFor("cd /tmp && "+command+" 2>&1", runLimit)
	if err != nil {
		t.Errorf("%v\n%s", err, out)
		return
	}
	t.Logf("%s", out)
	for _, skip := range skipLine.FindAllStringSubmatch(out, -1) {
		d.skips.Store(skip[1], true)
		if !slices.Contains(d.skipped, skip[1]) {
			t.Errorf("got unexpected skip of %s", skip[1])
		}
	}
	for _, name := range tests {
		if !strings.Contains(out, "--- PASS: "+name+" (") {
			t.Errorf("guest did not report that %s passed", name)
		}
	}
}

// program returns the command that runs tests of a program in the shared directory.
func program(name, skip string, tests ...string) string {
	return "/share/" + name + " -test.v -test.run '^(" + strings.Join(tests, "|") + ")$' -test.skip '" + skip + "'"
}

// runOnClient runs tests of this package in the client's guest.
func (d *deviceTest) runOnClient(t *testing.T, env string, tests ...string) {
	t.Helper()
	d.run(t, d.client, env+program("mount.test", "", tests...), tests...)
}

func (d *deviceTest) ownServer(t *testing.T) {
	d.runOnClient(t, d.own, "TestMainJob", "TestStorm", "TestAttacks")
}

func (d *deviceTest) anotherGuest(t *testing.T) {
	d.client.MustRun(fmt.Sprintf("modprobe -a nfs nfsv3 && "+
		"mount -t nfs -o tcp,vers=3,nolock,noac,mountport=20048,mountproto=tcp %v:/export /mnt", d.server.Linked))
	d.runOnClient(t, d.other+"NFSRDMAD_RDMACORE_EXPORT=/mnt ", "TestMainJob", "TestStorm")
	d.client.MustRun("umount /mnt")
}

func (d *deviceTest) wire(t *testing.T) {
	var peer sync.WaitGroup
	peer.Go(func() { d.run(t, d.server, d.other+program("mount.test", "", "TestPeer"), "TestPeer") })
	d.runOnClient(t, "for i in $(seq 600); do [ -e "+wireReady+" ] && break; sleep 0.2; done; "+d.other, "TestWire")
	peer.Wait()
}

func (d *deviceTest) cutLink(t *testing.T) {
	d.server.MustRun("rm -f /export/storm*")
	done := make(chan int)
	stop := make(chan struct{})
	go func() {
		d.server.Run("until [ -s /export/storm0 ]; do sleep 0.1; done") // the storm has started
		done <- cuts(d.link, stop)
	}()
	d.runOnClient(t, d.other, "TestStorm")
	close(stop)
	n := <-done
	t.Logf("%d cuts of the link", n)
	if n < cutsWanted {
		t.Errorf("the storm ended before %d cuts of the link", cutsWanted)
	}
}

func (d *deviceTest) conformance(t *testing.T) {
	tests := []string{"TestConformance", "TestDevicesListsAttributes"}
	d.run(t, d.client, d.own+"NFSRDMAD_RDMACORE_ADDR="+d.client.Linked.String()+":0 "+
		program("provider.test", strings.Join(d.broken, "|"), tests...), tests...)
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
