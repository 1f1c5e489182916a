package xprt

import (
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// invariantBreaks reports whether f finds a broken invariant, which would stop a daemon.
func invariantBreaks(t *testing.T, f func()) (broken bool) {
	t.Helper()
	defer func() {
		v := recover()
		if v == nil {
			return
		}
		if text, ok := v.(string); !ok || !strings.HasPrefix(text, "invariant broken") {
			panic(v)
		}
		broken = true
	}()
	f()
	return false
}

// TestSlotEndsWithFreeMemory checks that a slot does not end while the device or the server may use
// the memory of its call.
func TestSlotEndsWithFreeMemory(t *testing.T) {
	for _, c := range []struct {
		name             string
		state            slotState
		sendBusy, fenced bool
		broken           bool
	}{
		{"waiting", slotWaiting, false, false, false},
		{"waiting, Send is pending", slotWaiting, true, false, true},
		{"done", slotDone, false, true, false},
		{"done, keys are valid", slotDone, false, false, true},
		{"abandoned", slotAbandoned, false, true, false},
		{"abandoned, keys are valid", slotAbandoned, false, false, true},
		{"abandoned, Send is pending", slotAbandoned, true, true, true},
	} {
		tr := unconnected(t, nil)
		s := <-tr.free
		s.begin(t.Context(), &sunrpc.Message{}, tr.startCall())
		s.state, s.sendBusy, s.fenced = c.state, c.sendBusy, c.fenced
		if got := invariantBreaks(t, s.clear); got != c.broken {
			t.Errorf("%s: got broken %v, want %v", c.name, got, c.broken)
		}
	}
}

// TestSendQueueCountsAreChecked checks the limits of the counters of the send queue.
func TestSendQueueCountsAreChecked(t *testing.T) {
	for _, c := range []struct {
		taken, begun, retired int64
		broken                bool
	}{
		{0, 0, 0, false},
		{8, 8, 0, false},
		{18, 10, 10, false},
		{9, 8, 0, true},  // more places than the queue has
		{4, 5, 0, true},  // requests without a place
		{5, 4, 5, true},  // requests that were retired before the post
		{12, 5, 3, true}, // more places than the queue has
	} {
		var q sendQueue
		q.init(8, 1)
		q.taken.Store(c.taken)
		q.begun.Store(c.begun)
		q.retired.Store(c.retired)
		if got := invariantBreaks(t, q.check); got != c.broken {
			t.Errorf("%d places taken, %d requests posted, %d retired: got broken %v, want %v", c.taken, c.begun,
				c.retired, got, c.broken)
		}
	}
}

// TestSendLockIsChecked checks that calls and the worker hold the send lock when they must (S16).
func TestSendLockIsChecked(t *testing.T) {
	tr := &Transport{}
	if !invariantBreaks(t, tr.verifySending) || !invariantBreaks(t, tr.verifyTakingDown) {
		t.Error("without the send lock: got no broken invariant")
	}
	tr.send.RLock()
	if invariantBreaks(t, tr.verifySending) || !invariantBreaks(t, tr.verifyTakingDown) {
		t.Error("with the send lock for reading: want a broken invariant only for the worker")
	}
	tr.send.RUnlock()
	tr.send.Lock()
	if invariantBreaks(t, tr.verifyTakingDown) {
		t.Error("with the send lock for writing: got a broken invariant")
	}
	tr.send.Unlock()
}
