package xprt

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/observe/ledger"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/trace"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// received handles a completed Receive. It runs as a completion handler. It posts the buffer
// again before the window grows.
func (cn *conn) received(r *recvBuf, wc *verbs.WorkCompletion) {
	if wc.Status != verbs.StatusSuccess {
		cn.t.completionError("receive", wc)
		return
	}
	t := cn.t
	t.stats.Recvs.Add(1)
	now := ledger.Now()
	cn.lastReceived.Store(t.nowAt(now))
	b := r.wr.SGE.Buf[:wc.ByteLen]
	s, fence, err := cn.reply(b, now)
	if _, perr := cn.qp.PostRecv(&r.wr); perr != nil {
		cn.fail(&postError{"Receive", perr})
	}
	if err != nil {
		t.stats.BadReply.Add(1)
		t.trace.Add(trace.Event{Kind: trace.BadReply, XID: cn.hdr.XID})
		cn.warnDiscarded(err)
	}
	if s == nil {
		if wc.WithInv {
			cn.fail(&ProtocolError{Reason: "server invalidated a key in a message that answers no call"})
		}
		return
	}
	t.trace.Add(trace.Event{Kind: trace.Reply, XID: cn.hdr.XID, N: uint16(min(cn.hdr.Credits, 0xffff)),
		A: uint64(wc.ByteLen)})
	t.window.grant(s, cn.granted(cn.hdr.Credits))
	if !fence { // the call was abandoned
		s.lateReply()
		return
	}
	if wc.WithInv && !s.mrs.RemoteInvalidated(wc.InvalidatedRKey) {
		cn.fail(&ProtocolError{Reason: "server invalidated a key that does not belong to the answered call"})
		return
	}
	if err := s.invalidate(cn); err != nil {
		cn.fail(err)
	}
}

// discardPause is the shortest pause between log messages about discarded messages. The server
// controls their number. A metric counts each.
const discardPause = time.Second

// warnDiscarded logs that a message was discarded. It runs in a completion handler.
func (cn *conn) warnDiscarded(err error) {
	t := cn.t
	now := t.now()
	if cn.lastWarning != 0 && now-cn.lastWarning < int64(discardPause) {
		return
	}
	cn.lastWarning = max(now, 1)
	t.log.Warn("discarded invalid message from server", "server", t.Address(), "error", err)
}

// granted returns the window for the credits of a reply. It is at least one call, because RFC 8166
// §3.3.1 forbids a grant of zero. It is at most the number of slots.
func (cn *conn) granted(credits uint32) int {
	return int(min(max(credits, 1), uint32(cn.params.Slots)))
}

// lateReply records the reply of an abandoned call, and ends the slot if its caller has returned.
func (s *slot) lateReply() {
	s.mu.Lock()
	s.lateDone = true
	ends := s.over()
	s.mu.Unlock()
	if ends {
		s.end()
	}
}

