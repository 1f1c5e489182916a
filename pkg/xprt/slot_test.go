package xprt

import (
	"context"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
)

// TestAbandonedSlotEndsOnce orders the return of the caller, the late reply and the end of the
// connection in different ways. The last of them must return the slot, once.
func TestAbandonedSlotEndsOnce(t *testing.T) {
	callerReturns := func(s *slot) {
		if _, ok := s.tryReturn(new(Ended)); !ok {
			t.Error("tryReturn: got false, want true")
		}
	}
	reply, ends := (*slot).lateReply, (*slot).connectionEnded
	returning := func(s *slot) { s.callerReturned = true }
	for _, c := range []struct {
		name  string
		steps []func(*slot)
	}{
		{"reply, caller", []func(*slot){reply, callerReturns}},
		{"caller, reply", []func(*slot){callerReturns, reply}},
		{"connection, caller", []func(*slot){ends, callerReturns}},
		{"caller, connection", []func(*slot){callerReturns, ends}},
		{"reply, connection, caller", []func(*slot){reply, ends, callerReturns}},
		// tryReturn has seen the late reply and has not ended the slot yet.
		{"reply, connection during tryReturn", []func(*slot){reply, returning, ends, (*slot).end}},
	} {
		tr, err := New(Config{Provider: softiwarp.New(softiwarp.Config{}), Slots: 4})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { tr.Close() })
		s := <-tr.free
		s.begin(context.Background(), &sunrpc.Message{}, tr.startCall())
		s.state, s.fenced = slotAbandoned, true
		for _, step := range c.steps {
			if len(tr.free) == cap(tr.free) {
				t.Fatalf("%s: slot is free before the last step", c.name)
			}
			step(s)
		}
		if n := len(tr.free); n != cap(tr.free) || s.state != slotIdle {
			t.Errorf("%s: got %d free slots, state %d; want %d, idle", c.name, n, s.state, cap(tr.free))
		}
	}
}

// TestTimeoutIsCountedOnce checks a call repeatedly that exceeded its timeout while its connection
// is taken down.
func TestTimeoutIsCountedOnce(t *testing.T) {
	tr, err := New(Config{Provider: softiwarp.New(softiwarp.Config{}), Slots: 4})
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	s := <-tr.free
	s.begin(context.Background(), &sunrpc.Message{}, tr.startCall())
	s.state, s.sends, s.sentRunning, s.conn = slotSent, 1, tr.now(), &conn{ended: make(chan struct{})}
	for range 3 {
		tr.checkSlot(s, s.sentRunning+2*int64(tr.cfg.Timeout))
	}
	if n := tr.Stats().Timeouts; n != 1 || !isTimeout(s.conn.err) {
		t.Errorf("got %d timeouts, connection error %v; want 1, a TimeoutError", n, s.conn.err)
	}
}

// TestAbandonedSlotIsOver checks every condition for the end of the slot of an abandoned call.
func TestAbandonedSlotIsOver(t *testing.T) {
	if s := abandonedOver(); !s.over() {
		t.Fatal("all conditions hold: got false, want true")
	}
	for name, change := range map[string]func(*slot){
		"not abandoned":        func(s *slot) { s.state = slotFencing },
		"keys are valid":       func(s *slot) { s.fenced = false },
		"Send is pending":      func(s *slot) { s.sendBusy = true },
		"caller waits":         func(s *slot) { s.callerReturned = false },
		"no late reply so far": func(s *slot) { s.lateDone = false },
	} {
		s := abandonedOver()
		if change(s); s.over() {
			t.Errorf("%s: got true, want false", name)
		}
	}
}

func abandonedOver() *slot {
	return &slot{state: slotAbandoned, fenced: true, callerReturned: true, lateDone: true}
}

// TestCallerReturnsWhenMemoryIsFree checks when the caller of an interrupted call may return.
func TestCallerReturnsWhenMemoryIsFree(t *testing.T) {
	for _, c := range []struct {
		name    string
		slot    *slot
		state   slotState
		returns bool
	}{
		{"answered", &slot{state: slotDone}, slotDone, true},
		{"reply arrived, keys are valid", &slot{state: slotFencing}, 0, false},
		{"reply arrived, withdrawn before", &slot{state: slotFencing, withdrawn: true, fenced: true}, 0, false},
		{"keys are valid", &slot{state: slotAbandoned}, 0, false},
		{"Send is pending", &slot{state: slotAbandoned, fenced: true, sendBusy: true}, 0, false},
		{"fenced", &slot{state: slotAbandoned, fenced: true}, slotAbandoned, true},
		{"withdrawn, keys are valid", &slot{state: slotAbandoned, withdrawn: true}, slotAbandoned, true},
		{"withdrawn, Send is pending", &slot{state: slotAbandoned, withdrawn: true, fenced: true, sendBusy: true},
			slotAbandoned, true},
	} {
		if st, ok := c.slot.tryReturn(new(Ended)); ok != c.returns || st != c.state {
			t.Errorf("%s: got %v, state %d; want %v, state %d", c.name, ok, st, c.returns, c.state)
		}
		if want := c.returns && c.state == slotAbandoned; c.slot.callerReturned != want {
			t.Errorf("%s: got caller returned %v, want %v", c.name, c.slot.callerReturned, want)
		}
	}
}

