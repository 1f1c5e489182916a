//go:build rdmacore && cgo && linux

package rdmacore

/*
#include "shim.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"syscall"
	"unsafe"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// maxMessage is the longest message (IBTA volume 1 §9.7.1).
const maxMessage = 1 << 31

// A chained is a request of the chain that is being posted, which the device gets.
type chained struct {
	wr   *verbs.WorkRequest
	pos  uint32 // on the ring
	undo func() // nil: nothing
}

// PostSend queues a chain with one call of the device. What it does not get, as it has nothing to
// do or is bound to fail, completes in its turn.
func (q *qp) PostSend(first *verbs.WorkRequest) (bad *verbs.WorkRequest, err error) {
	q.mu.Lock()
	if q.state != qpReady {
		q.mu.Unlock()
		return first, verbs.ErrQPState
	}
	start := q.ring.Tail
	b := batch{q: q}
	for bad = first; bad != nil; bad = bad.Next {
		if q.ring.Full() {
			err = verbs.ErrQueueFull
			break
		}
		if err = b.add(bad); err != nil {
			break
		}
	}
	if at, e := b.post(); e != nil {
		bad, err = at, e
	}
	queued := int(q.ring.Tail - start)
	q.inflight.Add(queued)
	wake := q.ring.Head != q.ring.Tail && q.ring.At(q.ring.Head).soft
	q.mu.Unlock()
	if queued > 0 {
		q.stats.PostedChains.Add(1)
		q.stats.PostedSendWRs.Add(uint64(queued))
		q.stats.BytesSent.Add(b.bytes)
	}
	if wake {
		q.sendCQ.wake(q)
	}
	if b.failing != verbs.StatusSuccess {
		q.lost(&StatusError{Status: b.failing}, certain)
	}
	return bad, err
}

// A batch is a chain on its way to the device. Its memory is the queue pair's.
type batch struct {
	q       *qp
	n, sges int          // requests and SGEs for the device
	failing verbs.Status // of the first request that is bound to fail: those behind it are flushed
	bytes   uint64
	undone  []chained // soft requests with something to undo
}

// add puts wr onto the ring, and into the chain if the device gets it. Caller holds q.mu and has
// seen that there is room.
func (b *batch) add(wr *verbs.WorkRequest) error {
	q := b.q
	length, err := q.checks.Send(wr, q.ord)
	if err != nil {
		return err
	}
	to := &q.wrs[b.n]
	*to = C.struct_rc_wr{}
	e := sqe{op: wr.Opcode, signaled: wr.Signaled, done: wr.Done}
	var undo func()
	switch wr.Opcode {
	case verbs.OpSend, verbs.OpSendWithInv, verbs.OpRDMAWrite, verbs.OpRDMARead:
		b.gather(wr, to)
		e.length = length
		b.bytes += uint64(length)
	case verbs.OpFastReg:
		r, piece, err := q.checkReg(wr)
		if err != nil {
			return err
		}
		if e.soft, e.status, undo, err = r.fastReg(q, wr, piece, to); err != nil {
			return err
		}
	case verbs.OpLocalInv:
		e.soft, e.status = true, verbs.StatusLocQPOpErr
		if r := q.dev.regions.find(wr.InvalidateRKey); r != nil {
			e.soft, e.status = r.localInv(q, wr.InvalidateRKey, to)
			if w, ok := r.(*window); ok && to.opcode == C.IBV_WR_LOCAL_INV {
				e.inv, e.key = w, wr.InvalidateRKey
			}
		}
	}
	switch {
	case b.failing != verbs.StatusSuccess: // the queue stopped at a request before
		if undo != nil {
			undo()
		}
		e.soft, e.status = true, verbs.StatusWRFlushErr
	case e.soft && e.status != verbs.StatusSuccess:
		b.failing = e.status
	}
	pos := q.ring.Push(e)
	c := chained{wr: wr, pos: pos, undo: undo}
	if e.soft {
		if undo != nil {
			b.undone = append(b.undone, c)
		}
		return nil
	}
	to.wr_id = wrID(q.sendNo, wrSend, pos)
	if wr.Signaled || q.dev.perIO {
		// Without windows requests that the device does not see stand between those that it does:
		// only when it tells of each is their turn known.
		to.flags |= C.IBV_SEND_SIGNALED
	}
	q.chain = append(q.chain[:b.n], c)
	b.n++
	return nil
}

// gather translates a request that moves data. It has passed its checks.
func (b *batch) gather(wr *verbs.WorkRequest, to *C.struct_rc_wr) {
	q := b.q
	switch wr.Opcode {
	case verbs.OpSend:
		to.opcode = C.IBV_WR_SEND
	case verbs.OpSendWithInv:
		to.opcode, to.invalidate = C.IBV_WR_SEND_WITH_INV, C.uint32_t(wr.InvalidateRKey)
	case verbs.OpRDMAWrite:
		to.opcode = C.IBV_WR_RDMA_WRITE
	case verbs.OpRDMARead:
		to.opcode = C.IBV_WR_RDMA_READ
	}
	if wr.Opcode == verbs.OpRDMAWrite || wr.Opcode == verbs.OpRDMARead {
		to.remote_addr, to.rkey = C.uint64_t(wr.RemoteAddr), C.uint32_t(wr.RKey)
	}
	to.first_sge = C.uint32_t(b.sges)
	for i := range wr.SGList {
		s := &wr.SGList[i]
		if len(s.Buf) == 0 { // a length of 0 is 2 GiB to some devices
			continue
		}
		q.sges[b.sges] = C.struct_ibv_sge{addr: C.uint64_t(addressOf(s.Buf)), length: C.uint32_t(len(s.Buf)),
			lkey: C.uint32_t(s.LKey)}
		b.sges++
		to.num_sge++
	}
}

// checkReg refuses what can be seen to be wrong with a FastReg.
func (q *qp) checkReg(wr *verbs.WorkRequest) (region, []byte, error) {
	r, ok := wr.MR.(region)
	if !ok || r.domain() != q.pd {
		return nil, nil, q.checks.Invalid(wr, "the MR is not a fast-registration MR of this protection domain")
	}
	piece, ok := onePiece(wr.Segs)
	switch {
	case !ok:
		return nil, nil, q.checks.Invalid(wr, "the memory is not one piece")
	case len(piece) == 0:
		return nil, nil, q.checks.Invalid(wr, "no memory")
	case len(piece) > r.pages()*q.dev.attrs.PageSize:
		return nil, nil, q.checks.Invalid(wr, "%d bytes, the MR is %d pages deep", len(piece), r.pages())
	case wr.IOVA != addressOf(piece):
		return nil, nil, q.checks.Invalid(wr, "the address is %#x, the memory's own is %#x: the device does not choose others",
			wr.IOVA, addressOf(piece))
	}
	return r, piece, nil
}

// post hands the chain over. When the device refuses a request it is taken off the ring, with those
// behind it. Caller holds q.mu.
func (b *batch) post() (*verbs.WorkRequest, error) {
	if b.n == 0 {
		return nil, nil
	}
	q := b.q
	var posted C.int
	err := errnoOf(C.rc_post_send(q.c, &q.wrs[0], C.int(b.n), &q.sges[0], &q.scratch[0], &posted))
	if err == nil {
		clear(q.chain)
		return nil, nil
	}
	bad := q.chain[posted]
	for i := len(q.chain) - 1; i >= int(posted); i-- {
		if f := q.chain[i].undo; f != nil {
			f()
		}
	}
	for _, c := range b.undone {
		if int32(c.pos-bad.pos) >= 0 {
			c.undo()
		}
	}
	q.ring.truncate(bad.pos)
	clear(q.chain)
	b.failing = verbs.StatusSuccess // what was to fail stands behind bad, or was posted
	if bad.wr.Opcode == verbs.OpFastReg && !q.dev.proven.Load() {
		go q.dev.demote(err)
	}
	if errors.Is(err, syscall.ENOMEM) {
		return bad.wr, verbs.ErrQueueFull
	}
	return bad.wr, fmt.Errorf("rdmacore: post %v on %s: %w: %w", bad.wr.Opcode, q.dev.attrs.Name, verbs.ErrInvalid, err)
}

// PostRecv queues Receives.
func (q *qp) PostRecv(first *verbs.RecvRequest) (*verbs.RecvRequest, error) {
	q.rqMu.Lock()
	defer q.rqMu.Unlock()
	for rr := first; rr != nil; rr = rr.Next {
		if err := q.checks.Recv(rr, q.rqClosed, q.recvs.Full()); err != nil {
			return rr, err
		}
		pos := q.recvs.Push(rr.Done)
		buf := rr.SGE.Buf
		if err := errnoOf(C.rc_post_recv(q.c, wrID(q.recvNo, wrRecv, pos), unsafe.Pointer(unsafe.SliceData(buf)),
			C.uint32_t(len(buf)), C.uint32_t(rr.SGE.LKey))); err != nil {
			q.recvs.unpush()
			return rr, fmt.Errorf("rdmacore: post Receive on %s: %w", q.dev.attrs.Name, err)
		}
		q.inflight.Add(1)
		q.stats.PostedRecvWRs.Add(1)
	}
	return nil, nil
}
