package xprt

import (
	"context"
	"math"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/memreg"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
)

// TestGrantIsLimited checks the window after grants of a server: at least one call (RFC 8166
// §3.3.1), and at most the number of slots.
func TestGrantIsLimited(t *testing.T) {
	cn := &conn{adapter: &adapter{params: memreg.Params{Slots: 8}}}
	for credits, want := range map[uint32]int{0: 1, 1: 1, 7: 7, 8: 8, 9: 8, math.MaxUint32: 8} {
		if got := cn.granted(credits); got != want {
			t.Errorf("window after a grant of %d: got %d, want %d", credits, got, want)
		}
	}
}

// TestReplyIsAcceptedOnce gives a conn replies that answer no pending call: a reply that was
// received twice, to a call that was abandoned, or on another connection. Only the first reply to a
// call on its connection may be accepted.
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
		s.fenced = true // a slot ends only then
		s.end()
	}
}

// A recvQP accepts Receives.
type recvQP struct{ verbs.QP }

func (recvQP) PostRecv(*verbs.RecvRequest) (*verbs.RecvRequest, error) { return nil, nil }

// TestRemoteInvalidationNeedsKeyOfCall gives a conn messages that invalidate a key. A message that
// answers no call, or whose call does not have the key, must end the connection, because the key
// may belong to any call (S11).
func TestRemoteInvalidationNeedsKeyOfCall(t *testing.T) {
	tr, err := New(Config{Provider: softiwarp.New(softiwarp.Config{}), Slots: 4})
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	s := <-tr.free
	defer s.end()
	s.begin(context.Background(), &sunrpc.Message{}, tr.startCall())
	reply := func(xid uint32) []byte {
		h := rpcrdma.Header{XID: xid, Vers: rpcrdma.Version, Credits: 1, Proc: rpcrdma.ProcMsg}
		return sunrpc.AppendAcceptedReply(h.Append(nil), xid, sunrpc.Success)
	}
	for _, c := range []struct {
		name    string
		msg     []byte
		withInv bool
	}{
		{"unknown XID", reply(s.xid + tr.xidStep), false},
		{"unknown XID, invalidates a key", reply(s.xid + tr.xidStep), true},
		{"malformed", reply(s.xid)[:10], false},
		{"malformed, invalidates a key", reply(s.xid)[:10], true},
		{"reply to a call without keys", reply(s.xid), false},
		{"reply to a call without keys, invalidates a key", reply(s.xid), true},
	} {
		cn := &conn{adapter: &adapter{t: tr}, qp: recvQP{}, ended: make(chan struct{})}
		s.state, s.conn = slotSent, cn
		cn.received(&recvBuf{verbs.RecvRequest{SGE: verbs.SGE{Buf: c.msg}}},
			&verbs.WorkCompletion{ByteLen: uint32(len(c.msg)), WithInv: c.withInv, InvalidatedRKey: 4711})
		if ended := isClosed(cn.ended); ended != c.withInv || ended && !isProtocol(cn.err) {
			t.Errorf("%s: got ended %v, error %v; want ended %v", c.name, ended, cn.err, c.withInv)
		}
	}
}

// TestFailedReceiveEndsConnection has a Receive that cannot be posted again. The server may then
// send a message without a Receive, so the connection must end.
func TestFailedReceiveEndsConnection(t *testing.T) {
	var fail atomic.Bool
	tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}}), func(c *Config) {
		c.Provider = hooked(&hookedProvider{open: func() qpHooks {
			return qpHooks{recv: func() error {
				if fail.CompareAndSwap(true, false) {
					return errPost
				}
				return nil
			}}
		}})
	})
	fail.Store(true)
	if err := tr.Call(testContext(t), echo(1, nil, 0)); err != nil {
		t.Errorf("Call: %v", err)
	}
	eventually(t, "second connection", func() bool { return tr.Stats().Connects == 2 })
	if s := tr.Stats(); !strings.Contains(s.LastError, errPost.Error()) {
		t.Errorf("last error: got %q, want %v", s.LastError, errPost)
	}
}
