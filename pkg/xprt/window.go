package xprt

import "sync"

// A window manages the credits of a transport and the queue of slots that wait for a credit. The
// queue is first come, first served. The limit is zero while there is no connection.
type window struct {
	wanted chan struct{} // capacity 1: a call waits, and there is no connection

	mu        sync.Mutex // guards the fields below and slot.credit
	limit     int
	inFlight  int
	gen       uint64 // generation of the credits; each connection has another
	queue     []*slot
	pingFirst bool // the one credit of a new connection is for the keepalive call

	// Sums over all calls, taken when a call asks for a credit: calls in flight and calls in the
	// queue. The kernel's names are req_u and bklog_u.
	inFlightSum, queueSum uint64
}

// reserveFrom is the limit from which one credit is reserved for keepalive calls. The reserve
// distinguishes a dead server from a busy one even when all other credits are in use.
const reserveFrom = 16

// mayGrant reports whether s may have a credit now. The caller holds mu.
func (w *window) mayGrant(s *slot) bool {
	limit := w.limit
	if !s.ping && (w.pingFirst || limit >= reserveFrom) {
		limit--
	}
	return w.inFlight < limit
}

// enter requests a credit of the current connection for s and reports whether s has one. If not, s
// is in the queue, and its caller is woken when s gets a credit. enter may be called repeatedly.
func (w *window) enter(s *slot) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case s.credit.held && s.credit.gen == w.gen:
		return true
	case s.credit.queued:
		return false
	}
	w.inFlightSum += uint64(w.inFlight)
	w.queueSum += uint64(len(w.queue))
	if (len(w.queue) == 0 || s.ping) && w.mayGrant(s) {
		w.inFlight++
		s.credit.gen, s.credit.held = w.gen, true
		return true
	}
	s.credit.held, s.credit.queued = false, true
	w.queue = append(w.queue, s)
	if s.ping { // keepalive calls go first
		copy(w.queue[1:], w.queue)
		w.queue[0] = s
	}
	if w.limit == 0 && !s.ping { // a keepalive call requests no connection
		select {
		case w.wanted <- struct{}{}:
		default:
		}
	}
	return false
}

// leave removes s from the queue, or returns its credit.
func (w *window) leave(s *slot) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i, q := range w.queue {
		if q == s {
			copy(w.queue[i:], w.queue[i+1:])
			w.queue[len(w.queue)-1] = nil
			w.queue = w.queue[:len(w.queue)-1]
			s.credit.queued = false
			return
		}
	}
	w.release(s)
}

// release returns the credit of s if it belongs to the current connection. The caller holds mu.
func (w *window) release(s *slot) {
	if s.credit.held && s.credit.gen == w.gen {
		w.inFlight--
		w.dispatch()
	}
	s.credit.held = false
}

// dispatch grants free credits to the queue. The caller holds mu.
func (w *window) dispatch() {
	n := 0
	for n < len(w.queue) && w.mayGrant(w.queue[n]) {
		s := w.queue[n]
		n++
		w.inFlight++
		s.credit.gen, s.credit.held, s.credit.queued = w.gen, true, false
		s.wakeCaller()
	}
	if n > 0 {
		rest := copy(w.queue, w.queue[n:])
		clear(w.queue[rest:])
		w.queue = w.queue[:rest]
	}
}

// holds reports whether s holds a credit of the current connection.
func (w *window) holds(s *slot) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return s.credit.held && s.credit.gen == w.gen
}

// grant returns the credit of s and sets the limit that its reply granted. The grant is absolute
// and may shrink (RFC 8166 §3.3.1).
func (w *window) grant(s *slot, limit int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !s.credit.held || s.credit.gen != w.gen {
		return // the grant belongs to a connection that ended
	}
	w.limit, w.pingFirst = limit, false
	w.inFlight--
	s.credit.held = false
	w.dispatch()
}

// reset starts the credits of a new connection (limit 1) or of no connection (limit 0). It voids
// all credits held. With pingFirst, the first credit is for the keepalive call.
func (w *window) reset(limit int, pingFirst bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.gen++
	w.inFlight, w.limit, w.pingFirst = 0, limit, pingFirst
	w.dispatch()
}

// generation returns the generation of the credits, for closeIfUnused. The worker installs a
// connection before it sets the credits of this connection. A connection that is loaded after the
// generation therefore has this generation or a later one.
func (w *window) generation() uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.gen
}

// closeIfUnused sets the limit to zero if no call holds or waits for a credit, and reports whether
// it did. It does nothing if the credits have another generation: their connection would stay up
// without credits.
func (w *window) closeIfUnused(gen uint64) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.gen != gen || w.inFlight > 0 || len(w.queue) > 0 || w.limit == 0 {
		return false
	}
	w.limit = 0
	select { // discard an earlier request for a connection
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
