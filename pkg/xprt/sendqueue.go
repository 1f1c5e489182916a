package xprt

import (
	"sync"
	"sync/atomic"
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
// counts a request after the last completed one. The second is the condition of take. An RPC takes
// the places of its registrations, its Send and its LOCAL_INVs together, before it is marshaled.
// The reply handler therefore never waits for a place.
//
// A waiting call always gets its places. The last request of every LOCAL_INV chain is signaled. So
// is a Send once signalAfter requests, or half of the queue, are not known to be executed. A
// request that frees the places before it is therefore always in flight.
type sendQueue struct {
	size        int64
	signalAfter int64

	taken      atomic.Int64 // places taken, less those returned
	posted     atomic.Int64 // requests whose post has returned
	retired    atomic.Int64 // lower bound of the requests that are known to be executed
	unsignaled atomic.Int64

	waiting atomic.Bool // a caller may wait for room
	room    struct {
		sync.Mutex
		freed chan struct{} // closed when places become free
	}
}

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

// mark returns the mark of a chain of n requests whose last one is signaled. Call it before the
// post, and retire with the mark after the completion.
func (q *sendQueue) mark(n int) int64 { return q.posted.Load() + int64(n) }

// retire records that the request with this mark, and everything posted before it, was executed.
func (q *sendQueue) retire(mark int64) {
	for {
		r := q.retired.Load()
		if mark <= r || q.retired.CompareAndSwap(r, mark) {
			break
		}
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
