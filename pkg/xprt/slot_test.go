package xprt

import (
	"context"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
)

// TestAbandonedSlotEndsOnce ends the connection at each step of an abandoned call's way home:
// whichever of its caller, the late reply and the end of the connection comes last gives the slot
// back, and nobody else does.
func TestAbandonedSlotEndsOnce(t *testing.T) {
	leave := func(s *slot) {
		if _, ok := s.tryReturn(); !ok {
			t.Error("the caller may not leave")
		}
	}
	for _, c := range []struct {
		name  string
		steps []func(*slot)
	}{
		{"reply, caller", []func(*slot){(*slot).lateReply, leave}},
		{"caller, reply", []func(*slot){leave, (*slot).lateReply}},
		{"connection, caller", []func(*slot){(*slot).connectionEnded, leave}},
		{"caller, connection", []func(*slot){leave, (*slot).connectionEnded}},
		{"reply, connection, caller", []func(*slot){(*slot).lateReply, (*slot).connectionEnded, leave}},
		// leave has seen that the late reply is here, and has not ended the slot yet.
		{"reply, connection amid caller", []func(*slot){(*slot).lateReply, func(s *slot) { s.callerReturned = true },
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
				t.Fatalf("%s: the slot is free before its last user has let go", c.name)
			}
			step(s)
		}
		if n := len(tr.free); n != cap(tr.free) || s.state != slotIdle {
			t.Errorf("%s: %d free slots of %d, state %d", c.name, n, cap(tr.free), s.state)
		}
	}
}

// TestTimeoutIsCountedOnce looks again and again at a call that waited too long, while its
// connection is taken down.
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
		t.Errorf("%d timeouts, want 1; the connection ended with %v", n, s.conn.err)
	}
}
