package memreg

import (
	"errors"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// A limitedPD is the protection domain of a device with few MRs.
type limitedPD struct {
	mu    sync.Mutex // guards fakePD
	limit int
	fakePD
}

func (p *limitedPD) AllocMR(depth int) (verbs.MR, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.present == p.limit {
		return nil, syscall.ENOMEM
	}
	return p.fakePD.AllocMR(depth)
}

// TestSlotTakesFreeMRs has a slot that once needed most MRs of the device and is idle. Another slot
// must get the free ones, at the limit of the device and when an allocation fails.
func TestSlotTakesFreeMRs(t *testing.T) {
	var stats Counters
	pd := &limitedPD{limit: 10}
	pool := NewPool(pd, Params{Depth: 1, PageSize: 4096, MaxSegs: 8}, &stats, Hooks{})
	mem := pages(t, 8)
	var idle, busy, third List
	for _, l := range []*List{&idle, &busy, &third} {
		l.Use(pool)
	}
	if n, err := idle.Map([][]byte{mem}, true, 1); n != 8 || err != nil {
		t.Fatalf("Map of the first slot: got %d MRs, %v; want 8", n, err)
	}
	idle.Unmap()
	if n, err := busy.Map([][]byte{mem}, true, 2); n != 8 || err != nil {
		t.Fatalf("Map of the second slot: got %d MRs, %v; want 8", n, err)
	}
	// Two MRs are free. A call that needs more fails and takes none from the calls in flight.
	if _, err := third.Map([][]byte{mem[:3*4096]}, true, 3); !errors.Is(err, syscall.ENOMEM) {
		t.Fatalf("Map of more than all free MRs: got %v, want ENOMEM", err)
	}
	if n := len(busy.Registered()); n != 8 || stats.Free() != 2 || stats.MapErrors.Load() != 1 {
		t.Errorf("after the failed Map: got %d registered, %d free, %d map errors; want 8, 2, 1", n, stats.Free(),
			stats.MapErrors.Load())
	}
	if n, err := idle.Map([][]byte{mem[:2*4096]}, true, 4); n != 2 || err != nil {
		t.Fatalf("Map of the first slot: got %d MRs, %v; want 2", n, err)
	}
	if err := pool.Check(); err != nil {
		t.Error(err)
	}
	idle.Unmap()
	busy.Unmap()
	if stats.MRsAllocated.Load() != 10 || stats.Free() != 10 {
		t.Errorf("got %d allocated, %d free; want 10, 10", stats.MRsAllocated.Load(), stats.Free())
	}
	if err := pool.Check(); err != nil {
		t.Error(err)
	}
	pool.Destroy()
}

// TestSlotsShareFewMRs runs calls of one to three MRs in five slots on a device with six MRs. No
// slot may starve.
func TestSlotsShareFewMRs(t *testing.T) {
	const slots, calls = 5, 100
	var stats Counters
	pool := NewPool(&limitedPD{limit: 6}, Params{Depth: 1, PageSize: 4096, MaxSegs: 8}, &stats, Hooks{})
	mem := pages(t, 3)
	deadline := time.Now().Add(kit.Timeout)
	var wg sync.WaitGroup
	for i := range slots {
		wg.Go(func() {
			var l List
			l.Use(pool)
			for n := 0; n < calls; {
				_, err := l.Map([][]byte{mem[:(1+(i+n)%3)*4096]}, true, 1)
				if err != nil {
					if !errors.Is(err, syscall.ENOMEM) || time.Now().After(deadline) {
						t.Errorf("slot %d: call %d: %v", i, n, err)
						return
					}
					time.Sleep(time.Duration(10+i) * time.Microsecond)
					continue
				}
				send := verbs.WorkRequest{Done: func(*verbs.WorkCompletion) {}}
				l.Chain(&send)
				time.Sleep(time.Microsecond)
				if err := l.Invalidate(doneQP{}, func(bool) {}); err != nil {
					t.Error(err)
				}
				l.Fenced()
				n++
			}
		})
	}
	wg.Wait()
	if err := pool.Check(); err != nil {
		t.Error(err)
	}
	if stats.MRsAllocated.Load() != 6 || stats.Free() != 6 {
		t.Errorf("got %d allocated, %d free; want 6, 6", stats.MRsAllocated.Load(), stats.Free())
	}
	pool.Destroy()
}

// TestSteadyStateSharesNoLock runs a call while another goroutine holds the lock of the pool (S2).
func TestSteadyStateSharesNoLock(t *testing.T) {
	var stats Counters
	pool := NewPool(&fakePD{}, Params{Depth: 1, PageSize: 4096, MaxSegs: 8}, &stats, Hooks{})
	mem := pages(t, 2)
	var l List
	l.Use(pool)
	call := func() {
		l.Use(pool)
		if _, err := l.Map([][]byte{mem}, true, 1); err != nil {
			t.Error(err)
			return
		}
		l.RemoteInvalidated(l.Registered()[0].handle)
		if err := l.Invalidate(doneQP{}, func(bool) {}); err != nil {
			t.Error(err)
		}
		l.Fenced()
		if _, err := l.Map([][]byte{mem}, true, 1); err != nil {
			t.Error(err)
		}
		l.Unmap()
	}
	call() // allocates the MRs
	pool.mrs.Lock()
	done := make(chan struct{})
	go func() { defer close(done); call() }()
	select {
	case <-done:
	case <-time.After(kit.Timeout):
		t.Error("a call waits for the lock of the pool")
	}
	pool.mrs.Unlock()
	<-done
	pool.Destroy()
}
