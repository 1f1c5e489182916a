package xprt

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/trace"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// TestKeepAliveDropsSilentServer checks that the client drops the connection to a silent server
// before the timeout of the calls, with and without a pending call. Calls must succeed when the
// server answers again.
func TestKeepAliveDropsSilentServer(t *testing.T) {
	for _, idle := range []bool{true, false} {
		svc := &service{}
		tr := dial(t, serve(t, svcrdma.Config{Handler: svc}), func(c *Config) {
			c.KeepAlive, c.Timeout, c.TraceEvents = 100*time.Millisecond, time.Hour, 256
		})
		kit.Eventually(t, "reply to a keepalive call", func() bool { return tr.Stats().Recvs > 1 })
		if s := tr.Stats(); s.Connects != 1 || s.KeepAlives == 0 {
			t.Fatalf("idle %v: got %d connects, %d keepalive calls; want 1 and some", idle, s.Connects, s.KeepAlives)
		}
		svc.delay.Store(int64(time.Hour))
		ended := make(chan error, 1)
		if !idle {
			go func() { ended <- tr.Call(testContext(t), echo(1, nil, 0)) }()
		}
		kit.Eventually(t, "second connection", func() bool { return tr.Stats().Connects > 1 })
		if s := tr.Stats(); !strings.Contains(s.LastError, "did not answer") || s.Timeouts != 0 {
			t.Errorf("idle %v: got last error %q, %d timeouts; want a missing answer, 0 timeouts", idle, s.LastError,
				s.Timeouts)
		}
		found := map[trace.Kind]bool{}
		for _, e := range tr.Trace().Last(256) {
			found[e.Kind] = true
		}
		for _, k := range []trace.Kind{trace.Ping, trace.Connect, trace.Disconnect, trace.PostSend, trace.Reply} {
			if !found[k] {
				t.Errorf("idle %v: trace has no event %v", idle, k)
			}
		}
		svc.delay.Store(0)
		if !idle {
			if err := <-ended; err != nil {
				t.Errorf("pending call: %v", err)
			}
		} else if err := tr.Call(testContext(t), echo(1, nil, 0)); err != nil {
			t.Error(err)
		}
	}
}

// TestKeepAliveKeepsBusyServer has a long call on a server that answers other calls.
func TestKeepAliveKeepsBusyServer(t *testing.T) {
	hold := make(chan struct{})
	svc := handlerFunc(func(ctx context.Context, proc uint32) {
		if proc == 1 {
			<-hold
		}
	})
	tr := dial(t, serve(t, svcrdma.Config{Handler: svc}), func(c *Config) { c.KeepAlive = 300 * time.Millisecond })
	ended := make(chan error, 1)
	go func() { ended <- tr.Call(testContext(t), echo(1, nil, 0)) }()
	kit.Eventually(t, "fifth keepalive call", func() bool { return tr.Stats().KeepAlives >= 5 })
	close(hold)
	if err := <-ended; err != nil || tr.Stats().Connects != 1 {
		t.Errorf("got %v, %d connects; want nil, 1", err, tr.Stats().Connects)
	}
}

// TestIdleConnectionIsClosed checks that an idle connection is closed, and that the next call makes
// a new one without a pause.
func TestIdleConnectionIsClosed(t *testing.T) {
	tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}}), func(c *Config) {
		c.IdleTimeout, c.KeepAlive = 600*time.Millisecond, 200*time.Millisecond
		c.ReconnectMin, c.ReconnectMax = time.Hour, time.Hour // a pause would fail the test
	})
	for round := range 6 {
		if round < 3 {
			if err := tr.Call(testContext(t), echo(1, nil, 0)); err != nil {
				t.Fatal(err)
			}
		} else { // the request of a call that was given up before it was sent
			tr.window.wanted <- struct{}{}
			kit.Eventually(t, "new connection", func() bool { return tr.Stats().Connects == uint64(round+1) })
		}
		kit.Eventually(t, "idle state", func() bool { return tr.Stats().State == StateIdle })
		if s := tr.Stats(); s.Connects != uint64(round+1) || s.LastError != "" {
			t.Errorf("round %d: got %d connects, last error %q; want %d, none", round, s.Connects, s.LastError, round+1)
		}
	}
}

