package xprt

import (
	"context"
	"errors"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// TestFenceTimeoutFollowsQueue checks the time that an interrupted call waits for its LOCAL_INVs: 1
// s, and the bytes of unanswered calls at 1 Mbit/s, at most the timeout of a reply.
func TestFenceTimeoutFollowsQueue(t *testing.T) {
	for _, c := range []struct {
		name    string
		timeout time.Duration
		slots   []*slot
		want    time.Duration
	}{
		{"nothing in the queue", time.Minute, nil, time.Second},
		{"one call of 125,000 bytes", time.Minute, []*slot{{state: slotSent, outBytes: 125000}}, 2 * time.Second},
		{"calls that are not answered", time.Minute, []*slot{{state: slotSent, outBytes: 125000},
			{state: slotAbandoned, outBytes: 250000}}, 4 * time.Second},
		{"calls that are answered or not posted", time.Minute, []*slot{{state: slotFencing, outBytes: 125000},
			{state: slotDone, outBytes: 125000}, {state: slotWaiting, outBytes: 125000},
			{state: slotLost, outBytes: 125000}, {state: slotIdle, outBytes: 125000},
			{state: slotAbandoned, lateDone: true, outBytes: 125000}}, time.Second},
		{"more than the timeout of a reply", time.Minute, []*slot{{state: slotSent, outBytes: 1 << 27}}, time.Minute},
		{"short timeout of a reply", 300 * time.Millisecond, nil, 300 * time.Millisecond},
	} {
		tr := &Transport{cfg: Config{Timeout: c.timeout}, slots: c.slots}
		if got := tr.fenceTimeout(); got != c.want {
			t.Errorf("%s: got %v, want %v", c.name, got, c.want)
		}
	}
}

// A heldCompletions delays the completions of LOCAL_INVs until they are released.
type heldCompletions struct {
	release chan struct{} // closed to release all completions
	late    sync.WaitGroup
}

func (h *heldCompletions) hooks() qpHooks {
	return qpHooks{done: func(wr *verbs.WorkRequest, _ int, wc *verbs.WorkCompletion, next func(*verbs.WorkCompletion)) {
		if wr.Opcode != verbs.OpLocalInv {
			next(wc)
			return
		}
		w := *wc
		h.late.Go(func() {
			<-h.release
			next(&w)
		})
	}}
}

// TestInterruptWaitsBehindData interrupts a call whose LOCAL_INVs complete late, as on a slow link
// where they wait behind the data of WRITEs. The connection must stay up.
func TestInterruptWaitsBehindData(t *testing.T) {
	const writes = 3
	svc := &service{}
	held := &heldCompletions{release: make(chan struct{})}
	tr := dial(t, serve(t, svcrdma.Config{Handler: svc}), func(c *Config) {
		c.Provider = hooked(&hookedProvider{open: held.hooks})
	})
	if err := tr.Call(testContext(t), echo(1, nil, 0)); err != nil { // its reply grants the credits
		t.Fatal(err)
	}
	svc.delay.Store(int64(time.Hour))
	svc.calls.Store(0)
	c := nfs3.NewClient(tr, nfs3.Options{})
	data := fill(0, 1<<20)
	pending, stop := context.WithCancel(testContext(t))
	var wg sync.WaitGroup
	for range writes {
		wg.Go(func() {
			var r nfs3.WriteResult
			if err := c.Write(pending, noCred, testFH(t), 0, data, nfs3.FileSync, &r); !errors.Is(err, syscall.EINTR) {
				t.Errorf("WRITE: got %v, want EINTR", err)
			}
		})
	}
	ctx, cancel := context.WithCancel(testContext(t))
	interrupted := make(chan error, 1)
	go func() {
		var r nfs3.ReadResult
		interrupted <- c.Read(ctx, noCred, testFH(t), 0, make([]byte, 100000), &r)
	}()
	eventually(t, "call at the server", func() bool { return svc.calls.Load() == writes+1 })
	cancel()
	released := time.AfterFunc(fenceMin+200*time.Millisecond, func() { close(held.release) })
	if err := <-interrupted; !errors.Is(err, syscall.EINTR) {
		t.Errorf("READ: got %v, want EINTR", err)
	}
	if released.Stop() {
		t.Error("READ returned before its LOCAL_INVs completed")
		close(held.release)
	}
	stop()
	wg.Wait()
	held.late.Wait()
	if s := tr.Stats(); s.Connects != 1 || s.LastError != "" {
		t.Errorf("got %d connects, last error %q; want 1, none", s.Connects, s.LastError)
	}
}
