package xprt

import (
	"context"
	"math"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/memreg"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
)

// TestGrantIsLimited checks the window after grants of a server: at least one call (RFC 8166 §3.3.1),
// and at most the number of slots.
func TestGrantIsLimited(t *testing.T) {
	cn := &conn{adapter: &adapter{params: memreg.Params{Slots: 8}}}
	for credits, want := range map[uint32]int{0: 1, 1: 1, 7: 7, 8: 8, 9: 8, math.MaxUint32: 8} {
		if got := cn.granted(credits); got != want {
			t.Errorf("window after a grant of %d: got %d, want %d", credits, got, want)
		}
	}
}

// TestReplyIsAcceptedOnce gives a conn replies that answer no pending call: a reply that was received
// twice, to a call that was abandoned, or on another connection. Only the first reply to a call on
// its connection may be accepted.
func TestReplyIsAcceptedOnce(t *testing.T) {
	tr, err := New(Config{Provider: softiwarp.New(softiwarp.Config{}), Slots: 4})
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	cn := &conn{adapter: &adapter{t: tr}, ended: make(chan struct{})}
	other := &conn{adapter: &adapter{t: tr}, ended: make(chan struct{})}
	for _, c := range []struct {
		name   string
		state  slotState
		on     *conn
		late   bool
		accept bool
	}{
		{"call that is pending", slotSent, cn, false, true},
		{"call that is not posted", slotWaiting, cn, false, false},
		{"call that is answered, before the fence", slotFencing, cn, false, false},
		{"call that is answered", slotDone, cn, false, false},
		{"call of a lost connection", slotLost, cn, false, false},
		{"call of another connection", slotSent, other, false, false},
		{"call that is abandoned", slotAbandoned, cn, false, true},
		{"call that is abandoned, second reply", slotAbandoned, cn, true, false},
	} {
		s := <-tr.free
		s.begin(context.Background(), &sunrpc.Message{}, tr.startCall())
		s.state, s.conn, s.lateDone = c.state, c.on, c.late
		h := rpcrdma.Header{XID: s.xid, Vers: rpcrdma.Version, Credits: 1, Proc: rpcrdma.ProcMsg}
		msg := sunrpc.AppendAcceptedReply(h.Append(nil), s.xid, sunrpc.Success)
		before := tr.Stats().BadXIDs
		got, _, err := cn.reply(msg)
		if accepted := got == s; err != nil || accepted != c.accept || (tr.Stats().BadXIDs == before) != c.accept {
			t.Errorf("%s: got accepted %v, %v; want accepted %v", c.name, accepted, err, c.accept)
		}
		if second, _, _ := cn.reply(msg); second != nil && c.state == slotSent {
			t.Errorf("%s: the second reply was accepted", c.name)
		}
		s.end()
	}
}
