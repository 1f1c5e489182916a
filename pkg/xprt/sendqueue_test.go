package xprt

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/memreg"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
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
	const callers, rounds = 16, 3000
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
		synctest.Wait() // until each caller is blocked or has finished
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

// TestFullSendQueueMakesCallsWait uses a send queue that is little larger than one RPC needs
// (docs/features.md S8, empty_sendctx).
func TestFullSendQueueMakesCallsWait(t *testing.T) {
	svc := &service{}
	tr := dial(t, serve(t, svcrdma.Config{Handler: svc}), nil)
	if err := tr.Call(testContext(t), echo(1, nil, 0)); err != nil { // wait for the connection
		t.Fatal(err)
	}
	tr.conn.Load().sq.size = int64(tr.conn.Load().params.WRsPerRPC) + 3
	svc.delay.Store(int64(50 * time.Millisecond)) // the calls in flight fill the queue
	const callers, reads = 8, 50
	fh, ctx := testFH(t), testContext(t)
	c := nfs3.NewClient(tr, nfs3.Options{})
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			buf := make([]byte, 9000)
			var r nfs3.ReadResult
			for range reads {
				if err := c.Read(ctx, noCred, fh, 3, buf, &r); err != nil || !bytes.Equal(buf, fill(3, len(buf))) {
					t.Error("read:", err)
					return
				}
			}
		})
	}
	kit.Eventually(t, "call that waits for the send queue", func() bool { return tr.Stats().EmptySendCtx > 0 })
	svc.delay.Store(0)
	wg.Wait()
	s := tr.Stats()
	if s.Connects != 1 || s.FailedMarshal != 0 {
		t.Errorf("got %d connects, %d failed marshals; want 1, 0", s.Connects, s.FailedMarshal)
	}
	// A call that waits gives its MR back, and does not register it twice.
	if want := uint64(callers * reads); s.LocalInvNeeded != want {
		t.Errorf("LOCAL_INVs: got %d, want one for each of %d calls", s.LocalInvNeeded, want)
	}
}

// A queueCheck compares the accounting of the send queue with the requests of the queue pair.
type queueCheck struct {
	t        *testing.T
	tr       atomic.Pointer[Transport]
	executed atomic.Int64 // requests up to the last one with a completion
	posted   atomic.Int64
	most     atomic.Int64 // places in use
}

func (c *queueCheck) hooks() qpHooks {
	return qpHooks{
		post: func(_ *verbs.WorkRequest, n int) (int, error) {
			c.posted.Add(int64(n))
			c.check()
			return 0, nil
		},
		done: func(_ *verbs.WorkRequest, at int, wc *verbs.WorkCompletion, next func(*verbs.WorkCompletion)) {
			c.executed.Store(int64(at) + 1)
			next(wc)
			c.check()
		},
	}
}

// check checks that posted - executed <= taken - retired <= MaxSendWR. Each part of it holds also
// for values that are read in this order while calls are posted and completed.
func (c *queueCheck) check() {
	tr := c.tr.Load()
	if tr == nil {
		return
	}
	cn := tr.conn.Load()
	if cn == nil {
		return
	}
	q := &cn.sq
	posted := c.posted.Load()
	taken := q.taken.Load()
	retired := q.retired.Load()
	executed := c.executed.Load()
	if posted > taken || retired > executed || taken-retired > int64(cn.params.SendWRs) {
		c.t.Errorf("send queue of %d: got %d taken, %d posted, %d retired, %d executed", cn.params.SendWRs, taken,
			posted, retired, executed)
	}
	c.most.Store(max(c.most.Load(), taken-retired))
}

