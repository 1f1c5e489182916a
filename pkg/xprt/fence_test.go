package xprt

import (
	"bytes"
	"context"
	"errors"
	"io"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/server/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// writeOf returns a WRITE of n bytes.
func writeOf(n int) *sunrpc.Message {
	return &sunrpc.Message{Prog: nfsProg, Vers: 3, Proc: 7, Cred: noCred, Args: fill(0, 40), ArgDataPos: 40,
		ArgData: fill(0, n), MaxResult: 136}
}

// TestCallReturnsWhenItsMemoryIsFree delays the completion of the LOCAL_INVs of a READ, or that of
// the Send of a WRITE from the memory of the caller. The call must not return before, neither if
// its reply has arrived nor if its caller interrupts it (docs/features.md S8, S9, S21).
func TestCallReturnsWhenItsMemoryIsFree(t *testing.T) {
	for _, c := range []struct {
		op    verbs.Opcode
		m     *sunrpc.Message
		waits string
	}{{verbs.OpLocalInv, readOf(100000), WaitInvalidate}, {verbs.OpSend, writeOf(30000), WaitSend}} {
		for _, interrupt := range []bool{false, true} {
			inBubble(t, func(cfg *Config, _ *stepServer) {
				cfg.InlineBytes = 65536
			}, func(t *testing.T, b *bubble) {
				waits := c.waits
				b.set(func(s *stepServer) { s.holds = func(op verbs.Opcode) bool { return op == c.op } })
				if interrupt {
					waits = WaitLate
					b.handleWith(drop)
				}
				p := b.start(c.m)
				if interrupt {
					p.interrupt()
				}
				if calls := b.tr.Calls(); p.done || len(calls) != 1 || calls[0].Waits != waits {
					t.Errorf("%v, interrupt %v: got returned %v, calls %+v; want one that waits for %s", c.op,
						interrupt, p.done, calls, waits)
				}
				b.set(func(s *stepServer) { s.holds = nil })
				if !p.done || interrupt && !errors.Is(p.err, syscall.EINTR) || !interrupt && p.err != nil {
					t.Errorf("%v, interrupt %v: got returned %v, %v", c.op, interrupt, p.done, p.err)
				}
				s := b.tr.Stats()
				if c.op == verbs.OpSend && (s.PullupCopyBytes != 0 || s.ReadChunks != 0 ||
					s.ReplyWaitsForSend == 1 == interrupt) {
					t.Errorf("interrupt %v: got %d bytes copied, %d read chunks, %d replies that waited for a Send",
						interrupt, s.PullupCopyBytes, s.ReadChunks, s.ReplyWaitsForSend)
				}
			})
		}
	}
}

// TestInterruptWaitsBehindData interrupts a call whose LOCAL_INVs wait behind the data of WRITEs,
// as on a slow link. The connection must stay up for 1 s, and for the time of the data at 1 Mbit/s.
// If the LOCAL_INVs do not complete until then, the connection must end.
func TestInterruptWaitsBehindData(t *testing.T) {
	for _, c := range []struct {
		writes int
		limit  time.Duration
	}{{0, time.Second}, {3, 26 * time.Second}} {
		for _, late := range []bool{false, true} {
			inBubble(t, func(_ *Config, s *stepServer) {
				s.holds = func(op verbs.Opcode) bool { return op == verbs.OpLocalInv }
			}, func(t *testing.T, b *bubble) {
				b.handleWith(drop)
				for range c.writes {
					b.start(writeOf(1 << 20))
				}
				p := b.start(readOf(8192))
				p.interrupt()
				sleep(c.limit - 10*time.Millisecond)
				if n := b.tr.Stats().Connects; p.done || n != 1 {
					t.Errorf("%d WRITEs, before %v: got returned %v, %d connects; want false, 1", c.writes, c.limit,
						p.done, n)
				}
				want := uint64(1)
				if late {
					want = 2
					sleep(2 * time.Second)
				}
				b.set(func(s *stepServer) { s.holds = nil })
				if n := b.tr.Stats().Connects; !p.done || !errors.Is(p.err, syscall.EINTR) || n != want {
					t.Errorf("%d WRITEs, late %v: got returned %v, %v, %d connects; want EINTR, %d", c.writes, late,
						p.done, p.err, n, want)
				}
			})
		}
	}
}

// TestInterruptWaitsForDrain interrupts a call while its connection is taken down. The call must
// not return before the queue pair is drained, because the server may reach its memory until then
// (docs/features.md S16).
func TestInterruptWaitsForDrain(t *testing.T) {
	var g gate
	var drained atomic.Bool
	ctx, cancel := context.WithCancel(testContext(t))
	defer cancel()
	tr := dial(t, serve(t, svcrdma.Config{Handler: &g}), func(c *Config) {
		c.Provider = hooked(&hookedProvider{open: func() qpHooks {
			return qpHooks{drain: func() {
				cancel()
				time.Sleep(50 * time.Millisecond) // a call that does not wait returns now
				drained.Store(true)
			}}
		}})
	})
	defer shut(&g.closed)()
	interrupted := make(chan error, 1)
	go func() { interrupted <- tr.Call(ctx, readOf(100000)) }()
	kit.Eventually(t, "call at the server", func() bool { return g.calls.Load() == 1 })
	connOf(t, tr).fail(io.EOF)
	if err := <-interrupted; !errors.Is(err, syscall.EINTR) || !drained.Load() {
		t.Errorf("READ: got %v, after the drain %v; want EINTR after it", err, drained.Load())
	}
}

// TestInterruptFencesAndReturns interrupts a READ at a server. The RDMA Writes of the server come
// after the call has returned, before the late reply. They must not change the memory.
func TestInterruptFencesAndReturns(t *testing.T) {
	var g gate
	tr := dial(t, serve(t, svcrdma.Config{Handler: &g, RemoteInv: true}), nil)
	c, fh := nfs3.NewClient(tr), testFH(t)
	var r nfs3.ReadResult
	kit.Must(t, c.Read(testContext(t), noCred, fh, 0, make([]byte, 4096), &r))
	open := shut(&g.closed)
	defer open()
	calls := g.calls.Load()
	ctx, cancel := context.WithCancel(testContext(t))
	buf := make([]byte, 100000)
	returned := make(chan error, 1)
	go func() {
		var r nfs3.ReadResult
		returned <- c.Read(ctx, noCred, fh, 0, buf, &r)
	}()
	kit.Eventually(t, "call at the server", func() bool { return g.calls.Load() > calls })
	cancel()
	if err := <-returned; !errors.Is(err, syscall.EINTR) || !errors.Is(err, context.Canceled) {
		t.Fatalf("READ: got %v, want EINTR", err)
	}
	for i := range buf {
		buf[i] = 0xee // the buffer belongs to the caller again
	}
	open()
	kit.Eventually(t, "late reply", func() bool { return tr.Stats().SlotsInUse == 0 })
	if i := slices.IndexFunc(buf, func(v byte) bool { return v != 0xee }); i >= 0 {
		t.Fatalf("byte %d was written after the call had returned", i)
	}
	other := make([]byte, 50000)
	if err := c.Read(testContext(t), noCred, fh, 9, other, &r); err != nil || !bytes.Equal(other, fill(9, len(other))) {
		t.Fatalf("next READ: got %v, or wrong data", err)
	}
	if s := tr.Stats(); s.Interrupted != 1 || s.SlotsInUse != 0 {
		t.Errorf("got %d interrupted calls, %d slots in use; want 1, 0", s.Interrupted, s.SlotsInUse)
	}
}

// TestInterruptKeepsCredit interrupts calls. Their credits must stay in use until the late replies,
// because the server still counts the calls (RFC 8166 §3.3.1).
func TestInterruptKeepsCredit(t *testing.T) {
	const credits = 2
	inBubble(t, func(_ *Config, s *stepServer) { s.credits = credits }, func(t *testing.T, b *bubble) {
		hold := make(chan struct{})
		b.handleWith(answerAfter(hold))
		for range credits {
			p := b.start(echo(1, nil, 0))
			if p.interrupt(); !p.done || !errors.Is(p.err, syscall.EINTR) {
				t.Errorf("call: got returned %v, %v; want EINTR", p.done, p.err)
			}
		}
		next := b.start(echo(1, nil, 0))
		if s := b.tr.Stats(); s.InFlight != credits || s.SlotsInUse != credits+1 || s.Queued != 1 {
			t.Errorf("after the interrupts: got %d credits, %d slots in use, %d queued; want %d, %d, 1", s.InFlight,
				s.SlotsInUse, s.Queued, credits, credits+1)
		}
		close(hold)
		settle()
		if s := b.tr.Stats(); !next.done || next.err != nil || s.InFlight != 0 || s.SlotsInUse != 0 {
			t.Errorf("after the late replies: got next call %v, %v, %d credits, %d slots in use", next.done, next.err,
				s.InFlight, s.SlotsInUse)
		}
	})
}

// TestCreditsLimitCallsInFlight checks the number of calls at the server after different grants: at
// least one (RFC 8166 §3.3.1), and at most the number of slots. The calls arrive in their order.
func TestCreditsLimitCallsInFlight(t *testing.T) {
	for credits, want := range map[uint32]int{0: 1, 1: 1, 2: 2, 3: 3, 4: 4, 1000: 4} {
		inBubble(t, func(_ *Config, s *stepServer) { s.credits = credits }, func(t *testing.T, b *bubble) {
			release := make(chan struct{})
			b.handleWith(answerAfter(release))
			var calls []*pending
			for i := range uint32(6) {
				calls = append(calls, b.start(echo(1+i, nil, 0)))
			}
			for i := range calls {
				if at := min(want+i, len(calls)); len(b.calls) != at {
					t.Errorf("%d credits, after %d replies: got %d calls at the server, want %d", credits, i,
						len(b.calls), at)
				}
				release <- struct{}{}
				settle()
			}
			xids := map[uint32]bool{}
			for i, c := range b.calls {
				if xids[c.Header.XID] = true; c.CallHeader.Proc != uint32(i+1) && want == 1 {
					t.Errorf("call %d at the server: got that of procedure %d", i, c.CallHeader.Proc)
				}
			}
			if len(xids) != len(calls) {
				t.Errorf("XIDs: got %d, want another for each of %d calls", len(xids), len(calls))
			}
			if got := b.tr.Stats().Credits; got != uint64(want) {
				t.Errorf("credits: got %d, want %d", got, want)
			}
		})
	}
}

// TestCloseEndsWaitingCalls closes a transport with calls at the server, without a credit, and
// without a slot.
func TestCloseEndsWaitingCalls(t *testing.T) {
	inBubble(t, func(_ *Config, s *stepServer) { s.credits = 2 }, func(t *testing.T, b *bubble) {
		b.handleWith(drop)
		var calls []*pending
		for range MinSlots + 2 {
			calls = append(calls, b.start(readOf(8192)))
		}
		b.tr.Close()
		settle()
		for i, p := range append(calls, b.start(echo(1, nil, 0))) {
			if !p.done || !errors.Is(p.err, ErrClosed) {
				t.Errorf("call %d: got returned %v, %v; want %v", i, p.done, p.err, ErrClosed)
			}
		}
		if err := b.tr.Connect(t.Context()); !errors.Is(err, ErrClosed) || b.tr.Stats().State != StateClosed {
			t.Errorf("Connect after Close: got %v, state %s; want %v", err, b.tr.Stats().State, ErrClosed)
		}
		if err := b.tr.Close(); err != nil {
			t.Errorf("second Close: %v", err)
		}
	})
}

// TestCallsShowsWhatEachCallWaitsFor checks Calls with calls in different states, the oldest first.
func TestCallsShowsWhatEachCallWaitsFor(t *testing.T) {
	inBubble(t, func(_ *Config, s *stepServer) { s.credits = 2 }, func(t *testing.T, b *bubble) {
		check := func(want ...string) {
			t.Helper()
			var got []string
			for i, c := range b.tr.Calls() {
				got = append(got, c.Waits)
				late := c.Waits == WaitLate
				if sent := late || c.Waits == WaitReply; c.Prog != echoProg || c.Vers != 1 || c.Proc != uint32(i+1) ||
					sent == c.Sent.IsZero() || (c.Slot < 0) != (c.XID == 0) || (c.Ctx == nil) != late ||
					c.Began.IsZero() {
					t.Errorf("call: got %+v, want the fields of its state", c)
				}
			}
			if !slices.Equal(got, want) {
				t.Errorf("calls wait for %q, want %q", got, want)
			}
		}
		b.handleWith(drop)
		var calls []*pending
		for i := range uint32(6) {
			calls = append(calls, b.start(echo(i+1, nil, 0)))
			sleep(time.Second)
		}
		check(WaitReply, WaitReply, WaitCredit, WaitCredit, WaitSlot, WaitSlot)
		for _, p := range calls {
			p.interrupt()
		}
		check(WaitLate, WaitLate)
		if n := b.tr.Stats().Interrupted; n != 6 {
			t.Errorf("interrupted calls: got %d, want 6", n)
		}
	})
}
