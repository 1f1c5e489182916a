package softiwarp

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// mssEvery is how many batches go by before the MSS is asked for again.
const mssEvery = 1024

// A transmitter is the writer goroutine of a QP: it executes the send queue in order and answers
// RDMA Read Requests, one whole message after the other (RFC 5041 §5.3).
type transmitter struct {
	q      *qp
	conn   *net.TCPConn
	b      batch
	mssCB  func(fd uintptr)
	mss    int
	mulpdu int
	toMSS  int // batches until the MSS is asked for again

	sendMSN  uint32
	readMSN  uint32
	from     uint32 // what runQueue executes
	tail     uint32
	open     bool // FPDUs may be sent
	answered bool // the last message was a Read Response: the send queue is next
	random   [stagSize]byte
}

func newTransmitter(q *qp, conn *net.TCPConn) (*transmitter, error) {
	t := &transmitter{q: q, conn: conn, sendMSN: firstMSN, readMSN: firstMSN}
	if err := t.b.init(conn); err != nil {
		return nil, err
	}
	t.mssCB = func(fd uintptr) {
		if n, err := unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_MAXSEG); err == nil {
			t.mss = n
		}
	}
	return t, nil
}

// setup reads what start has settled.
func (t *transmitter) setup() {
	t.b.crc = t.q.crc
	t.updateMULPDU()
}

// updateMULPDU derives the largest ULPDU from the MSS.
func (t *transmitter) updateMULPDU() {
	t.toMSS = mssEvery
	t.b.raw.Control(t.mssCB)
	emss := t.mss
	if limit := t.q.dev.cfg.MaxFPDU; limit > 0 && (limit < emss || !t.q.crc) {
		emss = limit
	}
	t.mulpdu = mulpdu(emss)
}

// mulpdu is the largest ULPDU whose FPDU fits in emss octets: RFC 5044 §4.5 without markers.
func mulpdu(emss int) int {
	return min(max(emss-(fpduLenSize+fpduCRCSize+emss%fpduAlign), minMULPDU+fpduLenSize), maxSentULPDU)
}

// work is what the writer does next.
type work uint8

const (
	workNone work = iota
	workQueue
	workRespond
)

func (t *transmitter) run() {
	q := t.q
	for {
		w, rr := t.wait()
		var err error
		switch w {
		case workNone:
			t.end()
			return
		case workQueue:
			t.answered = false
			err = t.runQueue()
		case workRespond:
			t.answered = true
			err = t.respond(&rr)
		}
		if err != nil {
			q.mu.Lock()
			if _, ok := t.b.atBoundary(); !ok {
				q.broken = true
			}
			q.mu.Unlock()
			if errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) {
				t.hearOut(q.streamError("write", err))
			}
			// no effect when a Terminate was decided on already
			q.fail(q.streamError("write", err), nil, false)
		}
	}
}

// hearOut lets the reader take what the peer sent before it reset the connection: its Terminate,
// most likely, which tells more than the reset does. The reader meets the end of the stream itself,
// at once; Linger is for nothing but safety.
func (t *transmitter) hearOut(err error) {
	q := t.q
	q.mu.Lock()
	q.sendErr = err
	q.mu.Unlock()
	timeout := time.After(q.dev.cfg.Linger)
	for !q.dead.Load() {
		select {
		case <-q.wake: // fail does, among others
		case <-timeout:
			return
		}
	}
}

// wait returns the next thing to do, workNone when the QP is dead, and takes what runQueue needs.
func (t *transmitter) wait() (work, readRequest) {
	q := t.q
	q.mu.Lock()
	defer q.mu.Unlock()
	for {
		if q.state == qpDead {
			return workNone, readRequest{}
		}
		queue := t.queueReady()
		switch {
		case q.txOpen && q.rrHead != q.rrTail && !(t.answered && queue):
			rr := q.rrq[q.rrHead&uint32(len(q.rrq)-1)]
			q.rrHead++
			return workRespond, rr
		case queue:
			t.from, t.tail, t.open = q.sqSent, q.sqTail, q.txOpen
			return workQueue, readRequest{}
		}
		t.answered = false
		q.txIdle = true
		q.mu.Unlock()
		<-q.wake
		q.mu.Lock()
		q.txIdle = false
	}
}

// queueReady reports whether the next send queue entry can be executed. Caller holds mu.
func (t *transmitter) queueReady() bool {
	q := t.q
	if q.sqSent == q.sqTail {
		return false
	}
	switch q.sq[q.sqSent&uint32(len(q.sq)-1)].op {
	case verbs.OpFastReg, verbs.OpLocalInv:
		return true
	case verbs.OpRDMARead:
		return q.txOpen && q.readTail-q.readHead < uint32(q.ord)
	}
	return q.txOpen
}

