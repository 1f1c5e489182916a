package xprt

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/ledger"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// TestCallShowsStateOfSlot checks what Calls reports for a slot in each state.
func TestCallShowsStateOfSlot(t *testing.T) {
	ctx := context.Background()
	for _, c := range []struct {
		name      string
		slot      *slot
		connected bool
		waits     string
		noCtx     bool
	}{
		{"waiting", &slot{state: slotWaiting}, true, WaitCredit, false},
		{"waiting without a connection", &slot{state: slotWaiting}, false, WaitReconnect, false},
		{"waiting for room", &slot{state: slotWaiting, stalled: ledger.PhaseSend}, true, WaitSend, false},
		{"lost", &slot{state: slotLost}, false, WaitReconnect, false},
		{"sent", &slot{state: slotSent}, true, WaitReply, false},
		{"fencing", &slot{state: slotFencing, sendBusy: true}, true, WaitInvalidate, false},
		{"fencing, keys invalidated, Send pending", &slot{state: slotFencing, fenced: true, sendBusy: true}, true,
			WaitSend, false},
		{"done", &slot{state: slotDone, fenced: true}, true, WaitInvalidate, false},
		{"abandoned", &slot{state: slotAbandoned}, true, WaitLate, false},
		{"abandoned, withdrawn", &slot{state: slotAbandoned, withdrawn: true}, true, WaitSend, false},
		{"abandoned, caller returned", &slot{state: slotAbandoned, callerReturned: true}, true, WaitLate, true},
	} {
		s := c.slot
		s.ctx, s.xid, s.index, s.prog, s.vers, s.proc = ctx, 0x4711, 3, 100003, 3, 6
		s.startedAt.at, s.sentAt = time.Unix(10, 0), time.Unix(20, 0)
		for _, posted := range []bool{false, true} {
			want := Call{XID: 0x4711, Prog: 100003, Vers: 3, Proc: 6, Slot: 3, Waits: c.waits, Began: time.Unix(10, 0),
				Ctx: ctx}
			if posted {
				s.conn, want.Sent = &conn{}, time.Unix(20, 0)
			}
			if c.noCtx {
				want.Ctx = nil
			}
			if got, ok := s.call(c.connected); !ok || got != want {
				t.Errorf("%s: got %+v, %v; want %+v", c.name, got, ok, want)
			}
		}
	}
	if _, ok := (&slot{}).call(true); ok {
		t.Error("idle: got a call, want none")
	}
}

// TestExpiredWaitersAreToldOnce checks which calls without a slot end: those for which the timeout
// has passed, each once.
func TestExpiredWaitersAreToldOnce(t *testing.T) {
	var w waiters
	early := w.add(t.Context(), &sunrpc.Message{}, callStart{running: 1})
	late := w.add(t.Context(), &sunrpc.Message{}, callStart{running: 2})
	for range 2 {
		w.expire(func(startedAt callStart) bool { return startedAt.running == 1 })
		if !isClosed(early.expired) || isClosed(late.expired) {
			t.Errorf("expired: got %v, %v; want true, false", isClosed(early.expired), isClosed(late.expired))
		}
	}
}

// TestCallsAreSortedByAge checks the order of Calls: by start, and then by XID.
func TestCallsAreSortedByAge(t *testing.T) {
	tr := unconnected(t, nil)
	var slots []*slot
	for _, began := range []int64{20, 10, 20} {
		s := <-tr.free
		defer s.end()
		s.begin(t.Context(), &sunrpc.Message{}, callStart{at: time.Unix(began, 0)})
		slots = append(slots, s)
	}
	w := tr.waiters.add(t.Context(), &sunrpc.Message{}, callStart{at: time.Unix(15, 0)})
	defer tr.waiters.remove(w)
	want := []uint32{slots[1].xid, 0, min(slots[0].xid, slots[2].xid), max(slots[0].xid, slots[2].xid)}
	var got []uint32
	for _, c := range tr.Calls() {
		got = append(got, c.XID)
	}
	if !slices.Equal(got, want) {
		t.Errorf("XIDs: got %#x, want %#x", got, want)
	}
}
