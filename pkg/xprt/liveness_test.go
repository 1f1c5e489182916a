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
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/faults"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
)

// eventually waits for what must come; it fails the test when it does not for very long.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !cond(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// TestDeadServerIsNoticed lets a server fall silent, with a call waiting and without: the
// connection is dropped long before the calls' own timeout, and calls go on when the server does.
func TestDeadServerIsNoticed(t *testing.T) {
	for _, idle := range []bool{true, false} {
		svc := &service{}
		tr := dial(t, serve(t, svcrdma.Config{Handler: svc}), func(c *Config) {
			c.KeepAlive, c.Timeout, c.TraceEvents = 100*time.Millisecond, time.Hour, 256
		})
		eventually(t, "an answered liveness call", func() bool { return tr.Stats().Recvs > 1 })
		if s := tr.Stats(); s.Connects != 1 || s.KeepAlives == 0 {
			t.Fatalf("idle %v: %d connects, %d liveness calls", idle, s.Connects, s.KeepAlives)
		}
		svc.delay.Store(int64(time.Hour))
		ended := make(chan error, 1)
		if !idle {
			go func() { ended <- tr.Call(testContext(t), echo(1, nil, 0)) }()
		}
		eventually(t, "a dropped connection", func() bool { return tr.Stats().Connects > 1 })
		if s := tr.Stats(); !strings.Contains(s.LastError, "did not answer") || s.Timeouts != 0 {
			t.Errorf("idle %v: last error %q, %d calls timed out", idle, s.LastError, s.Timeouts)
		}
		found := map[trace.Kind]bool{}
		for _, e := range tr.Trace().Last(256) {
			found[e.Kind] = true
		}
		for _, k := range []trace.Kind{trace.Ping, trace.Connect, trace.Disconnect, trace.PostSend, trace.Reply} {
			if !found[k] {
				t.Errorf("idle %v: no %v in the trace", idle, k)
			}
		}
		svc.delay.Store(0)
		if !idle {
			if err := <-ended; err != nil {
				t.Errorf("the call that waited: %v", err)
			}
		} else if err := tr.Call(testContext(t), echo(1, nil, 0)); err != nil {
			t.Error(err)
		}
	}
}

// TestBusyServerIsLeftAlone has a call that takes long on a server that answers others.
func TestBusyServerIsLeftAlone(t *testing.T) {
	hold := make(chan struct{})
	svc := handlerFunc(func(ctx context.Context, proc uint32) {
		if proc == 1 {
			<-hold
		}
	})
	tr := dial(t, serve(t, svcrdma.Config{Handler: svc}), func(c *Config) { c.KeepAlive = 300 * time.Millisecond })
	ended := make(chan error, 1)
	go func() { ended <- tr.Call(testContext(t), echo(1, nil, 0)) }()
	eventually(t, "several liveness calls", func() bool { return tr.Stats().KeepAlives >= 5 })
	close(hold)
	if err := <-ended; err != nil || tr.Stats().Connects != 1 {
		t.Errorf("%v, %d connects", err, tr.Stats().Connects)
	}
}

// TestIdleConnectionIsClosed closes a connection that nobody uses, and makes a new one for the next
// call, without a word in between.
func TestIdleConnectionIsClosed(t *testing.T) {
	tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}}), func(c *Config) {
		c.IdleTimeout, c.KeepAlive = 600*time.Millisecond, 200*time.Millisecond
		c.ReconnectMin, c.ReconnectMax = time.Hour, time.Hour // a wait for a back-off would show
	})
	for round := range 6 {
		if round < 3 {
			if err := tr.Call(testContext(t), echo(1, nil, 0)); err != nil {
				t.Fatal(err)
			}
		} else { // for a call that was given up before it was sent
			tr.window.wanted <- struct{}{}
			eventually(t, "another connection", func() bool { return tr.Stats().Connects == uint64(round+1) })
		}
		eventually(t, "an idle connection", func() bool { return tr.Stats().State == StateIdle })
		if s := tr.Stats(); s.Connects != uint64(round+1) || s.LastError != "" {
			t.Errorf("round %d: %d connects, last error %q", round, s.Connects, s.LastError)
		}
	}
}

