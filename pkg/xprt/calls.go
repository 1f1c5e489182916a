package xprt

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/observe/ledger"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/trace"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// Values of Call.Waits: what a call waits for.
const (
	WaitSlot       = "slot"         // all slots, or the slot of the XID to repeat, are in use
	WaitCredit     = "credit"       // all credits of the server are in use
	WaitReconnect  = "reconnect"    // there is no connection
	WaitSend       = "send"         // no room in the send queue, no memory, or the Send is pending
	WaitReply      = "reply"        // the server has not answered
	WaitInvalidate = "invalidation" // the reply arrived, and LOCAL_INVs are pending
	WaitLate       = "late reply"   // the caller has returned, and the server still counts the call
)

// A Call describes a pending call.
type Call struct {
	XID              uint32 // 0 before the call has a slot
	Prog, Vers, Proc uint32
	Slot             int             // -1 before the call has a slot
	Waits            string          // one of the Wait constants
	Began            time.Time       // start of Transport.Call
	Sent             time.Time       // last post of the call; zero if none
	Ctx              context.Context // context of the caller; nil after the caller has returned
}

// An Ended describes a call that has ended. Config.Observe receives it.
type Ended struct {
	XID              uint32 // 0 if the call had no slot
	Prog, Vers, Proc uint32
	Slot             int // -1 if the call had no slot
	Sends            int // how often the call was sent, each time on another connection
	Err              error
	Message          *sunrpc.Message // valid until Observe returns; its results are valid if Err is nil
	Times            ledger.Times
}

// Calls returns all pending calls, oldest first. Safe for concurrent use; it takes only short
// locks.
func (t *Transport) Calls() []Call {
	connected := t.conn.Load() != nil
	calls := t.waiters.list()
	for _, s := range t.slots {
		if c, ok := s.call(connected); ok {
			calls = append(calls, c)
		}
	}
	slices.SortFunc(calls, func(a, b Call) int { return cmp.Or(a.Began.Compare(b.Began), cmp.Compare(a.XID, b.XID)) })
	return calls
}

func (s *slot) call(connected bool) (Call, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state == slotIdle {
		return Call{}, false
	}
	c := Call{XID: s.xid, Slot: int(s.index), Began: s.startedAt.at, Ctx: s.ctx, Prog: s.prog, Vers: s.vers,
		Proc: s.proc}
	if s.conn != nil {
		c.Sent = s.sentAt
	}
	switch s.phase(connected) {
	case ledger.PhaseReconnect:
		c.Waits = WaitReconnect
	case ledger.PhaseCredit:
		c.Waits = WaitCredit
	case ledger.PhaseSend, ledger.PhaseRegister:
		c.Waits = WaitSend
	case ledger.PhaseServer:
		c.Waits = WaitReply
	default:
		c.Waits = WaitInvalidate
	}
	if s.state == slotAbandoned {
		c.Waits = WaitLate
		if s.withdrawn {
			c.Waits = WaitSend
		}
		if s.callerReturned {
			c.Ctx = nil
		}
	}
	return c, true
}

// stall begins a wait for room in phase p. resume ends it.
func (s *slot) stall(p ledger.Phase) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stalled = p
}

func (s *slot) resume() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.times.Mark(s.stalled, ledger.Now())
	s.stalled = 0
}

// waiters holds the calls that wait for a slot. A call is added only if no slot is free, so the
// steady state takes no lock.
type waiters struct {
	mu  sync.Mutex // guards all
	all map[*waiter]struct{}
}

// A waiter is one call that waits for a slot.
type waiter struct {
	call      Call
	startedAt callStart
	expired   chan struct{} // closed when the call exceeds the timeout of a soft mount
}

func (w *waiters) add(ctx context.Context, m *sunrpc.Message, startedAt callStart) *waiter {
	c := &waiter{Call{Prog: m.Prog, Vers: m.Vers, Proc: m.Proc, Slot: -1, Waits: WaitSlot, Began: startedAt.at,
		Ctx: ctx}, startedAt, make(chan struct{})}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.all == nil {
		w.all = map[*waiter]struct{}{}
	}
	w.all[c] = struct{}{}
	return c
}

func (w *waiters) remove(c *waiter) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.all, c)
}

// noFuture is Transport.noFuture for the start times of the waiters.
func (w *waiters) noFuture(now int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for c := range w.all {
		c.startedAt.running = min(c.startedAt.running, now)
	}
}

// expire ends the calls for which over returns true.
func (w *waiters) expire(over func(startedAt callStart) bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for c := range w.all {
		if over(c.startedAt) && !isClosed(c.expired) {
			close(c.expired)
		}
	}
}

func (w *waiters) list() []Call {
	w.mu.Lock()
	defer w.mu.Unlock()
	var calls []Call
	for c := range w.all {
		calls = append(calls, c.call)
	}
	return calls
}

// A ConnEvent is an event of the connection history.
type ConnEvent struct {
	Time  time.Time
	Event string // "connected", "disconnected", "connect failed" or "closed while idle"
	Cause string // the error, or empty
	Times int    // number of equal consecutive events; Time is the time of the last one
}

// maxConnEvents is the length of the connection history.
const maxConnEvents = 16

func (t *Transport) recordEvent(event string, cause error) {
	e := ConnEvent{Time: time.Now(), Event: event, Times: 1}
	if cause != nil {
		e.Cause = cause.Error()
	}
	t.status.Lock()
	defer t.status.Unlock()
	if last := len(t.status.history) - 1; last >= 0 && t.status.history[last].Event == e.Event &&
		t.status.history[last].Cause == e.Cause {
		t.status.history[last].Time = e.Time
		t.status.history[last].Times++
		return
	}
	if len(t.status.history) == maxConnEvents {
		t.status.history = append(t.status.history[:0], t.status.history[1:]...)
	}
	t.status.history = append(t.status.history, e)
}

// History returns the last events of the connection, oldest first. Safe for concurrent use.
func (t *Transport) History() []ConnEvent {
	t.status.Lock()
	defer t.status.Unlock()
	return slices.Clone(t.status.history)
}

// Trace returns the ring of trace events, or nil if tracing is off.
func (t *Transport) Trace() *trace.Ring { return t.trace }