// TestCompletionsRetireRequests handles completions of a call on the connection of the call, on an
// earlier connection and without a connection. Only those of the connection may free places in its
// send queue.
func TestCompletionsRetireRequests(t *testing.T) {
	tr := unconnected(t, nil)
	qp, other := &stepQP{}, &stepQP{}
	for _, c := range []struct {
		name    string
		on      *stepQP // of the Send that completed; nil for LOCAL_INVs
		conn    bool    // the call has a connection
		invMark int64
		retired int64
	}{
		{"Send", qp, true, 0, 3},
		{"Send of an earlier connection", other, true, 0, 0},
		{"Send of a call without a connection", qp, false, 0, 0},
		{"LOCAL_INVs", nil, true, 5, 5},
		{"no LOCAL_INVs", nil, true, 0, 0},
		{"LOCAL_INVs of a call without a connection", nil, false, 5, 0},
	} {
		s := <-tr.free
		s.begin(t.Context(), &sunrpc.Message{}, tr.startCall())
		cn := &conn{qp: qp}
		cn.sq.init(10, 10)
		cn.sq.take(7)
		cn.sq.begin(7)
		if c.conn {
			s.conn = cn
		}
		s.state, s.sendMark, s.invMark, s.sendBusy = slotSent, 3, c.invMark, c.on != nil
		if c.on != nil {
			s.sendDone(&verbs.WorkCompletion{QP: c.on})
		} else {
			s.onFenced(true)
		}
		if got := cn.sq.retired.Load(); got != c.retired || s.sendBusy || s.fenced != (c.on == nil) {
			t.Errorf("%s: got %d requests retired, Send pending %v, fenced %v; want %d, false, %v", c.name, got,
				s.sendBusy, s.fenced, c.retired, c.on == nil)
		}
		s.end()
	}
}

// TestAnsweredCallWaitsForSendAndFence completes the Send and the LOCAL_INVs of an answered call in
// both orders. The call is done, and its caller is woken, after the second completion. Only a reply
// that waits for the Send counts as one.
func TestAnsweredCallWaitsForSendAndFence(t *testing.T) {
	send := func(s *slot) { s.sendDone(&verbs.WorkCompletion{}) }
	fence := func(s *slot) { s.onFenced(true) }
	for _, c := range []struct {
		name  string
		state slotState
		steps []func(*slot)
		waits uint64
	}{
		{"Send last", slotFencing, []func(*slot){fence, send}, 1},
		{"LOCAL_INVs last", slotFencing, []func(*slot){send, fence}, 0},
		{"abandoned, Send last", slotAbandoned, []func(*slot){fence, send}, 0},
	} {
		tr := unconnected(t, nil)
		s := <-tr.free
		s.begin(t.Context(), &sunrpc.Message{}, tr.startCall())
		s.state, s.sendBusy = c.state, true
		c.steps[0](s)
		if s.state != c.state || len(s.wake) > 0 {
			t.Errorf("%s: after one completion: got state %d, caller woken %v; want %d, false", c.name, s.state,
				len(s.wake) > 0, c.state)
		}
		c.steps[1](s)
		if done := s.state == slotDone; done != (c.state == slotFencing) || len(s.wake) != 1 {
			t.Errorf("%s: after both completions: got state %d, caller woken %v", c.name, s.state, len(s.wake) > 0)
		}
		if n := tr.Stats().ReplyWaitsForSend; n != c.waits {
			t.Errorf("%s: got %d replies that waited for the Send, want %d", c.name, n, c.waits)
		}
		s.end()
	}
}

// TestXIDsOfSlotDiffer checks the XIDs of one slot: its low bits are the number of the slot, and no
// two calls have the same XID.
func TestXIDsOfSlotDiffer(t *testing.T) {
	for _, slots := range []int{4, 7, 8, 127, MaxSlots} {
		tr := unconnected(t, func(c *Config) { c.Slots, c.InlineBytes = slots, MinInlineBytes })
		step := tr.xidStep
		if int(step) <= slots || int(step/2) > slots || step&(step-1) != 0 || tr.xidMask != step-1 {
			t.Errorf("%d slots: got step %d, mask %#x; want the next power of two, and its mask", slots, step,
				tr.xidMask)
		}
		if len(tr.slots) != slots+1 || len(tr.free) != slots || len(tr.pingSlot) != 1 {
			t.Errorf("%d slots: got %d slots, %d of them free, %d for keepalive calls", slots, len(tr.slots),
				len(tr.free), len(tr.pingSlot))
		}
		for i, s := range tr.slots {
			first := s.xid
			if tr.slotOf(first) != s || s.index != uint32(i) || s.ping != (i == slots) {
				t.Fatalf("slot %d of %d: got XID %#x, index %d, for keepalive calls %v", i, slots, first, s.index,
					s.ping)
			}
			if len(s.send) != MinInlineBytes || cap(s.send) != MinInlineBytes {
				t.Fatalf("slot %d: got a buffer of %d bytes, capacity %d; want %d", i, len(s.send), cap(s.send),
					MinInlineBytes)
			}
			s.begin(t.Context(), &sunrpc.Message{}, tr.startCall())
			if s.xid != first+tr.xidStep || tr.slotOf(s.xid) != s {
				t.Fatalf("slot %d: got XID %#x after %#x, want the next", i, s.xid, first)
			}
			s.state = slotIdle
		}
		for xid := uint32(slots + 1); xid <= tr.xidMask; xid++ {
			if s := tr.slotOf(xid); s != nil {
				t.Fatalf("XID %#x with %d slots: got slot %d, want none", xid, slots, s.index)
			}
		}
		tr.Close()
	}
}
