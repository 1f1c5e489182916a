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

	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

// What stands where in the guest.
const (
	goneMount    = "/mnt/gone"
	goneExport   = "/export"
	goneLog      = "/tmp/daemon.log"
	goneIO       = "/tmp/io.log"
	goneProgress = "/tmp/progress"
	goneStop     = "/tmp/stop"
)

// goneComplaints are what the kernel's server says of its own when its device is removed under
// traffic: it destroys a queue pair that still has registrations in use, and the device is told to
// be left with something of the server's.
var goneComplaints = []string{`WARNING: .*drivers/infiniband/core/(verbs|restrack)\.c`}

const (
	// recovery bounds how long I/O may stand still after the link, the address or the device is
	// back: the pause between attempts to connect is at most a minute.
	recovery = 3 * time.Minute
	// renewAfter is how long an rxe device may make no connection before it is taken for one that
	// makes none any more.
	renewAfter = time.Minute
	// removalLimit bounds the removal of a device that is in use, for which a second is usual.
	removalLimit = 3 * time.Minute
)

// A goneGuest is a guest with a daemon, a mount and verified I/O on it.
type goneGuest struct {
	*lab.Guest
	t      *testing.T
	device string // as "rdma link" has it
	kind   string
}

func startGone(t *testing.T, kernel, provider string) *goneGuest {
	lab.SkipIfDisabled(t)
	share := t.TempDir()
	build(t, share, "mount.test", "github.com/nfsrdmad/nfsrdmad/test/lab/rdmacore")
	lab.BuildRDMA(t, "build", "-trimpath", "-o", filepath.Join(share, "nfsrdmad"),
		"github.com/nfsrdmad/nfsrdmad/cmd/nfsrdmad")
	g := &goneGuest{Guest: lab.Start(t, lab.Options{Kernel: kernel, Provider: provider, Share: share,
		ExpectedKernelErrors: goneComplaints}), t: t, device: provider + "0", kind: provider}
	t.Cleanup(func() {
		if t.Failed() {
			out, _ := g.Run("nfsrdmad status " + goneMount + "; rdma link; rdma res show qp; tail -c 6000 " +
				goneLog + "; tail -c 1000 " + goneIO)
			t.Logf("the daemon at the end:\n%s", out)
		}
	})
	g.must("cp /share/nfsrdmad /usr/bin/ && modprobe fuse && mkdir -p /run/nfsrdmad " + goneMount)
	g.must("nfsrdmad daemon --log-level info >" + goneLog +
		" 2>&1 & for i in $(seq 1200); do [ -S /run/nfsrdmad/control.sock ] && exit 0; sleep 0.1; done; exit 1")
	g.must("nfsrdmad mount -o mountport=20048,provider=rdmacore " + guestAddr + ":" + goneExport + " " + goneMount)
	return g
}

func (g *goneGuest) must(command string) string {
	g.t.Helper()
	out, err := g.RunFor(command, 5*time.Minute)
	if err != nil {
		g.t.Fatal(err)
	}
	return strings.TrimSpace(out)
}

// startIO begins the verified I/O, and waits until it is under way.
func (g *goneGuest) startIO() {
	g.t.Helper()
	g.must(fmt.Sprintf("rm -f %s %s; NFSRDMAD_RDMACORE_IO=%s /share/mount.test -test.v -test.timeout 30m -test.run TestVerifiedIO >%s 2>&1 &", goneStop, goneProgress, goneMount, goneIO))
	g.moves(20)
}

// done is how many operations of the I/O have ended.
func (g *goneGuest) done() int {
	g.t.Helper()
	n, _ := strconv.Atoi(g.must("cat " + goneProgress + " 2>/dev/null || echo 0"))
	return n
}

// moves waits until n more operations have ended.
func (g *goneGuest) moves(n int) {
	g.t.Helper()
	began, from := time.Now(), g.done()
	for g.done() < from+n {
		if time.Since(began) > recovery {
			g.t.Fatalf("no I/O after %v: %d operations since then", recovery, g.done()-from)
		}
		time.Sleep(500 * time.Millisecond)
	}
	g.t.Logf("%d operations after %v", n, time.Since(began).Round(time.Millisecond))
}

// stopIO ends the I/O, which compares everything a last time.
func (g *goneGuest) stopIO() {
	g.t.Helper()
	out := g.must("touch " + goneStop + "; for i in $(seq 2400); do grep -Eq '^(PASS|FAIL|panic)' " + goneIO +
		" && break; sleep 0.1; done; cat " + goneIO)
	if !strings.HasSuffix(out, "PASS") {
		g.t.Errorf("the I/O failed:\n%s", out)
	}
	g.t.Logf("%s", out)
}

// A goneStatus is what "nfsrdmad status --output json" tells of MRs.
type goneStatus struct {
	MRs       map[string]uint64 `json:"mrs"`
	Hurt      uint64            `json:"mrs_failed"`
	Recovered uint64            `json:"mrs_recovered"`
	Recycled  uint64            `json:"mrs_recycled"`
	Orphaned  uint64            `json:"mrs_orphaned"`
}

