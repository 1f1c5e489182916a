package xprt

import "testing"

// TestIdleCloseIgnoresNextConnection closes the window of a connection that was replaced in the
// meantime. The new connection must keep its credits, because the worker would not replace it.
func TestIdleCloseIgnoresNextConnection(t *testing.T) {
	w := window{wanted: make(chan struct{}, 1)}
	w.reset(1, false)
	old := w.generation()
	w.reset(0, false)
	w.reset(1, false)
	if w.closeIfUnused(old) || w.limit != 1 {
		t.Error("closeIfUnused with an old generation: closed the window, want no effect")
	}
	if !w.closeIfUnused(w.generation()) || w.limit != 0 {
		t.Error("closeIfUnused of an unused window: got false, want true")
	}
	if w.closeIfUnused(w.generation()) {
		t.Error("closeIfUnused of a closed window: got true, want false")
	}
}

// TestKeepAliveRequestsNoConnection has a keepalive call wait on a window that was closed as idle.
// Only other calls may request a connection.
func TestKeepAliveRequestsNoConnection(t *testing.T) {
	w := window{wanted: make(chan struct{}, 1)}
	for _, ping := range []bool{true, false} {
		s := &slot{ping: ping, wake: make(chan struct{}, 1)}
		if w.enter(s) {
			t.Error("enter without a connection: got a credit, want none")
		}
		if wanted := len(w.wanted) > 0; wanted == ping {
			t.Errorf("connection requested by keepalive call %v: got %v, want %v", ping, wanted, !ping)
		}
		w.leave(s)
	}
}

// TestReplyOfLostConnectionGrantsNothing handles a reply while its connection is taken down. Its
// grant must not open the window without a connection, where calls would loop, nor the window of
// the next connection.
func TestReplyOfLostConnectionGrantsNothing(t *testing.T) {
	w := window{wanted: make(chan struct{}, 1)}
	sent, next := &slot{wake: make(chan struct{}, 1)}, &slot{wake: make(chan struct{}, 1)}
	w.reset(1, false)
	if !w.enter(sent) || w.enter(next) {
		t.Fatal("window of a new connection: want one credit")
	}
	w.reset(0, false)
	w.grant(sent, 64)
	if w.limit != 0 || w.inFlight != 0 || w.holds(next) {
		t.Errorf("without a connection: got limit %d, %d in flight, credit of the next call %v; want 0, 0, false",
			w.limit, w.inFlight, w.holds(next))
	}
	w.reset(1, false)
	w.grant(sent, 64)
	if w.limit != 1 || w.inFlight != 1 || !w.holds(next) {
		t.Errorf("on the next connection: got limit %d, %d in flight, credit of the next call %v; want 1, 1, true",
			w.limit, w.inFlight, w.holds(next))
	}
}
