package xprt

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// A boundedQueue is the send queue of a device. Requests stay in it, in order, until a completion
// of them or of a later request was seen.
type boundedQueue struct {
	t    *testing.T
	size int

	mu      sync.Mutex // guards the fields below
	entries []queued
	longest int
}

type queued struct{ done func() } // nil: unsignaled

func (q *boundedQueue) post(n int, done func()) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for range n - 1 {
		q.entries = append(q.entries, queued{})
	}
	q.entries = append(q.entries, queued{done})
	q.longest = max(q.longest, len(q.entries))
	if len(q.entries) > q.size {
		q.t.Errorf("requests in the queue: got %d, want at most %d", len(q.entries), q.size)
	}
}

// complete delivers the first completion in the queue, which frees the places up to it.
func (q *boundedQueue) complete() bool {
	q.mu.Lock()
	for i, e := range q.entries {
		if e.done != nil {
			q.entries = q.entries[i+1:]
			q.mu.Unlock()
			e.done()
			return true
		}
	}
	q.mu.Unlock()
	return false
}

// TestSendQueueNeverOverflows uses the accounting from many goroutines on a queue of the same size.
// The queue is as small as possible, and completions come as late as possible. The queue must not
// overflow, and every call must finish.
func TestSendQueueNeverOverflows(t *testing.T) {
	const perRPC = 7
	for _, size := range []int{2 * perRPC, 3*perRPC + 1, 20 * perRPC} {
		// In the bubble, the device notices that all callers are blocked.
		synctest.Test(t, func(t *testing.T) { fillSendQueue(t, size, perRPC) })
	}
}

// A queueUser uses a send queue like the calls of a connection.
type queueUser struct {
	q       *boundedQueue
	sq      *sendQueue
	waits   atomic.Int64  // waits for room
	blocked chan struct{} // closed when all calls wait and nothing is left to complete
}

// fillSendQueue has many callers use a send queue of the given size.
func fillSendQueue(t *testing.T, size, perRPC int) {
	const callers, rounds = 16, 500
	var sq sendQueue
	sq.init(size, 3)
	u := &queueUser{q: &boundedQueue{t: t, size: size}, sq: &sq, blocked: make(chan struct{})}
	var all sync.WaitGroup
	var finished atomic.Int64
	for c := range callers {
		rng := rand.New(rand.NewPCG(1, uint64(c)))
		all.Go(func() {
			for range rounds {
				if !u.call(rng.IntN((perRPC-1)/2+1), rng) {
					return
				}
			}
			finished.Add(1)
		})
	}
	for more := true; more; more = u.q.complete() {
		for u.q.complete() { // while callers run
		}
		settle() // until each caller is blocked or has finished
	}
	if n := finished.Load(); n != callers {
		t.Errorf("size %d: %d of %d callers wait forever for a completion or for room", size, callers-n, callers)
	}
	close(u.blocked)
	all.Wait()
	if left := sq.taken.Load() - sq.retired.Load(); left < int64(len(u.q.entries)) || left > int64(size) {
		t.Errorf("size %d: got %d places in use, want %d to %d", size, left, len(u.q.entries), size)
	}
	if size == 2*perRPC && u.waits.Load() == 0 {
		t.Error("waits for room: got 0, want some")
	}
	t.Logf("size %d: at most %d requests in the queue, %d waits", size, u.q.longest, u.waits.Load())
}

// call takes places for an RPC with regs registrations, posts its requests and waits for their
// completions. It returns false if it would wait forever.
func (u *queueUser) call(regs int, rng *rand.Rand) bool {
	q, sq := u.q, u.sq
	for !sq.take(places(regs)) {
		room := sq.full()
		if sq.take(places(regs)) {
			break
		}
		u.waits.Add(1)
		if !u.wait(room) {
			return false
		}
	}
	mark := sq.begin(regs + 1)
	sent := make(chan struct{})
	if sq.signalNow(regs + 1) {
		q.post(regs+1, func() { sq.retire(mark); close(sent) })
	} else {
		q.post(regs+1, nil)
		close(sent)
	}
	sq.end(regs + 1)
	invs := rng.IntN(regs + 1) // the server invalidated the others
	sq.giveBack(regs - invs)
	fenced := make(chan struct{})
	if invs > 0 {
		mark := sq.begin(invs)
		q.post(invs, func() { sq.retire(mark); close(fenced) })
		sq.end(invs)
	} else {
		close(fenced)
	}
	return u.wait(fenced) && u.wait(sent)
}

