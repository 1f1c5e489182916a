package rdmacore

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

// Paths in the guest.
const (
	outageMount    = "/mnt/outage"
	outageExport   = "/export"
	outageLog      = "/tmp/daemon.log"
	outageIO       = "/tmp/io.log"
	outageProgress = "/tmp/progress"
	outageStop     = "/tmp/stop"
)

// removalErrors are kernel errors of the server when its device is removed under traffic. The
// server destroys a queue pair with active registrations, and the device still has resources of the
// server.
var removalErrors = []string{`WARNING: .*drivers/infiniband/core/(verbs|restrack)\.c`}

const (
	// recoveryTimeout bounds the pause of I/O after the link, the address or the device returns.
	// The client waits at most a minute between two attempts to connect.
	recoveryTimeout = 3 * time.Minute
	// renewAfter is the time without a new connection after which an rxe device counts as broken.
	renewAfter = time.Minute
	// removalLimit bounds the removal of a device that is in use, which usually takes a second.
	removalLimit = 3 * time.Minute
)

// An outageGuest is a guest with a daemon, a mount and verified I/O on the mount.
type outageGuest struct {
	*lab.Guest
	t      *testing.T
	device string // device name of "rdma link"
	kind   string
}

func startOutageGuest(t *testing.T, kernel, provider string) *outageGuest {
	lab.SkipIfDisabled(t)
	share := t.TempDir()
	build(t, share, "mount.test", "github.com/nfsrdmad/nfsrdmad/test/lab/rdmacore")
	lab.BuildRDMA(t, "build", "-trimpath", "-o", filepath.Join(share, "nfsrdmad"),
		"github.com/nfsrdmad/nfsrdmad/cmd/nfsrdmad")
	g := &outageGuest{Guest: lab.Start(t, lab.Options{Kernel: kernel, Provider: provider, Share: share,
		ExpectedKernelErrors: removalErrors}), t: t, device: provider + "0", kind: provider}
	t.Cleanup(func() {
		if t.Failed() {
			out, _ := g.Run("nfsrdmad status " + outageMount + "; rdma link; rdma res show qp; tail -c 6000 " +
				outageLog + "; tail -c 1000 " + outageIO)
			t.Logf("daemon status and log:\n%s", out)
		}
	})
	g.must("cp /share/nfsrdmad /usr/bin/ && modprobe fuse && mkdir -p /run/nfsrdmad " + outageMount)
	g.must("nfsrdmad daemon --log-level info >" + outageLog +
		" 2>&1 & for i in $(seq 1200); do [ -S /run/nfsrdmad/control.sock ] && exit 0; sleep 0.1; done; exit 1")
	g.must("nfsrdmad mount -o mountport=20048,provider=rdmacore " + guestAddr + ":" + outageExport + " " + outageMount)
	return g
}

func (g *outageGuest) must(command string) string {
	g.t.Helper()
	out, err := g.RunFor(command, 5*time.Minute)
	if err != nil {
		g.t.Fatal(err)
	}
	return strings.TrimSpace(out)
}

// startIO starts the verified I/O and waits until it runs.
func (g *outageGuest) startIO() {
	g.t.Helper()
	g.must(fmt.Sprintf("rm -f %s %s; NFSRDMAD_RDMACORE_IO=%s "+
		"/share/mount.test -test.v -test.timeout 30m -test.run TestVerifiedIO >%s 2>&1 &",
		outageStop, outageProgress, outageMount, outageIO))
	g.awaitOperations(20)
}

// done returns the number of completed operations of the I/O.
func (g *outageGuest) done() int {
	g.t.Helper()
	n, _ := strconv.Atoi(g.must("cat " + outageProgress + " 2>/dev/null || echo 0"))
	return n
}

// awaitOperations waits until n more operations complete.
func (g *outageGuest) awaitOperations(n int) {
	g.t.Helper()
	began, from := time.Now(), g.done()
	for g.done() < from+n {
		if time.Since(began) > recoveryTimeout {
			g.t.Fatalf("got %[2]d operations within %[1]v, want more", recoveryTimeout, g.done()-from)
		}
		time.Sleep(500 * time.Millisecond)
	}
	g.t.Logf("%d operations after %v", n, time.Since(began).Round(time.Millisecond))
}

