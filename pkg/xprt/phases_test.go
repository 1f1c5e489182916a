package xprt

import (
	"bytes"
	"context"
	"errors"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/ledger"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// phaseDelay is how long the tests of this file keep calls in one phase.
const phaseDelay = 30 * time.Millisecond

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

// one returns the only call since the last take.
func (o *observed) one(t *testing.T) Ended {
	t.Helper()
	all := o.take(t)
	if len(all) != 1 {
		t.Fatalf("calls observed: got %+v, want 1", all)
	}
	return all[0]
}

// wantPhase fails t unless the call has spent phaseDelay in phase p, and no time in the phases of
// none.
func wantPhase(t *testing.T, c *Ended, p ledger.Phase, none ...ledger.Phase) {
	t.Helper()
	if d := c.Times.Spent(p); d < phaseDelay {
		t.Errorf("phase %v: got %v, want at least %v: %+v", p, d, phaseDelay, c.Times)
	}
	for _, p := range none {
		if d := c.Times.Spent(p); d != 0 {
			t.Errorf("phase %v: got %v, want 0: %+v", p, d, c.Times)
		}
	}
}

// A gate is a service whose replies wait while it is closed.
type gate struct {
	service
	closed atomic.Pointer[chan struct{}]
}

func (g *gate) ServeRPC(ctx context.Context, a netip.AddrPort, call, reply []byte) ([]byte, error) {
	wait(ctx, &g.closed)
	return g.service.ServeRPC(ctx, a, call, reply)
}

func wait(ctx context.Context, closed *atomic.Pointer[chan struct{}]) {
	if c := closed.Load(); c != nil {
		select {
		case <-*c:
		case <-ctx.Done():
		}
	}
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

// waiting waits until n calls wait for what, and then for phaseDelay.
func waiting(t *testing.T, tr *Transport, what string, n int) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		found := 0
		for _, c := range tr.Calls() {
			if c.Waits == what && (what != WaitReply || tr.slots[c.Slot].writtenAt.Load() != 0) {
				found++
			}
		}
		if found == n {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("calls that wait for %s: got %d of %+v, want %d", what, found, tr.Calls(), n)
		}
	}
	time.Sleep(phaseDelay)
}

func null(t *testing.T, tr *Transport) {
	if err := tr.Call(testContext(t), echo(0, nil, 0)); err != nil {
		t.Error(err)
	}
}

// waits are the phases in which a call waits for more than the server.
var waits = []ledger.Phase{ledger.PhaseSlot, ledger.PhaseReconnect, ledger.PhaseCredit}

func TestSlowServerShowsInPhaseServer(t *testing.T) {
	var o observed
	s := &service{}
	tr := dial(t, serve(t, svcrdma.Config{Handler: s}), func(c *Config) { c.Observe = o.observe })
	null(t, tr) // the first reply grants the credits
	if c := o.one(t); c.Prog != echoProg || c.Vers != 1 || c.Proc != 0 || c.Sends != 1 || c.Err != nil ||
		c.XID == 0 || tr.slots[c.Slot] != tr.slotOf(c.XID) || c.Message == nil || c.Message.XID != c.XID {
		t.Errorf("observed call: got %+v, want the call", c)
	}
	s.delay.Store(int64(phaseDelay))
	null(t, tr)
	c := o.one(t)
	wantPhase(t, &c, ledger.PhaseServer, append(waits, ledger.PhaseInvalidation)...)
}

func TestDelayedReplyShowsInPhaseServer(t *testing.T) {
	var o observed
	tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}}), func(c *Config) {
		c.Observe, c.Provider = o.observe, faulty(t, "seed=1,delay-reply=1:30ms")
	})
	null(t, tr)
	o.take(t)
	null(t, tr)
	c := o.one(t)
	wantPhase(t, &c, ledger.PhaseServer, append(waits, ledger.PhaseInvalidation)...)
}

