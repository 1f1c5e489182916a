package xprt

import (
	"slices"
	"testing"
)

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

// windowSlots returns n slots for a window without a transport.
func windowSlots(n int) []*slot {
	var all []*slot
	for range n {
		all = append(all, &slot{wake: make(chan struct{}, 1)})
	}
	return all
}

// TestCreditsGoToCallsInOrder has calls wait for credits. The credits must go to the first calls in
// the queue, each of them is woken once, and a call that leaves the queue keeps the order of the
// others.
func TestCreditsGoToCallsInOrder(t *testing.T) {
	w := window{wanted: make(chan struct{}, 1)}
	all := windowSlots(7)
	for _, s := range all {
		for range 2 {
			if w.enter(s) {
				t.Fatal("enter without a connection: got a credit, want none")
			}
		}
	}
	want := func(what string, limit, inFlight, queued int, holders ...int) {
		t.Helper()
		gotLimit, gotInFlight, gotQueued, _, _ := w.snapshot()
		if gotLimit != limit || gotInFlight != inFlight || gotQueued != queued || len(w.queue) != queued {
			t.Errorf("%s: got limit %d, %d in flight, %d queued; want %d, %d, %d", what, gotLimit, gotInFlight,
				gotQueued, limit, inFlight, queued)
		}
		for i, s := range all {
			holds := slices.Contains(holders, i)
			if w.holds(s) != holds || len(s.wake) > 0 != holds {
				t.Errorf("%s: slot %d: got credit %v, woken %v; want %v", what, i, w.holds(s), len(s.wake) > 0, holds)
			}
		}
	}
	want("no connection", 0, 0, 7)
	w.reset(1, false)
	want("new connection", 1, 1, 6, 0)
	w.leave(all[2]) // in the middle of the queue
	if !w.enter(all[0]) {
		t.Error("enter with a credit: got false, want true")
	}
	want("one call left the queue", 1, 1, 5, 0)
	<-all[0].wake
	w.grant(all[0], 3)
	want("first reply", 3, 3, 2, 1, 3, 4)
	<-all[3].wake
	w.leave(all[3]) // returns its credit
	want("one call ended", 3, 3, 1, 1, 4, 5)
	<-all[1].wake
	w.grant(all[1], 1) // the server reduces the window
	want("reduced window", 1, 2, 1, 4, 5)
	<-all[4].wake
	w.grant(all[4], 1)
	want("reduced window, one call less", 1, 1, 1, 5)
	w.leave(all[4]) // holds no credit
	want("call without a credit left", 1, 1, 1, 5)
	<-all[5].wake
	w.reset(0, false)
	want("connection lost", 0, 0, 1)
	w.leave(all[5]) // its credit is void
	want("call of the lost connection left", 0, 0, 1)
}

// TestKeepAliveCallsGoFirst checks the credits of keepalive calls: the first credit of a connection
// if pingFirst is set, the credit in reserve, and the first place in the queue.
func TestKeepAliveCallsGoFirst(t *testing.T) {
	ping := &slot{ping: true, wake: make(chan struct{}, 1)}
	for _, c := range []struct {
		limit     int
		pingFirst bool
		calls     int // other calls that get a credit
		ping      bool
	}{
		{1, false, 1, false},
		{1, true, 0, true},
		{reserveFrom - 1, false, reserveFrom - 1, false},
		{reserveFrom, false, reserveFrom - 1, true},
		{reserveFrom + 1, false, reserveFrom, true},
	} {
		w := window{wanted: make(chan struct{}, 1)}
		w.reset(c.limit, c.pingFirst)
		all := windowSlots(reserveFrom + 4)
		calls := 0
		for _, s := range all {
			if w.enter(s) {
				calls++
			}
		}
		if got := w.enter(ping); calls != c.calls || got != c.ping {
			t.Errorf("limit %d, keepalive call first %v: got %d calls, keepalive call %v; want %d, %v", c.limit,
				c.pingFirst, calls, got, c.calls, c.ping)
		}
		// A keepalive call that waits gets the next credit.
		if !c.ping {
			w.grant(all[0], c.limit)
			if !w.holds(ping) || w.holds(all[calls]) {
				t.Errorf("limit %d: the keepalive call did not get the next credit", c.limit)
			}
		}
		w.leave(ping)
	}
}

// TestWindowCountsCallsThatWait checks the sums of calls in flight and in the queue. They grow with
// each call that asks for a credit.
func TestWindowCountsCallsThatWait(t *testing.T) {
	w := window{wanted: make(chan struct{}, 1)}
	w.reset(2, false)
	for i, want := range []struct{ inFlight, queued uint64 }{{0, 0}, {1, 0}, {3, 0}, {5, 1}, {7, 3}} {
		s := windowSlots(1)[0]
		w.enter(s)
		w.enter(s) // does not ask again
		if _, _, _, inFlight, queued := w.snapshot(); inFlight != want.inFlight || queued != want.queued {
			t.Errorf("call %d: got sums %d, %d; want %d, %d", i, inFlight, queued, want.inFlight, want.queued)
		}
	}
}

// TestUnusedWindowIsClosed checks which windows closeIfUnused closes: those without calls.
func TestUnusedWindowIsClosed(t *testing.T) {
	for _, c := range []struct {
		name                    string
		limit, inFlight, queued int
		want                    bool
	}{
		{"unused", 1, 0, 0, true},
		{"call in flight", 2, 1, 0, false},
		{"call in the queue", 1, 0, 1, false},
		{"no connection", 0, 0, 0, false},
	} {
		w := window{wanted: make(chan struct{}, 1)}
		w.limit, w.inFlight, w.queue = c.limit, c.inFlight, windowSlots(c.queued)
		w.wanted <- struct{}{} // of a call that was given up
		if got := w.closeIfUnused(w.generation()); got != c.want || w.limit == 0 != (c.want || c.limit == 0) {
			t.Errorf("%s: got %v, limit %d; want %v", c.name, got, w.limit, c.want)
		}
		if got := len(w.wanted) == 0; got != c.want {
			t.Errorf("%s: got earlier request discarded %v, want %v", c.name, got, c.want)
		}
	}
}