// runQueue executes the send queue entries that wait found, as far as possible without waiting for
// anything but the socket. Until flush says that they are executed, they are this goroutine's.
func (t *transmitter) runQueue() error {
	q, at, tail, open := t.q, t.from, t.tail, t.open
	t.b.begin()
	for at != tail {
		e := &q.sq[at&uint32(len(q.sq)-1)]
		if !open && e.op != verbs.OpFastReg && e.op != verbs.OpLocalInv {
			break
		}
		switch e.op {
		case verbs.OpFastReg:
			if !q.executeLocal(e) {
				return t.localFailure(at, e, verbs.StatusMWBindErr)
			}
		case verbs.OpLocalInv:
			// What was posted before must not find its memory gone.
			if err := t.flush(at); err != nil {
				return err
			}
			if !q.executeLocal(e) {
				return t.localFailure(at, e, verbs.StatusLocProtErr)
			}
		case verbs.OpSend, verbs.OpSendWithInv, verbs.OpRDMAWrite:
			if whole, err := t.message(at, e); err != nil || !whole {
				return err
			}
		case verbs.OpRDMARead:
			if !t.b.room(0) {
				if err := t.flush(at); err != nil {
					return err
				}
			}
			if !t.startRead(at, e) {
				return t.flush(at)
			}
		}
		at++
		if q.dead.Load() {
			break
		}
	}
	return t.flush(at)
}

// flush sends the batch; with it every entry before at is executed.
func (t *transmitter) flush(at uint32) error {
	if err := t.transmit(); err != nil {
		return err
	}
	q := t.q
	q.mu.Lock()
	q.sqSent = at
	q.reap()
	q.mu.Unlock()
	t.b.begin()
	return nil
}

// localFailure ends the connection over a request that could not be executed (RFC 5040 §7.1: no
// headers to quote).
func (t *transmitter) localFailure(at uint32, e *sqe, status verbs.Status) error {
	if err := t.flush(at); err != nil {
		return err
	}
	t.q.mu.Lock()
	e.status = status
	t.q.mu.Unlock()
	t.q.fail(termLocalCatastrophic.asError(true), &terminate{code: termLocalCatastrophic}, false)
	return nil
}

// message puts a Send or an RDMA Write into FPDUs. whole is false when the QP died in the middle of
// it: what is left is not sent, and the request is not executed.
func (t *transmitter) message(at uint32, e *sqe) (whole bool, err error) {
	hdr, op := untaggedHdr, uint8(opSend)
	switch e.op {
	case verbs.OpSendWithInv:
		op = opSendInv
	case verbs.OpRDMAWrite:
		hdr, op = taggedHdr, opWrite
	}
	var seg, in int // cursor in the SGE list
	for done := uint32(0); ; {
		if !t.b.room(len(e.sges)) {
			if err := t.flush(at); err != nil {
				return false, err
			}
			if t.q.dead.Load() {
				return false, nil
			}
		}
		n := int(min(e.length-done, uint32(t.mulpdu-hdr)))
		last := done+uint32(n) == e.length
		b := t.b.header(fpduLenSize + hdr)
		switch op {
		case opWrite:
			putTagged(b, op, last, uint32(e.rkey), e.raddr+uint64(done), n)
		case opSendInv:
			putUntagged(b, op, last, uint32(e.inv), qnSend, t.sendMSN, done, n)
		default:
			putUntagged(b, op, last, 0, qnSend, t.sendMSN, done, n)
		}
		t.b.closeHeader()
		for left := n; left > 0; {
			p := e.sges[seg].Buf[in:]
			p = p[:min(len(p), left)]
			if len(p) <= copyBelow {
				t.b.addCopy(p)
			} else {
				t.b.addRef(p)
			}
			left -= len(p)
			if in += len(p); in == len(e.sges[seg].Buf) {
				seg, in = seg+1, 0
			}
		}
		t.b.trailer(hdr + n)
		done += uint32(n)
		if last {
			break
		}
	}
	if op != opWrite {
		t.sendMSN++
	}
	return true, nil
}

// startRead puts an RDMA Read Request into the batch, unless as many as allowed are outstanding. A
// Read of no octets needs no wire.
func (t *transmitter) startRead(at uint32, e *sqe) bool {
	q := t.q
	if e.length == 0 {
		q.mu.Lock()
		e.readDone = true
		q.mu.Unlock()
		return true
	}
	rand.Read(t.random[:]) // never fails (crypto/rand)
	r := readRequest{
		msn: t.readMSN, sinkSTag: binary.BigEndian.Uint32(t.random[:]), size: e.length,
		srcSTag: uint32(e.rkey), srcTO: e.raddr,
	}
	q.mu.Lock()
	if q.readTail-q.readHead >= uint32(q.ord) {
		q.mu.Unlock()
		return false
	}
	// In the ring before it is on the wire: the response may overtake this goroutine.
	q.reads[q.readTail&uint32(len(q.reads)-1)] = outstandingRead{wr: at, msn: r.msn, stag: r.sinkSTag,
		buf: e.sges[0].Buf}
	q.readTail++
	q.mu.Unlock()
	t.readMSN++
	putReadRequest(t.b.header(maxHeaderSize), &r)
	t.b.closeHeader()
	t.b.trailer(readReqULPDU)
	return true
}

