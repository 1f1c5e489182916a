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

// maxMessage is the longest message in bytes (IBTA volume 1 §9.7.1).
const maxMessage = 1 << 31

// A chainedWR is a request of the chain that is being posted.
type chainedWR struct {
	wr   *verbs.WorkRequest
	pos  uint32 // on the send ring
	undo func() // undoes the effect of a request that was not posted; may be nil
}

// PostSend queues a chain with one call of the device. The device does not get a soft request,
// which has no work for the device or cannot succeed. Soft requests also complete in the order of
// the posts.
func (q *qp) PostSend(first *verbs.WorkRequest) (bad *verbs.WorkRequest, err error) {
	q.sq.Lock()
	if q.sq.state != qpReady {
		q.sq.Unlock()
		return first, verbs.ErrQPState
	}
	start := q.sq.ring.Tail
	b := batch{q: q}
	for bad = first; bad != nil; bad = bad.Next {
		if q.sq.ring.Full() {
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
	queued := int(q.sq.ring.Tail - start)
	q.inflight.Add(queued)
	wake := q.sq.ring.Head != q.sq.ring.Tail && q.sq.ring.At(q.sq.ring.Head).soft
	q.sq.Unlock()
	if queued > 0 {
		q.stats.PostedChains.Add(1)
		q.stats.PostedSendWRs.Add(uint64(queued))
		q.stats.BytesSent.Add(b.bytes)
	}
	if wake {
		q.sendCQ.wakeFor(q)
	}
	if b.failStatus != verbs.StatusSuccess {
		q.disconnect(&StatusError{Status: b.failStatus}, certain)
	}
	return bad, err
}

// A batch is a chain that is being posted. It uses the memory of its queue pair.
type batch struct {
	q       *qp
	n, sges int // requests and SGEs for the device
	// failStatus is the status of the first request that cannot succeed. Later ones are flushed.
	failStatus verbs.Status
	bytes      uint64
	softUndo   []chainedWR // soft requests with an undo function
}

// add pushes wr onto the send ring, and adds it to the chain if the device gets it. Caller holds
// q.sq, and the ring is not full.
func (b *batch) add(wr *verbs.WorkRequest) error {
	q := b.q
	length, err := q.checks.Send(wr, q.sq.ord)
	if err != nil {
		return err
	}
	to := &q.sq.wrs[b.n]
	*to = C.struct_rc_wr{}
	e := sqe{op: wr.Opcode, signaled: wr.Signaled, done: wr.Done}
	var undo func()
	switch wr.Opcode {
	case verbs.OpSend, verbs.OpSendWithInv, verbs.OpRDMAWrite, verbs.OpRDMARead:
		b.gather(wr, to)
		e.length = length
		b.bytes += uint64(length)
	case verbs.OpFastReg:
		r, mem, err := q.checkFastReg(wr)
		if err != nil {
			return err
		}
		if e.soft, e.status, undo, err = r.fastReg(q, wr, mem, to); err != nil {
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
	case b.failStatus != verbs.StatusSuccess: // an earlier request stopped the queue
		if undo != nil {
			undo()
		}
		e.soft, e.status = true, verbs.StatusWRFlushErr
	case e.soft && e.status != verbs.StatusSuccess:
		b.failStatus = e.status
	}
	pos := q.sq.ring.Push(e)
	c := chainedWR{wr: wr, pos: pos, undo: undo}
	if e.soft {
		if undo != nil {
			b.softUndo = append(b.softUndo, c)
		}
		return nil
	}
	to.wr_id = wrID(q.sendNumber, wrSend, pos)
	if wr.Signaled || q.dev.perIO {
		// Without windows, soft requests stand between those of the device. The completion order is
		// known only if the device reports each of its requests.
		to.flags |= C.IBV_SEND_SIGNALED
	}
	q.sq.chain = append(q.sq.chain[:b.n], c)
	b.n++
	return nil
}

// gather translates a request that moves data. The request has passed its checks.
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
		if len(s.Buf) == 0 { // some devices read a length of 0 as 2 GiB
			continue
		}
		q.sq.sges[b.sges] = C.struct_ibv_sge{addr: C.uint64_t(addressOf(s.Buf)), length: C.uint32_t(len(s.Buf)),
			lkey: C.uint32_t(s.LKey)}
		b.sges++
		to.num_sge++
	}
}

// checkFastReg returns the region and the memory of a FastReg, or an error if its fields are
// invalid.
func (q *qp) checkFastReg(wr *verbs.WorkRequest) (region, []byte, error) {
	r, ok := wr.MR.(region)
	if !ok || r.domain() != q.pd {
		return nil, nil, q.checks.Invalid(wr, "MR is not a fast-registration MR of this protection domain")
	}
	mem, ok := contiguous(wr.Segs)
	switch {
	case !ok:
		return nil, nil, q.checks.Invalid(wr, "memory is not contiguous")
	case len(mem) == 0:
		return nil, nil, q.checks.Invalid(wr, "no memory")
	case len(mem) > r.pages()*q.dev.attrs.PageSize:
		return nil, nil, q.checks.Invalid(wr, "memory has %d bytes, want at most %d pages", len(mem), r.pages())
	case wr.IOVA != addressOf(mem):
		return nil, nil, q.checks.Invalid(wr, "IOVA is %#x, want the address of the memory, %#x",
			wr.IOVA, addressOf(mem))
	}
	return r, mem, nil
}

// post posts the chain. If the device refuses a request, post removes this and all later requests
// from the ring and returns the refused one. Caller holds q.sq.
func (b *batch) post() (*verbs.WorkRequest, error) {
	if b.n == 0 {
		return nil, nil
	}
	q := b.q
	var posted C.int
	err := errnoOf(C.rc_post_send(q.c, &q.sq.wrs[0], C.int(b.n), &q.sq.sges[0], &q.sq.scratch[0], &posted))
	if err == nil {
		clear(q.sq.chain)
		return nil, nil
	}
	bad := q.sq.chain[posted]
	for i := len(q.sq.chain) - 1; i >= int(posted); i-- {
		if f := q.sq.chain[i].undo; f != nil {
			f()
		}
	}
	for _, c := range b.softUndo {
		if int32(c.pos-bad.pos) >= 0 {
			c.undo()
		}
	}
	q.sq.ring.truncate(bad.pos)
	clear(q.sq.chain)
	b.failStatus = verbs.StatusSuccess // the request that cannot succeed is off the ring
	if bad.wr.Opcode == verbs.OpFastReg && !q.dev.bindWorks.Load() {
		go q.dev.disableWindows(err)
	}
	if errors.Is(err, syscall.ENOMEM) {
		return bad.wr, verbs.ErrQueueFull
	}
	return bad.wr, fmt.Errorf("rdmacore: post %v on %s: %w: %w", bad.wr.Opcode, q.dev.attrs.Name, verbs.ErrInvalid, err)
}

// PostRecv queues Receives, one call of the device for each.
func (q *qp) PostRecv(first *verbs.RecvRequest) (*verbs.RecvRequest, error) {
	q.rq.Lock()
	defer q.rq.Unlock()
	for rr := first; rr != nil; rr = rr.Next {
		if err := q.checks.Recv(rr, q.rq.closed, q.rq.ring.Full()); err != nil {
			return rr, err
		}
		pos := q.rq.ring.Push(rr.Done)
		buf := rr.SGE.Buf
		if err := errnoOf(C.rc_post_recv(q.c, wrID(q.recvNumber, wrRecv, pos), unsafe.Pointer(unsafe.SliceData(buf)),
			C.uint32_t(len(buf)), C.uint32_t(rr.SGE.LKey))); err != nil {
			q.rq.ring.undoPush()
			return rr, fmt.Errorf("rdmacore: post Receive on %s: %w", q.dev.attrs.Name, err)
		}
		q.inflight.Add(1)
		q.stats.PostedRecvWRs.Add(1)
	}
	return nil, nil
}
