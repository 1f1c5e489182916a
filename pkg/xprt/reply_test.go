package xprt

import (
	"bytes"
	"context"
	"errors"
	"math"
	"net/netip"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/internal/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/ledger"
	"github.com/nfsrdmad/nfsrdmad/pkg/memreg"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
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
		got, _, err := cn.reply(msg, ledger.Now())
		if accepted := got == s; err != nil || accepted != c.accept || (tr.Stats().BadXIDs == before) != c.accept {
			t.Errorf("%s: got accepted %v, %v; want accepted %v", c.name, accepted, err, c.accept)
		}
		if second, _, _ := cn.reply(msg, ledger.Now()); second != nil && c.state == slotSent {
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
	kit.Eventually(t, "second connection", func() bool { return tr.Stats().Connects == 2 })
	if s := tr.Stats(); !strings.Contains(s.LastError, errPost.Error()) {
		t.Errorf("last error: got %q, want %v", s.LastError, errPost)
	}
}

// TestReturnedChunkMustMatch compares returned chunks with the offered one (RFC 8166 §3.4.6).
func TestReturnedChunkMustMatch(t *testing.T) {
	type chunk = rpcrdma.Chunk
	offered := chunk{{Handle: 1, Length: 100, Offset: 1000}, {Handle: 2, Length: 50, Offset: 2000}}
	for _, c := range []struct {
		name string
		got  chunk
		n    int
		ok   bool
	}{
		{"unused", nil, 0, true},
		{"full", chunk{{Handle: 1, Length: 100, Offset: 1000}, {Handle: 2, Length: 50, Offset: 2000}}, 150, true},
		{"partly used", chunk{{Handle: 1, Length: 100, Offset: 1000}, {Handle: 2, Length: 7, Offset: 2000}}, 107, true},
		{"first segment only", chunk{{Handle: 1, Length: 9, Offset: 1000}, {Handle: 2, Offset: 2000}}, 9, true},
		{"empty", chunk{{Handle: 1, Offset: 1000}, {Handle: 2, Offset: 2000}}, 0, true},
		{"hole", chunk{{Handle: 1, Length: 99, Offset: 1000}, {Handle: 2, Length: 1, Offset: 2000}}, 0, false},
		{"too long", chunk{{Handle: 1, Length: 100, Offset: 1000}, {Handle: 2, Length: 51, Offset: 2000}}, 0, false},
		{"other key", chunk{{Handle: 1, Length: 100, Offset: 1000}, {Handle: 3, Length: 50, Offset: 2000}}, 0, false},
		{"other offset", chunk{{Handle: 1, Length: 100, Offset: 1001}, {Handle: 2, Length: 50, Offset: 2000}}, 0,
			false},
		{"segment missing", chunk{{Handle: 1, Length: 100, Offset: 1000}}, 0, false},
		{"segment more", append(offered[:2:2], offered[0]), 0, false},
	} {
		n, err := checkReturned(c.got, offered)
		if n != c.n || (err == nil) != c.ok || err != nil && !isProtocol(err) {
			t.Errorf("%s: got %d bytes, %v; want %d, valid %v", c.name, n, err, c.n, c.ok)
		}
	}
}

// TestReplyMustMatchCall gives a call replies that use the offered chunks in different ways. It
// checks the result and the counters.
func TestReplyMustMatchCall(t *testing.T) {
	type chunk = rpcrdma.Chunk
	writes := chunk{{Handle: 1, Length: 100, Offset: 1000}, {Handle: 9, Length: 4, Offset: 9000}} // with the pad
	long := chunk{{Handle: 2, Length: 500, Offset: 2000}}
	used := func(c chunk, n uint32) chunk { return chunk{{Handle: c[0].Handle, Length: n, Offset: c[0].Offset}} }
	for _, c := range []struct {
		name           string
		write, reply   bool // the call offers these chunks
		h              rpcrdma.Header
		ok             bool
		dataLen, total int // of the data; bytes returned in chunks
		longLen        int
	}{
		{"inline", false, false, rpcrdma.Header{}, true, -1, 0, -1},
		{"write chunk", true, false, rpcrdma.Header{Writes: []chunk{writes}}, true, 98, 104, -1},
		{"part of the write chunk", true, false, rpcrdma.Header{Writes: []chunk{{{Handle: 1, Length: 60, Offset: 1000},
			{Handle: 9, Offset: 9000}}}}, true, 60, 60, -1},
		{"unused write chunk", true, false, rpcrdma.Header{Writes: []chunk{nil}}, true, 0, 0, -1},
		{"write chunk not returned", true, false, rpcrdma.Header{}, false, 0, 0, 0},
		{"write chunk not offered", false, false, rpcrdma.Header{Writes: []chunk{writes}}, false, 0, 0, 0},
		{"Read list", false, false, rpcrdma.Header{Reads: make([]rpcrdma.ReadSegment, 1)}, false, 0, 0, 0},
		{"inline, reply chunk offered", false, true, rpcrdma.Header{}, true, -1, 0, -1},
		{"inline, reply chunk unused", false, true, rpcrdma.Header{HasReply: true, Reply: used(long, 0)}, true, -1, 0,
			-1},
		{"inline, reply chunk used", false, true, rpcrdma.Header{HasReply: true, Reply: used(long, 1)}, false, 0, 0, 0},
		{"reply chunk", false, true, rpcrdma.Header{HasReply: true, Reply: used(long, 28), Proc: rpcrdma.ProcNoMsg},
			true, -1, 28, 28},
		{"reply chunk not returned", false, true, rpcrdma.Header{Proc: rpcrdma.ProcNoMsg}, false, 0, 0, 0},
		{"reply chunk not offered", false, false, rpcrdma.Header{HasReply: true, Proc: rpcrdma.ProcNoMsg}, false, 0, 0,
			0},
		{"reply chunk too long", false, true, rpcrdma.Header{HasReply: true, Reply: used(long, 501),
			Proc: rpcrdma.ProcNoMsg}, false, 0, 0, 0},
	} {
		tr := &Transport{}
		m := &sunrpc.Message{ResultData: make([]byte, 98), ResultDataLen: 7}
		s := &slot{t: tr, xid: 5, msg: m, longLen: -1}
		if c.write {
			s.wchunk = writes
		}
		if c.reply {
			s.rchunk = long
		}
		msg := sunrpc.AppendAcceptedReply(nil, 5, sunrpc.Success)
		err := s.accept(&c.h, msg)
		if (err == nil) != c.ok || err != nil && !isProtocol(err) {
			t.Errorf("%s: got %v, want valid %v", c.name, err, c.ok)
		}
		if !c.ok {
			continue
		}
		if m.ResultDataLen != c.dataLen || tr.stats.totalReply.Load() != uint64(c.total) || s.longLen != c.longLen {
			t.Errorf("%s: got %d bytes of data, %d bytes in chunks, long reply of %d bytes; want %d, %d, %d", c.name,
				m.ResultDataLen, tr.stats.totalReply.Load(), s.longLen, c.dataLen, c.total, c.longLen)
		}
		copied := len(msg)
		if c.longLen >= 0 {
			copied = 0
		}
		if n := tr.stats.fixupBytes.Load(); n != uint64(copied) {
			t.Errorf("%s: got %d bytes copied, want %d", c.name, n, copied)
		}
	}
}

// TestResultsAreLimited parses replies with the largest results of the procedure, with more, and
// with the XID of another call.
func TestResultsAreLimited(t *testing.T) {
	for _, c := range []struct {
		name    string
		xid     uint32
		results int
		cut     int // bytes missing at the end
		ok      bool
	}{
		{"largest results", 5, 100 + 8, 0, true},
		{"larger results", 5, 100 + 9, 0, false},
		{"other XID", 6, 0, 0, false},
		{"other XID, cut after it", 6, 0, sunrpc.AcceptedReplySize - 4, false},
	} {
		s := &slot{xid: 5}
		m := &sunrpc.Message{MaxResult: 100, ResultData: make([]byte, 5), Result: []byte("old")}
		reply := append(sunrpc.AppendAcceptedReply(nil, c.xid, sunrpc.Success), make([]byte, c.results)...)
		err := s.parseReply(m, reply[:len(reply)-c.cut])
		if (err == nil) != c.ok || err != nil && !isProtocol(err) || c.ok && len(m.Result) != c.results {
			t.Errorf("%s: got %v and %d bytes, want valid %v", c.name, err, len(m.Result), c.ok)
		}
	}
	if err := (&slot{xid: 5}).parseReply(&sunrpc.Message{}, []byte{0, 0, 0}); !errors.Is(err, sunrpc.ErrMalformed) {
		t.Errorf("reply of 3 bytes: got %v, want %v", err, sunrpc.ErrMalformed)
	}
}

// TestResultsOfLongReply checks the outcome of a call whose reply is in the reply chunk.
func TestResultsOfLongReply(t *testing.T) {
	valid := append(sunrpc.AppendAcceptedReply(nil, 5, sunrpc.Success), 1, 2, 3, 4)
	for _, c := range []struct {
		name string
		slot *slot
		want error
		bad  uint64 // bad replies
		n    int    // bytes of the results
	}{
		{"inline", &slot{longLen: -1}, nil, 0, 0},
		{"failed", &slot{longLen: len(valid), longReply: valid, err: ErrClosed}, ErrClosed, 0, 0},
		{"long", &slot{longLen: len(valid), longReply: append(valid[:len(valid):len(valid)], 9, 9)}, nil, 0, 4},
		{"empty", &slot{longLen: 0, longReply: valid}, sunrpc.ErrMalformed, 0, 0},
		{"other XID", &slot{longLen: len(valid), longReply: append([]byte{1}, valid[1:]...)}, syscall.EIO, 1, 0},
	} {
		tr := &Transport{}
		c.slot.t, c.slot.xid = tr, 5
		m := &sunrpc.Message{MaxResult: 4}
		err := c.slot.results(m)
		if !errors.Is(err, c.want) || len(m.Result) != c.n || tr.stats.badReply.Load() != c.bad {
			t.Errorf("%s: got %v, %d bytes, %d bad replies; want %v, %d, %d", c.name, err, len(m.Result),
				tr.stats.badReply.Load(), c.want, c.n, c.bad)
		}
	}
}

// TestBackwardCallIsDiscarded checks which inline messages are calls of the server (RFC 8167 §4.1).
func TestBackwardCallIsDiscarded(t *testing.T) {
	for _, c := range []struct {
		msg  []byte
		want bool
	}{
		{[]byte{0, 0, 0, 5, 0, 0, 0, sunrpc.MsgCall}, true},
		{[]byte{0, 0, 0, 5, 0, 0, 0, sunrpc.MsgCall, 0, 0, 0, 2}, true},
		{[]byte{0, 0, 0, 5, 0, 0, 0, sunrpc.MsgReply}, false},
		{[]byte{0, 0, 0, 5, 0, 0, 0}, false},
	} {
		if got := isCall(c.msg); got != c.want {
			t.Errorf("%x: got call %v, want %v", c.msg, got, c.want)
		}
	}
	tr := unconnected(t, nil)
	s := <-tr.free
	defer s.end()
	s.begin(t.Context(), &sunrpc.Message{}, tr.startCall())
	cn := &conn{adapter: &adapter{t: tr}, ended: make(chan struct{})}
	s.state, s.conn = slotSent, cn
	h := rpcrdma.Header{XID: s.xid, Vers: rpcrdma.Version, Credits: 1, Proc: rpcrdma.ProcMsg}
	msg := sunrpc.AppendUint32(sunrpc.AppendUint32(h.Append(nil), s.xid), sunrpc.MsgCall)
	got, _, err := cn.reply(msg, ledger.Now())
	if got != nil || !errors.Is(err, errBackchannel) || s.state != slotSent {
		t.Errorf("call of the server with the XID of a call: got slot %v, %v, state %d; want none, %v, sent", got, err,
			s.state, errBackchannel)
	}
	h.Proc = rpcrdma.ProcNoMsg // the RPC message is not inline
	msg = sunrpc.AppendUint32(sunrpc.AppendUint32(h.Append(nil), s.xid), sunrpc.MsgCall)
	if got, _, err := cn.reply(msg, ledger.Now()); got != s || !isProtocol(err) {
		t.Errorf("RDMA_NOMSG: got slot %v, %v; want the call, and a ProtocolError", got, err)
	}
	s.state = slotWaiting
}

// TestWarningsAboutMessagesPause checks when a discarded message is logged: the first one, and then
// one for each discardPause.
func TestWarningsAboutMessagesPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		tr := &Transport{log: hclog.New(&hclog.LoggerOptions{Output: &log}), epoch: time.Now(),
			cfg: Config{Servers: NewAddresses(netip.AddrPort{})}}
		cn := &conn{adapter: &adapter{t: tr}}
		for _, c := range []struct {
			after time.Duration
			logs  int
		}{{0, 1}, {0, 0}, {discardPause, 0}, {1, 1}, {discardPause - 1, 0}, {1, 1}} {
			log.Reset()
			time.Sleep(c.after)
			cn.warnDiscarded(errBackchannel)
			if got := strings.Count(log.String(), "discarded"); got != c.logs {
				t.Errorf("after %v: got %d log lines, want %d", tr.now(), got, c.logs)
			}
		}
	})
}