// TestSendQueueHoldsCallsWithTwoChunks makes calls that have a long call and a long reply of 1 MiB
// each, on devices with MRs of different depth. Their registrations and LOCAL_INVs may exceed
// WRsPerRPC. No request may be posted without a place in the queue (docs/features.md S8).
func TestSendQueueHoldsCallsWithTwoChunks(t *testing.T) {
	const bytesPerCall = 1 << 20
	for _, depth := range []int{17, 64, 257} {
		for _, inv := range []bool{false, true} {
			t.Run(fmt.Sprintf("depth %d, remote invalidation %v", depth, inv), func(t *testing.T) {
				check := &queueCheck{t: t}
				p := hooked(&hookedProvider{attrs: withDepth(depth), open: check.hooks})
				tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}, RemoteInv: inv}), func(c *Config) {
					c.Provider, c.Slots = p, MinSlots
				})
				check.tr.Store(tr)
				args := fill(3, bytesPerCall)
				var wg sync.WaitGroup
				for range 2 * MinSlots {
					wg.Go(func() {
						for i := range 6 {
							m := echo(1, args, bytesPerCall)
							if i%2 == 1 {
								m = echo(1, args[:8], 8)
							}
							if err := tr.Call(testContext(t), m); err != nil || !bytes.Equal(m.Result, m.Args) {
								t.Errorf("echo of %d bytes: got %v, or wrong data", len(m.Args), err)
							}
						}
					})
				}
				wg.Wait()
				if s := tr.Stats(); s.Connects != 1 || s.NomsgCall == 0 || s.ReplyChunks == 0 {
					t.Errorf("got %d connects, %d long calls, %d reply chunks; want 1, some, some", s.Connects,
						s.NomsgCall, s.ReplyChunks)
				}
				q := &connOf(t, tr).sq
				if taken, posted := q.taken.Load(), check.posted.Load(); taken != posted {
					t.Errorf("places taken after all calls: got %d, want one for each of %d requests", taken, posted)
				}
				t.Logf("at most %d of %d places in use", check.most.Load(), q.size)
				if check.most.Load() == 0 {
					t.Error("the send queue was never checked")
				}
			})
		}
	}
}

// TestSendQueueReturnsPlacesOfRemoteInvalidation makes calls whose keys the server invalidates.
// Each call must return the places of its LOCAL_INVs.
func TestSendQueueReturnsPlacesOfRemoteInvalidation(t *testing.T) {
	const calls = 50
	tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}, RemoteInv: true}), nil)
	buf := make([]byte, 9000)
	for range calls {
		var r nfs3.ReadResult
		if err := nfs3.NewClient(tr, nfs3.Options{}).Read(testContext(t), noCred, testFH(t), 0, buf, &r); err != nil {
			t.Fatal(err)
		}
	}
	q := &connOf(t, tr).sq
	if n := tr.Stats().RemoteInvalidations; n != calls || q.taken.Load() != 2*calls {
		t.Errorf("got %d remote invalidations, %d places taken; want %d, %d for the FastRegs and Sends", n,
			q.taken.Load(), calls, 2*calls)
	}
}

// TestLargestCallFitsSendQueue checks for each depth that WRsPerRPC places hold a call with one
// chunk, and that half of the smallest send queue holds the largest call, which has two chunks. A
// call that waits for places then gets them when the other calls have ended.
func TestLargestCallFitsSendQueue(t *testing.T) {
	attrs := softiwarpAttrs(t)
	for depth := 17; depth <= 257; depth++ {
		attrs.MaxFastRegPageListLen = depth
		p, err := memreg.Query(attrs, MinSlots)
		if err != nil {
			t.Fatalf("depth %d: %v", depth, err)
		}
		if one := places(p.MaxSegs); one > p.WRsPerRPC {
			t.Errorf("depth %d: a call with one chunk needs %d places, want at most %d", depth, one, p.WRsPerRPC)
		}
		if most := places(2 * p.MaxSegs); 2*most > p.SendWRs {
			t.Errorf("depth %d: the largest call needs %d of %d places, want at most half", depth, most, p.SendWRs)
		}
	}
}

