package softiwarp

import (
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// PostSend copies a chain into the ring. If nothing else is to be sent and the chain is small, the
// caller sends it (sendInline), which saves a switch to the writer. Otherwise PostSend wakes the
// writer. PostSend never waits for the socket.
func (q *qp) PostSend(first *verbs.WorkRequest) (*verbs.WorkRequest, error) {
	q.mu.Lock()
	if q.mu.state != qpReady {
		q.mu.Unlock()
		return first, verbs.ErrQPState
	}
	var err error
	posted := 0
	ahead := q.mu.sq.sent == q.mu.sq.Tail // no goroutine is executing the send queue
	free := ahead && !q.writerNeeded() && !q.mu.txBusy
	wr := first
	for ; wr != nil; wr = wr.Next {
		length, e := q.checkSend(wr)
		if e != nil {
			err = e
			break
		}
		if int(q.sqUsed.Load()) >= q.attr.MaxSendWR {
			err = verbs.ErrQueueFull
			break
		}
		q.sqUsed.Add(1)
		q.inflight.Add(1)
		q.enqueue(wr, length)
		posted++
	}
	pushed := false
	if ahead {
		pushed = q.runLocal()
	}
	inline := free && q.tx.takesInline()
	q.mu.txBusy = q.mu.txBusy || inline
	wake := q.writerNeeded()
	q.mu.Unlock()
	if posted > 0 {
		q.stats.PostedChains.Add(1)
		q.stats.PostedSendWRs.Add(uint64(posted))
	}
	if inline {
		q.tx.sendInline()
	}
	if wake {
		q.wakeWriter()
	}
	if pushed {
		q.sendCQ.wake()
	}
	if err != nil {
		return wr, err
	}
	return nil, nil
}

// checkSend checks one request and returns the length of its message.
func (q *qp) checkSend(wr *verbs.WorkRequest) (uint32, error) {
	n, err := q.checks.Send(wr, q.ord)
	if err == nil && wr.Opcode == verbs.OpFastReg {
		err = q.checkReg(wr)
	}
	return n, err
}

// checkReg checks a FastReg.
func (q *qp) checkReg(wr *verbs.WorkRequest) error {
	m, ok := wr.MR.(*mr)
	if !ok || m.pd != q.pd {
		return q.checks.Invalid(wr, "the MR is not a fast-registration MR of this protection domain")
	}
	var n uint64
	for _, s := range wr.Segs {
		n += uint64(len(s))
	}
	switch {
	case len(wr.Segs) > m.depth:
		return q.checks.Invalid(wr, "%d segments, the MR is %d deep", len(wr.Segs), m.depth)
	case n == 0:
		return q.checks.Invalid(wr, "no memory")
	case n > uint64(m.depth)*uint64(pageSize):
		return q.checks.Invalid(wr, "%d bytes, the MR is %d pages deep", n, m.depth)
	case wr.IOVA+n < wr.IOVA:
		return q.checks.Invalid(wr, "the address wraps")
	}
	return nil
}

// enqueue copies wr to the tail. The caller holds mu and has checked that a slot is free.
func (q *qp) enqueue(wr *verbs.WorkRequest, length uint32) {
	e := q.mu.sq.At(q.mu.sq.Tail)
	e.op, e.signaled, e.done, e.length, e.wr = wr.Opcode, wr.Signaled, wr.Done, length, wr
	e.onWrite = wr.OnWrite
	e.raddr, e.rkey, e.inv = wr.RemoteAddr, wr.RKey, wr.InvalidateRKey
	e.sges = e.sges[:0]
	switch wr.Opcode {
	case verbs.OpFastReg:
		e.mr = wr.MR.(*mr)
		e.newKey, e.access, e.iova, e.segs = wr.NewKey, wr.Access, wr.IOVA, wr.Segs
	case verbs.OpLocalInv:
	default:
		e.sges = append(e.sges, wr.SGList...)
	}
	q.mu.sq.Tail++
}

// Withdraw takes back a chain whose Send no goroutine has begun to send. It converts the requests
// that are not executed to requests without effect, and invalidates the registrations of the
// others.
func (q *qp) Withdraw(first *verbs.WorkRequest) bool {
	q.mu.Lock()
	if q.mu.state != qpReady || !q.takeBack(first) {
		q.mu.Unlock()
		return false
	}
	for wr := first; wr != nil; wr = wr.Next {
		if m, ok := wr.MR.(*mr); ok && wr.Opcode == verbs.OpFastReg {
			m.invalidateLocal(q, uint32(m.first.WithKey(wr.NewKey)))
		}
	}
	pushed := q.unclaimed() == q.mu.sq.sent && q.runLocal()
	wake := q.writerNeeded()
	q.mu.Unlock()
	if wake {
		q.wakeWriter()
	}
	if pushed {
		q.sendCQ.wake()
	}
	return true
}

// takeBack converts the requests of a chain that are not executed, and reports whether its last one
// was among them. A chain is claimed as a whole or not at all, because PostSend queues it with mu
// held. The caller holds mu.
func (q *qp) takeBack(first *verbs.WorkRequest) bool {
	n, last := uint32(1), first
	for ; last.Next != nil; last = last.Next {
		n++
	}
	from, at := q.unclaimed(), q.mu.sq.Tail
	for at != from && q.mu.sq.At(at-1).wr != last {
		at--
	}
	if at == from {
		return false
	}
	for end := at - min(n, at-from); at != end; at-- {
		e := q.mu.sq.At(at - 1)
		e.withdrawn = true
		clear(e.sges)
		e.sges, e.mr, e.segs = e.sges[:0], nil, nil
	}
	return true
}

// unclaimed returns the first entry that no goroutine executes. The caller holds mu.
func (q *qp) unclaimed() uint32 {
	if int32(q.mu.sq.claimed-q.mu.sq.sent) > 0 { // positions wrap
		return q.mu.sq.claimed
	}
	return q.mu.sq.sent
}

// local reports whether the request sends nothing.
func (e *sqe) local() bool {
	return e.withdrawn || e.op == verbs.OpFastReg || e.op == verbs.OpLocalInv
}

// runLocal executes FastReg and LocalInv requests at the front of the queue. runLocal may do the
// writer's work, because the writer has executed everything before and reads the queue again under
// mu. An invalidation therefore never waits for a Read Response that the peer takes slowly. The
// writer handles a request that fails. runLocal reports whether it has pushed a completion. The
// caller holds mu.
func (q *qp) runLocal() (pushed bool) {
	from := q.mu.sq.sent
	for q.mu.sq.sent != q.mu.sq.Tail && q.executeLocal(q.mu.sq.At(q.mu.sq.sent)) {
		q.mu.sq.sent++
	}
	if q.mu.sq.sent != from {
		pushed = q.reap()
	}
	return pushed
}

// executeLocal executes e if e is a FastReg or LocalInv, or was taken back. It returns true if such
// a request succeeded.
func (q *qp) executeLocal(e *sqe) bool {
	switch {
	case e.withdrawn:
		return true
	case e.op == verbs.OpFastReg:
		return e.mr.register(q, uint32(e.mr.first.WithKey(e.newKey)), e.access, e.iova, e.segs)
	case e.op == verbs.OpLocalInv:
		m := q.dev.table.lookup(uint32(e.inv))
		return m != nil && m.invalidateLocal(q, uint32(e.inv))
	}
	return false
}

// PostRecv queues Receives.
func (q *qp) PostRecv(first *verbs.RecvRequest) (*verbs.RecvRequest, error) {
	q.rq.Lock()
	defer q.rq.Unlock()
	for rr := first; rr != nil; rr = rr.Next {
		full := int(q.rqUsed.Load()) >= q.attr.MaxRecvWR
		if err := q.checks.Recv(rr, q.rq.closed, full); err != nil {
			return rr, err
		}
		q.rqUsed.Add(1)
		q.inflight.Add(1)
		q.rq.Push(rqe{buf: rr.SGE.Buf, done: rr.Done})
		q.stats.PostedRecvWRs.Add(1)
	}
	return nil, nil
}

// takeRecv takes the oldest Receive for the reader.
func (q *qp) takeRecv() bool {
	q.rq.Lock()
	defer q.rq.Unlock()
	if q.rq.Len() == 0 || q.rq.closed {
		return false
	}
	e := q.rq.At(q.rq.Head)
	q.current = *e
	e.buf, e.done = nil, nil
	q.rq.Head++
	return true
}