// TestCallsAreExplained asks what each call waits for.
func TestCallsAreExplained(t *testing.T) {
	svc := &service{}
	tr := dial(t, serve(t, svcrdma.Config{Handler: svc, Credits: 2}), func(c *Config) {
		c.Slots, c.ReconnectMin, c.ReconnectMax = 4, time.Hour, time.Hour
	})
	if err := tr.Call(testContext(t), echo(1, nil, 0)); err != nil { // the grant is 2 from here on
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
				t.Errorf("call ended with %v", err)
			}
		})
	}
	count := func() map[string]int {
		n := map[string]int{}
		for _, c := range tr.Calls() {
			n[c.Waits]++
			if c.Waits != WaitLate && (c.Prog != echoProg || c.Proc != 1 || c.Began.IsZero() ||
				c.Ctx.Value(owner{}) != 4711) {
				t.Errorf("a call of nobody knows what: %+v", c)
			}
			if (c.Waits == WaitReply || c.Waits == WaitLate) == c.Sent.IsZero() || (c.Slot < 0) != (c.XID == 0) {
				t.Errorf("%+v", c)
			}
		}
		return n
	}
	eventually(t, "2 at the server, 2 without a credit, 2 without a slot", func() bool {
		n := count()
		return n[WaitReply] == 2 && n[WaitCredit] == 2 && n[WaitSlot] == 2
	})
	cancel()
	wg.Wait()
	eventually(t, "2 late replies", func() bool {
		n := count()
		return n[WaitLate] == 2 && len(n) == 1
	})
	if n := tr.Stats().Interrupted; n != 6 {
		t.Errorf("%d calls were given up, 6 were", n)
	}
	story := tr.History()
	if len(story) != 1 || story[0].Event != "connected" {
		t.Errorf("story %+v", story)
	}
}

// TestReplayIsNotLeftWaiting has a server that, like knfsd, discards a replay while it still
// executes the first copy of the call: the next replay comes long before the calls' timeout.
func TestReplayIsNotLeftWaiting(t *testing.T) {
	var replies atomic.Int64
	hooks := svcrdma.Hooks{Reply: func(*rpcrdma.Header) svcrdma.Verdict {
		switch replies.Add(1) {
		case 1:
			return svcrdma.Disconnect // the call is replayed
		case 2:
			return svcrdma.Drop // the replay is not answered
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
		t.Errorf("the call took %v", took)
	}
	if s := tr.Stats(); s.Resends != 2 || s.Timeouts != 1 {
		t.Errorf("%d resends, %d timeouts; want 2 and 1", s.Resends, s.Timeouts)
	}
}

// TestCallsThatWereNotPostedAreNotReplays has posts fail before anything was sent: such a call is
// no replay, neither in the counters nor in the patience that it finds.
func TestCallsThatWereNotPostedAreNotReplays(t *testing.T) {
	plan, err := faults.Parse("post-fail=3:0")
	if err != nil {
		t.Fatal(err)
	}
	p := faults.New(softiwarp.New(softiwarp.Config{}), plan, nil)
	tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}}), func(c *Config) { c.Provider = p })
	const calls = 9
	for range calls {
		if err := tr.Call(testContext(t), echo(1, nil, 0)); err != nil {
			t.Fatal(err)
		}
	}
	if s := tr.Stats(); s.Sends != calls || s.Resends != 0 || s.Connects < 2 {
		t.Errorf("%d calls sent, %d again, %d connections; want %d, 0, several", s.Sends, s.Resends, s.Connects, calls)
	}
}

func TestPatience(t *testing.T) {
	tr := &Transport{cfg: Config{Timeout: 60 * time.Second}}
	for sends, want := range []float64{60, 60, 4.8, 9.6, 19.2, 38.4, 60, 60} {
		if got := tr.replyTimeout(sends); got.Seconds() != want {
			t.Errorf("sent %d times: %v, want %v s", sends, got, want)
		}
	}
}
