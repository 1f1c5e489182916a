package xprt

import (
	"sync"
	"sync/atomic"

	"github.com/nfsrdmad/nfsrdmad/internal/selfcheck"
)

// A sendQueue prevents overflow of the send queue of a connection, and decides which Sends are
// signaled (S8).
//
// A caller takes a place in the queue before it posts a request. The place is free again when the
// request is known to be executed, that is, after it or a later request has completed. So at any
// time
//
//	requests in the queue  <=  taken - retired  <=  size
//
// The first inequality holds because every posted request has a place, and because retired never
// counts a request after the last completed one. The second is the condition of take. With
// NFSRDMAD_VERIFY=all, both are checked at every post and completion.
//
// An RPC takes the places of its registrations, its Send and its LOCAL_INVs together, after it is
// marshaled: then their number is known. The reply handler therefore never waits for a place. It
// returns the places of the LOCAL_INVs that the RPC does not need.
//
// A waiting call always gets its places. The last request of every LOCAL_INV chain is signaled. So
// is a Send once signalAfter requests, or half of the queue, are not known to be executed. A
// request that frees the places before it is therefore always in flight. The other half of the
// queue holds the largest call.
type sendQueue struct {
	size        int64
	signalAfter int64

	taken      atomic.Int64 // places taken, less those returned
	begun      atomic.Int64 // requests whose post has begun; counted for check only
	posted     atomic.Int64 // requests whose post has returned
	retired    atomic.Int64 // lower bound of the requests that are known to be executed
	unsignaled atomic.Int64

	waiting atomic.Bool // a caller may wait for room
	room    struct {
		sync.Mutex
		freed chan struct{} // closed when places become free
	}
}

// places returns the number of places that a call with n MRs needs: for its registrations, its Send
// and its LOCAL_INVs.
func places(n int) int { return 2*n + 1 }

func (q *sendQueue) init(size, signalAfter int) {
	q.size, q.signalAfter = int64(size), int64(max(signalAfter, 1))
}

// take takes n places. It returns false, and takes none, if fewer than n places are free.
func (q *sendQueue) take(n int) bool {
	for {
		t := q.taken.Load()
		if t+int64(n)-q.retired.Load() > q.size {
			return false
		}
		if q.taken.CompareAndSwap(t, t+int64(n)) {
			return true
		}
	}
}

// giveBack returns n places that were taken and not used.
func (q *sendQueue) giveBack(n int) {
	if n > 0 {
		q.taken.Add(-int64(n))
		q.wake()
	}
}

// signalNow reports whether to signal a Send at the end of a chain of n requests.
func (q *sendQueue) signalNow(n int) bool {
	if q.unsignaled.Add(int64(n)) < q.signalAfter && 2*(q.taken.Load()-q.retired.Load()) < q.size {
		return false
	}
	q.unsignaled.Store(0)
	return true
}

// begin counts a chain of n requests. Call it before the post, and end after it. If the last
// request is signaled, retire with the mark after its completion.
func (q *sendQueue) begin(n int) (mark int64) {
	if selfcheck.On() {
		q.begun.Add(int64(n))
		q.check()
	}
	return q.posted.Load() + int64(n)
}

// end counts a chain of n requests whose post has returned.
func (q *sendQueue) end(n int) { q.posted.Add(int64(n)) }

// check stops the process unless the inequalities of sendQueue hold. Each comparison is also valid
// while other goroutines change the values, because it reads the smaller side first.
func (q *sendQueue) check() {
	retired := q.retired.Load()
	begun := q.begun.Load()
	taken := q.taken.Load()
	if used := taken - q.retired.Load(); retired > begun || begun > taken || used > q.size {
		selfcheck.Failf("send queue of %d: %d places taken, %d requests posted, %d retired", q.size, taken, begun,
			retired)
	}
}

// retire records that the request with this mark, and everything posted before it, was executed.
func (q *sendQueue) retire(mark int64) {
	for {
		r := q.retired.Load()
		if mark <= r || q.retired.CompareAndSwap(r, mark) {
			break
		}
	}
	if selfcheck.On() {
		q.check()
	}
	q.wake()
}

// full returns a channel that is closed when places become free. After full, call take once more
// before waiting.
func (q *sendQueue) full() <-chan struct{} {
	q.room.Lock()
	defer q.room.Unlock()
	q.waiting.Store(true)
	if q.room.freed == nil {
		q.room.freed = make(chan struct{})
	}
	return q.room.freed
}

func (q *sendQueue) wake() {
	if !q.waiting.Load() {
		return
	}
	q.room.Lock()
	defer q.room.Unlock()
	q.waiting.Store(false)
	if q.room.freed != nil {
		close(q.room.freed)
		q.room.freed = nil
	}
}
