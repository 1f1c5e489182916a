package xprt

import (
	"context"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
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

// A heldCompletions delays the completions of requests with one opcode until they are released.
type heldCompletions struct {
	op      verbs.Opcode
	release chan struct{} // closed to release all completions
	late    sync.WaitGroup
}

func (h *heldCompletions) hooks() qpHooks {
	return qpHooks{done: func(wr *verbs.WorkRequest, _ int, wc *verbs.WorkCompletion,
		next func(*verbs.WorkCompletion)) {
		if wr.Opcode != h.op || wc.Status != verbs.StatusSuccess {
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
	held := &heldCompletions{op: verbs.OpLocalInv, release: make(chan struct{})}
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
	kit.Eventually(t, "call at the server", func() bool { return svc.calls.Load() == writes+1 })
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

// TestReplyWaitsForFence has a call whose reply arrives before its LOCAL_INVs complete. The call
// must not return before (docs/features.md S9).
func TestReplyWaitsForFence(t *testing.T) {
	held := &heldCompletions{op: verbs.OpLocalInv, release: make(chan struct{})}
	tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}}), func(c *Config) {
		c.Provider = hooked(&hookedProvider{open: held.hooks})
	})
	ended := make(chan error, 1)
	go func() {
		var r nfs3.ReadResult
		ended <- nfs3.NewClient(tr, nfs3.Options{}).Read(testContext(t), noCred, testFH(t), 0, make([]byte, 100000), &r)
	}()
	kit.Eventually(t, "call that waits for its LOCAL_INVs", func() bool {
		calls := tr.Calls()
		return len(calls) == 1 && calls[0].Waits == WaitInvalidate || len(ended) > 0
	})
	released := time.AfterFunc(50*time.Millisecond, func() { close(held.release) })
	if err := <-ended; err != nil {
		t.Errorf("READ: %v", err)
	}
	if released.Stop() {
		t.Error("READ returned before its LOCAL_INVs completed")
		close(held.release)
	}
	held.late.Wait()
}

// TestFlushIsNoFence handles a flushed LOCAL_INV. The call must not end before its connection has
// ended, because only then the server cannot reach its memory.
func TestFlushIsNoFence(t *testing.T) {
	tr, err := New(Config{Provider: softiwarp.New(softiwarp.Config{}), Slots: 4})
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	for _, c := range []struct{ before, flushed, ended slotState }{
		{slotFencing, slotFencing, slotDone},
		{slotAbandoned, slotAbandoned, slotAbandoned},
	} {
		s := <-tr.free
		s.begin(context.Background(), &sunrpc.Message{}, tr.startCall())
		s.state = c.before
		s.onFenced(false)
		if s.state != c.flushed || s.fenced || len(s.wake) > 0 {
			t.Fatalf("state %d after a flush: got %d, fenced %v; want no change", c.before, s.state, s.fenced)
		}
		if _, ok := s.tryReturn(new(Ended)); ok {
			t.Fatalf("state %d after a flush: the caller may return, want not", c.before)
		}
		s.connectionEnded()
		if s.state != c.ended || !s.fenced {
			t.Errorf("state %d after the end of the connection: got %d, fenced %v; want %d, true", c.before, s.state,
				s.fenced, c.ended)
		}
		s.end()
	}
}

// TestInterruptWaitsForSend interrupts a call whose Send uses the memory of the caller. The call
// must not return before the Send has completed, even if all keys are invalidated (docs/features.md
// S8).
func TestInterruptWaitsForSend(t *testing.T) {
	svc := &service{}
	held := &heldCompletions{op: verbs.OpSend, release: make(chan struct{})}
	tr := dial(t, serve(t, svcrdma.Config{Handler: svc, InlineBytes: 65536}), func(c *Config) {
		c.Provider, c.InlineBytes = hooked(&hookedProvider{open: held.hooks}), 65536
	})
	svc.delay.Store(int64(time.Hour))
	ctx, cancel := context.WithCancel(testContext(t))
	interrupted := make(chan error, 1)
	go func() {
		var r nfs3.WriteResult
		interrupted <- nfs3.NewClient(tr, nfs3.Options{}).Write(ctx, noCred, testFH(t), 0, fill(0, 30000),
			nfs3.FileSync, &r)
	}()
	kit.Eventually(t, "call at the server", func() bool { return svc.calls.Load() == 1 })
	cancel()
	released := time.AfterFunc(100*time.Millisecond, func() { close(held.release) })
	if err := <-interrupted; !errors.Is(err, syscall.EINTR) {
		t.Errorf("WRITE: got %v, want EINTR", err)
	}
	if released.Stop() {
		t.Error("WRITE returned before its Send completed")
		close(held.release)
	}
	held.late.Wait()
}

// TestInterruptWaitsForDrain interrupts a call while its connection is taken down. The call must
// not return before the queue pair is drained, because the server may reach its memory until then
// (docs/features.md S16).
func TestInterruptWaitsForDrain(t *testing.T) {
	svc := &service{}
	draining, drain := make(chan struct{}), make(chan struct{})
	var once sync.Once
	tr := dial(t, serve(t, svcrdma.Config{Handler: svc}), func(c *Config) {
		c.Provider = hooked(&hookedProvider{open: func() qpHooks {
			return qpHooks{drain: func() {
				once.Do(func() { close(draining) })
				<-drain
			}}
		}})
	})
	svc.delay.Store(int64(time.Hour))
	ctx, cancel := context.WithCancel(testContext(t))
	interrupted := make(chan error, 1)
	go func() {
		var r nfs3.ReadResult
		interrupted <- nfs3.NewClient(tr, nfs3.Options{}).Read(ctx, noCred, testFH(t), 0, make([]byte, 100000), &r)
	}()
	kit.Eventually(t, "call at the server", func() bool { return svc.calls.Load() == 1 })
	connOf(t, tr).fail(io.EOF)
	<-draining
	cancel()
	released := time.AfterFunc(100*time.Millisecond, func() { close(drain) })
	if err := <-interrupted; !errors.Is(err, syscall.EINTR) {
		t.Errorf("READ: got %v, want EINTR", err)
	}
	if released.Stop() {
		t.Error("READ returned before the queue pair was drained")
		close(drain)
	}
}

// TestInterruptKeepsCredit interrupts calls. Their credits must stay in use until the late replies,
// because the server still counts the calls (RFC 8166 §3.3.1).
func TestInterruptKeepsCredit(t *testing.T) {
	const credits = 2
	hold := make(chan struct{})
	var calls atomic.Int64
	svc := handlerFunc(func(ctx context.Context, proc uint32) {
		if calls.Add(1) > 1 { // the first reply grants the credits
			<-hold
		}
	})
	tr := dial(t, serve(t, svcrdma.Config{Handler: svc, Credits: credits}), nil)
	if err := tr.Call(testContext(t), echo(1, nil, 0)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(testContext(t))
	var wg sync.WaitGroup
	for range credits {
		wg.Go(func() {
			if err := tr.Call(ctx, echo(1, nil, 0)); !errors.Is(err, syscall.EINTR) {
				t.Errorf("Call: got %v, want EINTR", err)
			}
		})
	}
	kit.Eventually(t, "calls at the server", func() bool { return calls.Load() == 1+credits })
	cancel()
	wg.Wait()
	if s := tr.Stats(); s.InFlight != credits || s.SlotsInUse != credits {
		t.Errorf("after the interrupt: got %d credits, %d slots in use; want %d, %d", s.InFlight, s.SlotsInUse, credits,
			credits)
	}
	next := make(chan error, 1)
	go func() { next <- tr.Call(testContext(t), echo(1, nil, 0)) }()
	kit.Eventually(t, "call that waits for a credit", func() bool { return tr.Stats().Queued == 1 })
	close(hold)
	if err := <-next; err != nil {
		t.Error(err)
	}
	kit.Eventually(t, "free slots and credits", func() bool {
		s := tr.Stats()
		return s.InFlight == 0 && s.SlotsInUse == 0
	})
}
