package softiwarp

import (
	"errors"
	"hash/crc32"
	"io"
	"net"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// errRefused means that the QP has failed because of the peer's data. The rest of the stream is
// discarded.
var errRefused = errors.New("softiwarp: stream refused")

// A receiver is the reader goroutine of a QP. A receiver parses the stream, places payload and
// completes Receives and RDMA Reads.
type receiver struct {
	q  *qp
	in intake
	h  header

	expect   [numQueues]uint32 // next MSN of each untagged queue
	inSend   bool              // between the segments of a Send
	sendLen  uint32            // bytes of it placed so far
	received bool              // the first FPDU has arrived
}

func newReceiver(q *qp, conn *net.TCPConn) (*receiver, error) {
	x := &receiver{q: q, expect: [numQueues]uint32{firstMSN, firstMSN, firstMSN}}
	if err := x.in.init(conn); err != nil {
		return nil, err
	}
	return x, nil
}

func (x *receiver) run() {
	q := x.q
	var err error
	for err == nil && !q.dead.Load() {
		err = x.fpdu()
	}
	if err != nil && err != errRefused {
		q.fail(q.readError(err), nil, false)
	}
	q.leaveMemory()
	if err == nil || err == errRefused || q.dead.Load() && !errors.Is(err, io.EOF) {
		// This side ends the connection. Unread data would make TCP reset it before the peer has
		// received the last message, so read to the end (RFC 5040 §6.2.1).
		q.mu.Lock() // fail sets its deadline under mu, so this one is later
		q.conn.SetReadDeadline(time.Now().Add(q.dev.cfg.Linger))
		q.mu.Unlock()
		x.in.discard()
	}
	q.leaveSocket()
}

// refuse ends the connection with a Terminate. hdr, if not nil, is the refused segment from its
// length field on.
func (x *receiver) refuse(code termCode, hdr []byte) error {
	t := &terminate{code: code}
	if hdr != nil {
		t.quote(hdr, &x.h)
	}
	x.q.fail(code.asError(true), t, false)
	return errRefused
}

// fpdu receives one FPDU.
func (x *receiver) fpdu() error {
	if err := x.in.need(fpduLenSize); err != nil {
		if errors.Is(err, io.EOF) && (x.in.w > x.in.r || x.inSend) {
			return io.ErrUnexpectedEOF
		}
		return err
	}
	if err := x.body(); err != nil {
		if errors.Is(err, io.EOF) {
			return io.ErrUnexpectedEOF
		}
		return err
	}
	if !x.received {
		x.received = true
		x.q.firstFPDU()
	}
	return nil
}

// firstFPDU allows this side to send. A responder sends nothing before the peer's first FPDU (RFC
// 5044 §7.1.2).
func (q *qp) firstFPDU() {
	q.mu.Lock()
	q.mu.txOpen = true
	wake := q.writerNeeded()
	q.mu.Unlock()
	if wake {
		q.wakeWriter()
	}
}

// body receives an FPDU whose length field is in the buffer.
func (x *receiver) body() error {
	in := &x.in
	ulpdu := int(in.buf[in.r])<<8 | int(in.buf[in.r+1])
	tail := padding(ulpdu) + fpduCRCSize
	in.noteSize(fpduLenSize + ulpdu + tail)
	if x.q.crc {
		// An FPDU is not used before its CRC is verified (RFC 5044 §4.4).
		if err := in.need(fpduLenSize + ulpdu + tail); err != nil {
			return err
		}
		p := in.buf[in.r : in.r+fpduLenSize+ulpdu+tail]
		if sum := len(p) - fpduCRCSize; crc32.Checksum(p[:sum], castagnoli) != getCRC(p[sum:]) {
			return x.refuse(termCRC, nil)
		}
	}
	if ulpdu < ctrlSize {
		return x.refuse(termFPDULength, nil)
	}
	if err := in.need(fpduLenSize + ctrlSize); err != nil {
		return err
	}
	h := &x.h
	*h = header{}
	h.parseControl(in.buf[in.r:])
	if ulpdu < h.size() {
		return x.refuse(termFPDULength, nil)
	}
	if err := in.need(fpduLenSize + h.size()); err != nil {
		return err
	}
	hdr := in.buf[in.r : in.r+fpduLenSize+h.size()]
	h.parseRest(hdr)
	if code, bad := h.check(); bad {
		return x.refuse(code, hdr)
	}
	x.q.stats.BytesReceived.Add(uint64(ulpdu - h.size()))
	switch {
	case h.op == opWrite:
		return x.write(hdr, tail)
	case h.op == opReadResp:
		return x.readResponse(hdr, tail)
	case h.qn == qnSend:
		return x.send(hdr, tail)
	case h.qn == qnReadReq:
		return x.readRequest(tail)
	}
	return x.terminate(hdr, tail)
}

// check validates the fields that need no state: versions, opcode and queue (RFC 5041 §7.1, RFC
// 5040 §7.2).
func (h *header) check() (code termCode, bad bool) {
	switch {
	case h.ctrl&ctrlDVMask != ctrlDV1 && h.tagged:
		return termTaggedVersion, true
	case h.ctrl&ctrlDVMask != ctrlDV1:
		return termUntaggedVersion, true
	case !h.tagged && h.qn >= numQueues:
		return termUntaggedQN, true
	case h.ctrl&ctrlRVMask != ctrlRV1:
		return termRDMAPVersion, true
	}
	var fits bool
	switch h.op {
	case opWrite, opReadResp:
		fits = h.tagged
	case opSend, opSendInv, opSendSE, opSendSEInv:
		fits = !h.tagged && h.qn == qnSend
	case opReadRequest:
		fits = !h.tagged && h.qn == qnReadReq
	case opTerminate:
		fits = !h.tagged && h.qn == qnTerminate
	}
	return termOpcode, !fits
}

// take consumes the header.
func (x *receiver) take(hdr []byte) { x.in.r += len(hdr) }

// trailer consumes pad and CRC.
func (x *receiver) trailer(tail int) error {
	if err := x.in.need(tail); err != nil {
		return err
	}
	x.in.r += tail
	return nil
}

// write places a segment of an RDMA Write.
func (x *receiver) write(hdr []byte, tail int) error {
	h := x.h
	n := h.ulpdu - taggedHdr
	if n == 0 { // a Write of zero bytes is not checked: RFC 5041 §5.2
		x.take(hdr)
		return x.trailer(tail)
	}
	g, deny := x.q.access(h.stag, h.to, uint64(n), verbs.AccessRemoteWrite)
	if deny != granted {
		x.q.stats.RemoteAccessErrors.Add(1)
		return x.refuse(deny.placementCode(), hdr)
	}
	x.take(hdr)
	return x.placed(sink{src: g, n: n}, tail)
}

// placed places payload and consumes the trailer.
func (x *receiver) placed(s sink, tail int) error {
	err := x.in.place(s)
	if err == errRevoked {
		x.q.stats.RemoteAccessErrors.Add(1)
		return x.refuse(termTaggedInvalidSTag, x.rebuildHeader())
	}
	if err != nil {
		return err
	}
	return x.trailer(tail)
}

// rebuildHeader encodes the current tagged header again, because its buffer may have been reused.
func (x *receiver) rebuildHeader() []byte {
	b := make([]byte, fpduLenSize+taggedHdr)
	putTagged(b, x.h.op, x.h.last, x.h.stag, x.h.to, x.h.ulpdu-taggedHdr)
	return b
}

// readResponse places a segment of an RDMA Read Response into the sink of the oldest outstanding
// RDMA Read.
func (x *receiver) readResponse(hdr []byte, tail int) error {
	q, h := x.q, x.h
	n := uint32(h.ulpdu - taggedHdr)
	q.mu.Lock()
	if q.mu.reads.Len() == 0 {
		q.mu.Unlock()
		return x.refuse(termOpcode, hdr)
	}
	r := q.mu.reads.At(q.mu.reads.Head) // stays valid: only this goroutine removes it
	q.mu.Unlock()
	left := uint32(len(r.buf)) - r.got
	var code termCode
	switch {
	case h.stag != r.stag:
		code = termTaggedInvalidSTag
	case h.to != uint64(r.got) || n > left:
		code = termTaggedBounds
	case h.last != (n == left):
		code = termUnspecified
	default:
		x.take(hdr)
		if err := x.placed(sink{buf: r.buf[r.got:], n: int(n)}, tail); err != nil {
			return err
		}
		if r.got += n; h.last {
			x.finishRead(r)
		}
		return nil
	}
	x.failRead(r, verbs.StatusBadRespErr)
	q.stats.RemoteAccessErrors.Add(1)
	return x.refuse(code, hdr)
}

// finishRead completes the oldest RDMA Read and invalidates its sink STag.
func (x *receiver) finishRead(r *outstandingRead) {
	q := x.q
	q.mu.Lock()
	q.mu.sq.At(r.wr).readDone = true
	*r = outstandingRead{}
	q.mu.reads.Head++
	pushed := q.reap()
	wake := q.writerNeeded()
	q.mu.Unlock()
	if wake {
		q.wakeWriter()
	}
	if pushed {
		q.completed(q.sendCQ)
	}
}

// failRead sets the status that the RDMA Read r completes with.
func (x *receiver) failRead(r *outstandingRead, status verbs.Status) {
	x.q.mu.Lock()
	x.q.mu.sq.At(r.wr).status = status
	x.q.mu.Unlock()
}

// send places a segment of a Send and completes the Receive with the last one.
func (x *receiver) send(hdr []byte, tail int) error {
	q, h := x.q, x.h
	n := h.ulpdu - untaggedHdr
	if h.msn != x.expect[qnSend] {
		return x.refuse(termMSNRange, hdr)
	}
	if !x.inSend {
		if h.mo != 0 {
			return x.refuse(termMO, hdr)
		}
		if q.rtr && !x.received && n == 0 && h.last {
			// The ready-to-receive indication is part of connection set-up and consumes no Receive
			// (RFC 6581 §4.4.2).
			x.take(hdr)
			x.expect[qnSend]++
			return x.trailer(tail)
		}
		if !q.takeRecv() {
			if q.dead.Load() {
				return nil
			}
			return x.refuse(termNoBuffer, hdr)
		}
		x.inSend, x.sendLen = true, 0
	}
	if h.mo != x.sendLen {
		return x.refuse(termMO, hdr)
	}
	if n > len(q.current.buf)-int(x.sendLen) {
		q.currentStatus = verbs.StatusLocLenErr
		return x.refuse(termTooLong, hdr)
	}
	x.take(hdr)
	if err := x.placed(sink{buf: q.current.buf[x.sendLen:], n: n}, tail); err != nil {
		return err
	}
	x.sendLen += uint32(n)
	if !h.last {
		return nil
	}
	return x.deliver()
}

// deliver completes the Receive of a whole Send, after the invalidation that the Send requests (RFC
// 5040 §5.3).
func (x *receiver) deliver() error {
	q, h := x.q, &x.h
	wc := verbs.WorkCompletion{ByteLen: x.sendLen}
	if h.op == opSendInv || h.op == opSendSEInv {
		if m := q.dev.table.lookup(h.stag); m == nil || !m.invalidateRemote(q, h.stag) {
			q.currentStatus = verbs.StatusLocProtErr
			var hdr [fpduLenSize + untaggedHdr]byte
			putUntagged(hdr[:], h.op, h.last, h.stag, h.qn, h.msn, h.mo, h.ulpdu-untaggedHdr)
			return x.refuse(termCannotInvalidate, hdr[:])
		}
		q.stats.RemoteInvalidates.Add(1)
		wc.WithInv, wc.InvalidatedRKey = true, verbs.RKey(h.stag)
	}
	x.expect[qnSend]++
	x.inSend = false
	q.completeRecv(&q.current, &wc)
	q.completed(q.recvCQ)
	return nil
}

// readRequest queues an RDMA Read Request for the writer.
func (x *receiver) readRequest(tail int) error {
	in, h, q := &x.in, x.h, x.q
	if h.ulpdu < readReqULPDU {
		return x.refuse(termFPDULength, nil)
	}
	if err := in.need(maxHeaderSize); err != nil {
		return err
	}
	hdr := in.buf[in.r : in.r+maxHeaderSize]
	switch {
	case h.msn != x.expect[qnReadReq]:
		return x.refuse(termMSNRange, hdr)
	case h.mo != 0:
		return x.refuse(termMO, hdr)
	case h.ulpdu > readReqULPDU || !h.last:
		return x.refuse(termTooLong, hdr)
	}
	rr := readRequest{msn: h.msn}
	rr.parseRDMAP(hdr[fpduLenSize+untaggedHdr:])
	q.mu.Lock()
	if q.mu.rrq.Full() {
		q.mu.Unlock()
		return x.refuse(termNoBuffer, hdr)
	}
	q.mu.rrq.Push(rr)
	wake := q.writerNeeded()
	q.mu.Unlock()
	if wake {
		q.wakeWriter()
	}
	x.expect[qnReadReq]++
	x.take(hdr)
	return x.trailer(tail)
}

// terminate handles the peer's Terminate, which ends the stream (RFC 5040 §5.4).
func (x *receiver) terminate(hdr []byte, tail int) error {
	in, h, q := &x.in, x.h, x.q
	switch {
	case h.msn != x.expect[qnTerminate]:
		return x.refuse(termMSNRange, hdr)
	case h.mo != 0:
		return x.refuse(termMO, hdr)
	}
	if err := in.need(fpduLenSize + h.ulpdu + tail); err != nil {
		return err
	}
	code, readMSN := decodeTerminate(in.buf[in.r+fpduLenSize+untaggedHdr : in.r+fpduLenSize+h.ulpdu])
	q.stats.TerminatesReceived.Add(1)
	x.failNamedRead(code, readMSN)
	q.fail(code.asError(false), nil, false)
	return errRefused
}

// failNamedRead sets the status of the RDMA Read that a Terminate names.
func (x *receiver) failNamedRead(code termCode, msn uint32) {
	if code.layer != layerRDMAP || code == termCannotInvalidate {
		return
	}
	status := verbs.StatusRemOpErr
	if code.etype == termReadInvalidSTag.etype {
		status = verbs.StatusRemAccessErr
	}
	q := x.q
	q.mu.Lock()
	defer q.mu.Unlock()
	for i := q.mu.reads.Head; i != q.mu.reads.Tail; i++ {
		r := q.mu.reads.At(i)
		if r.msn == msn || msn == 0 { // the Terminate names no Read: take the oldest
			q.mu.sq.At(r.wr).status = status
			return
		}
	}
}
