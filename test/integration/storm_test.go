package integration

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/server/nfsserve"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/faults"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

// stormEnv sets the number of disconnects of TestStorm. `make soak` sets 10,000.
const stormEnv = "NFSRDMAD_STORM"

// mostMore is how many disconnects more than 10 times the wanted number a storm waits for the
// rarest ends of MRs.
const mostMore = 1000

// TestStorm runs 32 workers with verified I/O on a mount while both ends disconnect at random
// points and the devices inject all other faults. No byte may be wrong, no call may be lost or
// executed twice, every failed MR must be recovered, recycled or orphaned, and memory must not
// grow.
func TestStorm(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	disconnects := 50
	if s := os.Getenv(stormEnv); s != "" {
		var err error
		if disconnects, err = strconv.Atoi(s); err != nil {
			t.Fatalf("%s: %v", stormEnv, err)
		}
	}
	plan := func(spec string) *faults.Plan {
		p, err := faults.Parse(spec)
		kit.Must(t, err)
		t.Log("faults:", p)
		return p
	}
	server := faults.New(softiwarp.New(softiwarp.Config{}),
		plan("disconnect-every=~600,late-write=~400,stale-key=~500,wild-write=~700"), nil)
	client := faults.New(softiwarp.New(softiwarp.Config{}),
		plan("disconnect-every=~150,post-fail=~500:*,flush-reg=~600,reg-error=~700,linv-error=~40,alloc-fail=~20,"+
			"dereg-fail=~20,connect-fail=~30,delay-reply=~200:1ms"), nil)
	// With NoRemoteInv the client invalidates every chunk by LOCAL_INV.
	s := serve(t, nfsserve.Config{Dir: t.TempDir(), TCPListen: "127.0.0.1:0", Provider: server, NoRemoteInv: true})
	m := mountIt(t, mountConfig{rdma: s.RDMAAddr, export: embedded(t, s), tune: func(c *xprt.Config) {
		c.Provider, c.ReconnectMin, c.ReconnectMax = client, time.Millisecond, 10*time.Millisecond
		c.TraceEvents = xprt.DefaultTraceEvents
	}})
	const workers = 32
	var stop atomic.Bool
	var ops atomic.Int64
	var wg sync.WaitGroup
	for w := range workers {
		rng := rand.New(rand.NewPCG(client.Plan().Seed(), uint64(w)))
		wg.Go(func() {
			if err := stormWorker(m.dir, w, rng, &stop, &ops); err != nil {
				t.Errorf("worker %d: %v", w, err)
				stop.Store(true)
			}
		})
	}
	var heap []uint64
	last, lastOps := time.Now(), int64(0)
	for !stop.Load() {
		time.Sleep(50 * time.Millisecond)
		st := m.tr.Stats()
		if n := uint64(disconnects); st.Connects > n && (endedInEveryWay(st) || st.Connects > 10*n+mostMore) {
			stop.Store(true)
		}
		if len(heap) < int(st.Connects)*10/disconnects {
			var ms runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&ms)
			heap = append(heap, ms.HeapAlloc)
		}
		if n := ops.Load(); n != lastOps {
			last, lastOps = time.Now(), n
		} else if time.Since(last) > kit.Timeout {
			for _, c := range m.tr.Calls() {
				t.Logf("call %+v", c)
			}
			t.Errorf("no operation completed for %v: %+v", kit.Timeout, st)
			stop.Store(true)
		}
	}
	wg.Wait()
	st := m.tr.Stats()
	if !endedInEveryWay(st) {
		t.Errorf("MRs: got %d recovered, %d recycled, %d orphaned, want some of each", st.MRsRecovered, st.MRsRecycled,
			st.MRsOrphaned)
	}
	t.Logf("%d operations, %d RPCs, %d connects, %d resends; heap %v", ops.Load(), st.Sends, st.Connects, st.Resends,
		heap)
	// The heap grows to its normal size during the first samples.
	if n := len(heap); n >= 8 && heap[n-1] > heap[n/2]+32<<20 {
		t.Errorf("heap grows: %v", heap)
	}
}

// endedInEveryWay reports whether failed MRs were recovered, recycled and orphaned. The faults are
// random, so a short storm may orphan none.
func endedInEveryWay(st xprt.Stats) bool {
	return st.MRsRecovered > 0 && st.MRsRecycled > 0 && st.MRsOrphaned > 0
}

// stormWorker compares a file with a copy in memory after each write, and creates, renames and
// removes names that no other worker uses. It returns the first error.
func stormWorker(dir string, w int, rng *rand.Rand, stop *atomic.Bool, ops *atomic.Int64) error {
	const size = 192 << 10
	shadow := make([]byte, size)
	// With O_DIRECT, every read and write goes to the server.
	f, err := os.OpenFile(filepath.Join(dir, fmt.Sprintf("file%d", w)),
		os.O_CREATE|os.O_EXCL|os.O_RDWR|syscall.O_DIRECT, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.Write(shadow); err != nil {
		return err
	}
	got := make([]byte, size)
	for i := 0; !stop.Load(); i++ {
		ops.Add(1)
		off := rng.IntN(size)
		n := 1 + rng.IntN(min(size-off, []int{100, 5000, size}[rng.IntN(3)]))
		switch rng.IntN(8) {
		case 0, 1, 2:
			for k := range n {
				shadow[off+k] = byte(rng.Uint32())
			}
			if _, err := f.WriteAt(shadow[off:off+n], int64(off)); err != nil {
				return err
			}
		case 3, 4, 5, 6:
			if _, err := f.ReadAt(got[:n], int64(off)); err != nil {
				return err
			}
			if !bytes.Equal(got[:n], shadow[off:off+n]) {
				return fmt.Errorf("step %d: %d bytes at offset %d differ from what was written", i, n, off)
			}
		case 7:
			if err := stormNames(dir, w, i); err != nil {
				return err
			}
		}
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if _, err := f.ReadAt(got, 0); err != nil {
		return err
	}
	if !bytes.Equal(got, shadow) {
		return errors.New("file differs from what was written")
	}
	return f.Close()
}

// stormNames calls operations that fail when they run twice. An unexpected EEXIST or ENOENT means
// that the server executed a retransmitted call again.
func stormNames(dir string, w, i int) error {
	d := filepath.Join(dir, fmt.Sprintf("d%d.%d", w, i))
	a, b := filepath.Join(d, "a"), filepath.Join(d, "b")
	for _, step := range []func() error{
		func() error { return os.Mkdir(d, 0o755) },
		func() error {
			f, err := os.OpenFile(a, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
			if err != nil {
				return err
			}
			return f.Close()
		},
		func() error { return os.Rename(a, b) },
		func() error { return os.Symlink("b", a) },
		func() error { return os.Remove(a) },
		func() error { return os.Remove(b) },
		func() error { return os.Remove(d) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}