// stopIO ends the I/O, which compares all data a last time.
func (g *outageGuest) stopIO() {
	g.t.Helper()
	out := g.must("touch " + outageStop + "; for i in $(seq 2400); do grep -Eq '^(PASS|FAIL|panic)' " + outageIO +
		" && break; sleep 0.1; done; cat " + outageIO)
	if !strings.HasSuffix(out, "PASS") {
		g.t.Errorf("verified I/O failed:\n%s", out)
	}
	g.t.Logf("%s", out)
}

func (g *outageGuest) statusText() string {
	g.t.Helper()
	return strings.Join(strings.Fields(g.must("nfsrdmad status "+outageMount)), " ")
}

// awaitStatus waits until the status contains text.
func (g *outageGuest) awaitStatus(text string) {
	g.t.Helper()
	began := time.Now()
	for {
		s := g.statusText()
		if strings.Contains(s, text) {
			return
		}
		if time.Since(began) > recoveryTimeout {
			g.t.Fatalf("status without %q:\n%s", text, s)
		}
		time.Sleep(500 * time.Millisecond)
	}
}

// checkMRs compares the MR counters with their sum while no call is pending. It returns the number
// of failed MRs.
func (g *outageGuest) checkMRs() (failed uint64) {
	g.t.Helper()
	for try := 0; ; try++ {
		var all []control.Numbers
		text := g.must("nfsrdmad status --output json " + outageMount)
		if err := json.Unmarshal([]byte(text), &all); err != nil || len(all) != 1 {
			g.t.Fatalf("status: %v\n%s", err, text)
		}
		s := all[0]
		used := uint64(0)
		for state, n := range s.MRs {
			if state != "INVALID" {
				used += n
			}
		}
		if used != 0 && try < 20 {
			time.Sleep(500 * time.Millisecond)
			continue
		}
		n := s.Metrics.Count
		failed = n("mrs_failed_total")
		recovered, recycled, orphaned := n("mrs_recovered_total"), n("mrs_recycled_total"), n("mrs_orphaned_total")
		g.t.Logf("MRs: %v; failed %d: recovered %d, recycled %d, orphaned %d", s.MRs, failed, recovered, recycled,
			orphaned)
		if used != 0 {
			g.t.Errorf("got %d MRs in other states than INVALID without pending calls, want none", used)
		}
		if failed != recovered+recycled+orphaned {
			g.t.Error("got failed MRs that are not the sum of recovered, recycled and orphaned MRs")
		}
		return failed
	}
}

// remove removes the device, in bounded time.
func (g *outageGuest) remove() {
	g.t.Helper()
	began := time.Now()
	if out, err := g.RunFor("rdma link delete "+g.device, removalLimit); err != nil {
		g.t.Fatalf("remove a device in use: %v\n%s", err, out)
	}
	g.t.Logf("the device was removed within %v", time.Since(began).Round(time.Millisecond))
}

func (g *outageGuest) add() {
	g.t.Helper()
	g.must("rdma link add " + g.device + " type " + g.kind + " netdev eth0")
}

// renew recreates an rxe device whose connection manager is broken. After a message without a
// route, queue pair 1 of rxe's connection manager stays in the error state, and no process can
// connect to or from the machine. Kernel 6.1 does not show this state. siw has no connection
// manager.
func (g *outageGuest) renew() {
	if g.kind != lab.RXE {
		return
	}
	from := g.done()
	for end := time.Now().Add(renewAfter); time.Now().Before(end); time.Sleep(time.Second) {
		if strings.Contains(g.must("rdma res show qp | grep 'type GSI'"), "state ERR") {
			break
		}
		if g.done() > from+10 {
			return
		}
	}
	g.t.Log("recreating the device: its connection manager is broken")
	g.remove()
	g.add()
}

// TestDeviceOutages removes the link, the address and the device under a mount with verified I/O
// and provider=rdmacore in a guest. After each outage I/O must resume with all its data. During the
// outage the status must report the reason, readers must be killable, and unmount must work.
func TestDeviceOutages(t *testing.T) {
	devices := []string{lab.RXE}
	if lab.FullRun() {
		devices = append(devices, lab.SIW)
	}
	for _, kernel := range lab.TestedKernels() {
		for _, device := range devices {
			t.Run(kernel+"-"+device, func(t *testing.T) { testDeviceOutages(t, kernel, device) })
		}
	}
}

