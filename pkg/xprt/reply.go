package xprt

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/trace"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// received handles one completed Receive. It runs on the CQ's goroutine, and posts the buffer again
// before it widens the window.
func (cn *conn) received(r *recvBuf, wc *verbs.WorkCompletion) {
	if wc.Status != verbs.StatusSuccess {
		cn.t.completionError("receive", wc)
		return
	}
	t := cn.t
	t.stats.recvs.Add(1)
	cn.lastHeard.Store(t.now())
	b := r.wr.SGE.Buf[:wc.ByteLen]
	s, fence, err := cn.reply(b)
	if _, perr := cn.qp.PostRecv(&r.wr); perr != nil {
		cn.fail(&postError{"Receive", perr})
	}
	if err != nil {
		t.stats.badReply.Add(1)
		t.trace.Add(trace.Event{Kind: trace.BadReply, XID: cn.hdr.XID})
		cn.warnDiscarded(err)
	}
	if s == nil {
		if wc.WithInv {
			cn.fail(&ProtocolError{Reason: "server invalidated a key with a message that answers no call"})
		}
		return
	}
	t.trace.Add(trace.Event{Kind: trace.Reply, XID: cn.hdr.XID, N: uint16(min(cn.hdr.Credits, 0xffff)),
		A: uint64(wc.ByteLen)})
	t.window.replied(s, cn.granted(cn.hdr.Credits))
	if !fence { // abandoned earlier
		s.lateReply()
		return
	}
	if wc.WithInv && !s.mrs.RemoteInvalidated(wc.InvalidatedRKey) {
		cn.fail(&ProtocolError{Reason: "server invalidated a key that the answered call does not have"})
		return
	}
	if err := s.invalidate(cn); err != nil {
		cn.fail(err)
	}
}

// discardPause is how often at most a discarded message is written to the log: the server decides
// how many there are. The metrics count each.
const discardPause = time.Second

// warnDiscarded tells of a message that could not be used. It runs on the CQ's goroutine.
func (cn *conn) warnDiscarded(err error) {
	t := cn.t
	now := t.now()
	if cn.warned != 0 && now-cn.warned < int64(discardPause) {
		return
	}
	cn.warned = max(now, 1)
	t.log.Warn("discarded a message of the server", "server", t.cfg.Addr, "error", err)
}

// granted is the window that a reply allows: at least one call (RFC 8166 §3.3.1 forbids a grant of
// zero), at most ours.
func (cn *conn) granted(credits uint32) int {
	return int(min(max(credits, 1), uint32(cn.params.Slots)))
}

// lateReply ends an abandoned call whose reply came after all.
func (s *slot) lateReply() {
	s.mu.Lock()
	s.late = true
	done := s.left
	s.mu.Unlock()
	if done {
		s.end()
	}
}

