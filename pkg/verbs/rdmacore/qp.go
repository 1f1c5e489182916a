//go:build rdmacore && cgo && linux

package rdmacore

/*
#include <stdlib.h>
#include "shim.h"
*/
import "C"

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/nfsrdmad/nfsrdmad/internal/selfcheck"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/internal/base"
)

// A qpState is the state of a queue pair.
//
//	┌──────┐  start   ┌───────┐  disconnect, Drain  ┌───────┐  device flushes, or      ┌─────────┐
//	│ init │ ───────▶ │ ready │ ──────────────────▶ │ error │ ───────────────────────▶ │ drained │
//	└──┬───┘          └───────┘                     └───────┘  destroyed, then flushed └─────────┘
//	   │ Drain (never connected)                        ▲
//	   └────────────────────────────────────────────────┘
type qpState uint8

const (
	qpInit qpState = iota
	qpReady
	qpError
)

const (
	// certain and guessed say how much is known about the cause of a disconnect. A flushed request
	// is only a guess, because it does not carry the cause.
	certain = true
	guessed = false

	// causeTimeout is the time that a guessed cause waits for a certain one. The connection event
	// may arrive after the first flushed completion.
	causeTimeout = 300 * time.Millisecond
	// notifyTimeout is the time that OnDisconnect gets to return before posted requests are
	// flushed.
	notifyTimeout = 100 * time.Millisecond
	// flushTimeout is the time without a completion after which the queue pair is destroyed and
	// flushed by this package.
	flushTimeout = 2 * time.Second
)

// A qp is a queue pair.
//
// Lock order: device.objects, then sq; sq or rq, then a region's lock or completionQueue.qps.
type qp struct {
	dev            *device
	pd             *protectionDomain
	id             *connID
	cid            *C.struct_rdma_cm_id
	c              *C.struct_ibv_qp // valid until destroyOnDevice
	port           int
	attr           verbs.QPInitAttr
	sendCQ, recvCQ *completionQueue
	reserved       base.Reservation
	checks         base.PostChecks
	// sendNumber and recvNumber identify this QP on sendCQ and recvCQ.
	sendNumber, recvNumber uint32

	inflight sync.WaitGroup // requests whose handler has not returned
	progress atomic.Uint64  // completions handled

	stopOnce    sync.Once
	abandonOnce sync.Once
	destroyOnce sync.Once

	causeKnown chan struct{} // closed when disconnect has a certain cause
	notified   chan struct{} // closed when OnDisconnect has returned or notifyTimeout is over

	sq struct {
		sync.Mutex
		state        qpState
		drained      bool // Drain was called before the QP was in the error state
		disconnected bool // disconnect was called; OnDisconnect was or will be called
		cause        error
		causeCertain bool
		ord          int // RDMA Reads that this side may have outstanding
		ring         sendRing
		chain        []chainedWR // used by PostSend
		wrs          []C.struct_rc_wr
		sges         []C.struct_ibv_sge
		scratch      []C.struct_ibv_send_wr
		abandoned    bool // this package flushes both queues
	}

	rq struct {
		sync.Mutex
		closed bool
		ring   recvRing
	}

	stats base.Counters
}