func TestCreditStarvationShowsInPhaseCredit(t *testing.T) {
	var o observed
	var g gate
	tr := dial(t, serve(t, svcrdma.Config{Handler: &g}), func(c *Config) {
		c.Observe, c.Provider = o.observe, faulty(t, "seed=1,credits=1")
	})
	null(t, tr)
	o.take(t)
	open := shut(&g.closed)
	defer open()
	var calls sync.WaitGroup
	calls.Go(func() { null(t, tr) })
	waiting(t, tr, WaitReply, 1)
	calls.Go(func() { null(t, tr) })
	waiting(t, tr, WaitCredit, 1)
	open()
	calls.Wait()
	all := o.take(t)
	if len(all) != 2 {
		t.Fatalf("calls: got %d, want 2", len(all))
	}
	if all[0].Times.Spent(ledger.PhaseCredit) > 0 {
		all[0], all[1] = all[1], all[0]
	}
	wantPhase(t, &all[0], ledger.PhaseServer, waits...)
	wantPhase(t, &all[1], ledger.PhaseCredit, ledger.PhaseSlot, ledger.PhaseReconnect)
}

func TestSlotStarvationShowsInPhaseSlot(t *testing.T) {
	var o observed
	var g gate
	tr := dial(t, serve(t, svcrdma.Config{Handler: &g}), func(c *Config) { c.Observe, c.Slots = o.observe, MinSlots })
	null(t, tr)
	o.take(t)
	open := shut(&g.closed)
	defer open()
	var calls sync.WaitGroup
	for range MinSlots {
		calls.Go(func() { null(t, tr) })
	}
	waiting(t, tr, WaitReply, MinSlots)
	calls.Go(func() { null(t, tr) })
	waiting(t, tr, WaitSlot, 1)
	c := interruptCall(t, tr, &o, WaitSlot, 2) // had no slot
	wantPhase(t, &c, ledger.PhaseSlot)
	if c.XID != 0 || c.Slot != -1 || c.Sends != 0 || c.Err == nil ||
		c.Times.Spent(ledger.PhaseSlot) != c.Times.Total() {
		t.Errorf("call without slot: got %+v, want only time for a slot, and an error", c)
	}
	open()
	calls.Wait()
	waited := 0
	for _, c := range o.take(t) {
		if c.Times.Spent(ledger.PhaseSlot) > 0 {
			wantPhase(t, &c, ledger.PhaseSlot, ledger.PhaseReconnect)
			waited++
		}
	}
	if waited != 1 {
		t.Errorf("calls that waited for a slot: got %d, want 1", waited)
	}
}

// TestSendQueueShowsInPhaseSend makes calls on a link that conveys nothing for a time. The first
// one is taken back from the send queue.
func TestSendQueueShowsInPhaseSend(t *testing.T) {
	b := newBusyLink(t)
	b.ended.take(t)
	ctx, cancel := context.WithCancel(testContext(t))
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- b.tr.Call(ctx, echo(0, nil, 0)) }()
	b.posted(2) // with the WRITE
	time.Sleep(phaseDelay)
	cancel()
	if err := <-ended; err == nil {
		t.Error("canceled call: got no error")
	}
	c := b.ended.one(t)
	wantPhase(t, &c, ledger.PhaseSend, append(waits, ledger.PhaseServer)...)

	go func() { ended <- b.tr.Call(testContext(t), echo(0, nil, 0)) }()
	b.posted(2)
	time.Sleep(phaseDelay)
	b.resume()
	if err := errors.Join(<-ended, <-b.write); err != nil {
		t.Error(err)
	}
	for _, c := range b.ended.take(t) {
		if c.Prog == echoProg {
			wantPhase(t, &c, ledger.PhaseSend, waits...)
			if c.Times.Spent(ledger.PhaseServer) <= 0 {
				t.Errorf("call that was sent late: got %+v, want time at the server", c.Times)
			}
		}
	}
}

// A gatedProvider waits in Resolve while it is closed.
type gatedProvider struct {
	verbs.Provider
	closed atomic.Pointer[chan struct{}]
}

