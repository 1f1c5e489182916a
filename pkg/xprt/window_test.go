package xprt

import "testing"

// TestIdleWindowIsOfItsConnection closes the window of a connection that was replaced meanwhile:
// the new one keeps its credits, as nobody would take it down and make another.
func TestIdleWindowIsOfItsConnection(t *testing.T) {
	w := window{wanted: make(chan struct{}, 1)}
	w.reset(1, false)
	old := w.generation()
	w.reset(0, false)
	w.reset(1, false)
	if w.closeIfUnused(old) || w.limit != 1 {
		t.Errorf("the window of the next connection was closed")
	}
	if !w.closeIfUnused(w.generation()) || w.limit != 0 {
		t.Errorf("an unused window was not closed")
	}
	if w.closeIfUnused(w.generation()) {
		t.Errorf("a closed window was closed")
	}
}

// TestOnlyCallsWantAConnection has a liveness call meet the window of a connection that was just
// closed as idle: it is no reason to make another.
func TestOnlyCallsWantAConnection(t *testing.T) {
	w := window{wanted: make(chan struct{}, 1)}
	for _, ping := range []bool{true, false} {
		s := &slot{ping: ping, wake: make(chan struct{}, 1)}
		if w.enter(s) {
			t.Error("a credit of no connection")
		}
		if wanted := len(w.wanted) > 0; wanted == ping {
			t.Errorf("liveness call %v: a connection is wanted: %v", ping, wanted)
		}
		w.leave(s)
	}
}

// TestReplyOfALostConnectionGrantsNothing has a reply come out of the completion queue while its
// connection is taken down already: its grant must not open the window of no connection, where
// calls would go round and round, nor that of the next.
func TestReplyOfALostConnectionGrantsNothing(t *testing.T) {
	w := window{wanted: make(chan struct{}, 1)}
	sent, next := &slot{wake: make(chan struct{}, 1)}, &slot{wake: make(chan struct{}, 1)}
	w.reset(1, false)
	if !w.enter(sent) || w.enter(next) {
		t.Fatal("want one credit")
	}
	w.reset(0, false)
	w.grant(sent, 64)
	if w.limit != 0 || w.inFlight != 0 || w.holds(next) {
		t.Errorf("without a connection: limit %d, %d in flight, the next call holds a credit: %v", w.limit,
			w.inFlight, w.holds(next))
	}
	w.reset(1, false)
	w.grant(sent, 64)
	if w.limit != 1 || w.inFlight != 1 || !w.holds(next) {
		t.Errorf("on the next connection: limit %d, %d in flight, the next call holds a credit: %v", w.limit,
			w.inFlight, w.holds(next))
	}
}
