package softiwarp

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/selfcheck"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/internal/base"
)

// qpState of a queue pair.
//
//	┌──────┐  start   ┌───────┐  fail   ┌──────┐  reader and writer   ┌─────────┐
//	│ init │ ───────▶ │ ready │ ──────▶ │ dead │ ───────────────────▶ │ flushed │
//	└──┬───┘          └───────┘         └──────┘  are off the memory  └────┬────┘
//	   │ fail (never connected)                                           │ Terminate, FIN,
//	   └───────────────────────────────────────────────────────────▶      ▼ bounded linger
//	                                                                    closed
type qpState uint8

const (
	qpInit qpState = iota
	qpReady
	qpDead
)

// An sqe is one entry of the send queue.
type sqe struct {
	op        verbs.Opcode
	signaled  bool
	withdrawn bool               // the request has no effect
	readDone  bool               // an RDMA Read whose response is complete
	wr        *verbs.WorkRequest // as posted, for Withdraw; only compared
	status    verbs.Status       // status if the connection fails; StatusSuccess means flush error
	done      func(*verbs.WorkCompletion)
	onWrite   func()      // as posted; nil for none
	sges      []verbs.SGE // in an array of the QP
	length    uint32
	raddr     uint64
	rkey      verbs.RKey
	inv       verbs.RKey
	mr        *mr
	newKey    uint8
	access    verbs.Access
	iova      uint64
	segs      [][]byte
}

// An rqe is one entry of the receive queue.
type rqe struct {
	buf  []byte
	done func(*verbs.WorkCompletion)
}

// An outstandingRead is an RDMA Read that waits for its response. The sink STag exists only in this
// entry, so no RDMA Write can use the STag. The STag becomes invalid when the entry is removed.
type outstandingRead struct {
	wr   uint32 // send queue position
	msn  uint32
	stag uint32
	buf  []byte
	got  uint32 // placed bytes; used only by the reader
}

// A qp is a reliable connection: its queues, the negotiated depths, and the two goroutines of its
// stream.
//
// Lock order: mu, then an MR's lock; mu, then a CQ's lock; rq, then a CQ's lock.
type qp struct {
	dev      *device
	pd       *protectionDomain
	attr     verbs.QPInitAttr
	sendCQ   *completionQueue
	recvCQ   *completionQueue
	reserved base.Reservation
	checks   base.PostChecks

	conn *net.TCPConn // set by start, as the four fields below
	crc  bool
	rtr  bool // the peer's first message may be a zero-length Send that consumes no Receive
	ird  int
	ord  int

	sqUsed   atomic.Int32 // used slots: posted, and the completion is not dispatched
	rqUsed   atomic.Int32
	inflight sync.WaitGroup // requests whose handler has not returned
	dead     atomic.Bool    // equals mu.state == qpDead; read without mu
	users    atomic.Int32   // goroutines that may access consumer memory
	io       atomic.Int32   // goroutines that use the socket

	tx      *transmitter  // set by start; used by the goroutine that has set txBusy
	wake    chan struct{} // wakes the writer, capacity 1
	flushed chan struct{} // closed when all requests have completed
	ioDone  chan struct{} // closed when the socket is closed

	mu struct { // guards its fields
		sync.Mutex
		state   qpState
		cause   error
		local   bool
		term    *terminate // to be sent
		broken  bool       // an FPDU was sent in part, so nothing more may be sent
		sendErr error      // error of the writer; the reader reports it unless it finds a better cause
		txBusy  bool       // a goroutine uses tx: the writer or a poster
		txOpen  bool       // FPDUs may be sent; a responder first waits for an FPDU of the peer

		sq struct {
			base.Ring[sqe]
			sent uint32 // entries before it are on the wire or executed
			// claimed is the end of the entries that the goroutine with txBusy executes, if it is
			// after sent. A batch that a poster left also claims its entries.
			claimed uint32
		}
		reads base.Ring[outstandingRead]
		rrq   base.Ring[readRequest] // inbound Read Requests
	}

	rq struct { // guards its fields
		sync.Mutex
		closed bool
		base.Ring[rqe]
	}

	current       rqe // used only by the reader: the Receive of the current message
	currentStatus verbs.Status

	stats base.Counters
}

