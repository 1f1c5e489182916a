package knfsd

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/faults"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

// These cases cut the connection again and again under calls that cannot be done twice: a replay
// that is executed again ends in EEXIST or ENOENT.
var (
	_ = register("cut by us", "names and data while we cut the connection again and again", testCutByUs)
	_ = register("cut by the server", "names and data while the server cuts the connection again and again",
		testCutByServer)
	_ = register("nfsd restarted", "nfsd stopped under a mount and started again", testRestart)
)

const (
	cutWorkers = 6
	cutsByUs   = 40
	cutsByIt   = 8
	cutSize    = 128 << 10 // of each worker's file
)

func testCutByUs(t *testing.T, b bench) {
	b = b.another(lab.Options{ExpectedKernelErrors: cutComplaints})
	plan, err := faults.Parse("disconnect-every=~60")
	if err != nil {
		t.Fatal(err)
	}
	t.Log("faults:", plan)
	p := faults.New(b.newProvider(t), plan, nil)
	capture := b.Capture(t, "cut")
	m := b.mount(t, func(c *xprt.Config) {
		shortWaits(c)
		c.Provider, c.ReconnectMin, c.ReconnectMax, c.Logger = p, time.Millisecond, 10*time.Millisecond, nil
	})
	w := startWork(t, m, plan.Seed())
	w.await(func() bool { return m.tr.Stats().Connects > cutsByUs })
	w.stop()
	if m.tr.Stats().Resends == 0 {
		t.Error("no call was cut off")
	}
	gentle(t, b, capture, 1, false)
}

// testCutByServer has the server's kernel abort its connections, each when it has carried calls:
// what siw has not looked at must not be cut.
func testCutByServer(t *testing.T, b bench) {
	b = b.another(lab.Options{ExpectedKernelErrors: cutComplaints})
	m := b.mount(t, func(c *xprt.Config) {
		shortWaits(c)
		c.ReconnectMin, c.ReconnectMax = 100*time.Millisecond, time.Second
	})
	w := startWork(t, m, 1)
	for range cutsByIt {
		before := m.tr.Stats()
		w.await(func() bool {
			s := m.tr.Stats()
			return s.State == xprt.StateConnected && s.Recvs > before.Recvs+50
		})
		before = m.tr.Stats()
		b.abort()
		w.await(func() bool { return m.tr.Stats().Connects > before.Connects })
	}
	w.stop()
}

// cutComplaints are what the kernel's server may say of its own when connections end under traffic,
// or its device is removed. These cases have servers of their own for that.
var cutComplaints = []string{
	// A queue pair is destroyed that still has registrations in use, and the device is told to be
	// left with something of the server's.
	`WARNING: .*drivers/infiniband/core/(verbs|restrack)\.c`,
	// A receive context, and the pages that it reads a chunk into, are given back twice (seen once,
	// below svc_rdma_free).
	`BUG: Bad page state in process nfsd`, `kernel BUG at mm/slub\.c`, `Oops: invalid opcode`,
}

// abort ends all connections to the server, as the server's own doing. Where they are not TCP its
// device goes, and another comes in its place.
func (b bench) abort() {
	b.t.Helper()
	if b.device == lab.RXE {
		b.MustRun("set -e; card=$(rdma link show rxe0/1 | sed 's/.*netdev //'); rdma link delete rxe0; rdma link add rxe0 type rxe netdev $card")
		return
	}
	if out := b.MustRun("modprobe tcp_diag; ss -nK state established sport = :20049"); !strings.Contains(out,
		":20049") {
		b.t.Fatalf("nothing was cut: %s", out)
	}
}

// testRestart stops the server's threads, and with them its listeners and connections, under an
// idle mount, has work wait for it, and starts it again. Under calls a kernel of 6.1 may never get
// its threads back.
func testRestart(t *testing.T, b bench) {
	b = b.another(lab.Options{}) // and so it may after connections that were cut
	m := b.mount(t, shortWaits)
	b.MustRun("rpc.nfsd 0")
	waitFor(t, "the loss of the connection to be noticed",
		func() bool { return m.tr.Stats().State != xprt.StateConnected })
	w := startWork(t, m, 2)
	w.await(func() bool { return m.tr.Stats().ConnectFailures > 1 })
	b.MustRun(`rpc.nfsd -G 10 -L 15 8
		echo Y 2>/dev/null >/proc/fs/nfsd/v4_end_grace
		echo "rdma 20049" >/proc/fs/nfsd/portlist`)
	w.await(func() bool { return w.steps.Load() > 10*cutWorkers })
	w.stop()
}