func (g *goneGuest) statusText() string {
	g.t.Helper()
	return strings.Join(strings.Fields(g.must("nfsrdmad status "+goneMount)), " ")
}

// says waits until the status has text.
func (g *goneGuest) says(text string) {
	g.t.Helper()
	began := time.Now()
	for {
		s := g.statusText()
		if strings.Contains(s, text) {
			return
		}
		if time.Since(began) > recovery {
			g.t.Fatalf("the status does not say %q:\n%s", text, s)
		}
		time.Sleep(500 * time.Millisecond)
	}
}

// accounts holds the MRs to their sum, while no call is under way.
func (g *goneGuest) accounts() goneStatus {
	g.t.Helper()
	for try := 0; ; try++ {
		var all []goneStatus
		text := g.must("nfsrdmad status --output json " + goneMount)
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
		g.t.Logf("MRs: %+v", s)
		if used != 0 {
			g.t.Errorf("%d MRs are not INVALID although no call is under way", used)
		}
		if s.Hurt != s.Recovered+s.Recycled+s.Orphaned {
			g.t.Error("the MRs that were hurt are not those that were recovered, recycled and orphaned")
		}
		return s
	}
}

// remove takes the device away, in bounded time.
func (g *goneGuest) remove() {
	g.t.Helper()
	began := time.Now()
	if out, err := g.RunFor("rdma link delete "+g.device, removalLimit); err != nil {
		g.t.Fatalf("the device does not go while it is in use: %v\n%s", err, out)
	}
	g.t.Logf("the device was removed within %v", time.Since(began).Round(time.Millisecond))
}

func (g *goneGuest) add() {
	g.t.Helper()
	g.must("rdma link add " + g.device + " type " + g.kind + " netdev eth0")
}

// renew makes an rxe device again on which there is no I/O now: where its connection manager has
// met a message without a route, its queue pair 1 stays in the error state (6.1 does not show
// that), and nobody can connect to or from the machine any more, whoever tries. siw has none.
func (g *goneGuest) renew() {
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
	g.t.Log("the device's connection manager is dead: the device is made again")
	g.remove()
	g.add()
}

// TestGone takes from a mount with verified I/O on it, by provider=rdmacore in a guest: the link,
// the address, and the device. I/O goes on when it is back, with all its data; while it is away the
// status says why, readers can be killed, and the mount be unmounted.
func TestGone(t *testing.T) {
	devices := []string{lab.RXE}
	if lab.FullRun() {
		devices = append(devices, lab.SIW)
	}
	for _, kernel := range lab.TestedKernels() {
		for _, device := range devices {
			t.Run(kernel+"-"+device, func(t *testing.T) { testGone(t, kernel, device) })
		}
	}
}

func testGone(t *testing.T, kernel, device string) {
	g := startGone(t, kernel, device)
	g.startIO()
	step := func(name string, f func(g *goneGuest)) {
		t.Run(name, func(t *testing.T) {
			h := *g
			h.t = t
			f(&h)
		})
		if t.Failed() {
			t.FailNow()
		}
	}
	step("link down", (*goneGuest).linkDown)
	step("address change", (*goneGuest).addressChange)
	step("removal", (*goneGuest).removal)
	step("removal again and again", (*goneGuest).removals)
	step("data", func(g *goneGuest) {
		g.stopIO()
		s := g.accounts()
		if s.Hurt == 0 {
			g.t.Error("no MR was hurt by all this")
		}
	})
	step("unmount", (*goneGuest).unmount)
}

func (g *goneGuest) linkDown() {
	g.must("ip link set eth0 down")
	g.says("port 1 of RDMA device " + g.device + " is down")
	g.must("ip link set eth0 up && ip route replace default via 10.0.2.2")
	g.renew()
	g.moves(50)
}

// addressChange takes the server's and the client's own address away, and gives it back.
func (g *goneGuest) addressChange() {
	g.must("ip addr del 10.0.2.15/24 dev eth0")
	// siw's connections are TCP's, which sends again; rxe's queue pairs fail
	time.Sleep(5 * time.Second)
	g.must("ip addr add 10.0.2.15/24 dev eth0 && ip route replace default via 10.0.2.2")
	g.renew()
	g.moves(50)
}

func (g *goneGuest) removal() {
	g.must("dd if=/dev/urandom of=" + goneExport + "/unread bs=64k count=16 2>/dev/null")
	g.remove()
	g.says("RDMA device " + g.device + " was removed")
	g.says("waiting (reconnect")
	// A reader waits, and can be killed.
	g.must("(cat " + goneMount + "/unread >/dev/null 2>&1 & echo $! >/tmp/reader); sleep 3; kill -0 $(cat /tmp/reader)")
	g.must("kill -KILL $(cat /tmp/reader); for i in $(seq 1200); do kill -0 $(cat /tmp/reader) 2>/dev/null || exit 0; sleep 0.1; done; cat /proc/$(cat /tmp/reader)/stack; exit 1")
	g.add()
	g.moves(50)
	g.must("cmp " + goneExport + "/unread " + goneMount + "/unread")
}