// reply parses a message and takes what it says to the slot of its call. It returns the slot, nil
// when there is none, and whether the call is to be fenced. err says why a message was discarded
// (RFC 8166 §4.5).
func (cn *conn) reply(b []byte) (s *slot, fence bool, err error) {
	h := &cn.hdr
	n, err := h.Decode(b)
	if err != nil && !errors.Is(err, rpcrdma.ErrBadChunks) {
		return nil, false, err // the XID is not to be trusted
	}
	t := cn.t
	if err == nil && h.Proc == rpcrdma.ProcMsg && isCall(b[n:]) {
		return nil, false, errBackchannel // its XID may well equal one of ours (RFC 8167 §2.4.1)
	}
	s = t.slotOf(h.XID)
	if s == nil {
		t.stats.badXIDs.Add(1)
		return nil, false, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.xid != h.XID || s.conn != cn || (s.state != slotSent && s.state != slotAbandoned) || s.late {
		t.stats.badXIDs.Add(1)
		return nil, false, nil
	}
	cn.sawReply(s)
	if s.state == slotAbandoned {
		return s, false, nil
	}
	s.state = slotFencing
	if err != nil {
		s.err = &ProtocolError{Reason: "reply with malformed chunk lists"}
		return s, true, err
	}
	if s.err = s.accept(h, b[n:]); s.err != nil {
		var bad *ProtocolError
		if errors.As(s.err, &bad) {
			return s, true, s.err
		}
	}
	return s, true, nil
}

func (t *Transport) slotOf(xid uint32) *slot {
	if i := int(xid & t.xidMask); i < len(t.slots) {
		return t.slots[i]
	}
	return nil
}

// accept checks a reply against what was offered and takes its inline part. Called with s.mu held.
func (s *slot) accept(h *rpcrdma.Header, msg []byte) error {
	m := s.msg
	if h.Proc == rpcrdma.ProcError {
		s.t.stats.remoteErrs.Add(1)
		s.t.stats.badReply.Add(1) // as the kernel's client counts
		return &ServerError{Code: h.Err, Low: h.Low, High: h.High}
	}
	if len(h.Reads) != 0 {
		return &ProtocolError{Reason: "reply with a Read list"}
	}
	m.ResultDataLen = -1
	if len(s.wchunk) > 0 {
		if len(h.Writes) != 1 {
			return &ProtocolError{Reason: fmt.Sprintf("reply returns %d write chunks, 1 was offered", len(h.Writes))}
		}
		n, err := returned(h.Writes[0], s.wchunk)
		if err != nil {
			return err
		}
		m.ResultDataLen = min(n, len(m.ResultData)) // what lies beyond went to the pad
		s.t.stats.totalReply.Add(uint64(n))
	} else if len(h.Writes) != 0 {
		return &ProtocolError{Reason: "reply returns a write chunk, none was offered"}
	}
	long := 0
	if h.HasReply {
		var err error
		if long, err = returned(h.Reply, s.rchunk); err != nil {
			return err
		}
		s.t.stats.totalReply.Add(uint64(long))
	}
	if h.Proc == rpcrdma.ProcNoMsg {
		if len(s.rchunk) == 0 || !h.HasReply {
			return &ProtocolError{Reason: "long reply, but no reply chunk was offered"}
		}
		s.longLen = long // parsed when it is fenced
		return nil
	}
	if long != 0 {
		return &ProtocolError{Reason: "inline reply with octets in the reply chunk"}
	}
	s.t.stats.fixupBytes.Add(uint64(len(msg)))
	return s.take(m, msg)
}

// returned checks a returned chunk against the offered one: the same segments, filled from the
// front (RFC 8166 §3.4.6). It returns the octets written. A chunk without segments counts as
// unused.
func returned(got, offered rpcrdma.Chunk) (int, error) {
	if len(got) == 0 {
		return 0, nil
	}
	if len(got) != len(offered) {
		return 0, &ProtocolError{Reason: fmt.Sprintf("reply returns a chunk of %d segments, %d were offered",
			len(got), len(offered))}
	}
	total, full := 0, true
	for i := range got {
		g, o := &got[i], &offered[i]
		if g.Handle != o.Handle || g.Offset != o.Offset || g.Length > o.Length || (g.Length > 0 && !full) {
			return 0, &ProtocolError{Reason: "reply returns a chunk that is not the one offered"}
		}
		full = g.Length == o.Length
		total += int(g.Length)
	}
	return total, nil
}

// take parses an RPC reply and copies its results to the caller's message.
func (s *slot) take(m *sunrpc.Message, msg []byte) error {
	xid, results, err := sunrpc.ParseReply(msg)
	if len(msg) >= 4 && xid != s.xid {
		return &ProtocolError{Reason: fmt.Sprintf("RPC XID %#08x under transport XID %#08x", xid, s.xid)}
	}
	if err != nil {
		return err
	}
	if limit := m.MaxResult + sunrpc.Pad4(len(m.ResultData)); len(results) > limit {
		return &ProtocolError{Reason: fmt.Sprintf("results of %d octets, the procedure has at most %d", len(results),
			limit)}
	}
	m.Result = append(m.Result[:0], results...)
	return nil
}

// results ends an answered call on its caller's side.
func (s *slot) results(m *sunrpc.Message) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil || s.longLen < 0 {
		return s.err
	}
	err := s.take(m, s.longReply[:s.longLen])
	if _, bad := err.(*ProtocolError); bad {
		s.t.stats.badReply.Add(1)
	}
	return err
}

var errBackchannel = errors.New("xprt: a call from the server, which NFSv3 has no use for")

// isCall reports whether an RPC message is a call of the server, on the back channel (RFC 8167
// §4.1).
func isCall(msg []byte) bool {
	return len(msg) >= 8 && binary.BigEndian.Uint32(msg[4:]) == sunrpc.MsgCall
}
