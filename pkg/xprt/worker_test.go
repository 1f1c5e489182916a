package xprt

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/internal/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/trace"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// TestBackOff checks the longest pauses before attempts to connect, and with a random number that
// is not 0, shorter ones. They are at most 5 s at first and grow up to 60 s. The pause is at most
// 250 ms after a connection that made progress, and at first after a connection that answered a
// call, or after a local fault.
func TestBackOff(t *testing.T) {
	const progress = -1 * time.Second
	for _, half := range []bool{false, true} {
		b := newBackOff(&Config{ReconnectMin: 5 * time.Second, ReconnectMax: 60 * time.Second,
			Servers: NewAddresses(netip.AddrPort{})})
		random := 0.0
		if half {
			random = 0.5
		}
		b.Random = func() float64 { return random }
		first := time.Duration(random * float64(250*time.Millisecond))
		want := func(what string, got, limit time.Duration) {
			t.Helper()
			want := first
			if limit != progress {
				want = limit - time.Duration(random*float64(limit-limit/5))
			}
			if got != want {
				t.Errorf("random number %v, pause %s: got %v, want %v", random, what, got, want)
			}
		}
		seconds := func(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
		want("after a connection with progress", b.afterLoss(useProgress, false), progress)
		for _, s := range []float64{5, 7.5, 11.25, 16.875, 25.3125, 37.96875, 56.953125, 60, 60} {
			want("after a failed attempt", b.next(), seconds(s))
		}
		want("after a connection that answered nothing, after failed attempts", b.afterLoss(useNone, false),
			seconds(60))
		want("after a connection with progress", b.afterLoss(useProgress, false), progress)
		want("after a connection that answered nothing", b.afterLoss(useNone, false), seconds(5))
		want("after a connection with progress", b.afterLoss(useProgress, false), progress)
		want("after a local fault", b.afterLoss(useNone, true), progress)
		want("after a second local fault", b.afterLoss(useNone, true), seconds(7.5))
		want("after a connection with progress", b.afterLoss(useProgress, true), progress)
		want("after a connection that answered", b.afterLoss(useAlive, false), progress)
		want("after a second connection that answered", b.afterLoss(useAlive, false), seconds(7.5))
		want("after a third connection that answered, with a local fault", b.afterLoss(useAlive, true),
			seconds(11.25))
	}
}

// TestFirstPauseIsShort checks that the pause before the first attempt is no longer than
// ReconnectMin.
func TestFirstPauseIsShort(t *testing.T) {
	b := newBackOff(&Config{ReconnectMin: 10 * time.Millisecond, ReconnectMax: time.Second,
		Servers: NewAddresses(netip.AddrPort{})})
	b.Random = func() float64 { return 0.999 }
	if got := b.afterLoss(useProgress, false); got < 9*time.Millisecond || got > 10*time.Millisecond {
		t.Errorf("pause: got %v, want a little less than 10ms", got)
	}
}

// TestUsefulness checks when a connection has made progress: after 16 answered calls, or after
// ReconnectMin if it answered anything.
func TestUsefulness(t *testing.T) {
	const minLife = 5 * time.Second
	for _, c := range []struct {
		calls, pings int
		life         time.Duration
		want         usefulness
	}{
		{0, 0, 0, useNone},
		{0, 0, time.Hour, useNone},
		{0, 1, 0, useAlive},
		{0, 100, minLife - 1, useAlive},
		{0, 1, minLife, useProgress},
		{1, 0, 0, useAlive},
		{15, 100, minLife - 1, useAlive},
		{1, 0, minLife, useProgress},
		{16, 0, 0, useProgress},
		{1000, 0, 0, useProgress},
	} {
		synctest.Test(t, func(t *testing.T) {
			tr := &Transport{epoch: time.Now()}
			time.Sleep(time.Minute)
			cn := &conn{adapter: &adapter{t: tr}, installedAt: tr.now()}
			time.Sleep(c.life)
			for range c.calls {
				cn.recordReply(&slot{})
			}
			for range c.pings {
				cn.recordReply(&slot{ping: true})
			}
			if n := cn.served.Load(); int(n) != min(c.calls, progressCalls) {
				t.Errorf("%d calls answered: got %d counted, want at most %d", c.calls, n, progressCalls)
			}
			if got := cn.usefulness(minLife); got != c.want {
				t.Errorf("%d calls and %d keepalive calls answered in %v: got %d, want %d", c.calls, c.pings, c.life,
					got, c.want)
			}
		})
	}
}

func TestLocalFault(t *testing.T) {
	for _, c := range []struct {
		err   error
		local bool
	}{
		{io.EOF, false},
		{errors.New("connection reset"), false},
		{&TimeoutError{}, false},
		{&completionFailure{"send", verbs.StatusRemAccessErr}, false},
		{&completionFailure{"receive", verbs.StatusWRFlushErr}, false},
		{&completionFailure{"localinv", verbs.StatusMWBindErr}, true},
		{&completionFailure{"fastreg", verbs.StatusLocProtErr}, true},
		{&postError{"RPC", verbs.ErrQueueFull}, true},
		{&unmapError{verbs.ErrBusy}, true},
		{&postError{"RPC", fmt.Errorf("late: %w", verbs.ErrQPState)}, false},
	} {
		if got := localFault(c.err); got != c.local {
			t.Errorf("localFault(%v): got %v, want %v", c.err, got, c.local)
		}
	}
}

// TestFailedCompletionsAreLogged makes LOCAL_INVs fail. Each failure must be logged once, with its
// status and the code of the vendor. The flushes that follow must not be logged (docs/features.md
// S25).
func TestFailedCompletionsAreLogged(t *testing.T) {
	var log bytes.Buffer
	p := faulty(t, "linv-error=10")
	tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}}), func(c *Config) {
		c.Provider, c.Logger = p, hclog.New(&hclog.LoggerOptions{Output: &log, Level: hclog.Error,
			Mutex: &sync.Mutex{}})
	})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 30 {
				buf := make([]byte, 9000)
				var r nfs3.ReadResult
				if err := nfs3.NewClient(tr, nfs3.Options{}).Read(testContext(t), noCred, testFH(t), 0, buf,
					&r); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	tr.Close()
	lines := strings.Count(log.String(), "\n")
	injected := p.Counts()[0].Injected
	if injected == 0 || uint64(lines) != injected {
		t.Errorf("log lines for %d failures: got %d:\n%s", injected, lines, log.String())
	}
	for line := range strings.Lines(log.String()) {
		if !strings.Contains(line, "work request failed") || !strings.Contains(line, "localinv") ||
			!strings.Contains(line, "status=") || !strings.Contains(line, "vendor=") {
			t.Errorf("log line: got %q, want the failed request, its status and the vendor code", line)
		}
	}
}