func testDeviceOutages(t *testing.T, kernel, device string) {
	g := startOutageGuest(t, kernel, device)
	g.startIO()
	step := func(name string, f func(g *outageGuest)) {
		t.Run(name, func(t *testing.T) {
			h := *g
			h.t = t
			f(&h)
		})
		if t.Failed() {
			t.FailNow()
		}
	}
	step("link down", (*outageGuest).linkDown)
	step("address change", (*outageGuest).addressChange)
	step("removal", (*outageGuest).removal)
	step("removal again and again", (*outageGuest).removals)
	step("data", func(g *outageGuest) {
		g.stopIO()
		if g.checkMRs() == 0 {
			g.t.Error("got no failed MR, want at least one")
		}
	})
	step("unmount", (*outageGuest).unmount)
}

func (g *outageGuest) linkDown() {
	g.must("ip link set eth0 down")
	g.awaitStatus("port 1 of RDMA device " + g.device + " is down")
	g.must("ip link set eth0 up && ip route replace default via 10.0.2.2")
	g.renew()
	g.awaitOperations(50)
}

// addressChange removes the address of the server and the client, and restores it.
func (g *outageGuest) addressChange() {
	g.must("ip addr del 10.0.2.15/24 dev eth0")
	// siw's connections survive because TCP retransmits; rxe's queue pairs fail.
	time.Sleep(5 * time.Second)
	g.must("ip addr add 10.0.2.15/24 dev eth0 && ip route replace default via 10.0.2.2")
	g.renew()
	g.awaitOperations(50)
}

func (g *outageGuest) removal() {
	g.must("dd if=/dev/urandom of=" + outageExport + "/unread bs=64k count=16 2>/dev/null")
	g.remove()
	g.awaitStatus("RDMA device " + g.device + " was removed")
	g.awaitStatus("pending (reconnect")
	// A process that reads waits for the device, and a signal can kill the process.
	g.must("(cat " + outageMount + "/unread >/dev/null 2>&1 & echo $! >/tmp/reader); " +
		"sleep 3; kill -0 $(cat /tmp/reader)")
	g.must("kill -KILL $(cat /tmp/reader); " +
		"for i in $(seq 1200); do kill -0 $(cat /tmp/reader) 2>/dev/null || exit 0; sleep 0.1; done; " +
		"cat /proc/$(cat /tmp/reader)/stack; exit 1")
	g.add()
	g.awaitOperations(50)
	g.must("cmp " + outageExport + "/unread " + outageMount + "/unread")
}

// daemonPID prints the process ID of the daemon. The processes that it has started have other
// names, but the same program.
const daemonPID = "for p in $(pidof nfsrdmad); do grep -qx nfsrdmad /proc/$p/comm && echo $p; done; true"

// removals removes the device several times during I/O and checks for leaks.
func (g *outageGuest) removals() {
	pid := g.must(daemonPID)
	descriptors := func() int {
		n, _ := strconv.Atoi(g.must("ls /proc/" + pid + "/fd | wc -l"))
		return n
	}
	before := descriptors()
	for range 3 {
		g.remove()
		g.add()
		g.awaitOperations(30)
	}
	// One context is open, and librdmacm keeps the descriptors of at most one other.
	if n := descriptors(); n > before+4 {
		g.t.Errorf("got %d open descriptors, %d before:\n%s", n, before, g.must("ls -l /proc/"+pid+"/fd"))
	}
	if n, _ := strconv.Atoi(g.must("ls -l /proc/" + pid + "/fd | grep -c infiniband/uverbs")); n > 4 {
		g.t.Errorf("got %d open device descriptors:\n%s", n, g.must("ls -l /proc/"+pid+"/fd"))
	}
	if n := strings.Count(g.must("rdma res show cm_id"), "comm nfsrdmad"); n > 1 {
		g.t.Errorf("got %d connection IDs, want at most 1", n)
	}
}