// newQP makes a QP on the connection id of c. Caller holds the lock of c.ConnID.
func newQP(c *connID, vpd verbs.PD, attr verbs.QPInitAttr) (*qp, error) {
	d := c.dev
	pd, ok := vpd.(*protectionDomain)
	if !ok || pd.dev.context != d.context {
		return nil, fmt.Errorf("rdmacore: create QP: protection domain belongs to another device: %w",
			verbs.ErrInvalid)
	}
	scq, ok1 := attr.SendCQ.(*completionQueue)
	rcq, ok2 := attr.RecvCQ.(*completionQueue)
	if !ok1 || !ok2 || scq.dev.context != d.context || rcq.dev.context != d.context {
		return nil, fmt.Errorf("rdmacore: create QP: completion queue belongs to another device: %w",
			verbs.ErrInvalid)
	}
	if err := base.CheckQPAttr(Name, &attr, d.attrs); err != nil {
		return nil, err
	}
	if err := d.context.acquire(); err != nil {
		return nil, err
	}
	defer d.context.release()
	reserved, err := base.Reserve(&pd.uses, scq.entries, rcq.entries, attr)
	if err != nil {
		return nil, err
	}
	q := &qp{dev: d, pd: pd, id: c, cid: c.c, attr: attr, sendCQ: scq, recvCQ: rcq, reserved: reserved,
		checks:     base.PostChecks{Provider: Name, MaxSendSGE: attr.MaxSendSGE, MaxMessage: maxMessage},
		causeKnown: make(chan struct{}), notified: make(chan struct{})}
	q.sq.ring, q.rq.ring = newSendRing(attr.MaxSendWR), newRecvRing(attr.MaxRecvWR)
	if err := errnoOf(C.rc_create_qp(c.c, pd.c, scq.c, rcq.c, C.int(attr.MaxSendWR+markerWRs), C.int(attr.MaxRecvWR),
		C.int(attr.MaxSendSGE), &q.c)); err != nil {
		q.reserved.Release()
		return nil, fmt.Errorf("rdmacore: create QP with %d send and %d receive requests on %s: %w: %w",
			attr.MaxSendWR, attr.MaxRecvWR, d.attrs.Name, verbs.ErrNoResources, err)
	}
	q.port = int(c.c.port_num)
	q.allocate()
	q.sendNumber, q.recvNumber = scq.addQP(q), rcq.addQP(q)
	d.objects.Lock()
	d.objects.qps[q.c] = q
	d.objects.Unlock()
	selfcheck.Track(selfcheck.QP, 1)
	return q, nil
}

// allocate allocates the C memory in which chains are posted.
func (q *qp) allocate() {
	n := q.attr.MaxSendWR
	q.sq.chain = make([]chainedWR, 0, n)
	q.sq.wrs = unsafe.Slice((*C.struct_rc_wr)(C.calloc(C.size_t(n), C.sizeof_struct_rc_wr)), n)
	q.sq.sges = unsafe.Slice((*C.struct_ibv_sge)(C.calloc(C.size_t(n*q.attr.MaxSendSGE), C.sizeof_struct_ibv_sge)),
		n*q.attr.MaxSendSGE)
	q.sq.scratch = unsafe.Slice((*C.struct_ibv_send_wr)(C.calloc(C.size_t(n), C.sizeof_struct_ibv_send_wr)), n)
}

// start makes the QP ready, unless it is in the error state. ord is the depth of its RDMA Reads.
func (q *qp) start(ord int) {
	q.sq.Lock()
	if q.sq.state == qpInit {
		q.sq.state, q.sq.ord = qpReady, ord
	}
	q.sq.Unlock()
}

// undoStart undoes start after the connection could not be made.
func (q *qp) undoStart() {
	q.sq.Lock()
	if q.sq.state == qpReady {
		q.sq.state = qpInit
	}
	q.sq.Unlock()
}

// requestFailed processes the status of a failed request. The device has moved the QP to the error
// state.
func (q *qp) requestFailed(status verbs.Status, vendor uint32) {
	q.disconnect(&StatusError{Status: status, VendorErr: vendor}, status != verbs.StatusWRFlushErr)
}

// disconnect ends a ready QP for a cause of the peer or the device, and reports the cause to the
// consumer. It does not block. On a QP that Drain or an earlier call ended, it can only replace a
// guessed cause.
func (q *qp) disconnect(cause error, isCertain bool) {
	q.sq.Lock()
	defer q.sq.Unlock()
	if q.sq.disconnected || q.sq.drained || q.sq.state == qpInit {
		if q.sq.disconnected && isCertain && !q.sq.causeCertain {
			q.sq.cause, q.sq.causeCertain = cause, true
			close(q.causeKnown)
		}
		return
	}
	q.sq.state, q.sq.disconnected = qpError, true
	q.sq.cause, q.sq.causeCertain = cause, isCertain
	if isCertain {
		close(q.causeKnown)
	}
	go q.notifyAndFlush()
}