// newQP creates a QP in the init state.
func newQP(d *device, vpd verbs.PD, attr verbs.QPInitAttr) (*qp, error) {
	pd, ok := vpd.(*protectionDomain)
	if !ok || pd.dev != d {
		return nil, fmt.Errorf("softiwarp: create QP: the protection domain belongs to another device: %w",
			verbs.ErrInvalid)
	}
	scq, ok1 := attr.SendCQ.(*completionQueue)
	rcq, ok2 := attr.RecvCQ.(*completionQueue)
	if !ok1 || !ok2 || scq.dev != d || rcq.dev != d {
		return nil, fmt.Errorf("softiwarp: create QP: a completion queue belongs to another device: %w",
			verbs.ErrInvalid)
	}
	if err := base.CheckQPAttr(Name, &attr, d.Attrs()); err != nil {
		return nil, err
	}
	reserved, err := base.Reserve(&pd.uses, scq.entries, rcq.entries, attr)
	if err != nil {
		return nil, err
	}
	q := &qp{
		dev: d, pd: pd, attr: attr, sendCQ: scq, recvCQ: rcq, reserved: reserved,
		checks: base.PostChecks{Provider: Name, MaxSendSGE: attr.MaxSendSGE, MaxMessage: maxMessageLen},
		wake:   make(chan struct{}, 1), flushed: make(chan struct{}), ioDone: make(chan struct{}),
	}
	q.rq.Ring = base.NewRing[rqe](attr.MaxRecvWR)
	q.mu.sq.Ring = base.NewRing[sqe](attr.MaxSendWR)
	slots := q.mu.sq.Slots()
	sges := make([]verbs.SGE, len(slots)*attr.MaxSendSGE)
	for i := range slots {
		slots[i].sges, sges = sges[:0:attr.MaxSendSGE], sges[attr.MaxSendSGE:]
	}
	selfcheck.Track(selfcheck.QP, 1)
	return q, nil
}

// A stream is an established MPA connection.
type stream struct {
	conn   *net.TCPConn
	crc    bool
	active bool
	rtr    bool
	depths depths
}

// start makes the QP ready and starts its reader and writer. start returns false when the QP is not
// in the init state.
func (q *qp) start(s stream) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.mu.state != qpInit {
		return false
	}
	tx, err1 := newTransmitter(q, s.conn)
	rx, err2 := newReceiver(q, s.conn)
	if err1 != nil || err2 != nil {
		return false
	}
	q.conn, q.crc, q.rtr, q.tx = s.conn, s.crc, s.rtr, tx
	q.ird, q.ord = s.depths.ird, s.depths.ord
	q.mu.rrq = base.NewRing[readRequest](q.ird)
	q.mu.reads = base.NewRing[outstandingRead](q.ord)
	q.mu.txOpen = s.active
	q.mu.txBusy = true // the writer
	q.mu.state = qpReady
	q.users.Store(2)
	q.io.Store(2)
	tx.setup()
	go tx.run()
	go rx.run()
	return true
}

// started reports whether the QP owns a TCP connection.
func (q *qp) started() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.conn != nil
}

// wakeWriter wakes the writer if it waits. The caller does not hold mu.
func (q *qp) wakeWriter() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// fail moves the QP to the error state. Only the first call has an effect. t, if not nil, is sent
// to the peer. local means that the consumer ended the connection.
func (q *qp) fail(cause error, t *terminate, local bool) {
	q.mu.Lock()
	if q.mu.state == qpDead {
		q.mu.Unlock()
		return
	}
	was := q.mu.state
	q.mu.state, q.mu.cause, q.mu.local, q.mu.term = qpDead, cause, local, t
	q.dead.Store(true)
	if was == qpReady {
		// The expired deadline ends the wait of the reader. The reader sets its next deadline under
		// mu, so this one cannot replace the next one.
		q.conn.SetReadDeadline(time.Unix(1, 0))
		q.conn.SetWriteDeadline(time.Now().Add(q.dev.cfg.Linger))
	}
	q.mu.Unlock()

	q.rq.Lock()
	q.rq.closed = true
	q.rq.Unlock()

	if was == qpInit {
		q.flush()
		close(q.ioDone)
		return
	}
	q.dev.cfg.Logger.Debug("connection ends", "peer", q.conn.RemoteAddr(), "local", local, "cause", cause)
	q.wakeWriter()
}

// streamError adds the operation and the addresses to an error of the stream. streamError returns
// io.EOF, an orderly end, unchanged.
func (q *qp) streamError(op string, err error) error {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		err = os.NewSyscallError(op, errno)
	} else if !errors.Is(err, io.ErrUnexpectedEOF) {
		return err
	}
	return &net.OpError{Op: op, Net: "tcp", Source: q.conn.LocalAddr(), Addr: q.conn.RemoteAddr(), Err: err}
}

// readError returns the cause of a stream that the reader cannot read any further.
func (q *qp) readError(err error) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.mu.sendErr != nil { // the writer received the socket's error; the reader sees only the end
		return q.mu.sendErr
	}
	return q.streamError("read", err)
}

// leaveMemory is called by the reader and the writer when they no longer access consumer memory.
func (q *qp) leaveMemory() {
	if q.users.Add(-1) == 0 {
		q.flush()
	}
}

// leaveSocket is the last call of the reader and of the writer.
func (q *qp) leaveSocket() {
	if q.io.Add(-1) == 0 {
		q.dropUnsent()
		q.conn.Close()
		close(q.ioDone)
	}
}