// TestSendQueueCountsPlaces takes, returns and retires places one after the other.
func TestSendQueueCountsPlaces(t *testing.T) {
	var q sendQueue
	q.init(8, 1)
	for i, c := range []struct {
		retire int64 // mark; 0 for none
		back   int   // places to return
		take   int
		ok     bool
		taken  int64
	}{
		{0, 0, 9, false, 0},
		{0, 0, 8, true, 8},
		{0, 0, 1, false, 8},
		{2, 0, 3, false, 8},
		{0, 0, 2, true, 10},
		{1, 0, 1, false, 10}, // an earlier mark has no effect
		{0, 3, 4, false, 7},
		{0, -1, 3, true, 10}, // returns nothing
		{0, 0, 1, false, 10},
	} {
		q.begun.Store(q.taken.Load())
		if c.retire > 0 {
			q.retire(c.retire)
		}
		q.giveBack(c.back)
		if ok := q.take(c.take); ok != c.ok || q.taken.Load() != c.taken {
			t.Errorf("step %d: take %d: got %v, %d places taken; want %v, %d", i, c.take, ok, q.taken.Load(), c.ok,
				c.taken)
		}
	}
}

// TestFreePlacesWakeCallers checks which events tell the waiting callers that places are free.
func TestFreePlacesWakeCallers(t *testing.T) {
	for _, c := range []struct {
		name  string
		event func(q *sendQueue)
		wakes bool
	}{
		{"place returned", func(q *sendQueue) { q.giveBack(1) }, true},
		{"nothing returned", func(q *sendQueue) { q.giveBack(0) }, false},
		{"requests retired", func(q *sendQueue) { q.retire(1) }, true},
	} {
		var q sendQueue
		q.init(8, 1)
		q.take(8)
		q.begin(8)
		c.event(&q) // no caller waits
		room := q.full()
		if other := q.full(); other != room || isClosed(room) {
			t.Errorf("%s: two callers: got other channels, or a closed one", c.name)
		}
		q.begun.Store(q.taken.Load())
		c.event(&q)
		if got := isClosed(room); got != c.wakes {
			t.Errorf("%s: got woken %v, want %v", c.name, got, c.wakes)
		}
		if c.wakes && isClosed(q.full()) {
			t.Errorf("%s: the next caller does not wait", c.name)
		}
	}
}

// TestSendsAreSignaledInTime checks after which requests a Send is signaled: signalAfter requests,
// or when half of the queue is in use.
func TestSendsAreSignaledInTime(t *testing.T) {
	for _, c := range []struct {
		name              string
		size, signalAfter int
		taken             int64 // before the chains
		want              []bool
	}{
		{"after 6 requests", 100, 6, 0, []bool{false, true, false, true}},
		{"after 7 requests", 100, 7, 0, []bool{false, false, true, false, false, true}},
		{"half of the queue", 100, 1000, 49, []bool{false}},
		{"half of the queue, one more", 100, 1000, 50, []bool{true, true}},
		{"at least one request", 100, 0, 0, []bool{true, true}},
	} {
		var q sendQueue
		q.init(c.size, c.signalAfter)
		q.taken.Store(c.taken)
		for i, want := range c.want {
			if got := q.signalNow(3); got != want {
				t.Errorf("%s: chain %d: got signaled %v, want %v", c.name, i, got, want)
			}
		}
	}
	var q sendQueue
	q.init(100, 1000)
	q.taken.Store(60)
	q.retired.Store(11)
	if q.signalNow(3) {
		t.Error("49 of 100 places in use: got signaled")
	}
}

// TestMarksFollowPosts checks the marks of chains: the number of requests up to their ends.
func TestMarksFollowPosts(t *testing.T) {
	var q sendQueue
	q.init(100, 1)
	q.take(20)
	for _, c := range []struct {
		n    int
		want int64
	}{{3, 3}, {4, 7}, {1, 8}} {
		if got := q.begin(c.n); got != c.want {
			t.Errorf("chain of %d requests: got mark %d, want %d", c.n, got, c.want)
		}
		q.end(c.n)
	}
}
