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

func invalid(wr *verbs.WorkRequest, format string, args ...any) error {
	return fmt.Errorf("rdmacore: post %v: %s: %w", wr.Opcode, fmt.Sprintf(format, args...), verbs.ErrInvalid)
}

// PostSend queues a chain with one call of the device. What it does not get, as it has nothing to
// do or is bound to fail, completes in its turn.
func (q *qp) PostSend(first *verbs.WorkRequest) (bad *verbs.WorkRequest, err error) {
	q.mu.Lock()
	if q.state != qpReady {
		q.mu.Unlock()
		return first, verbs.ErrQPState
	}
	start := q.ring.tail
	b := batch{q: q}
	for bad = first; bad != nil; bad = bad.Next {
		if q.ring.full() {
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
	queued := int(q.ring.tail - start)
	q.inflight.Add(queued)
	wake := q.ring.head != q.ring.tail && q.ring.at(q.ring.head).soft
	q.mu.Unlock()
	if queued > 0 {
		q.stats.chains.Add(1)
		q.stats.sendWRs.Add(uint64(queued))
		q.stats.bytesSent.Add(b.octets)
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
	octets  uint64
	undone  []chained // soft requests with something to undo
}

// add puts wr onto the ring, and into the chain if the device gets it. Caller holds q.mu and has
// seen that there is room.
func (b *batch) add(wr *verbs.WorkRequest) error {
	q := b.q
	if wr.Done == nil {
		return invalid(wr, "no completion handler")
	}
	to := &q.wrs[b.n]
	*to = C.struct_rc_wr{}
	e := sqe{op: wr.Opcode, signaled: wr.Signaled, done: wr.Done}
	var undo func()
	switch wr.Opcode {
	case verbs.OpSend, verbs.OpSendWithInv, verbs.OpRDMAWrite, verbs.OpRDMARead:
		n, err := b.gather(wr, to)
		if err != nil {
			return err
		}
		e.length = n
		b.octets += uint64(n)
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
	default:
		return invalid(wr, "unknown opcode %d", wr.Opcode)
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
	pos := q.ring.push(e)
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

// gather translates what moves octets, and returns how many.
func (b *batch) gather(wr *verbs.WorkRequest, to *C.struct_rc_wr) (uint32, error) {
	q := b.q
	if len(wr.SGList) > q.attr.MaxSendSGE {
		return 0, invalid(wr, "%d SGEs, the queue was made for %d", len(wr.SGList), q.attr.MaxSendSGE)
	}
	switch wr.Opcode {
	case verbs.OpSend:
		to.opcode = C.IBV_WR_SEND
	case verbs.OpSendWithInv:
		to.opcode, to.invalidate = C.IBV_WR_SEND_WITH_INV, C.uint32_t(wr.InvalidateRKey)
	case verbs.OpRDMAWrite:
		to.opcode = C.IBV_WR_RDMA_WRITE
	case verbs.OpRDMARead:
		to.opcode = C.IBV_WR_RDMA_READ
		switch {
		case len(wr.SGList) != 1:
			return 0, invalid(wr, "%d SGEs, an RDMA Read has one", len(wr.SGList))
		case q.ord == 0:
			return 0, invalid(wr, "no RDMA Read may be outstanding: this side's InitiatorDepth is 0")
		}
	}
	if wr.Opcode == verbs.OpRDMAWrite || wr.Opcode == verbs.OpRDMARead {
		to.remote_addr, to.rkey = C.uint64_t(wr.RemoteAddr), C.uint32_t(wr.RKey)
	}
	to.first_sge = C.uint32_t(b.sges)
	var total uint64
	for i := range wr.SGList {
		s := &wr.SGList[i]
		if len(s.Buf) == 0 { // a length of 0 is 2 GiB to some devices
			continue
		}
		q.sges[b.sges] = C.struct_ibv_sge{addr: C.uint64_t(addressOf(s.Buf)), length: C.uint32_t(len(s.Buf)),
			lkey: C.uint32_t(s.LKey)}
		b.sges++
		to.num_sge++
		total += uint64(len(s.Buf))
	}
	if total > maxMessage {
		b.sges -= int(to.num_sge)
		return 0, invalid(wr, "message of %d octets, the limit is %d", total, uint64(maxMessage))
	}
	return uint32(total), nil
}

// checkReg refuses what can be seen to be wrong with a FastReg.
func (q *qp) checkReg(wr *verbs.WorkRequest) (region, []byte, error) {
	r, ok := wr.MR.(region)
	if !ok || r.domain() != q.pd {
		return nil, nil, invalid(wr, "the MR is not a fast-registration MR of this protection domain")
	}
	piece, ok := onePiece(wr.Segs)
	switch {
	case !ok:
		return nil, nil, invalid(wr, "the memory is not one piece")
	case len(piece) == 0:
		return nil, nil, invalid(wr, "no memory")
	case len(piece) > r.pages()*q.dev.attrs.PageSize:
		return nil, nil, invalid(wr, "%d octets, the MR is %d pages deep", len(piece), r.pages())
	case wr.IOVA != addressOf(piece):
		return nil, nil, invalid(wr, "the address is %#x, the memory's own is %#x: the device does not choose others",
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
		switch {
		case q.rqClosed:
			return rr, verbs.ErrQPState
		case rr.Done == nil:
			return rr, fmt.Errorf("rdmacore: post Receive: no completion handler: %w", verbs.ErrInvalid)
		case q.recvs.full():
			return rr, verbs.ErrQueueFull
		}
		pos := q.recvs.push(rr.Done)
		buf := rr.SGE.Buf
		if err := errnoOf(C.rc_post_recv(q.c, wrID(q.recvNo, wrRecv, pos), unsafe.Pointer(unsafe.SliceData(buf)),
			C.uint32_t(len(buf)), C.uint32_t(rr.SGE.LKey))); err != nil {
			q.recvs.unpush()
			return rr, fmt.Errorf("rdmacore: post Receive on %s: %w", q.dev.attrs.Name, err)
		}
		q.inflight.Add(1)
		q.stats.recvWRs.Add(1)
	}
	return nil, nil
}
