package xprt

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/trace"
)

// What a call waits for.
const (
	WaitSlot      = "slot"      // all slots are taken
	WaitCredit    = "credit"    // the server's credits are taken
	WaitReconnect = "reconnect" // there is no connection
	// the send queue is full or memory is short, or the reply is here and the Send is not done
	WaitSend       = "send"
	WaitReply      = "reply"        // the server
	WaitInvalidate = "invalidation" // the reply is here, its keys are not dead yet
	WaitLate       = "late reply"   // the caller has left; the server still counts the call
)

// A Call is one call that has not ended.
type Call struct {
	XID              uint32 // 0 before the call has a slot
	Prog, Vers, Proc uint32
	Slot             int             // -1 before it has one
	Waits            string          // for what, one of the Wait constants
	Began            time.Time       // when its caller came
	Sent             time.Time       // when it was last sent; zero if it was not
	Ctx              context.Context // of the caller; nil when the caller has left
}

// Calls returns all calls that have not ended, the oldest first. Safe for concurrent use; it waits
// for nothing but short locks.
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
	c := Call{XID: s.xid, Slot: int(s.index), Began: s.started, Ctx: s.ctx, Prog: s.prog, Vers: s.vers, Proc: s.proc}
	if s.conn != nil {
		c.Sent = s.sentAt
	}
	switch s.state {
	case slotWaiting, slotLost:
		switch {
		case s.noRoom:
			c.Waits = WaitSend
		case connected:
			c.Waits = WaitCredit
		default:
			c.Waits = WaitReconnect
		}
	case slotSent:
		c.Waits = WaitReply
	case slotFencing, slotDone:
		c.Waits = WaitInvalidate
		if s.fenced && s.sendBusy {
			c.Waits = WaitSend
		}
	case slotAbandoned:
		c.Waits = WaitLate
		if s.left {
			c.Ctx = nil
		}
	}
	return c, true
}

func (s *slot) setNoRoom(yes bool) {
	s.mu.Lock()
	s.noRoom = yes
	s.mu.Unlock()
}

// waiters are the calls that wait for a slot. They are noted only when there is none, so the steady
// state takes no lock.
type waiters struct {
	mu  sync.Mutex
	all map[*Call]struct{} // guarded by mu
}

func (w *waiters) add(ctx context.Context, m *sunrpc.Message, came time.Time) *Call {
	c := &Call{Prog: m.Prog, Vers: m.Vers, Proc: m.Proc, Slot: -1, Waits: WaitSlot, Began: came, Ctx: ctx}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.all == nil {
		w.all = map[*Call]struct{}{}
	}
	w.all[c] = struct{}{}
	return c
}

func (w *waiters) remove(c *Call) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.all, c)
}

func (w *waiters) list() []Call {
	w.mu.Lock()
	defer w.mu.Unlock()
	var calls []Call
	for c := range w.all {
		calls = append(calls, *c)
	}
	return calls
}

// A ConnEvent is one line of a connection's story.
type ConnEvent struct {
	Time  time.Time
	Event string // "connected", "disconnected", "connect failed"
	Cause string // why, where there is a why
	Times int    // in a row, the last one at Time
}

// maxNotes is how much of the story is kept.
const maxNotes = 16

func (t *Transport) note(event string, cause error) {
	n := ConnEvent{Time: time.Now(), Event: event, Times: 1}
	if cause != nil {
		n.Cause = cause.Error()
	}
	t.stateMu.Lock()
	defer t.stateMu.Unlock()
	if last := len(t.story) - 1; last >= 0 && t.story[last].Event == n.Event && t.story[last].Cause == n.Cause {
		t.story[last].Time = n.Time
		t.story[last].Times++
		return
	}
	if len(t.story) == maxNotes {
		t.story = append(t.story[:0], t.story[1:]...)
	}
	t.story = append(t.story, n)
}

// History returns the last events of the connection, oldest first.
func (t *Transport) History() []ConnEvent {
	t.stateMu.Lock()
	defer t.stateMu.Unlock()
	return slices.Clone(t.story)
}

// Trace is the ring of trace events; nil when it is off.
func (t *Transport) Trace() *trace.Ring { return t.trace }
