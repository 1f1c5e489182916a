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

// mssInterval is the number of batches between two queries of the MSS.
const mssInterval = 1024

// inlineBytes is the size of the largest request that the goroutine of a poster sends. It bounds
// the time of PostSend.
const inlineBytes = 32 << 10

// inlineRounds is how many batches a poster sends while other goroutines post more.
const inlineRounds = 4

// A transmitter executes the send queue in order and answers RDMA Read Requests. It sends one whole
// message after the other (RFC 5041 §5.3). Two kinds of goroutines use it, one at a time: the
// writer, which may wait for the socket, and posters of small requests, which do not. The one that
// uses it has set qp.mu.txBusy. What a poster cannot finish, the writer continues (unsent).
//
//	        PostSend, small request            work, or a poster left work
//	poster  <----------------------  (free)  ------------------------------->  writer
//	        ---------------------->          <-------------------------------
//	         done, or socket full                        no work
type transmitter struct {
	q      *qp
	conn   *net.TCPConn
	b      batch
	mssCB  func(fd uintptr)
	mss    int
	mulpdu int
	toMSS  int // batches until the next query of the MSS

	sendMSN  uint32
	readMSN  uint32
	from     uint32 // first entry for runQueue
	tail     uint32
	open     bool   // FPDUs may be sent
	at       uint32 // entries before it are executed when the batch is sent
	done     uint32 // entries before it are executed
	unsent   bool   // a poster left a part of the batch, or failed with err
	err      error
	answered bool // the last message was a Read Response, so the send queue is next
	random   [stagSize]byte
}

func newTransmitter(q *qp, conn *net.TCPConn) (*transmitter, error) {
	t := &transmitter{q: q, conn: conn, sendMSN: firstMSN, readMSN: firstMSN}
	if err := t.b.init(conn); err != nil {
		return nil, err
	}
	t.b.attempt = t.attempt
	t.mssCB = func(fd uintptr) {
		if n, err := unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_MAXSEG); err == nil {
			t.mss = n
		}
	}
	return t, nil
}

// setup reads the parameters that start has set.
func (t *transmitter) setup() {
	t.b.crc = t.q.crc
	t.updateMULPDU()
}

// updateMULPDU derives the largest ULPDU from the MSS.
func (t *transmitter) updateMULPDU() {
	t.toMSS = mssInterval
	t.b.raw.Control(t.mssCB)
	emss := t.mss
	if limit := t.q.dev.cfg.MaxFPDU; limit > 0 && (limit < emss || !t.q.crc) {
		emss = limit
	}
	t.mulpdu = mulpdu(emss)
}

// mulpdu returns the size of the largest ULPDU whose FPDU fits in emss bytes (RFC 5044 §4.5,
// without markers).
func mulpdu(emss int) int {
	return min(max(emss-(fpduLenSize+fpduCRCSize+emss%fpduAlign), minMULPDU+fpduLenSize), maxSentULPDU)
}

// work is the next task of the writer.
type work uint8

const (
	workNone work = iota
	workUnsent
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
		case workUnsent:
			err = t.finishUnsent()
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
				q.mu.broken = true
			}
			q.mu.Unlock()
			if errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) {
				t.waitForReader(q.streamError("write", err))
			}
			// no effect when the QP has already failed
			q.fail(q.streamError("write", err), nil, false)
		}
	}
}

// waitForReader lets the reader read the data that the peer sent before it reset the connection.
// The data is usually a Terminate, which explains more than the reset. The reader sees the end of
// the stream at once; Linger is only an upper bound.
func (t *transmitter) waitForReader(err error) {
	q := t.q
	q.mu.Lock()
	q.mu.sendErr = err
	q.mu.Unlock()
	timeout := time.After(q.dev.cfg.Linger)
	for !q.dead.Load() {
		select {
		case <-q.wake: // fail wakes the writer
		case <-timeout:
			return
		}
	}
}

