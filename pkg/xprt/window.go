package xprt

import "sync"

// A window is the credits of a transport and the queue of slots that wait for one, first come first
// served. Without a connection the limit is zero.
type window struct {
	mu       sync.Mutex
	limit    int
	inFlight int
	gen      uint64 // the connection whose credits these are; grows with each
	queue    []*slot
	wanted   chan struct{} // capacity 1: a call waits, and there is no connection
	fresh    bool          // the one credit of a new connection is for the liveness call

	// Sums over all calls, at the time each asks for a credit: the calls in flight and those in the
	// queue (req_u and bklog_u of the kernel).
	inFlightSum, queueSum uint64
}

// reserveFrom is the limit from which one credit is kept for liveness calls, so that a server that
// answers nothing any more can be told from one that is busy even when every other credit is taken.
const reserveFrom = 16

// room reports whether s may have a credit now. Called with mu held.
func (w *window) room(s *slot) bool {
	limit := w.limit
	if !s.ping && (w.fresh || limit >= reserveFrom) {
		limit--
	}
	return w.inFlight < limit
}

// enter asks for a credit of the present connection for s. It returns true when s has one; else s
// is in the queue, and is signaled when it has. It may be called again at any time.
func (w *window) enter(s *slot) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case s.credit && s.creditGen == w.gen:
		return true
	case s.queued:
		return false
	}
	w.inFlightSum += uint64(w.inFlight)
	w.queueSum += uint64(len(w.queue))
	if (len(w.queue) == 0 || s.ping) && w.room(s) {
		w.inFlight++
		s.creditGen, s.credit = w.gen, true
		return true
	}
	s.credit, s.queued = false, true
	w.queue = append(w.queue, s)
	if s.ping { // to the front
		copy(w.queue[1:], w.queue)
		w.queue[0] = s
	}
	if w.limit == 0 && !s.ping { // a liveness call is of a connection that there is
		select {
		case w.wanted <- struct{}{}:
		default:
		}
	}
	return false
}

// leave takes s out of the queue, or gives its credit back.
func (w *window) leave(s *slot) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i, q := range w.queue {
		if q == s {
			copy(w.queue[i:], w.queue[i+1:])
			w.queue[len(w.queue)-1] = nil
			w.queue = w.queue[:len(w.queue)-1]
			s.queued = false
			return
		}
	}
	w.release(s)
}

// release gives the credit of s back, if it has one of this connection. Called with mu held.
func (w *window) release(s *slot) {
	if s.credit && s.creditGen == w.gen {
		w.inFlight--
		w.dispatch()
	}
	s.credit = false
}

// dispatch hands free credits to the queue. Called with mu held.
func (w *window) dispatch() {
	n := 0
	for n < len(w.queue) && w.room(w.queue[n]) {
		s := w.queue[n]
		n++
		w.inFlight++
		s.creditGen, s.credit, s.queued = w.gen, true, false
		s.signal()
	}
	if n > 0 {
		rest := copy(w.queue, w.queue[n:])
		clear(w.queue[rest:])
		w.queue = w.queue[:rest]
	}
}

// holds reports whether s holds a credit of the present connection.
func (w *window) holds(s *slot) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return s.credit && s.creditGen == w.gen
}

// replied gives the credit of s back and sets the limit to what its reply granted (RFC 8166 §3.3.1:
// absolute, and it may shrink).
func (w *window) replied(s *slot, limit int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !s.credit || s.creditGen != w.gen {
		return // what a connection that is being taken down grants is good for no other
	}
	w.limit, w.fresh = limit, false
	w.inFlight--
	s.credit = false
	w.dispatch()
}

// reset starts the credits of a new connection (limit 1), or of none (limit 0). Credits held are
// void. With pingFirst the first credit is for the liveness call.
func (w *window) reset(limit int, pingFirst bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.gen++
	w.inFlight, w.limit, w.fresh = 0, limit, pingFirst
	w.dispatch()
}

// generation names the connection whose credits these are, for closeIfUnused. A connection is there
// before its credits are, so the one loaded after the generation is its own, or a later one.
func (w *window) generation() uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.gen
}

// closeIfUnused takes the credits of a connection away if no call holds or waits for one. It
// reports whether it did: not when they are those of another connection by now, which nobody would
// take down then.
func (w *window) closeIfUnused(gen uint64) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.gen != gen || w.inFlight > 0 || len(w.queue) > 0 || w.limit == 0 {
		return false
	}
	w.limit = 0
	select { // what was wanted before is not any more
	case <-w.wanted:
	default:
	}
	return true
}

func (w *window) snapshot() (limit, inFlight, queued int, inFlightSum, queueSum uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.limit, w.inFlight, len(w.queue), w.inFlightSum, w.queueSum
}