// A lateCause provider reports the cause of a lost connection late, after all requests were
// flushed.
type lateCause struct {
	verbs.Provider
	wait func() // before the report
}

type lateCauseID struct {
	verbs.ActiveID
	wait func()
}

func (p lateCause) Resolve(ctx context.Context, a netip.AddrPort) (verbs.ActiveID, error) {
	id, err := p.Provider.Resolve(ctx, a)
	if err != nil {
		return nil, err
	}
	return lateCauseID{id, p.wait}, nil
}

func (i lateCauseID) CreateQP(pd verbs.PD, attr verbs.QPInitAttr) (verbs.QP, error) {
	report := attr.OnDisconnect
	attr.OnDisconnect = func(cause error) {
		i.wait()
		report(cause)
	}
	return i.ActiveID.CreateQP(pd, attr)
}

// TestHistoryNamesLateCause checks that the history names the cause of a loss that the provider
// reports after the flushes.
func TestHistoryNamesLateCause(t *testing.T) {
	hooks := svcrdma.Hooks{Reply: func(*rpcrdma.Header) svcrdma.Verdict { return svcrdma.Disconnect }}
	tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}, Hooks: hooks}),
		func(c *Config) { c.Provider = lateCause{c.Provider, func() { time.Sleep(50 * time.Millisecond) }} })
	ctx, cancel := context.WithCancel(testContext(t))
	done := make(chan error)
	go func() { done <- tr.Call(ctx, echo(1, nil, 0)) }()
	kit.Eventually(t, "lost connection", func() bool { return len(tr.History()) > 1 })
	if cause := tr.History()[1].Cause; cause != io.EOF.Error() {
		t.Errorf("cause of the loss in the history: got %q, want %q", cause, io.EOF)
	}
	cancel()
	<-done
}

// TestReplayOfFatalCallPauses has a server that answers keepalive calls, and disconnects instead of
// every other reply, as a server does that crashes on a call. The client must pause between the
// replays.
func TestReplayOfFatalCallPauses(t *testing.T) {
	var fatal atomic.Int64
	hooks := svcrdma.Hooks{Reply: func(*rpcrdma.Header) svcrdma.Verdict {
		if fatal.Load() > 0 {
			fatal.Add(-1)
			return svcrdma.Disconnect
		}
		return svcrdma.Send
	}}
	svc := handlerFunc(func(_ context.Context, proc uint32) {
		if proc != 0 {
			fatal.Add(1)
		}
	})
	tr := dial(t, serve(t, svcrdma.Config{Handler: svc, Hooks: hooks}), func(c *Config) {
		c.KeepAlive, c.ReconnectMin, c.ReconnectMax = time.Second, 10*time.Second, time.Minute
	})
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if err := tr.Call(ctx, echo(1, nil, 0)); err == nil {
		t.Error("fatal call: got a reply, want an error")
	}
	if n := tr.Stats().Connects; n > 3 {
		t.Errorf("connects in one second: got %d, want at most 3, with one immediate replay", n)
	}
}