// wait is called by the writer. It waits for work and returns it; workNone means that the QP is
// dead. If the work is workQueue, wait sets the range of entries to execute.
func (t *transmitter) wait() (work, readRequest) {
	q := t.q
	q.mu.Lock()
	defer q.mu.Unlock()
	q.mu.sq.claimed = q.mu.sq.sent
	for q.mu.txBusy = false; ; {
		if !q.mu.txBusy {
			if w, rr := t.next(); w != workNone || q.mu.state == qpDead {
				q.mu.txBusy = true
				return w, rr
			}
			t.answered = false
		}
		q.mu.Unlock()
		<-q.wake
		q.mu.Lock()
	}
}

// next returns the next work of the writer. The caller holds mu, and txBusy is false.
func (t *transmitter) next() (work, readRequest) {
	q := t.q
	if t.unsent { // first: a Terminate may follow only a whole FPDU
		return workUnsent, readRequest{}
	}
	if q.mu.state == qpDead {
		return workNone, readRequest{}
	}
	queue := q.queueReady()
	switch {
	case q.responseReady() && !(t.answered && queue):
		rr := *q.mu.rrq.At(q.mu.rrq.Head)
		q.mu.rrq.Head++
		return workRespond, rr
	case queue:
		t.claim()
		return workQueue, readRequest{}
	}
	return workNone, readRequest{}
}

// claim takes all entries of the send queue for runQueue. The caller holds mu.
func (t *transmitter) claim() {
	q := t.q
	t.from, t.tail, t.open = q.mu.sq.sent, q.mu.sq.Tail, q.mu.txOpen
	t.at, t.done = t.from, t.from // nothing is in the batch
	q.mu.sq.claimed = t.tail
}

// writerNeeded reports whether the writer has work that no other goroutine will do. The caller
// holds mu.
func (q *qp) writerNeeded() bool {
	return !q.mu.txBusy && q.mu.state == qpReady && (q.tx.unsent || q.responseReady() || q.queueReady())
}

// responseReady reports whether a Read Request can be answered. The caller holds mu.
func (q *qp) responseReady() bool { return q.mu.txOpen && q.mu.rrq.Len() > 0 }

// queueReady reports whether the next send queue entry can be executed. The caller holds mu.
func (q *qp) queueReady() bool {
	if q.mu.sq.sent == q.mu.sq.Tail {
		return false
	}
	switch e := q.mu.sq.At(q.mu.sq.sent); {
	case e.local():
		return true
	case e.op == verbs.OpRDMARead:
		return q.mu.txOpen && !q.mu.reads.Full()
	}
	return q.mu.txOpen
}