// reply parses a message that was received at now, and updates the slot of its call. It returns the
// slot, or nil if there is none. The result fence says whether the caller must fence the call. The
// error says why the message was discarded (RFC 8166 §4.5).
func (cn *conn) reply(b []byte, now ledger.Time) (s *slot, fence bool, err error) {
	h := &cn.hdr
	n, err := h.Decode(b)
	if err != nil && !errors.Is(err, rpcrdma.ErrBadChunks) {
		return nil, false, err // the XID may be wrong
	}
	t := cn.t
	if err == nil && h.Proc == rpcrdma.ProcMsg && isCall(b[n:]) {
		return nil, false, errBackchannel // its XID may equal an XID of ours (RFC 8167 §2.4.1)
	}
	s = t.slotOf(h.XID)
	if s == nil {
		t.stats.BadXIDs.Add(1)
		return nil, false, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.xid != h.XID || s.conn != cn || (s.state != slotSent && s.state != slotAbandoned) || s.lateDone {
		t.stats.BadXIDs.Add(1)
		return nil, false, nil
	}
	cn.recordReply(s)
	if s.state == slotAbandoned {
		return s, false, nil
	}
	s.state = slotFencing
	s.markAnswered(now)
	if err != nil {
		s.err = &ProtocolError{Reason: "reply has malformed chunk lists"}
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

// accept checks a reply against the offered chunks and stores its inline part. The caller holds
// s.mu.
func (s *slot) accept(h *rpcrdma.Header, msg []byte) error {
	m := s.msg
	if h.Proc == rpcrdma.ProcError {
		s.t.stats.RDMAErrors.Add(1)
		s.t.stats.BadReply.Add(1) // as the client of the kernel counts
		return &ServerError{Code: h.Err, Low: h.Low, High: h.High}
	}
	if len(h.Reads) != 0 {
		return &ProtocolError{Reason: "reply has a Read list"}
	}
	m.ResultDataLen = -1
	if len(s.wchunk) > 0 {
		if len(h.Writes) != 1 {
			return &ProtocolError{Reason: fmt.Sprintf("reply returns %d write chunks, the call offered 1",
				len(h.Writes))}
		}
		n, err := checkReturned(h.Writes[0], s.wchunk)
		if err != nil {
			return err
		}
		m.ResultDataLen = min(n, m.ResultRoom()) // more bytes went to the pad
		s.t.stats.TotalRDMAReply.Add(uint64(n))
	} else if len(h.Writes) != 0 {
		return &ProtocolError{Reason: "reply returns a write chunk, the call offered none"}
	}
	long := 0
	if h.HasReply {
		var err error
		if long, err = checkReturned(h.Reply, s.rchunk); err != nil {
			return err
		}
		s.t.stats.TotalRDMAReply.Add(uint64(long))
	}
	if h.Proc == rpcrdma.ProcNoMsg {
		if len(s.rchunk) == 0 || !h.HasReply {
			return &ProtocolError{Reason: "reply is in a reply chunk, the call offered none"}
		}
		s.longLen = long // parsed after the memory is fenced
		return nil
	}
	if long != 0 {
		return &ProtocolError{Reason: "inline reply uses the reply chunk"}
	}
	s.t.stats.FixupCopyBytes.Add(uint64(len(msg)))
	return s.parseReply(m, msg)
}

// checkReturned compares a returned chunk with the offered one: it must have the same segments,
// filled from the front (RFC 8166 §3.4.6). It returns the number of bytes written. A chunk without
// segments is unused.
func checkReturned(got, offered rpcrdma.Chunk) (int, error) {
	if len(got) == 0 {
		return 0, nil
	}
	if len(got) != len(offered) {
		return 0, &ProtocolError{Reason: fmt.Sprintf("reply returns a chunk of %d segments, the call offered %d",
			len(got), len(offered))}
	}
	total, full := 0, true
	for i := range got {
		g, o := &got[i], &offered[i]
		if g.Handle != o.Handle || g.Offset != o.Offset || g.Length > o.Length || (g.Length > 0 && !full) {
			return 0, &ProtocolError{Reason: "reply returns a chunk that differs from the offered one"}
		}
		full = g.Length == o.Length
		total += int(g.Length)
	}
	return total, nil
}

// parseReply parses an RPC reply and copies its results to the message of the caller.
func (s *slot) parseReply(m *sunrpc.Message, msg []byte) error {
	xid, results, err := sunrpc.ParseReply(msg)
	if len(msg) >= 4 && xid != s.xid {
		return &ProtocolError{Reason: fmt.Sprintf("reply has RPC XID %#08x, but transport XID %#08x", xid, s.xid)}
	}
	if err != nil {
		return err
	}
	if limit := m.MaxResult + sunrpc.Pad4(m.ResultRoom()); len(results) > limit {
		return &ProtocolError{Reason: fmt.Sprintf("reply has results of %d bytes, the procedure has at most %d",
			len(results), limit)}
	}
	m.Result = append(m.Result[:0], results...)
	return nil
}

// results returns the outcome of an answered call to its caller.
func (s *slot) results(m *sunrpc.Message) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil || s.longLen < 0 {
		return s.err
	}
	err := s.parseReply(m, s.longReply[:s.longLen])
	if err != nil {
		var bad *ProtocolError
		if errors.As(err, &bad) {
			s.t.stats.BadReply.Add(1)
		}
	}
	return err
}

var errBackchannel = errors.New("xprt: server sent a call; NFSv3 has no backward calls")

// isCall reports whether an RPC message is a backward call of the server (RFC 8167 §4.1).
func isCall(msg []byte) bool {
	return len(msg) >= 8 && binary.BigEndian.Uint32(msg[4:]) == sunrpc.MsgCall
}
