package xprt

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/memreg"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/ledger"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/trace"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// If no memory can be registered for a call, the transport retries after marshalRetry. The pause
// doubles up to marshalRetryMax.
const (
	marshalRetry    = 10 * time.Millisecond
	marshalRetryMax = time.Second
)

var errNoBuffer = errors.New("xprt: all buffers for long messages are in use")

// A shortageError reports that marshal failed because memory is short. A retry may succeed.
type shortageError struct{ error }

// A queueFullError reports that the send queue has no room for one more RPC. room is closed when
// places become free.
type queueFullError struct{ room, connEnded <-chan struct{} }

func (*queueFullError) Error() string { return "xprt: send queue is full" }

// transmit marshals and posts the call of s. It returns false without an error if the connection
// ended; the caller must then wait for a credit again. Other errors of interest:
//
//   - *unfencedError: wait until the memory is fenced;
//   - *shortageError: retry after a pause;
//   - *queueFullError: retry when there is room.
func (t *Transport) transmit(s *slot) (sent bool, err error) {
	t.send.RLock()
	defer t.send.RUnlock()
	t.verifySending()
	cn := t.conn.Load()
	if cn == nil || !t.window.holds(s) {
		return false, nil
	}
	s.mrs.Use(cn.pool)
	if err := t.marshal(s, cn); err != nil {
		t.stats.FailedMarshal.Add(1)
		var bad *ProtocolError
		if !errors.As(err, &bad) && !errors.Is(err, memreg.ErrTooManySegments) &&
			!errors.Is(err, memreg.ErrForeignMemory) {
			err = &shortageError{err}
		}
		return false, s.unmap(cn, err)
	}
	if err := cn.reserve(s, places(len(s.mrs.Registered()))); err != nil {
		return false, s.unmap(cn, err)
	}
	head, n := s.mrs.Chain(&s.sendWR)
	s.chain, s.sqTaken = head, n // places for the LOCAL_INVs
	shared := len(s.sendWR.SGList) > 1
	s.sendWR.Signaled = cn.sq.signalNow(n+1) || shared
	if err := s.post(cn, head, n+1); err != nil {
		// The end of the connection fences the posted part of the chain, and the worker updates the
		// call (S15).
		cn.fail(&postError{"RPC", err})
	}
	cn.sq.end(n + 1)
	cn.startNudges()
	return true, nil
}

// reserve takes n places in the send queue. It returns a *queueFullError, and takes none, if there
// are not enough.
func (cn *conn) reserve(s *slot, n int) error {
	if cn.sq.take(n) {
		return nil
	}
	room := cn.sq.full()
	if cn.sq.take(n) {
		return nil
	}
	cn.t.stats.EmptySendCtx.Add(1)
	cn.t.trace.Add(trace.Event{Kind: trace.NoSendCtx, XID: s.xid})
	return &queueFullError{room, cn.ended}
}