// TestCallsShowsWhatEachCallWaitsFor checks Calls with calls in different states.
func TestCallsShowsWhatEachCallWaitsFor(t *testing.T) {
	svc := &service{}
	tr := dial(t, serve(t, svcrdma.Config{Handler: svc, Credits: 2}), func(c *Config) {
		c.Slots, c.ReconnectMin, c.ReconnectMax = 4, time.Hour, time.Hour
	})
	if err := tr.Call(testContext(t), echo(1, nil, 0)); err != nil { // its reply grants 2 credits
		t.Fatal(err)
	}
	svc.delay.Store(int64(time.Hour))
	type owner struct{}
	ctx, cancel := context.WithCancel(context.WithValue(context.Background(), owner{}, 4711))
	defer cancel()
	var wg sync.WaitGroup
	for range 6 {
		wg.Go(func() {
			if err := tr.Call(ctx, echo(1, nil, 0)); !errors.Is(err, syscall.EINTR) {
				t.Errorf("Call: got %v, want EINTR", err)
			}
		})
	}
	count := func() map[string]int {
		n := map[string]int{}
		for _, c := range tr.Calls() {
			n[c.Waits]++
			if c.Waits != WaitLate && (c.Prog != echoProg || c.Proc != 1 || c.Began.IsZero() ||
				c.Ctx.Value(owner{}) != 4711) {
				t.Errorf("call: got %+v, want the echo call with its context", c)
			}
			if (c.Waits == WaitReply || c.Waits == WaitLate) == c.Sent.IsZero() || (c.Slot < 0) != (c.XID == 0) {
				t.Errorf("call: got %+v, want the fields of its state", c)
			}
		}
		return n
	}
	kit.Eventually(t, "state with 2 calls at the server, 2 without a credit, 2 without a slot", func() bool {
		n := count()
		return n[WaitReply] == 2 && n[WaitCredit] == 2 && n[WaitSlot] == 2
	})
	cancel()
	wg.Wait()
	kit.Eventually(t, "state with 2 late replies", func() bool {
		n := count()
		return n[WaitLate] == 2 && len(n) == 1
	})
	if n := tr.Stats().Interrupted; n != 6 {
		t.Errorf("interrupted calls: got %d, want 6", n)
	}
	history := tr.History()
	if len(history) != 1 || history[0].Event != "connected" {
		t.Errorf("history: got %+v, want one connected event", history)
	}
}

// TestReplayTimeoutIsShort has a server that discards a replay while it executes the first copy of
// the call, as knfsd does. The next replay must come long before the timeout of the call.
func TestReplayTimeoutIsShort(t *testing.T) {
	var replies atomic.Int64
	hooks := svcrdma.Hooks{Reply: func(*rpcrdma.Header) svcrdma.Verdict {
		switch replies.Add(1) {
		case 1:
			return svcrdma.Disconnect // the call is replayed
		case 2:
			return svcrdma.Drop // the replay is discarded
		}
		return svcrdma.Send
	}}
	tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}, Hooks: hooks}),
		func(c *Config) { c.Timeout = 10 * time.Second })
	began := time.Now()
	if err := tr.Call(testContext(t), echo(1, nil, 0)); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("duration of the call: got %v, want at most 5 s", took)
	}
	if s := tr.Stats(); s.Resends != 2 || s.Timeouts != 1 {
		t.Errorf("got %d resends, %d timeouts; want 2, 1", s.Resends, s.Timeouts)
	}
}

// TestFailedPostIsNoReplay has posts that fail before anything was sent. A call with a failed post
// is not a replay: the counters and the reply timeout ignore the failed post.
func TestFailedPostIsNoReplay(t *testing.T) {
	p := faulty(t, "post-fail=3:0")
	tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}}), func(c *Config) { c.Provider = p })
	const calls = 9
	for range calls {
		if err := tr.Call(testContext(t), echo(1, nil, 0)); err != nil {
			t.Fatal(err)
		}
	}
	if s := tr.Stats(); s.Sends != calls || s.Resends != 0 || s.Connects < 2 {
		t.Errorf("got %d sends, %d resends, %d connects; want %d, 0, at least 2", s.Sends, s.Resends, s.Connects, calls)
	}
}

func TestReplyTimeoutByNumberOfSends(t *testing.T) {
	for timeout, all := range map[time.Duration][]float64{
		60 * time.Second: {60, 60, 4.8, 9.6, 19.2, 38.4, 60, 60},
		10 * time.Second: {10, 10, 2, 4, 8, 10, 10},
		time.Second:      {1, 1, 1, 1},
	} {
		tr := &Transport{cfg: Config{Timeout: timeout}}
		for sends, want := range all {
			if got := tr.replyTimeout(sends); got.Seconds() != want {
				t.Errorf("timeout %v, reply timeout after %d sends: got %v, want %v s", timeout, sends, got, want)
			}
		}
	}
}
