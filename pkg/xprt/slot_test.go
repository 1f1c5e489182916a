package xprt

import (
	"context"
	"testing"
	"time"

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
	for _, c := range []struct {
		name  string
		steps []func(*slot)
	}{
		{"reply, caller", []func(*slot){(*slot).lateReply, callerReturns}},
		{"caller, reply", []func(*slot){callerReturns, (*slot).lateReply}},
		{"connection, caller", []func(*slot){(*slot).connectionEnded, callerReturns}},
		{"caller, connection", []func(*slot){callerReturns, (*slot).connectionEnded}},
		{"reply, connection, caller", []func(*slot){(*slot).lateReply, (*slot).connectionEnded, callerReturns}},
		// tryReturn has seen the late reply and has not ended the slot yet.
		{"reply, connection during tryReturn",
			[]func(*slot){(*slot).lateReply, func(s *slot) { s.callerReturned = true },
				(*slot).connectionEnded, (*slot).end}},
	} {
		tr, err := New(Config{Provider: softiwarp.New(softiwarp.Config{}), Slots: 4})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { tr.Close() })
		s := <-tr.free
		s.begin(context.Background(), &sunrpc.Message{}, time.Now())
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
	s.begin(context.Background(), &sunrpc.Message{}, time.Now())
	s.state, s.sends, s.sentAt, s.conn = slotSent, 1, time.Now(), &conn{ended: make(chan struct{})}
	for range 3 {
		tr.checkSlot(s, s.sentAt.Add(2*tr.cfg.Timeout))
	}
	if n := tr.Stats().Timeouts; n != 1 || !isTimeout(s.conn.err) {
		t.Errorf("got %d timeouts, connection error %v; want 1, a TimeoutError", n, s.conn.err)
	}
}