func (p *gatedProvider) Resolve(ctx context.Context, a netip.AddrPort) (verbs.ActiveID, error) {
	wait(ctx, &p.closed)
	return p.Provider.Resolve(ctx, a)
}

// TestReconnectShowsInPhaseReconnect ends the connection instead of a reply, and delays the next
// connection. The call was sent twice, and a second call only waited for the connection.
func TestReconnectShowsInPhaseReconnect(t *testing.T) {
	var o observed
	var s service
	var end atomic.Bool
	hooks := svcrdma.Hooks{Reply: func(*rpcrdma.Header) svcrdma.Verdict {
		if end.Swap(false) {
			return svcrdma.Disconnect
		}
		return svcrdma.Send
	}}
	p := &gatedProvider{Provider: faulty(t, "seed=1")}
	tr := dial(t, serve(t, svcrdma.Config{Handler: &s, Hooks: hooks}), func(c *Config) {
		c.Observe, c.Provider = o.observe, p
	})
	null(t, tr)
	o.take(t)
	open := shut(&p.closed)
	defer open()
	s.delay.Store(int64(phaseDelay))
	end.Store(true)
	var calls sync.WaitGroup
	calls.Go(func() { null(t, tr) })
	waiting(t, tr, WaitReconnect, 1)
	s.delay.Store(0)
	calls.Go(func() { null(t, tr) })
	waiting(t, tr, WaitReconnect, 2)
	open()
	calls.Wait()
	sends := make(map[int]Ended)
	for _, c := range o.take(t) {
		wantPhase(t, &c, ledger.PhaseReconnect, ledger.PhaseSlot)
		sends[c.Sends] = c
	}
	twice, ok := sends[2]
	if _, once := sends[1]; !ok || !once {
		t.Fatalf("calls: got %+v, want one that was sent once, and one that was sent twice", sends)
	}
	wantPhase(t, &twice, ledger.PhaseServer) // at first
}

// TestInterruptedCallHasItsPhases cancels a call at the server, and one without connection.
func TestInterruptedCallHasItsPhases(t *testing.T) {
	var o observed
	var g gate
	p := &gatedProvider{Provider: faulty(t, "seed=1")}
	tr := dial(t, serve(t, svcrdma.Config{Handler: &g}), func(c *Config) { c.Observe, c.Provider = o.observe, p })
	null(t, tr)
	o.take(t)
	open := shut(&g.closed)
	defer open()
	c := interruptCall(t, tr, &o, WaitReply, 1)
	wantPhase(t, &c, ledger.PhaseServer, waits...)
	if c.Times.Spent(ledger.PhaseInvalidation) <= 0 || c.Err == nil {
		t.Errorf("call that was canceled at the server: got %+v, want time for invalidation, and an error", c)
	}
	openProvider := shut(&p.closed)
	defer openProvider()
	lost := tr.conn.Load()
	lost.fail(ErrClosed)
	<-lost.down
	c = interruptCall(t, tr, &o, WaitReconnect, 1)
	wantPhase(t, &c, ledger.PhaseReconnect, ledger.PhaseServer, ledger.PhaseSlot)
}

// interruptCall makes a call, cancels it after n calls wait for what, and returns it.
func interruptCall(t *testing.T, tr *Transport, o *observed, what string, n int) Ended {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var calls sync.WaitGroup
	calls.Go(func() {
		var interrupted *InterruptedError
		if err := tr.Call(ctx, readOf(1<<16)); !errors.As(err, &interrupted) {
			t.Errorf("canceled call: got error %v, want an *InterruptedError", err)
		}
	})
	waiting(t, tr, what, n)
	cancel()
	calls.Wait()
	return o.one(t)
}

// readOf returns a READ of n bytes.
func readOf(n int) *sunrpc.Message {
	args := sunrpc.AppendUint64(sunrpc.AppendOpaque(nil, []byte("the file")), 0)
	return &sunrpc.Message{Prog: nfsProg, Vers: 3, Proc: 6, Cred: noCred, Args: sunrpc.AppendUint32(args, uint32(n)),
		ResultData: make([]byte, n), MaxResult: 104}
}