// notifyAndFlush calls OnDisconnect and then flushes the QP.
func (q *qp) notifyAndFlush() {
	select {
	case <-q.causeKnown:
	case <-time.After(causeTimeout):
	}
	q.sq.Lock()
	q.sq.state = qpError
	cause := q.sq.cause
	q.sq.causeCertain = true
	q.sq.Unlock()
	if f := q.attr.OnDisconnect; f != nil {
		returned := make(chan struct{})
		go func() {
			f(cause)
			close(returned)
		}()
		// A consumer reports the first error that it gets. OnDisconnect must therefore come before
		// the flushed completions.
		select {
		case <-returned:
		case <-time.After(notifyTimeout):
		}
	}
	close(q.notified)
	q.stop()
	q.flush() // posted requests complete even before the consumer calls Drain
}

// takeDown destroys the queue pair of a removed device and flushes its requests. It waits while the
// kernel makes the connection.
func (q *qp) takeDown(cause error) {
	q.disconnect(cause, certain)
	q.sq.Lock()
	disconnected := q.sq.disconnected
	q.sq.Unlock()
	if disconnected {
		<-q.notified
	}
	q.id.callMu.Lock()
	defer q.id.callMu.Unlock()
	q.stop()
	q.abandon("")
}

// stop closes both queues, disconnects, and moves the device's queue pair to the error state, so
// that the device flushes it. Only the first call has an effect.
func (q *qp) stop() {
	q.stopOnce.Do(func() {
		q.sq.Lock()
		q.sq.state = qpError
		q.sq.Unlock()
		q.rq.Lock()
		q.rq.closed = true
		q.rq.Unlock()
		C.rc_disconnect(q.cid) // fails if the connection has already ended
		C.rc_fail_qp(q.c)
		q.sq.Lock()
		pos, left := q.sq.ring.Tail, q.sq.ring.Len()
		q.sq.Unlock()
		// The device does not report unsignaled requests that succeeded. The marker is flushed
		// behind them and completes them. Without windows all requests are signaled.
		if left > 0 && !q.dev.perIO {
			C.rc_post_marker(q.c, wrID(q.sendNumber, wrMarker, pos))
		}
	})
}

// Drain moves the QP to the error state and waits until every handler has returned.
func (q *qp) Drain() {
	q.sq.Lock()
	if q.sq.state != qpError {
		q.sq.drained = true
	}
	q.sq.state = qpError
	q.sq.Unlock()
	q.stop()
	q.flush()
}

// flush waits until every handler has returned. If the device makes no progress for flushTimeout,
// flush abandons its queue pair.
func (q *qp) flush() {
	done := make(chan struct{})
	go func() {
		q.inflight.Wait()
		close(done)
	}()
	for last := q.progress.Load(); ; {
		select {
		case <-done:
			return
		case <-time.After(flushTimeout):
		}
		now := q.progress.Load()
		if now == last {
			break
		}
		last = now
	}
	q.abandon("RDMA device did not flush a queue pair in the error state; destroying it")
	<-done
}

// abandon destroys the device's queue pair and makes the dispatchers flush its requests. If warning
// is not empty it is logged. Only the first call has an effect.
func (q *qp) abandon(warning string) {
	q.abandonOnce.Do(func() {
		if warning != "" {
			q.dev.log.Warn(warning, "device", q.dev.attrs.Name)
		}
		q.destroyOnDevice()
		q.sq.Lock()
		q.sq.abandoned = true
		q.sq.Unlock()
		q.sendCQ.wakeFor(q)
		if q.recvCQ != q.sendCQ {
			q.recvCQ.wakeFor(q)
		}
	})
}