// unmount checks that without the device a forced unmount is immediate and the daemon can stop.
func (g *outageGuest) unmount() {
	g.remove()
	g.must("(cat " + outageMount + "/unread >/dev/null 2>&1 &); (ls " + outageMount + " >/dev/null 2>&1 &); sleep 1")
	if out, err := g.RunFor("nfsrdmad umount --force "+outageMount, removalLimit); err != nil {
		g.t.Errorf("umount --force without a device: %v\n%s", err, out)
	}
	g.must("! grep -q ' " + outageMount + " ' /proc/mounts")
	g.add()
	g.must("nfsrdmad mount -o mountport=20048,provider=rdmacore " + guestAddr + ":" + outageExport + " " + outageMount +
		" && cmp " + outageExport + "/unread " + outageMount + "/unread")
	g.remove()
	const stop = "kill $(" + daemonPID + "); " +
		"for i in $(seq 900); do pidof nfsrdmad >/dev/null || exit 0; sleep 0.1; done; exit 1"
	if out, err := g.RunFor(stop, 2*time.Minute); err != nil {
		g.t.Errorf("daemon did not stop without a device: %v\n%s", err, out)
	}
	g.must("! grep -q ' " + outageMount + " ' /proc/mounts")
	g.add()
}

// outageIOEnv is the mount for TestVerifiedIO.
const outageIOEnv = "NFSRDMAD_RDMACORE_IO"

// TestVerifiedIO writes and reads at random through the mount until outageStop exists. Each worker
// has its own file and compares it with a copy. The test runs in the guest.
func TestVerifiedIO(t *testing.T) {
	dir := os.Getenv(outageIOEnv)
	if dir == "" {
		t.Skipf("test needs a guest of the lab: %s is not set", outageIOEnv)
	}
	var count atomic.Int64
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		for ctx.Err() == nil {
			if _, err := os.Stat(outageStop); err == nil {
				cancel()
			}
			os.WriteFile(outageProgress+".new", fmt.Append(nil, count.Load()), 0o644)
			os.Rename(outageProgress+".new", outageProgress)
			time.Sleep(200 * time.Millisecond)
		}
	}()
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			name := fmt.Sprintf("io%d", w)
			if err := verifiedIO(ctx, filepath.Join(dir, name), filepath.Join(outageExport, name), uint64(w),
				&count); err != nil {
				t.Errorf("worker %d: %v", w, err)
			}
		})
	}
	wg.Wait()
	t.Logf("%d operations", count.Load())
}

// verifiedIO is one worker. far is the path of its file in the export.
func verifiedIO(ctx context.Context, near, far string, seed uint64, count *atomic.Int64) error {
	const span, most = 1 << 20, 256 << 10
	f, err := os.OpenFile(near, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	rng := rand.New(rand.NewPCG(seed, 5))
	model, buf := make([]byte, span), make([]byte, most)
	if _, err := f.WriteAt(model, 0); err != nil {
		return err
	}
	for i := 0; ctx.Err() == nil; i++ {
		n := 1 + rng.IntN(most)
		off := rng.IntN(span - n + 1)
		if i%2 == 0 {
			pattern(buf[:n], off, byte(seed)*16+byte(i))
			copy(model[off:], buf[:n])
			if _, err := f.WriteAt(buf[:n], int64(off)); err != nil {
				return fmt.Errorf("operation %d: %w", i, err)
			}
			if err := f.Sync(); err != nil {
				return fmt.Errorf("operation %d: %w", i, err)
			}
		} else {
			// so that the client reads from the server
			unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
			if _, err := f.ReadAt(buf[:n], int64(off)); err != nil {
				return fmt.Errorf("operation %d: %w", i, err)
			}
			if at, ok := firstDifference(buf[:n], model[off:off+n]); !ok {
				return fmt.Errorf("operation %d: byte %d of the file differs from the written data", i, off+at)
			}
		}
		count.Add(1)
	}
	if err := f.Sync(); err != nil {
		return err
	}
	got, err := os.ReadFile(far)
	if err != nil {
		return err
	}
	if at, ok := firstDifference(got, model); !ok {
		return fmt.Errorf("final check: byte %d of the server's file differs from the written data", at)
	}
	return nil
}

// pattern fills b with bytes that depend on their offset and seed.
func pattern(b []byte, off int, seed byte) {
	for i := range b {
		o := off + i
		b[i] = byte(o) ^ byte(o>>8)*7 ^ byte(o>>16)*31 ^ seed
	}
}

// firstDifference reports whether a and b are equal, or else the offset of their first difference.
func firstDifference(a, b []byte) (at int, ok bool) {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return i, false
		}
	}
	return min(len(a), len(b)), len(a) == len(b)
}