// TestReconnectPausesWithoutProgress has a server that disconnects after each reply to a call. The
// client may reconnect once without a pause. Then it must pause, although each connection answered.
func TestReconnectPausesWithoutProgress(t *testing.T) {
	var replies atomic.Int64
	hooks := svcrdma.Hooks{Reply: func(*rpcrdma.Header) svcrdma.Verdict {
		if replies.Add(1)%2 == 0 {
			return svcrdma.Disconnect
		}
		return svcrdma.Send
	}}
	tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}, Hooks: hooks}), func(c *Config) {
		c.ReconnectMin, c.ReconnectMax = time.Hour, time.Hour
	})
	ctx, cancel := context.WithCancel(testContext(t))
	ended := make(chan error, 1)
	go func() { // each connection answers one call and ends with the next
		for {
			if err := tr.Call(ctx, echo(1, nil, 0)); err != nil {
				ended <- err
				return
			}
		}
	}()
	kit.Eventually(t, "pause after the second connection", func() bool {
		s := tr.Stats()
		return s.Connects >= 2 && s.State == StateDisconnected
	})
	// The replies stop in a pause. Without one, they go on.
	before := replies.Load()
	time.Sleep(50 * time.Millisecond)
	if s := tr.Stats(); s.Connects != 2 || replies.Load() != before {
		t.Errorf("got %d connects, %d replies after %d; want 2 connects and no more replies", s.Connects,
			replies.Load(), before)
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("Call: got %v, want %v", err, context.Canceled)
	}
}

// TestResendKeepsXID has a server that disconnects instead of the first reply. The call must be
// sent again with the same XID, so that the server recognizes it.
func TestResendKeepsXID(t *testing.T) {
	var mu sync.Mutex // guards xids
	var xids []uint32
	hooks := svcrdma.Hooks{Reply: func(h *rpcrdma.Header) svcrdma.Verdict {
		mu.Lock()
		defer mu.Unlock()
		if xids = append(xids, h.XID); len(xids) == 1 {
			return svcrdma.Disconnect
		}
		return svcrdma.Send
	}}
	tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}, Hooks: hooks}), nil)
	m := echo(1, nil, 0)
	if err := tr.Call(testContext(t), m); err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	defer mu.Unlock()
	if len(xids) != 2 || xids[0] != xids[1] || xids[0] != m.XID {
		t.Errorf("XIDs of the replies: got %#x, want twice %#x", xids, m.XID)
	}
}

// TestEventsAreLoggedAfterFailure checks that the end of a connection logs the last trace events
// unless the end is normal, and that another failure soon after logs nothing.
func TestEventsAreLoggedAfterFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		tr := &Transport{log: hclog.New(&hclog.LoggerOptions{Output: &log})}
		failure := errors.New("defect")
		tr.logHistory(failure) // without tracing
		tr.trace = trace.NewRing(2*historyEvents, func(uint8) string { return "" })
		for range historyEvents + 1 {
			tr.trace.Add(trace.Event{Kind: trace.Connect})
		}
		for _, c := range []struct {
			name  string
			pause time.Duration
			err   error
			want  int
		}{
			{"end of the stream", 0, fmt.Errorf("read: %w", io.EOF), 0},
			{"closed", 0, fmt.Errorf("call: %w", ErrClosed), 0},
			{"failure", 0, failure, historyEvents},
			{"again at once", 0, failure, 0},
			{"again before the pause", historyPause - 1, failure, 0},
			{"again after the pause", 1, failure, historyEvents},
		} {
			log.Reset()
			time.Sleep(c.pause)
			tr.logHistory(c.err)
			if got := strings.Count(log.String(), "trace event before connection loss"); got != c.want {
				t.Errorf("%s: got %d events, want %d", c.name, got, c.want)
			}
		}
	})
}

// TestHistoryJoinsEqualEvents checks that consecutive equal events take one place, and that the
// oldest events leave a full history.
func TestHistoryJoinsEqualEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := &Transport{}
		add := func(event string, cause error) {
			time.Sleep(time.Second)
			tr.recordEvent(event, cause)
		}
		refused, timeout := errors.New("refused"), errors.New("timeout")
		add("connected", nil)
		add("connected", nil)
		add("connect failed", refused)
		add("connect failed", refused)
		add("connect failed", refused)
		last := time.Now()
		add("connect failed", timeout)
		add("disconnected", timeout)
		want := []ConnEvent{{Event: "connected", Times: 2}, {Event: "connect failed", Cause: "refused", Times: 3},
			{Event: "connect failed", Cause: "timeout", Times: 1}, {Event: "disconnected", Cause: "timeout", Times: 1}}
		got := tr.History()
		if len(got) == len(want) && got[1].Time != last {
			t.Errorf("time of equal events: got %v, want that of the last, %v", got[1].Time, last)
		}
		for i := range got {
			got[i].Time = time.Time{}
		}
		if !slices.Equal(got, want) {
			t.Errorf("got %+v, want %+v", got, want)
		}
		for i := range maxConnEvents {
			add("connected", fmt.Errorf("%d", i))
		}
		if got := tr.History(); len(got) != maxConnEvents || got[0].Cause != "0" {
			t.Errorf("full history: got %d events, the first %+v; want %d events from 0", len(got), got[0],
				maxConnEvents)
		}
		add("connected", nil)
		if got := tr.History(); len(got) != maxConnEvents || got[0].Cause != "1" || got[maxConnEvents-1].Cause != "" {
			t.Errorf("full history and one event: got %d events, %+v", len(got), got)
		}
	})
}
