package xprt

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/internal/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/faults"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
)

// TestBackOff goes through the pauses before attempts to connect: 5 s, doubled up to 60 s; none
// after a connection that was of use; none, once, after one that was alive and after a loss of this
// side's making.
func TestBackOff(t *testing.T) {
	cfg := &Config{ReconnectMin: 5 * time.Second, ReconnectMax: 60 * time.Second}
	var b backOff
	want := func(what string, got, want time.Duration) {
		t.Helper()
		if got != want {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	want("after an answer", b.afterLoss(cfg, useCalls, false), 0)
	for _, s := range []time.Duration{5, 10, 20, 40, 60, 60} {
		want("failed attempt", b.next(cfg), s*time.Second)
	}
	want("connected, but lost without an answer", b.afterLoss(cfg, useNone, false), 60*time.Second)
	want("after an answer", b.afterLoss(cfg, useCalls, false), 0)
	want("lost without an answer", b.afterLoss(cfg, useNone, false), 5*time.Second)
	want("after an answer", b.afterLoss(cfg, useCalls, false), 0)
	want("our own loss", b.afterLoss(cfg, useNone, true), 0)
	want("our own loss again", b.afterLoss(cfg, useNone, true), 10*time.Second)
	want("after an answer", b.afterLoss(cfg, useCalls, false), 0)
	want("alive, but lost without an answer to a call", b.afterLoss(cfg, useAlive, false), 0)
	want("alive again, but lost without an answer to a call", b.afterLoss(cfg, useAlive, false), 10*time.Second)
}

func TestWhoseLoss(t *testing.T) {
	for _, c := range []struct {
		err  error
		ours bool
	}{
		{io.EOF, false},
		{errors.New("connection reset"), false},
		{&TimeoutError{}, false},
		{&completionFailure{"send", verbs.StatusRemAccessErr}, false},
		{&completionFailure{"receive", verbs.StatusWRFlushErr}, false},
		{&completionFailure{"localinv", verbs.StatusMWBindErr}, true},
		{&completionFailure{"fastreg", verbs.StatusLocProtErr}, true},
		{&postError{"RPC", verbs.ErrQueueFull}, true},
		{&postError{"RPC", fmt.Errorf("late: %w", verbs.ErrQPState)}, false},
	} {
		if got := localFault(c.err); got != c.ours {
			t.Errorf("%v is ours: %v", c.err, got)
		}
	}
}

// TestFailedCompletionsAreLogged breaks LOCAL_INVs: each failure is logged once, with its status
// and the vendor's code, and none of the flushes that follow it is (docs/features.md S25).
func TestFailedCompletionsAreLogged(t *testing.T) {
	var log bytes.Buffer
	plan, err := faults.Parse("linv-error=10")
	if err != nil {
		t.Fatal(err)
	}
	p := faults.New(softiwarp.New(softiwarp.Config{}), plan, nil)
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
		t.Errorf("%d failures, %d lines:\n%s", injected, lines, log.String())
	}
	for line := range strings.Lines(log.String()) {
		if !strings.Contains(line, "work request failed") || !strings.Contains(line, "localinv") ||
			!strings.Contains(line, "status=") || !strings.Contains(line, "vendor=") {
			t.Errorf("line %q", line)
		}
	}
}

// lateCause is a provider that says only after a while why it lost a connection: when everything
// was flushed already.
type lateCause struct{ verbs.Provider }

type lateCauseID struct{ verbs.ActiveID }

func (p lateCause) Resolve(ctx context.Context, a netip.AddrPort) (verbs.ActiveID, error) {
	id, err := p.Provider.Resolve(ctx, a)
	return lateCauseID{id}, err
}

func (i lateCauseID) CreateQP(pd verbs.PD, attr verbs.QPInitAttr) (verbs.QP, error) {
	tell := attr.OnDisconnect
	attr.OnDisconnect = func(cause error) {
		time.Sleep(50 * time.Millisecond)
		tell(cause)
	}
	return i.ActiveID.CreateQP(pd, attr)
}

// TestReasonOfALossIsTold has everything flushed before the provider says why: the status and the
// story tell the reason all the same.
func TestReasonOfALossIsTold(t *testing.T) {
	hooks := svcrdma.Hooks{Reply: func(*rpcrdma.Header) svcrdma.Verdict { return svcrdma.Disconnect }}
	tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}, Hooks: hooks}),
		func(c *Config) { c.Provider = lateCause{c.Provider} })
	ctx, cancel := context.WithCancel(testContext(t))
	done := make(chan error)
	go func() { done <- tr.Call(ctx, echo(1, nil, 0)) }()
	eventually(t, "a lost connection", func() bool { return len(tr.History()) > 1 })
	if why := tr.History()[1].Cause; why != io.EOF.Error() {
		t.Errorf("the connection was lost by %q, the story says %q", io.EOF, why)
	}
	cancel()
	<-done
}

// TestPoisonedCallIsNotReplayedHotly has a server that answers liveness calls and breaks the
// connection over each other one, as one does that dies of a call: the replays are spaced out.
func TestPoisonedCallIsNotReplayedHotly(t *testing.T) {
	var poisoned atomic.Int64
	hooks := svcrdma.Hooks{Reply: func(*rpcrdma.Header) svcrdma.Verdict {
		if poisoned.Load() > 0 {
			poisoned.Add(-1)
			return svcrdma.Disconnect
		}
		return svcrdma.Send
	}}
	svc := handlerFunc(func(_ context.Context, proc uint32) {
		if proc != 0 {
			poisoned.Add(1)
		}
	})
	tr := dial(t, serve(t, svcrdma.Config{Handler: svc, Hooks: hooks}), func(c *Config) {
		c.KeepAlive, c.ReconnectMin, c.ReconnectMax = time.Second, 10*time.Second, time.Minute
	})
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if err := tr.Call(ctx, echo(1, nil, 0)); err == nil {
		t.Error("the poisoned call was answered")
	}
	if n := tr.Stats().Connects; n > 3 {
		t.Errorf("%d connections within a second, want one replay at once and no other: at most 3", n)
	}
}
