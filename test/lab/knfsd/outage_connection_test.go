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
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

// These cases repeatedly cut the connection during calls that are not idempotent. A replayed call
// that the server executes twice fails with EEXIST or ENOENT.
var (
	_ = register("cut by the client", "names and data while the client repeatedly cuts the connection", testCutByClient)
	_ = register("cut by the server", "names and data while the server repeatedly cuts the connection",
		testCutByServer)
	_ = register("nfsd restarted", "nfsd stopped and restarted under a mount", testRestart)
)

const (
	cutWorkers   = 6
	cutsByClient = 40
	cutsByServer = 8
	cutSize      = 128 << 10 // size in bytes of each worker's file
)

func testCutByClient(t *testing.T, b bench) {
	b = b.serverForCuts()
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
	w.await(func() bool { return m.tr.Stats().Connects > cutsByClient })
	w.stop()
	if m.tr.Stats().Resends == 0 {
		t.Error("got no resend, want at least one")
	}
	checkConnections(t, b, capture, 1, false)
}

// testCutByServer makes the server's kernel abort its connections. Each connection has carried
// calls before the abort, because a stock siw fails when it loses a connection that it has not
// handled yet.
func testCutByServer(t *testing.T, b bench) {
	b = b.serverForCuts()
	m := b.mount(t, func(c *xprt.Config) {
		shortWaits(c)
		c.ReconnectMin, c.ReconnectMax = 100*time.Millisecond, time.Second
	})
	w := startWork(t, m, 1)
	for range cutsByServer {
		before := m.tr.Stats()
		w.await(func() bool {
			s := m.tr.Stats()
			return s.State == xprt.StateConnected && s.Recvs > before.Recvs+50
		})
		before = m.tr.Stats()
		b.abortConnections()
		w.await(func() bool { return m.tr.Stats().Connects > before.Connects })
	}
	w.stop()
}

// cutErrors are kernel errors of the server when connections end under traffic or its device is
// removed.
var cutErrors = []string{
	// The server destroys a queue pair with active registrations, and the device still has
	// resources of the server.
	`WARNING: .*drivers/infiniband/core/(verbs|restrack)\.c`,
	// The server frees a receive context and its pages twice (seen once, below svc_rdma_free).
	`BUG: Bad page state in process nfsd`, `kernel BUG at mm/slub\.c`, `Oops: invalid opcode`,
}

// serverForCuts starts a server for a case in which connections end under traffic: a test, a signal
// or the RPC timeout ends them.
func (b bench) serverForCuts() bench {
	b.t.Helper()
	return b.ownServer(lab.Options{ExpectedKernelErrors: cutErrors})
}

// abortConnections makes the server end all its connections. Without TCP it deletes the server's
// device and adds it again.
func (b bench) abortConnections() {
	b.t.Helper()
	if b.device == lab.RXE {
		b.MustRun("set -e; card=$(rdma link show rxe0/1 | sed 's/.*netdev //'); rdma link delete rxe0; " +
			"rdma link add rxe0 type rxe netdev $card")
		return
	}
	if out := b.MustRun("modprobe tcp_diag; ss -nK state established sport = :20049"); !strings.Contains(out,
		":20049") {
		b.t.Fatalf("ss -K: got no aborted connection: %s", out)
	}
}

// testRestart stops the server's threads under an idle mount, which ends its listeners and
// connections. testRestart then starts I/O, and starts the threads again. If calls are in flight,
// kernel 6.1 may fail to start its threads.
func testRestart(t *testing.T, b bench) {
	b = b.ownServer(lab.Options{}) // the same can happen after the cases that cut connections
	m := b.mount(t, shortWaits)
	b.MustRun("rpc.nfsd 0")
	kit.Eventually(t, "the loss of the connection to be noticed",
		func() bool { return m.tr.Stats().State != xprt.StateConnected })
	w := startWork(t, m, 2)
	w.await(func() bool { return m.tr.Stats().ConnectFailures > 1 })
	b.MustRun(`rpc.nfsd -G 10 -L 15 8
		echo Y 2>/dev/null >/proc/fs/nfsd/v4_end_grace
		echo "rdma 20049" >/proc/fs/nfsd/portlist`)
	w.await(func() bool { return w.steps.Load() > 10*cutWorkers })
	w.stop()
}

// A work is a set of workers that use a mount.
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

// await waits for a condition while the workers run.
func (w *work) await(happened func() bool) {
	w.t.Helper()
	for end := time.Now().Add(waitTimeout); !happened() && !w.over.Load(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			w.over.Store(true)
			for _, c := range w.m.tr.Calls() {
				w.t.Logf("call %+v", c)
			}
			w.t.Fatalf("condition not met within %v: %+v", waitTimeout, w.m.tr.Stats())
		}
	}
}

// stop ends the work and checks the transport's counters.
func (w *work) stop() {
	w.t.Helper()
	w.over.Store(true)
	w.all.Wait()
	s := w.m.tr.Stats()
	w.t.Logf("%d steps, %d RPCs, %d connects, %d failed, %d resends, %d timeouts, %d nudges",
		w.steps.Load(), s.Sends, s.Connects, s.ConnectFailures, s.Resends, s.Timeouts, s.Nudges)
	w.t.Logf("%d MRs failed, %d recovered, %d recycled, %d orphaned",
		s.MRsFailed, s.MRsRecovered, s.MRsRecycled, s.MRsOrphaned)
	if s.Connects < 2 {
		w.t.Error("got no reconnect, want at least one")
	}
	if s.MRsFailed != s.MRsRecovered+s.MRsRecycled+s.MRsOrphaned {
		w.t.Error("got failed MRs that are not the sum of recovered, recycled and orphaned MRs")
	}
	if left, err := os.ReadDir(w.m.dir); err != nil || len(left) != 0 {
		w.t.Errorf("got remaining files %v, error %v", left, err)
	}
}

// worker compares a file with a copy in memory, and creates and removes names that no other worker
// uses. It returns the first error.
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
				err = fmt.Errorf("step %d: read of %d bytes at %d: data differs from what was written", i, n, off)
			}
		case 2:
			err = w.changeNames(fmt.Sprintf("d%d.%d", id, i))
		}
		if err != nil {
			return err
		}
	}
	if _, err := f.ReadAt(got, 0); err != nil {
		return err
	}
	if !bytes.Equal(got, shadow) {
		return fmt.Errorf("final read: data differs from what was written")
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Remove(name)
}

// changeNames executes operations on names that are not idempotent.
func (w *work) changeNames(dir string) error {
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