// dropUnsent makes the close of the socket a reset if the peer has not acknowledged all data.
// Otherwise the kernel would go on to send this data for minutes. The peer could then execute an
// old request after the consumer has repeated it on another connection and has sent later ones.
func (q *qp) dropUnsent() {
	unsent := 0
	raw, err := q.conn.SyscallConn()
	if err == nil {
		_ = raw.Control(func(fd uintptr) { unsent, err = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) })
	}
	if err != nil || unsent > 0 {
		_ = q.conn.SetLinger(0)
	}
}

// flush completes all queued requests in order. flush calls OnDisconnect unless the consumer ended
// the connection.
func (q *qp) flush() {
	q.mu.Lock()
	for q.mu.sq.Len() > 0 {
		e := q.mu.sq.At(q.mu.sq.Head)
		status := e.status
		if status == verbs.StatusSuccess {
			status = verbs.StatusWRFlushErr
		}
		q.mu.sq.Head++
		q.completeSend(e, status)
	}
	q.mu.sq.sent = q.mu.sq.Tail
	local, cause := q.mu.local, q.mu.cause
	q.mu.Unlock()

	if q.current.done != nil {
		status := q.currentStatus
		if status == verbs.StatusSuccess {
			status = verbs.StatusWRFlushErr
		}
		q.completeRecv(&q.current, &verbs.WorkCompletion{Status: status})
	}
	q.rq.Lock()
	q.rq.closed = true // fail, on another goroutine, may not have set it yet
	for q.rq.Len() > 0 {
		e := q.rq.At(q.rq.Head)
		q.rq.Head++
		q.completeRecv(e, &verbs.WorkCompletion{Status: verbs.StatusWRFlushErr})
	}
	q.rq.Unlock()
	q.sendCQ.wake()
	q.recvCQ.wake()
	close(q.flushed)
	if !local && q.attr.OnDisconnect != nil {
		go q.attr.OnDisconnect(cause)
	}
}

// completeSend completes e and reports whether it has pushed a completion to sendCQ. The caller
// holds mu.
func (q *qp) completeSend(e *sqe, status verbs.Status) (pushed bool) {
	done, signaled, op, n := e.done, e.signaled, e.op, e.length
	clear(e.sges)
	e.sges = e.sges[:0]
	e.done, e.wr, e.mr, e.segs = nil, nil, nil, nil
	e.withdrawn, e.readDone, e.status = false, false, verbs.StatusSuccess
	if status == verbs.StatusSuccess && !signaled {
		q.sqUsed.Add(-1)
		q.inflight.Done()
		return false
	}
	wc := verbs.WorkCompletion{Status: status, Opcode: op, QP: q}
	if op == verbs.OpRDMARead {
		wc.ByteLen = n
	}
	q.stats.SendCompletions.Add(1)
	q.sendCQ.push(q, false, done, &wc)
	return true
}

// completeRecv pushes the completion of e to recvCQ, and fills in the Opcode and the QP of wc.
func (q *qp) completeRecv(e *rqe, wc *verbs.WorkCompletion) {
	done := e.done
	e.buf, e.done = nil, nil
	wc.Opcode, wc.QP = verbs.OpRecv, q
	q.stats.RecvCompletions.Add(1)
	q.recvCQ.push(q, true, done, wc)
}

// reap completes the executed requests at the head of the send queue, in order, and reports whether
// it has pushed a completion to sendCQ. The caller holds mu.
func (q *qp) reap() (pushed bool) {
	for q.mu.sq.Head != q.mu.sq.sent {
		e := q.mu.sq.At(q.mu.sq.Head)
		if e.op == verbs.OpRDMARead && !e.readDone {
			break
		}
		q.mu.sq.Head++
		pushed = q.completeSend(e, verbs.StatusSuccess) || pushed
	}
	return pushed
}

// completed makes c call the handlers of what the reader has pushed: on the reader if the consumer
// permits that.
func (q *qp) completed(c *completionQueue) {
	if q.attr.InlineHandlers {
		c.run()
	} else {
		c.wake()
	}
}

// releaseSlot frees a queue slot, before the handler of its completion is called.
func (q *qp) releaseSlot(recv bool) {
	if recv {
		q.rqUsed.Add(-1)
	} else {
		q.sqUsed.Add(-1)
	}
}

var errLocalEnd = errors.New("closed by this side")

// Drain moves the QP to the error state and waits until every handler has returned.
func (q *qp) Drain() {
	q.fail(errLocalEnd, nil, true)
	<-q.flushed
	q.inflight.Wait()
}

// destroy drains and releases the QP.
func (q *qp) destroy() {
	q.Drain()
	<-q.ioDone
	q.reserved.Release()
	selfcheck.Track(selfcheck.QP, -1)
}

// Stats returns a snapshot of the counters.
func (q *qp) Stats() verbs.QPStats { return q.stats.Stats() }
