package xprt

import (
	"sync"
	"sync/atomic"
)

// A sendQueue keeps the send queue of a connection from overflowing, and decides which Sends are
// signaled (S8).
//
// A place of the queue is taken before a request is posted and is free again when the request is
// known to have been executed: when it, or one behind it, has completed. So at any time
//
//	requests on the queue  <=  taken - retired  <=  size
//
// The left half: whatever is posted was taken before, and what retire counts stands, in the order
// of the queue, at or before a request that completed. The right half is the condition of take. An
// RPC takes the places of its registrations, its Send and its LOCAL_INVs together, before it is
// marshaled, so that the reply handler never waits for a place.
//
// Whoever waits for places gets them: the last request of every LOCAL_INV chain is signaled, and so
// is a Send as soon as signalAfter requests, or half of the queue, are not known to be executed; so
// there is always one on its way that frees those before it.
type sendQueue struct {
	size        int64
	signalAfter int64

	taken      atomic.Int64 // places ever taken, less those given back
	posted     atomic.Int64 // requests whose post has returned
	retired    atomic.Int64 // requests known to be executed: a lower bound
	unsignaled atomic.Int64

	waiting atomic.Bool
	mu      sync.Mutex
	room    chan struct{} // guarded by mu: closed when places become free
}

func (q *sendQueue) init(size, signalAfter int) {
	q.size, q.signalAfter = int64(size), int64(max(signalAfter, 1))
}

// take takes n places. It reports false when there are not as many.
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

// signalNow reports whether a Send behind n-1 other requests is to be signaled.
func (q *sendQueue) signalNow(n int) bool {
	if q.unsignaled.Add(int64(n)) < q.signalAfter && 2*(q.taken.Load()-q.retired.Load()) < q.size {
		return false
	}
	q.unsignaled.Store(0)
	return true
}

// mark is asked for before a chain of n requests is posted whose last one is signaled; its
// completion retires up to the mark.
func (q *sendQueue) mark(n int) int64 { return q.posted.Load() + int64(n) }

// retire notes that the request with this mark has completed: it and everything posted before it
// has been executed.
func (q *sendQueue) retire(mark int64) {
	for {
		r := q.retired.Load()
		if mark <= r || q.retired.CompareAndSwap(r, mark) {
			break
		}
	}
	q.wake()
}

// full returns a channel that is closed when places become free. Ask it, then take once more, then
// wait.
func (q *sendQueue) full() <-chan struct{} {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.waiting.Store(true)
	if q.room == nil {
		q.room = make(chan struct{})
	}
	return q.room
}

func (q *sendQueue) wake() {
	if !q.waiting.Load() {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.waiting.Store(false)
	if q.room != nil {
		close(q.room)
		q.room = nil
	}
}
