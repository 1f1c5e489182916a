package xprt

import (
	"context"
	"slices"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// TestUsersTakeTurnsForSlots lets calls of one user take and await the slots of a transport without
// a connection. The call of another user gets the second slot that becomes free.
func TestUsersTakeTurnsForSlots(t *testing.T) {
	const waiting = 8
	tr := unconnected(t, nil)
	ended := make(chan error)
	calls := 0
	call := func(uid, proc uint32) context.CancelFunc {
		m := echo(proc, nil, 0)
		m.Cred = sunrpc.AppendAuthSys(nil, &sunrpc.AuthSys{UID: uid})
		ctx, cancel := context.WithCancel(t.Context())
		go func() { ended <- tr.Call(ctx, m) }()
		calls++
		kit.Eventually(t, "call", func() bool { return len(tr.Calls()) == calls })
		return cancel
	}
	var holders []context.CancelFunc
	for i := range uint32(MinSlots + waiting) {
		cancel := call(1, i)
		defer cancel()
		holders = append(holders, cancel)
	}
	const other = 100
	cancel := call(2, other)
	defer cancel()
	for i, want := range []uint32{MinSlots, other, MinSlots + 1} {
		holders[i]()
		<-ended
		calls--
		var with []uint32 // calls with a slot
		kit.Eventually(t, "slot for the next call", func() bool {
			with = with[:0]
			for _, c := range tr.Calls() {
				if c.Slot >= 0 {
					with = append(with, c.Proc)
				}
			}
			return len(with) == MinSlots
		})
		if !slices.Contains(with, want) {
			t.Errorf("calls with a slot after %d have ended: got %v, want call %d among them", i+1, with, want)
		}
	}
	tr.Close()
	for range calls {
		<-ended
	}
}

// TestUsersTakeTurnsForCredits grants credits one after the other to calls that wait. The keepalive
// call goes first.
func TestUsersTakeTurnsForCredits(t *testing.T) {
	tr := unconnected(t, func(c *Config) { c.Slots = 8 })
	w := &tr.window
	users := []uint32{1, 1, 1, 1, 2, 1, 2, 3}
	for i, u := range users {
		tr.slots[i].user = u
		if w.enter(tr.slots[i]) {
			t.Fatal("got a credit without a connection")
		}
	}
	ping := tr.slots[8]
	w.enter(ping)
	w.leave(tr.slots[2])
	w.reset(1, true)
	for _, want := range []int{8, 0, 4, 7, 1, 6, 3, 5} {
		for i, s := range tr.slots {
			if w.holds(s) != (i == want) {
				t.Fatalf("slot %d holds a credit: got %v, want the credit at slot %d", i, w.holds(s), want)
			}
		}
		w.grant(tr.slots[want], 1)
	}
	if _, inFlight, queued, _, _ := w.snapshot(); inFlight != 0 || queued != 0 {
		t.Errorf("at the end: got %d credits in use and %d calls that wait, want none", inFlight, queued)
	}
}

// TestUserHasShareWhileOthersCall lets one user ask for all credits, before, during and after the
// time in which another user makes calls.
func TestUserHasShareWhileOthersCall(t *testing.T) {
	const credits = 64
	tr := unconnected(t, func(c *Config) { c.Slots = 2 * credits })
	w := &tr.window
	next := 0
	enter := func(user uint32, payload int) (*slot, bool) {
		s := tr.slots[next%len(tr.slots)]
		next++
		s.user, s.payload = user, payload
		return s, w.enter(s)
	}
	// flood makes calls until one waits, ends all, and returns how many were in flight.
	flood := func(payload int) (n int) {
		var all []*slot
		for {
			s, ok := enter(1, payload)
			all = append(all, s)
			if !ok {
				break
			}
			n++
		}
		if other, ok := enter(2, payload); ok != (n < credits-1) {
			t.Errorf("call of another user beside %d in flight: got a credit %v", n, ok)
		} else {
			all = append(all, other)
		}
		for _, s := range all {
			w.leave(s)
		}
		return n
	}
	w.reset(credits, false)
	if n := flood(0); n != credits-1 {
		t.Errorf("calls in flight of the only user: got %d, want all %d but that for keepalive", n, credits)
	}
	for _, c := range []struct{ payload, want int }{
		{0, credits / creditShare}, {128 << 10, 8}, {shareBytes, minShareCalls}, {4 * shareBytes, minShareCalls},
	} {
		if n := flood(c.payload); n != c.want {
			t.Errorf("calls with %d bytes in flight, of one of two users: got %d, want %d", c.payload, n, c.want)
		}
	}
	for range presentCalls {
		s, ok := enter(1, 0)
		if !ok {
			t.Fatal("got no credit")
		}
		w.leave(s)
	}
	if n := flood(0); n != credits-1 {
		t.Errorf("calls in flight after the calls of the other user: got %d, want all", n)
	}
	if _, inFlight, queued, _, _ := w.snapshot(); inFlight != 0 || queued != 0 || len(w.shares.users) != 0 {
		t.Errorf("at the end: %d credits in use, %d calls wait, shares %v, want none", inFlight, queued, w.shares.users)
	}
}
