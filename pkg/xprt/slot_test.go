package xprt

import (
	"context"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
)

// TestAbandonedSlotEndsOnce orders the return of the caller, the late reply and the end of the
// connection in different ways. The last of them must return the slot, once.
func TestAbandonedSlotEndsOnce(t *testing.T) {
	callerReturns := func(s *slot) {
		if _, ok := s.tryReturn(); !ok {
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