// TestTimeoutHasItsPhases times out a call of a soft mount.
func TestTimeoutHasItsPhases(t *testing.T) {
	var o observed
	var g gate
	tr := dial(t, serve(t, svcrdma.Config{Handler: &g}), func(c *Config) {
		c.Observe, c.Recovery, c.Timeout = o.observe, Soft, phaseDelay
	})
	open := shut(&g.closed)
	defer open()
	var timeout *TimeoutError
	if err := tr.Call(testContext(t), echo(0, nil, 0)); !errors.As(err, &timeout) {
		t.Errorf("call without reply: got error %v, want a *TimeoutError", err)
	}
	c := o.one(t)
	// The timeout begins when the call is posted.
	if d := c.Times.Spent(ledger.PhaseSend) + c.Times.Spent(ledger.PhaseServer); d < phaseDelay || c.Err == nil {
		t.Errorf("call that timed out: got %v in the send queue and at the server, want at least %v, and an error: %+v",
			d, phaseDelay, c)
	}
}

// TestInvalidationShowsWhoInvalidates compares a server that invalidates keys with one that leaves
// this to the client.
func TestInvalidationShowsWhoInvalidates(t *testing.T) {
	for _, remote := range []bool{true, false} {
		var o observed
		tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}, RemoteInv: remote}), func(c *Config) {
			c.Observe = o.observe
		})
		if err := tr.Call(testContext(t), readOf(1<<16)); err != nil {
			t.Fatal(err)
		}
		c := o.one(t)
		if got := c.Times.Spent(ledger.PhaseInvalidation); got > 0 == remote {
			t.Errorf("time for invalidation, if the server invalidates is %v: got %v", remote, got)
		}
		for _, p := range []ledger.Phase{ledger.PhaseRegister, ledger.PhaseSend, ledger.PhaseServer,
			ledger.PhaseCompletion, ledger.PhaseReturn} {
			if c.Times.Spent(p) <= 0 {
				t.Errorf("phase %v: got 0, want more", p)
			}
		}
	}
}

// TestEveryCallIsObservedOnce makes calls of several goroutines on connections with faults, and
// cancels some of them.
func TestEveryCallIsObservedOnce(t *testing.T) {
	var o observed
	tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}, RemoteInv: true}), func(c *Config) {
		c.Observe, c.Slots = o.observe, MinSlots
		c.Provider = faulty(t, "seed=7,disconnect-every=~60,delay-reply=~20:3ms,linv-error=~300,credits=3")
	})
	fh, cl := testFH(t), nfs3.NewClient(tr, nfs3.Options{})
	const workers, calls = 8, 60
	var running sync.WaitGroup
	var failed atomic.Int64
	for w := range workers {
		running.Go(func() {
			buf := make([]byte, 30000)
			for i := range calls {
				ctx, cancel := context.WithCancel(testContext(t))
				if i%7 == 0 {
					time.AfterFunc(time.Duration(w)*100*time.Microsecond, cancel)
				}
				var r nfs3.ReadResult
				err := cl.Read(ctx, noCred, fh, 0, buf[:1+i*499], &r)
				cancel()
				if err != nil {
					failed.Add(1)
				} else if !bytes.Equal(buf[:r.N], fill(0, r.N)) {
					t.Error("READ: wrong data")
				}
			}
		})
	}
	running.Wait()
	all := o.take(t)
	failures, resends := int64(0), 0
	for i := range all {
		if all[i].Err != nil {
			failures++
		}
		resends += max(all[i].Sends-1, 0)
	}
	if len(all) != workers*calls || failures != failed.Load() {
		t.Errorf("calls observed: got %d with %d failures, want %d with %d", len(all), failures, workers*calls,
			failed.Load())
	}
	if s := tr.Stats(); resends == 0 || uint64(resends) != s.Resends {
		t.Errorf("resends observed: got %d, want %d, more than 0", resends, s.Resends)
	}
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
