package xprt

import (
	"context"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/observe/ledger"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// observed are the calls that Config.Observe has received.
type observed struct {
	mu  sync.Mutex
	all []Ended
}

func (o *observed) observe(_ context.Context, c Ended) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.all = append(o.all, c)
}

// take returns the calls since the last take. It fails t unless the phases of each call sum to its
// total and none is negative.
func (o *observed) take(t *testing.T) []Ended {
	t.Helper()
	o.mu.Lock()
	defer o.mu.Unlock()
	all := o.all
	o.all = nil
	for i := range all {
		var sum time.Duration
		for p := range ledger.NumPhases {
			d := all[i].Times.Spent(p)
			sum += d
			if d < 0 {
				t.Errorf("phase %v of %+v: got %v, want at least 0", p, all[i], d)
			}
		}
		if total := all[i].Times.Total(); sum != total {
			t.Errorf("sum of the phases of %+v: got %v, want the total, %v", all[i], sum, total)
		}
	}
	return all
}

// A gate is a service whose replies wait while it is closed.
type gate struct {
	service
	closed atomic.Pointer[chan struct{}]
}

func (g *gate) ServeRPC(ctx context.Context, a netip.AddrPort, call, reply []byte) ([]byte, error) {
	g.calls.Add(1)
	if c := g.closed.Load(); c != nil {
		select {
		case <-*c:
		case <-ctx.Done():
		}
	}
	return g.service.ServeRPC(ctx, a, call, reply)
}

// shut makes closed a channel, and returns the function that closes the channel.
func shut(closed *atomic.Pointer[chan struct{}]) (open func()) {
	c := make(chan struct{})
	closed.Store(&c)
	return sync.OnceFunc(func() {
		closed.Store(nil)
		close(c)
	})
}

// readOf returns a READ of n bytes.
func readOf(n int) *sunrpc.Message {
	args := sunrpc.AppendUint64(sunrpc.AppendOpaque(nil, []byte("the file")), 0)
	return &sunrpc.Message{Prog: nfsProg, Vers: 3, Proc: 6, Cred: noCred, Args: sunrpc.AppendUint32(args, uint32(n)),
		ResultData: make([]byte, n), MaxResult: 104}
}

// slow answers calls after 30 ms.
func slow(*stepCall) outcome {
	time.Sleep(30 * time.Millisecond)
	return answered
}

// TestObservedPhases keeps a call in one phase after the other, and checks the times of the phases
// in milliseconds.
func TestObservedPhases(t *testing.T) {
	type phases map[ledger.Phase]int
	const ms = time.Millisecond
	busy := func(b *bubble, n int) {
		b.handleWith(slow)
		for range n {
			b.start(echo(1, nil, 0))
		}
	}
	for _, c := range []struct {
		name   string
		setup  func(b *bubble)
		m      *sunrpc.Message
		cancel time.Duration // 0 for never
		want   phases
		sends  int
	}{
		{"slow server", func(b *bubble) { b.handleWith(slow) }, readOf(8192), 0, phases{ledger.PhaseServer: 30}, 1},
		{"canceled at the server", func(b *bubble) { b.handleWith(drop) }, readOf(8192), 7 * ms,
			phases{ledger.PhaseServer: 7}, 1},
		{"no credit", func(b *bubble) {
			b.set(func(s *stepServer) { s.credits = 1 })
			b.mustSucceed(echo(0, nil, 0))
			busy(b, 1)
		}, echo(2, nil, 0), 0, phases{ledger.PhaseCredit: 30, ledger.PhaseServer: 30}, 1},
		{"no slot", func(b *bubble) { busy(b, MinSlots) }, echo(2, nil, 0), 0,
			phases{ledger.PhaseSlot: 30, ledger.PhaseServer: 30}, 1},
		{"canceled without a slot", func(b *bubble) { busy(b, MinSlots) }, echo(2, nil, 0), 7 * ms,
			phases{ledger.PhaseSlot: 7}, 0},
		{"stalled send queue", func(b *bubble) {
			b.set(func(s *stepServer) { s.stalled, s.handle = true, slow })
			go resumeAfter(b, 5*ms)
		}, readOf(8192), 0, phases{ledger.PhaseSend: 5, ledger.PhaseServer: 30}, 1},
		{"withdrawn from the send queue", func(b *bubble) {
			b.dev.withdraw = true
			b.set(func(s *stepServer) { s.stalled = true })
		}, echo(2, nil, 0), 7 * ms, phases{ledger.PhaseSend: 7}, 1},
		{"late LOCAL_INVs", func(b *bubble) {
			b.set(func(s *stepServer) { s.holds = func(op verbs.Opcode) bool { return op == verbs.OpLocalInv } })
			go resumeAfter(b, 5*ms)
		}, readOf(8192), 0, phases{ledger.PhaseInvalidation: 5}, 1},
		{"no memory", func(b *bubble) {
			b.dev.maxMR = 0
			time.AfterFunc(marshalRetry/2, func() {
				b.dev.mu.Lock()
				b.dev.maxMR = 1
				b.dev.mu.Unlock()
			})
		}, readOf(8192), 0, phases{ledger.PhaseRegister: int(marshalRetry / ms)}, 1},
		{"lost connection", func(b *bubble) { loseOnce(b, 20*ms) }, readOf(8192), 0,
			phases{ledger.PhaseServer: 30, ledger.PhaseReconnect: 20}, 2},
		{"canceled without a connection", func(b *bubble) { loseOnce(b, time.Hour) }, readOf(8192), 50 * ms,
			phases{ledger.PhaseServer: 30, ledger.PhaseReconnect: 20}, 1},
	} {
		inBubble(t, nil, func(t *testing.T, b *bubble) {
			c.setup(b)
			p := b.start(c.m)
			if c.cancel > 0 {
				sleep(c.cancel)
				p.interrupt()
			}
			sleep(time.Second)
			if !p.done || p.err != nil != (c.cancel > 0) {
				t.Fatalf("%s: got returned %v, %v", c.name, p.done, p.err)
			}
			for _, ended := range b.ended.take(t) {
				if ended.Proc != c.m.Proc {
					continue
				}
				for phase := range ledger.NumPhases {
					if got, want := ended.Times.Spent(phase), time.Duration(c.want[phase])*ms; got != want {
						t.Errorf("%s: phase %v: got %v, want %v", c.name, phase, got, want)
					}
				}
				if ended.Sends != c.sends || ended.XID != p.XID || (ended.Slot < 0) != (c.sends == 0) ||
					ended.Err != p.err || ended.Message != c.m || ended.Prog != c.m.Prog {
					t.Errorf("%s: got %+v, want the call with %d sends", c.name, ended, c.sends)
				}
				return
			}
			t.Errorf("%s: the call was not observed", c.name)
		})
	}
}

// resumeAfter ends a stall and delays of completions.
func resumeAfter(b *bubble, d time.Duration) {
	time.Sleep(d)
	b.mu.Lock()
	b.stalled, b.holds = false, nil
	b.mu.Unlock()
	b.serve(b.qp())
}

// loseOnce ends the connection of the next call after 30 ms, and delays the next connection.
func loseOnce(b *bubble, pause time.Duration) {
	b.set(func(s *stepServer) {
		s.connect = func(ctx context.Context, _ netip.AddrPort) error {
			select {
			case <-time.After(pause):
			case <-ctx.Done():
			}
			return ctx.Err()
		}
		s.handle = func(c *stepCall) outcome {
			b.mu.Lock()
			b.handle = nil
			b.mu.Unlock()
			time.Sleep(30 * time.Millisecond)
			return disconnected
		}
	})
}