// work is workers that use a mount.
type work struct {
	t     *testing.T
	m     *mount
	over  atomic.Bool
	steps atomic.Int64
	all   sync.WaitGroup
}

func startWork(t *testing.T, m *mount, seed uint64) *work {
	w := &work{t: t, m: m}
	for i := range cutWorkers {
		rng := rand.New(rand.NewPCG(seed, uint64(i)))
		w.all.Go(func() {
			if err := w.worker(i, rng); err != nil {
				t.Errorf("worker %d: %v", i, err)
				w.over.Store(true)
			}
		})
	}
	t.Cleanup(func() {
		w.over.Store(true)
		w.all.Wait()
	})
	return w
}

// await waits while the workers work.
func (w *work) await(happened func() bool) {
	w.t.Helper()
	for end := time.Now().Add(patience); !happened() && !w.over.Load(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			w.over.Store(true)
			for _, c := range w.m.tr.Calls() {
				w.t.Logf("call %+v", c)
			}
			w.t.Fatalf("waited %v in vain: %+v", patience, w.m.tr.Stats())
		}
	}
}

// stop ends the work, and holds the transport to its promises.
func (w *work) stop() {
	w.t.Helper()
	w.over.Store(true)
	w.all.Wait()
	s := w.m.tr.Stats()
	w.t.Logf("%d steps, %d RPCs, %d connects, %d failed, %d resends, %d timeouts, %d nudges; %d MRs hurt = %d recovered + %d recycled + %d orphaned", w.steps.Load(), s.Sends, s.Connects,
		s.ConnectFailures, s.Resends, s.Timeouts, s.Nudges, s.MRsFailed, s.MRsRecovered, s.MRsRecycled, s.MRsOrphaned)
	if s.Connects < 2 {
		w.t.Error("the connection was never lost")
	}
	if s.MRsFailed != s.MRsRecovered+s.MRsRecycled+s.MRsOrphaned {
		w.t.Error("the MRs do not add up")
	}
	if left, err := os.ReadDir(w.m.dir); err != nil || len(left) != 0 {
		w.t.Errorf("left in the export: %v, %v", left, err)
	}
}

// worker keeps a file and its shadow in step, and makes and removes names that nobody else has.
// Every error is wrong.
func (w *work) worker(id int, rng *rand.Rand) error {
	shadow, got := make([]byte, cutSize), make([]byte, cutSize)
	name := filepath.Join(w.m.dir, fmt.Sprint("file", id))
	f, err := os.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_RDWR|syscall.O_DIRECT, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.Write(shadow); err != nil {
		return err
	}
	for i := 0; !w.over.Load(); i++ {
		w.steps.Add(1)
		off := rng.IntN(cutSize)
		n := 1 + rng.IntN(cutSize-off)
		switch i % 3 {
		case 0:
			for k := range n {
				shadow[off+k] = byte(rng.Uint32())
			}
			_, err = f.WriteAt(shadow[off:off+n], int64(off))
		case 1:
			if _, err = f.ReadAt(got[:n], int64(off)); err == nil && !bytes.Equal(got[:n], shadow[off:off+n]) {
				err = fmt.Errorf("step %d: %d octets at %d are not what was written", i, n, off)
			}
		case 2:
			err = w.names(fmt.Sprintf("d%d.%d", id, i))
		}
		if err != nil {
			return err
		}
	}
	if _, err := f.ReadAt(got, 0); err != nil {
		return err
	}
	if !bytes.Equal(got, shadow) {
		return fmt.Errorf("the file is not what was written")
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Remove(name)
}

// names does once what cannot be done twice.
func (w *work) names(dir string) error {
	d := filepath.Join(w.m.dir, dir)
	a, b, c := filepath.Join(d, "a"), filepath.Join(d, "b"), filepath.Join(d, "c")
	for _, step := range []func() error{
		func() error { return os.Mkdir(d, 0o755) },
		func() error {
			f, err := os.OpenFile(a, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
			if err != nil {
				return err
			}
			return f.Close()
		},
		func() error { return os.Link(a, b) },
		func() error { return os.Rename(a, c) },
		func() error { return os.Symlink("b", a) },
		func() error { return os.Remove(a) },
		func() error { return os.Remove(b) },
		func() error { return os.Remove(c) },
		func() error { return os.Remove(d) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}