// runQueue executes the send queue entries from t.from to t.tail. It stops at an entry that must
// wait for the peer. Until flush marks the entries as executed, only this goroutine accesses them.
//
// The writer waits for the socket. A poster fills one batch with whole entries, and stops at an
// entry that does not fit or that only the writer may execute.
func (t *transmitter) runQueue() error {
	q, at, tail, open, poster := t.q, t.from, t.tail, t.open, t.b.nowait
	t.b.begin()
	for at != tail {
		e := q.mu.sq.At(at)
		if !open && !e.local() {
			break
		}
		if poster && !t.fitsWhole(e) {
			break
		}
		switch op := e.op; {
		case e.withdrawn:
		case op == verbs.OpFastReg:
			if !q.executeLocal(e) {
				return t.localFailure(at, e, verbs.StatusMWBindErr)
			}
		case op == verbs.OpLocalInv:
			// Earlier requests may still use the memory.
			if err := t.flush(at); err != nil {
				return err
			}
			if !q.executeLocal(e) {
				return t.localFailure(at, e, verbs.StatusLocProtErr)
			}
		case op == verbs.OpSend, op == verbs.OpSendWithInv, op == verbs.OpRDMAWrite:
			if whole, err := t.message(at, e); err != nil || !whole {
				return err
			}
		case op == verbs.OpRDMARead:
			if !t.b.fits(0) {
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

// flush sends the batch and marks every entry before at as executed.
func (t *transmitter) flush(at uint32) error {
	t.at = at
	if err := t.transmit(); err != nil {
		return err
	}
	q := t.q
	q.mu.Lock()
	q.mu.sq.sent, t.done = at, at
	pushed := q.reap()
	q.mu.Unlock()
	if pushed {
		q.sendCQ.wake()
	}
	t.b.begin()
	return nil
}

// attempt calls OnWrite of the Sends in the batch, before each system call that writes it.
func (t *transmitter) attempt() {
	for i := t.done; int32(t.at-i) > 0; i++ { // positions wrap
		if e := t.q.mu.sq.At(i); e.onWrite != nil && !e.withdrawn {
			e.onWrite()
		}
	}
}

// localFailure ends the connection because a request could not be executed. The Terminate quotes no
// headers (RFC 5040 §7.1).
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

// message encodes a Send or an RDMA Write as FPDUs. whole is false when the QP failed during the
// message; then the rest is not sent and the request is not executed.
func (t *transmitter) message(at uint32, e *sqe) (whole bool, err error) {
	hdr, op := untaggedHdr, uint8(opSend)
	switch e.op {
	case verbs.OpSendWithInv:
		op = opSendInv
	case verbs.OpRDMAWrite:
		hdr, op = taggedHdr, opWrite
	}
	var seg, in int // position in the SGE list
	for done := uint32(0); ; {
		if !t.b.fits(len(e.sges)) {
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

// startRead adds an RDMA Read Request to the batch. startRead returns false when the limit of
// outstanding Reads is reached. A Read of zero bytes completes without a Read Request.
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
	if q.mu.reads.Full() {
		q.mu.Unlock()
		return false
	}
	// The response may arrive before this goroutine continues, so the entry comes first.
	q.mu.reads.Push(outstandingRead{wr: at, msn: r.msn, stag: r.sinkSTag, buf: e.sges[0].Buf})
	q.mu.Unlock()
	t.readMSN++
	putReadRequest(t.b.header(maxHeaderSize), &r)
	t.b.closeHeader()
	t.b.trailer(readReqULPDU)
	return true
}

// respond answers an RDMA Read Request. respond checks the registration again for every batch.
func (t *transmitter) respond(rr *readRequest) error {
	q := t.q
	t.b.begin()
	var src grant
	if rr.size > 0 { // a Read of zero bytes needs no valid STag (RFC 5040 §5.2.1)
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

// gatherResponse fills the batch with Read Response FPDUs from offset done on, and returns the
// number of bytes. ok is false when the registration has ended.
func (t *transmitter) gatherResponse(rr *readRequest, src grant, done uint32) (gathered uint32, ok bool) {
	if rr.size > 0 {
		src.mr.mu.Lock()
		defer src.mr.mu.Unlock()
		if src.mr.mu.gen != src.gen {
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
		if last || !t.b.fits(minPieces) {
			return gathered, true
		}
	}
}

// minPieces is how many vector elements must be free to start another Read Response FPDU.
const minPieces = 8

// coverable returns how many of the n bytes at off fit into the free vector elements. The caller
// holds m.mu.
func (b *batch) coverable(m *mr, off uint64, n int) int {
	seg, in := m.find(off)
	covered := 0
	for free := maxIOV - b.niov - 2; free > 0 && covered < n; seg++ {
		if k := len(m.mu.segs[seg]) - in; k > 0 {
			covered += k
			free--
		}
		in = 0
	}
	return min(covered, n)
}

// addRegistered appends the n bytes at off of m as payload, without a copy. The caller holds m.mu.
func (b *batch) addRegistered(m *mr, off uint64, n int) {
	if n == 0 {
		return
	}
	seg, in := m.find(off)
	for n > 0 {
		p := m.mu.segs[seg][in:]
		p = p[:min(len(p), n)]
		b.addRef(p)
		n -= len(p)
		seg, in = seg+1, 0
	}
}

// refuseRead ends the connection because of a Read Request. The Terminate quotes the request,
// advanced by the served bytes (RFC 5040 §4.8).
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

// transmit sends the batch and updates the counters.
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

// end sends the Terminate, if any, and a FIN.
func (t *transmitter) end() {
	q := t.q
	q.leaveMemory()
	t.done = t.at // nothing of the queue is sent any more
	q.mu.Lock()
	term, broken := q.mu.term, q.mu.broken
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