func (u *queueUser) wait(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	case <-u.blocked:
		return false
	}
}

// TestFullSendQueueMakesCallsWait stalls calls that have two chunks of 1 MiB each, and need up to
// half of the send queue. A call that finds no room waits, gives its MRs back, and does not
// register them twice. No request is posted without a place in the queue (docs/features.md S8,
// empty_sendctx).
func TestFullSendQueueMakesCallsWait(t *testing.T) {
	for _, depth := range []int{17, 64, 257} {
		for _, remoteInv := range []bool{false, true} {
			inBubble(t, func(c *Config, _ *stepServer) {
				dev := c.Provider.(*stepDevice)
				dev.attrs, dev.maxMR, dev.remoteInv = withDepth(depth), 1000, remoteInv
			}, func(t *testing.T, b *bubble) { b.fillSendQueue(depth == 17, !remoteInv) })
		}
	}
}

// fillSendQueue is one case of TestFullSendQueueMakesCallsWait.
func (b *bubble) fillSendQueue(waits, localInvs bool) {
	const payload, rounds = 1 << 20, 2
	for range rounds {
		before := b.tr.Stats()
		b.set(func(s *stepServer) { s.stalled = true })
		var calls []*pending
		for range MinSlots {
			calls = append(calls, b.start(&sunrpc.Message{Prog: echoProg, Vers: 1, Proc: 1, Cred: noCred,
				ArgData: fill(0, payload), ResultData: make([]byte, payload)}))
		}
		posted := uint64(0)
		for _, c := range b.tr.Calls() {
			if c.Waits == WaitReply {
				posted++
			}
		}
		s := b.tr.Stats()
		mrs := s.MRStates["VALID"]
		if waits != (posted < MinSlots) || waits != (s.EmptySendCtx > before.EmptySendCtx) {
			b.t.Errorf("got %d posted calls, counter of waits %d; want waits %v", posted, s.EmptySendCtx, waits)
		}
		b.set(func(s *stepServer) { s.stalled = false })
		for _, p := range calls {
			if !p.done || p.err != nil || p.ResultDataLen != payload {
				b.t.Fatalf("call: got returned %v, %v, %d bytes", p.done, p.err, p.ResultDataLen)
			}
		}
		s = b.tr.Stats()
		if n := s.LocalInvNeeded - before.LocalInvNeeded; s.Connects != 1 || s.FailedMarshal != 0 ||
			localInvs && n != mrs*MinSlots/posted {
			b.t.Errorf("got %d connects, %d failed marshals, %d LOCAL_INVs; want 1, 0, %d MRs for each %d calls",
				s.Connects, s.FailedMarshal, n, mrs, posted)
		}
	}
}

// TestSendQueueReturnsPlacesOfRemoteInvalidation makes calls whose keys the server invalidates.
// Each call must return the places of its LOCAL_INVs. Otherwise a call soon waits forever.
func TestSendQueueReturnsPlacesOfRemoteInvalidation(t *testing.T) {
	const calls = 500
	inBubble(t, func(c *Config, _ *stepServer) { c.Provider.(*stepDevice).remoteInv = true },
		func(t *testing.T, b *bubble) {
			for range calls {
				if p := b.start(readOf(9000)); !p.done || p.err != nil {
					t.Fatalf("READ: got returned %v, %v", p.done, p.err)
				}
			}
			if n := b.tr.Stats().RemoteInvalidations; n != calls {
				t.Errorf("remote invalidations: got %d, want %d", n, calls)
			}
		})
}