// unmap gives back the MRs and the buffers of a call that was not posted because of cause. It
// returns cause. If the memory may still be registered, it ends the connection and returns an
// *unfencedError.
func (s *slot) unmap(cn *conn, cause error) error {
	if err := s.mrs.Unmap(); err != nil {
		cn.fail(&unmapError{err})
		return &unfencedError{cause, cn.down}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.releaseLong()
	return cause
}

// An unfencedError reports that a call was not posted, and that the server may reach its memory
// until down is closed.
type unfencedError struct {
	cause error
	down  <-chan struct{}
}

func (*unfencedError) Error() string { return "xprt: memory of a call is not fenced" }

// awaitFence returns err, the error of transmit. After an *unfencedError, it waits until the worker
// has taken the connection down, releases the buffers of the call, and returns the cause.
func (s *slot) awaitFence(err error) error {
	var unfenced *unfencedError
	if !errors.As(err, &unfenced) {
		return err
	}
	<-unfenced.down
	s.mu.Lock()
	defer s.mu.Unlock()
	s.releaseLong()
	return unfenced.cause
}

// post posts the chain of a call, which has n requests. It holds mu during the post, so that a
// forged reply cannot release the MRs before the post returns.
func (s *slot) post(cn *conn, head *verbs.WorkRequest, n int) error {
	t := s.t
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	s.state, s.conn, s.sentAt, s.sentRunning = slotSent, cn, now, t.nowAt(ledger.At(now))
	s.times.Mark(ledger.PhaseRegister, ledger.At(now))
	s.writtenAt.Store(0)
	s.sendBusy, s.sendMark = s.sendWR.Signaled, cn.sq.begin(n)
	s.outBytes = s.bytesToSend()
	bad, err := cn.qp.PostSend(head)
	if !s.markWritten(math.MaxInt64) {
		s.times.Mark(ledger.PhaseSend, ledger.Now())
	}
	if err == nil {
		t.stats.Sends.Add(1)
		if s.sends++; s.sends > 1 {
			t.stats.Resends.Add(1)
			t.trace.Add(trace.Event{Kind: trace.Resend, XID: s.xid})
		}
		t.trace.Add(trace.Event{Kind: trace.PostSend, XID: s.xid, N: uint16(n), A: uint64(len(s.sge[0].Buf))})
	} else {
		t.trace.Add(trace.Event{Kind: trace.PostSendErr, XID: s.xid, N: uint16(before(head, bad))})
	}
	return err
}

// bytesToSend returns the size of the Send and of the data that the server may read.
func (s *slot) bytesToSend() (n int) {
	for i := range s.sendWR.SGList {
		n += len(s.sendWR.SGList[i].Buf)
	}
	for i := range s.hdr.Reads {
		n += int(s.hdr.Reads[i].Length)
	}
	return n
}

// before returns the number of requests in front of bad.
func before(head, bad *verbs.WorkRequest) (n int) {
	for ; head != nil && head != bad; head = head.Next {
		n++
	}
	return n
}

// marshal chooses the message form and fills the send buffer.
//
// The reply side has three forms (RFC 8166 §4.3.3, RFC 8267 §3):
//
//   - inline, if the largest possible reply fits;
//   - a write chunk, if there is a DDP-eligible result and the rest of the reply fits inline;
//   - a reply chunk otherwise. A server uses a reply chunk whenever it has one. The call therefore
//     offers it only when it is needed, and never together with a write chunk.
//
// The call is inline if it fits. Otherwise its eligible argument is a read chunk without a pad (RFC
// 8166 §3.4.5.2), or else the whole call is a position-zero read chunk.
func (t *Transport) marshal(s *slot, cn *conn) error {
	m, h := s.msg, &s.hdr
	h.Reset()
	h.XID, h.Vers, h.Credits, h.Proc = s.xid, rpcrdma.Version, uint32(cn.params.Slots), rpcrdma.ProcMsg
	if err := s.marshalReplySide(cn); err != nil {
		return err
	}
	room := cn.inlineSend - h.Size()
	callHeader := sunrpc.CallSize(m.Cred)
	rest := callHeader + len(m.Args)
	inlineData := false
	switch {
	case rest+sunrpc.Pad4(len(m.ArgData)) <= room:
		inlineData = true
	case len(m.ArgData) > 0 && rest+cn.params.MaxSegs*rpcrdma.ReadSegmentSize <= room:
		if err := s.mapReads(m.ArgData, uint32(callHeader+m.ArgDataPos)); err != nil {
			return err
		}
	default:
		return s.marshalLongCall(cn, rest)
	}
	b := h.Append(s.send[:0])
	b = sunrpc.AppendCall(b, s.xid, m.Prog, m.Vers, m.Proc, m.Cred)
	if inlineData && len(m.ArgData) > pullupMax && cn.gathers() {
		s.gatherSend(cn, b)
		return nil
	}
	b = appendArgs(b, m, inlineData)
	if inlineData {
		t.stats.PullupCopyBytes.Add(uint64(len(m.ArgData)))
	}
	s.fillSend(cn, b)
	return nil
}

// pullupMax is the largest inline data in bytes that is copied after the header. For more data, a
// gathering Send is cheaper, although the call must wait for its completion.
const pullupMax = 4096

// gathers reports whether the device can send from memory that was not registered for Sends.
func (cn *conn) gathers() bool {
	return cn.dev.Attrs().Caps.Has(verbs.CapRegisterAny)
}

// gatherSend fills the Send with b, the arguments, and the data in the memory of the caller. The
// Send is signaled, and the call ends only after its completion (S8).
func (s *slot) gatherSend(cn *conn, b []byte) {
	m, n := s.msg, len(b)+s.msg.ArgDataPos
	b = append(b, m.Args[:m.ArgDataPos]...)
	for range sunrpc.Pad4(len(m.ArgData)) - len(m.ArgData) {
		b = append(b, 0)
	}
	b = append(b, m.Args[m.ArgDataPos:]...)
	s.sge[0] = verbs.SGE{Buf: b[:n:n], LKey: cn.sendLKey}
	s.sge[1] = verbs.SGE{Buf: m.ArgData}
	s.sge[2] = verbs.SGE{Buf: b[n:], LKey: cn.sendLKey}
	sges := s.sge[:3]
	if len(b) == n {
		sges = s.sge[:2]
	}
	s.sendWR.SGList, s.sendWR.Next = sges, nil
}

func (s *slot) fillSend(cn *conn, b []byte) {
	s.sge[0] = verbs.SGE{Buf: b, LKey: cn.sendLKey}
	s.sendWR.SGList = s.sge[:1]
	s.sendWR.Next = nil
}

// appendArgs appends the arguments, with or without their data.
func appendArgs(b []byte, m *sunrpc.Message, withData bool) []byte {
	b = append(b, m.Args[:m.ArgDataPos]...)
	if withData {
		b = append(b, m.ArgData...)
		for range sunrpc.Pad4(len(m.ArgData)) - len(m.ArgData) {
			b = append(b, 0)
		}
	}
	return append(b, m.Args[m.ArgDataPos:]...)
}

func (s *slot) marshalReplySide(cn *conn) error {
	m, h, t := s.msg, &s.hdr, s.t
	s.wchunk, s.rchunk = s.wchunk[:0], s.rchunk[:0]
	reply := rpcrdma.MinHeaderSize + sunrpc.AcceptedReplySize + m.MaxResult
	room := m.ResultRoom()
	data := sunrpc.Pad4(room)
	writeList := rpcrdma.ChunkHeadSize + (cn.params.MaxSegs+1)*rpcrdma.SegmentSize
	switch {
	case reply+data <= cn.inlineRecv:
		return nil
	case data > 0 && reply+writeList <= cn.inlineRecv:
		var err error
		segs := m.ResultPieces
		if len(segs) == 0 {
			s.single[0] = m.ResultData
			segs = s.single[:]
		}
		if s.wchunk, err = s.mapWrites(s.wchunk, segs); err != nil {
			return err
		}
		t.stats.WriteChunks.Add(uint64(len(s.wchunk)))
		t.stats.TotalRDMARequest.Add(uint64(room))
		if pad := cn.writePad; pad != nil && room%4 != 0 {
			s.wchunk = append(s.wchunk, *pad)
		}
		h.Writes = append(h.Writes, s.wchunk)
		return nil
	}
	size := sunrpc.MaxReplyHeader + m.MaxResult + data
	buf, err := s.getLong(&s.longReply, size)
	if err != nil {
		return err
	}
	s.single[0] = buf
	if s.rchunk, err = s.mapWrites(s.rchunk, s.single[:]); err != nil {
		return err
	}
	t.stats.ReplyChunks.Add(uint64(len(s.rchunk)))
	t.stats.TotalRDMARequest.Add(uint64(size))
	h.Reply, h.HasReply = s.rchunk, true
	return nil
}

// getLong stores a long buffer in *p and returns its first size bytes. The buffer of an earlier
// attempt was returned to the pool before.
func (s *slot) getLong(p *[]byte, size int) ([]byte, error) {
	if size > longBytes {
		return nil, &ProtocolError{Reason: fmt.Sprintf("message of %d bytes exceeds the largest long message, %d",
			size, longBytes)}
	}
	buf := s.t.long.TryGet()
	if buf == nil {
		return nil, errNoBuffer
	}
	s.mu.Lock()
	*p = buf
	s.mu.Unlock()
	return buf[:size], nil
}

// mapWrites registers segs for RDMA Writes of the server and appends the segments to c.
func (s *slot) mapWrites(c rpcrdma.Chunk, segs [][]byte) (rpcrdma.Chunk, error) {
	n, err := s.mrs.Map(segs, true, s.xid)
	if err != nil {
		return c, err
	}
	reg := s.mrs.Registered()
	for _, mr := range reg[len(reg)-n:] {
		c = append(c, rpcrdma.Segment{Handle: mr.Handle(), Length: mr.Length(), Offset: mr.Offset()})
	}
	return c, nil
}

// mapReads registers mem for RDMA Reads of the server and adds the segments to the Read list at
// position pos.
func (s *slot) mapReads(mem []byte, pos uint32) error {
	s.single[0] = mem
	n, err := s.mrs.Map(s.single[:], false, s.xid)
	if err != nil {
		return err
	}
	reg := s.mrs.Registered()
	for _, mr := range reg[len(reg)-n:] {
		s.hdr.Reads = append(s.hdr.Reads, rpcrdma.ReadSegment{Position: pos,
			Segment: rpcrdma.Segment{Handle: mr.Handle(), Length: mr.Length(), Offset: mr.Offset()}})
	}
	s.t.stats.ReadChunks.Add(uint64(n))
	return nil
}

// marshalLongCall conveys the whole call as a position-zero read chunk (RFC 8166 §3.5.3). The
// argument rest is the size of the call in bytes without its data.
func (s *slot) marshalLongCall(cn *conn, rest int) error {
	m, h := s.msg, &s.hdr
	buf, err := s.getLong(&s.longCall, rest+sunrpc.Pad4(len(m.ArgData)))
	if err != nil {
		return err
	}
	b := sunrpc.AppendCall(buf[:0], s.xid, m.Prog, m.Vers, m.Proc, m.Cred)
	b = appendArgs(b, m, true)
	s.t.stats.PullupCopyBytes.Add(uint64(len(b)))
	s.t.stats.NomsgCall.Add(1)
	h.Proc = rpcrdma.ProcNoMsg
	if err := s.mapReads(b, 0); err != nil {
		return err
	}
	if n := h.Size(); n > cn.inlineSend {
		return &ProtocolError{Reason: fmt.Sprintf(
			"transport header of %d bytes exceeds the inline threshold of the server, %d", n, cn.inlineSend)}
	}
	s.fillSend(cn, h.Append(s.send[:0]))
	return nil
}