// destroyOnDevice destroys the device's queue pair. The device accesses no memory for it
// afterwards, and no request may be posted. Only the first call has an effect.
func (q *qp) destroyOnDevice() {
	q.destroyOnce.Do(func() {
		q.dev.objects.Lock()
		delete(q.dev.objects.qps, q.c)
		q.dev.objects.Unlock()
		q.dev.regions.deallocWindowsOf(q)
		// Before the connection is established, librdmacm may use the queue pair in any event.
		// After that the lock is not needed; without it a slow device does not delay events of
		// other connections.
		q.id.setup.Lock()
		established := q.id.setup.established
		q.id.setup.Unlock()
		if !established {
			eventMu.Lock()
			defer eventMu.Unlock()
		}
		C.rc_destroy_qp(q.cid)
	})
}

// destroy drains the QP and releases all its resources. Only connID.Close calls it.
func (q *qp) destroy() {
	q.Drain()
	q.destroyOnDevice()
	q.sendCQ.removeQP(q.sendNumber)
	q.recvCQ.removeQP(q.recvNumber)
	C.free(unsafe.Pointer(&q.sq.wrs[0]))
	C.free(unsafe.Pointer(&q.sq.sges[0]))
	C.free(unsafe.Pointer(&q.sq.scratch[0]))
	q.reserved.Release()
	selfcheck.Track(selfcheck.QP, -1)
}

// sendCompleted appends to out the requests that the completion of the request at pos completes.
// Only the dispatcher of sendCQ calls it.
func (q *qp) sendCompleted(pos uint32, status verbs.Status, vendor uint32, out []completion) []completion {
	q.sq.Lock()
	defer q.sq.Unlock()
	from := len(out)
	out, ok := q.sq.ring.complete(pos, status, vendor, out)
	if !ok {
		return out
	}
	for i := range out[from:] {
		q.checkBind(&out[from+i].wc)
	}
	return out
}

// checkBind finds out from a completion whether the device can bind windows. Caller holds sq.
func (q *qp) checkBind(wc *verbs.WorkCompletion) {
	if wc.Opcode != verbs.OpFastReg || q.dev.perIO || q.dev.bindWorks.Load() {
		return
	}
	switch wc.Status {
	case verbs.StatusSuccess:
		q.dev.bindWorks.Store(true)
	case verbs.StatusWRFlushErr:
	default:
		go q.dev.disableWindows(&StatusError{Status: wc.Status, VendorErr: wc.VendorErr})
	}
}

// markerCompleted appends to out all requests before the marker, which was posted at pos.
func (q *qp) markerCompleted(pos uint32, out []completion) []completion {
	q.sq.Lock()
	defer q.sq.Unlock()
	return q.sq.ring.completeSoft(q.sq.ring.completeBefore(pos, out))
}

// recvCompleted appends to out the Receive at pos. Only the dispatcher of recvCQ calls it.
func (q *qp) recvCompleted(pos uint32, wc verbs.WorkCompletion, out []completion) []completion {
	q.rq.Lock()
	defer q.rq.Unlock()
	out, _ = q.rq.ring.complete(pos, wc, out)
	return out
}

// softCompletions appends to out the completions on c that the device does not report: those of
// soft requests, or all if the QP is abandoned.
func (q *qp) softCompletions(c *completionQueue, out []completion) []completion {
	q.sq.Lock()
	abandoned := q.sq.abandoned
	if c == q.sendCQ {
		if abandoned {
			out = q.sq.ring.flush(out)
		} else {
			out = q.sq.ring.completeSoft(out)
		}
	}
	q.sq.Unlock()
	if abandoned && c == q.recvCQ {
		q.rq.Lock()
		out = q.rq.ring.flush(out)
		q.rq.Unlock()
	}
	return out
}

// Stats returns a snapshot of the counters. ReadRequestsServed and the counts of Terminates stay 0:
// the device answers RDMA Reads and handles Terminates without reporting them.
func (q *qp) Stats() verbs.QPStats { return q.stats.Stats() }
