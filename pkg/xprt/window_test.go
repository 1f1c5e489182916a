package xprt

import "testing"

// TestIdleWindowIsOfItsConnection closes the window of a connection that was replaced meanwhile: the new one keeps its credits, as nobody would take it
// down and make another.
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