// respond answers an RDMA Read Request. The source is checked anew for every piece that is fetched.
func (t *transmitter) respond(rr *readRequest) error {
	q := t.q
	t.b.begin()
	var src grant
	if rr.size > 0 { // a Read of no octets needs no valid STag (RFC 5040 §5.2.1)
		var deny denial
		if src, deny = q.access(rr.srcSTag, rr.srcTO, uint64(rr.size), verbs.AccessRemoteRead); deny != granted {
			return t.refuseRead(rr, 0, deny.fetchCode())
		}
	}
	for done := uint32(0); ; {
		t.b.begin()
		n, ok := t.gatherResponse(rr, src, done)
		if !ok {
			return t.refuseRead(rr, done, termReadInvalidSTag)
		}
		if err := t.transmit(); err != nil {
			if sent, whole := t.b.atBoundary(); errors.Is(err, errRevoked) && whole {
				return t.refuseRead(rr, done+sent, termReadInvalidSTag)
			}
			return err
		}
		if done += n; done == rr.size || q.dead.Load() {
			break
		}
	}
	q.stats.ReadRequestsServed.Add(1)
	t.b.begin()
	return nil
}

// gatherResponse fills the batch with Read Response FPDUs from offset done on. It fails when the
// registration has ended.
func (t *transmitter) gatherResponse(rr *readRequest, src grant, done uint32) (gathered uint32, ok bool) {
	if rr.size > 0 {
		src.mr.mu.Lock()
		defer src.mr.mu.Unlock()
		if src.mr.gen != src.gen {
			return 0, false
		}
		t.b.src = src
	}
	for {
		left := int(min(rr.size-done-gathered, uint32(t.mulpdu-taggedHdr)))
		n := 0
		if left > 0 {
			n = t.b.coverable(src.mr, src.off+uint64(done+gathered), left)
		}
		last := done+gathered+uint32(n) == rr.size
		putTagged(t.b.header(fpduLenSize+taggedHdr), opReadResp, last, rr.sinkSTag, rr.sinkTO+uint64(done+gathered), n)
		t.b.closeHeader()
		t.b.addRegistered(src.mr, src.off+uint64(done+gathered), n)
		t.b.trailer(taggedHdr + n)
		gathered += uint32(n)
		if last || !t.b.room(minPieces) {
			return gathered, true
		}
	}
}

// minPieces is how much vector must be free before another Read Response FPDU is begun.
const minPieces = 8

// coverable is how many of n octets at off can be referred to with the vector elements that are
// left. Caller holds m.mu.
func (b *batch) coverable(m *mr, off uint64, n int) int {
	seg, in := m.find(off)
	covered := 0
	for free := maxIOV - b.niov - 2; free > 0 && covered < n; seg++ {
		if k := len(m.segs[seg]) - in; k > 0 {
			covered += k
			free--
		}
		in = 0
	}
	return min(covered, n)
}

// addRegistered appends n octets at off by reference. Caller holds m.mu.
func (b *batch) addRegistered(m *mr, off uint64, n int) {
	if n == 0 {
		return
	}
	seg, in := m.find(off)
	for n > 0 {
		p := m.segs[seg][in:]
		p = p[:min(len(p), n)]
		b.addRef(p)
		n -= len(p)
		seg, in = seg+1, 0
	}
}

// refuseRead ends the connection over a Read Request, quoting it past what was served (RFC 5040
// §4.8).
func (t *transmitter) refuseRead(rr *readRequest, served uint32, code termCode) error {
	q := t.q
	t.b.begin()
	q.stats.RemoteAccessErrors.Add(1)
	at := *rr
	at.srcTO += uint64(served)
	at.size -= served
	term := &terminate{code: code}
	term.quoteRead(&at)
	q.fail(code.asError(true), term, false)
	return nil
}

// transmit sends the batch and keeps the accounts.
func (t *transmitter) transmit() error {
	if t.b.total == 0 {
		return nil
	}
	if err := t.b.send(); err != nil {
		return err
	}
	t.q.stats.BytesSent.Add(uint64(t.b.payload))
	if t.toMSS--; t.toMSS <= 0 {
		t.updateMULPDU()
	}
	return nil
}

// end closes this half of the stream: a Terminate if there is one, then FIN.
func (t *transmitter) end() {
	q := t.q
	q.leaveMemory()
	q.mu.Lock()
	term, broken := q.term, q.broken
	q.mu.Unlock()
	if !broken {
		if term != nil {
			t.b.begin()
			var b [fpduLenSize + maxTermULPDU]byte
			n := term.encode(b[:])
			copy(t.b.header(n), b[:n])
			t.b.closeHeader()
			t.b.trailer(n - fpduLenSize)
			if t.b.send() == nil {
				q.stats.TerminatesSent.Add(1)
			}
		}
		t.conn.CloseWrite()
	}
	q.leaveSocket()
}
