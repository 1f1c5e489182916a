package xprt

import (
	"sync"

	"github.com/nfsrdmad/nfsrdmad/internal/fair"
)

// A window manages the credits of a transport and the queue of slots that wait for a credit. The
// users have turns, see fair.Queue, and while several make calls each has a share. The limit is
// zero while there is no connection.
type window struct {
	wanted chan struct{} // capacity 1: a call waits, and there is no connection

	mu        sync.Mutex // guards the fields below and slot.credit
	limit     int
	inFlight  int
	gen       uint64 // generation of the credits; each connection has another
	shares    shares
	queue     fair.Queue[*slot]
	ping      *slot // the keepalive call, if it waits; it goes first
	pingFirst bool  // the one credit of a new connection is for the keepalive call

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
	return w.inFlight < limit && (s.ping || w.shares.allows(s.user, s.payload, w.limit))
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
	w.queueSum += uint64(w.queued())
	if !s.ping {
		w.shares.ask(s.user)
	}
	if (w.queued() == 0 || s.ping) && w.mayGrant(s) {
		w.give(s)
		return true
	}
	s.credit.held, s.credit.queued = false, true
	if s.ping {
		w.ping = s
		return false // it requests no connection
	}
	w.queue.Add(&s.credit.turn, s.user)
	if w.limit == 0 {
		select {
		case w.wanted <- struct{}{}:
		default:
		}
	}
	w.dispatch(s) // the calls of other users may wait only for their shares
	return s.credit.held
}

// queued returns the number of calls that wait. The caller holds mu.
func (w *window) queued() int {
	if w.ping != nil {
		return w.queue.Len() + 1
	}
	return w.queue.Len()
}

// give gives a credit to s. The caller holds mu.
func (w *window) give(s *slot) {
	w.inFlight++
	s.credit.gen, s.credit.held, s.credit.queued = w.gen, true, false
	if !s.ping {
		w.shares.add(s.user, 1, s.payload)
	}
}

// takeBack takes the credit of s, which belongs to the current connection. The caller holds mu.
func (w *window) takeBack(s *slot) {
	w.inFlight--
	s.credit.held = false
	if !s.ping {
		w.shares.add(s.user, -1, s.payload)
	}
	w.dispatch(nil)
}

// leave removes s from the queue, or returns its credit.
func (w *window) leave(s *slot) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !s.credit.queued {
		w.release(s)
		return
	}
	s.credit.queued = false
	if s.ping {
		w.ping = nil
	} else {
		w.queue.Remove(&s.credit.turn)
	}
}

// release returns the credit of s if it belongs to the current connection. The caller holds mu.
func (w *window) release(s *slot) {
	if s.credit.held && s.credit.gen == w.gen {
		w.takeBack(s)
	}
	s.credit.held = false
}

// dispatch grants free credits to the queue. It wakes the callers except that of asking. The caller
// holds mu.
func (w *window) dispatch(asking *slot) {
	if s := w.ping; s != nil && w.mayGrant(s) {
		w.ping = nil
		w.give(s)
		s.wakeCaller()
	}
	for e := w.queue.TakeIf(w.mayGrant); e != nil; e = w.queue.TakeIf(w.mayGrant) {
		w.give(e.Value)
		if e.Value != asking {
			e.Value.wakeCaller()
		}
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
	w.takeBack(s)
}

// reset starts the credits of a new connection (limit 1) or of no connection (limit 0). It voids
// all credits held. With pingFirst, the first credit is for the keepalive call.
func (w *window) reset(limit int, pingFirst bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.gen++
	w.inFlight, w.limit, w.pingFirst = 0, limit, pingFirst
	w.shares.reset()
	w.dispatch(nil)
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
	if w.gen != gen || w.inFlight > 0 || w.queued() > 0 || w.limit == 0 {
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
	return w.limit, w.inFlight, w.queued(), w.inFlightSum, w.queueSum
}