// removals takes the device away at other moments of the I/O, and looks for what stays behind.
func (g *goneGuest) removals() {
	pid := g.must("pidof nfsrdmad")
	descriptors := func() int {
		n, _ := strconv.Atoi(g.must("ls /proc/" + pid + "/fd | wc -l"))
		return n
	}
	before := descriptors()
	for range 3 {
		g.remove()
		g.add()
		g.moves(30)
	}
	// One context is open, and the descriptors of at most one other are kept for librdmacm.
	if n := descriptors(); n > before+4 {
		g.t.Errorf("%d descriptors are open, %d before:\n%s", n, before, g.must("ls -l /proc/"+pid+"/fd"))
	}
	if n, _ := strconv.Atoi(g.must("ls -l /proc/" + pid + "/fd | grep -c infiniband/uverbs")); n > 4 {
		g.t.Errorf("%d descriptors of devices are open:\n%s", n, g.must("ls -l /proc/"+pid+"/fd"))
	}
	if n := strings.Count(g.must("rdma res show cm_id"), "comm nfsrdmad"); n > 1 {
		g.t.Errorf("%d connection ids", n)
	}
}

// unmount: with the device away, a mount can be forced off at once, and the daemon ends.
func (g *goneGuest) unmount() {
	g.remove()
	g.must("(cat " + goneMount + "/unread >/dev/null 2>&1 &); (ls " + goneMount + " >/dev/null 2>&1 &); sleep 1")
	if out, err := g.RunFor("nfsrdmad umount --force "+goneMount, removalLimit); err != nil {
		g.t.Errorf("forced unmount while the device is away: %v\n%s", err, out)
	}
	g.must("! grep -q ' " + goneMount + " ' /proc/mounts")
	g.add()
	g.must("nfsrdmad mount -o mountport=20048,provider=rdmacore " + guestAddr + ":" + goneExport + " " + goneMount +
		" && cmp " + goneExport + "/unread " + goneMount + "/unread")
	g.remove()
	if out, err := g.RunFor("kill $(pidof nfsrdmad); for i in $(seq 900); do pidof nfsrdmad >/dev/null || exit 0; sleep 0.1; done; exit 1", 2*time.Minute); err != nil {
		g.t.Errorf("the daemon does not end while the device is away: %v\n%s", err, out)
	}
	g.must("! grep -q ' " + goneMount + " ' /proc/mounts")
	g.add()
}

// goneIOEnv is the mount for TestVerifiedIO.
const goneIOEnv = "NFSRDMAD_RDMACORE_IO"

// TestVerifiedIO writes and reads at random, through the mount, each worker a file of its own, and
// compares with what it wrote, until goneStop is there. It runs in the guest.
func TestVerifiedIO(t *testing.T) {
	dir := os.Getenv(goneIOEnv)
	if dir == "" {
		t.Skipf("this runs in a guest of the lab: %s is not set", goneIOEnv)
	}
	var count atomic.Int64
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		for ctx.Err() == nil {
			if _, err := os.Stat(goneStop); err == nil {
				cancel()
			}
			os.WriteFile(goneProgress+".new", fmt.Append(nil, count.Load()), 0o644)
			os.Rename(goneProgress+".new", goneProgress)
			time.Sleep(200 * time.Millisecond)
		}
	}()
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			name := fmt.Sprintf("io%d", w)
			if err := verifiedIO(ctx, filepath.Join(dir, name), filepath.Join(goneExport, name), uint64(w),
				&count); err != nil {
				t.Errorf("worker %d: %v", w, err)
			}
		})
	}
	wg.Wait()
	t.Logf("%d operations", count.Load())
}

// verifiedIO is one worker. far is the same file on the server.
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
			unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED) // so that the server is asked
			if _, err := f.ReadAt(buf[:n], int64(off)); err != nil {
				return fmt.Errorf("operation %d: %w", i, err)
			}
			if at, ok := firstDifference(buf[:n], model[off:off+n]); !ok {
				return fmt.Errorf("operation %d: octet %d of the file differs from what was written", i, off+at)
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
		return fmt.Errorf("at the end: octet %d of the server's file differs from what was written", at)
	}
	return nil
}

// pattern fills b with octets that tell place and seed.
func pattern(b []byte, off int, seed byte) {
	for i := range b {
		o := off + i
		b[i] = byte(o) ^ byte(o>>8)*7 ^ byte(o>>16)*31 ^ seed
	}
}

// firstDifference reports ok, or where a and b differ first.
func firstDifference(a, b []byte) (at int, ok bool) {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return i, false
		}
	}
	return min(len(a), len(b)), len(a) == len(b)
}
