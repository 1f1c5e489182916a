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

	"github.com/nfsrdmad/nfsrdmad/internal/leakcheck"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/internal/base"
)

// qpState of a queue pair.
//
//	┌──────┐  start   ┌───────┐  lost, Drain   ┌──────┐  device flushes, or   ┌─────────┐
//	│ init │ ───────▶ │ ready │ ─────────────▶ │ dead │ ────────────────────▶ │ drained │
//	└──┬───┘          └───────┘                └──────┘  destroy, then flush  └─────────┘
//	   │ Drain (never connected)                   ▲
//	   └───────────────────────────────────────────┘
type qpState uint8

const (
	qpInit qpState = iota
	qpReady
	qpDead
)

const (
	// certain and guessed say what is known of why a queue pair was lost: of a flushed request only
	// that it was.
	certain = true
	guessed = false

	// causeTimeout is how long a guessed cause waits for a better one: the event of the connection
	// comes beside the completions.
	causeTimeout = 300 * time.Millisecond
	// notifyTimeout is how long what is posted may wait for the consumer to hear why it will fail.
	notifyTimeout = 100 * time.Millisecond
	// flushTimeout is how long a device may make no progress in flushing before its queue pair is
	// destroyed and flushed without it.
	flushTimeout = 2 * time.Second
)

// A qp is a queue pair.
//
// Lock order: device.mu, then mu; mu or rqMu, then a region's lock or completionQueue.mu.
type qp struct {
	dev            *device
	pd             *protectionDomain
	id             *connID
	cid            *C.struct_rdma_cm_id
	c              *C.struct_ibv_qp // valid until destroyed
	port           int
	attr           verbs.QPInitAttr
	sendCQ, recvCQ *completionQueue
	reserved       base.Reservation
	checks         base.PostChecks
	sendNo, recvNo uint32 // its numbers there

	inflight sync.WaitGroup // requests whose handler has not returned
	progress atomic.Uint64  // completions handled
	tearing  sync.Once
	takeOver sync.Once // flushes here what the device does not
	undo     sync.Once // destroys

	mu      sync.Mutex
	state   qpState // guarded by mu, as all below
	local   bool    // this side ended it
	told    bool    // OnDisconnect was, or will be, called
	cause   error
	sure    bool          // cause is certain
	better  chan struct{} // closed when it is
	heard   chan struct{} // closed when the consumer has heard of it, or takes too long
	ord     int           // RDMA Reads that this side may have outstanding
	ring    sendRing
	chain   []chained // of the PostSend under way
	wrs     []C.struct_rc_wr
	sges    []C.struct_ibv_sge
	scratch []C.struct_ibv_send_wr
	broken  bool // what the device left is to be flushed here

	rqMu     sync.Mutex
	rqClosed bool // guarded by rqMu, as below
	recvs    recvRing

	stats base.Counters
}

// newQP makes a QP on the connection id of c. Caller holds c.mu.
func newQP(c *connID, vpd verbs.PD, attr verbs.QPInitAttr) (*qp, error) {
	d := c.dev
	pd, ok := vpd.(*protectionDomain)
	if !ok || pd.dev.context != d.context {
		return nil, fmt.Errorf("rdmacore: create QP: the protection domain belongs to another device: %w",
			verbs.ErrInvalid)
	}
	scq, ok1 := attr.SendCQ.(*completionQueue)
	rcq, ok2 := attr.RecvCQ.(*completionQueue)
	if !ok1 || !ok2 || scq.dev.context != d.context || rcq.dev.context != d.context {
		return nil, fmt.Errorf("rdmacore: create QP: a completion queue belongs to another device: %w",
			verbs.ErrInvalid)
	}
	if err := base.CheckQPAttr(Name, &attr, d.attrs); err != nil {
		return nil, err
	}
	if err := d.context.use(); err != nil {
		return nil, err
	}
	defer d.context.done()
	reserved, err := base.Reserve(&pd.uses, scq.entries, rcq.entries, attr)
	if err != nil {
		return nil, err
	}
	q := &qp{dev: d, pd: pd, id: c, cid: c.c, attr: attr, sendCQ: scq, recvCQ: rcq, reserved: reserved,
		checks: base.PostChecks{Provider: Name, MaxSendSGE: attr.MaxSendSGE, MaxMessage: maxMessage},
		better: make(chan struct{}), heard: make(chan struct{}),
		ring: newSendRing(attr.MaxSendWR), recvs: newRecvRing(attr.MaxRecvWR)}
	if err := errnoOf(C.rc_create_qp(c.c, pd.c, scq.c, rcq.c, C.int(attr.MaxSendWR+markerWRs), C.int(attr.MaxRecvWR),
		C.int(attr.MaxSendSGE), &q.c)); err != nil {
		q.reserved.Release()
		return nil, fmt.Errorf("rdmacore: create QP with %d send and %d receive requests on %s: %w: %w",
			attr.MaxSendWR, attr.MaxRecvWR, d.attrs.Name, verbs.ErrNoResources, err)
	}
	q.port = int(c.c.port_num)
	q.allocate()
	q.sendNo, q.recvNo = scq.enroll(q), rcq.enroll(q)
	d.mu.Lock()
	d.qps[q.c] = q
	d.mu.Unlock()
	leakcheck.Track(leakcheck.QP, 1)
	return q, nil
}

// allocate makes the memory of chains, C's own, used again for every post.
func (q *qp) allocate() {
	n := q.attr.MaxSendWR
	q.chain = make([]chained, 0, n)
	q.wrs = unsafe.Slice((*C.struct_rc_wr)(C.calloc(C.size_t(n), C.sizeof_struct_rc_wr)), n)
	q.sges = unsafe.Slice((*C.struct_ibv_sge)(C.calloc(C.size_t(n*q.attr.MaxSendSGE), C.sizeof_struct_ibv_sge)),
		n*q.attr.MaxSendSGE)
	q.scratch = unsafe.Slice((*C.struct_ibv_send_wr)(C.calloc(C.size_t(n), C.sizeof_struct_ibv_send_wr)), n)
}

// start makes the QP ready, unless it is dead. ord is the depth of its RDMA Reads.
func (q *qp) start(ord int) {
	q.mu.Lock()
	if q.state == qpInit {
		q.state, q.ord = qpReady, ord
	}
	q.mu.Unlock()
}

// unstart takes start back, when the connection was not made after all.
func (q *qp) unstart() {
	q.mu.Lock()
	if q.state == qpReady {
		q.state = qpInit
	}
	q.mu.Unlock()
}

// failed notes a completion that was no success: the device has moved the QP to the error state.
func (q *qp) failed(status verbs.Status, vendor uint32) {
	q.lost(&StatusError{Status: status, VendorErr: vendor}, status != verbs.StatusWRFlushErr)
}

// lost ends a QP that is ready, for a cause of the peer's or the device's, and tells the consumer.
// It does not block.
func (q *qp) lost(cause error, sure bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.told || q.local || q.state == qpInit {
		if q.told && sure && !q.sure { // what was guessed is known now
			q.cause, q.sure = cause, true
			close(q.better)
		}
		return
	}
	q.state, q.told, q.cause, q.sure = qpDead, true, cause, sure
	if sure {
		close(q.better)
	}
	go q.end()
}

// end takes a lost QP down and tells the consumer.
func (q *qp) end() {
	select {
	case <-q.better:
	case <-time.After(causeTimeout):
	}
	q.mu.Lock()
	q.state = qpDead
	cause := q.cause
	q.sure = true
	q.mu.Unlock()
	if f := q.attr.OnDisconnect; f != nil {
		told := make(chan struct{})
		go func() {
			f(cause)
			close(told)
		}()
		// the reason first, and then what comes of it: a consumer goes by the first that it hears
		select {
		case <-told:
		case <-time.After(notifyTimeout):
		}
	}
	close(q.heard)
	q.tear()
	q.flush() // what is posted completes, also if the consumer takes its time to close
}

// takeDown destroys the queue pair of a device that is gone; what is posted is flushed here. It
// waits while the kernel makes the connection.
func (q *qp) takeDown(cause error) {
	q.lost(cause, certain)
	q.mu.Lock()
	told := q.told
	q.mu.Unlock()
	if told {
		<-q.heard
	}
	q.id.call.Lock()
	defer q.id.call.Unlock()
	q.tear()
	q.abandon("")
}

// tear closes the queues, disconnects, and has the device flush, once.
func (q *qp) tear() {
	q.tearing.Do(func() {
		q.mu.Lock()
		q.state = qpDead
		q.mu.Unlock()
		q.rqMu.Lock()
		q.rqClosed = true
		q.rqMu.Unlock()
		C.rc_disconnect(q.cid) // fails where there is no connection any more
		C.rc_fail_qp(q.c)
		q.mu.Lock()
		pos, left := q.ring.Tail, q.ring.Len()
		q.mu.Unlock()
		// Unsignaled requests that were executed tell nothing; what is flushed behind them does.
		// Where all are signaled there are none.
		if left > 0 && !q.dev.perIO {
			C.rc_post_marker(q.c, wrID(q.sendNo, wrMarker, pos))
		}
	})
}

// Drain moves the QP to the error state and waits until every handler has returned.
func (q *qp) Drain() {
	q.mu.Lock()
	if q.state != qpDead {
		q.local = true
	}
	q.state = qpDead
	q.mu.Unlock()
	q.tear()
	q.flush()
}

// flush waits until every handler has returned. A device that does not flush is made to by
// destroying the QP.
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
	q.abandon("RDMA device does not flush a queue pair in the error state: it is destroyed")
	<-done
}

// abandon destroys the device's queue pair, once, and has what is posted flushed here. warning is
// for the log.
func (q *qp) abandon(warning string) {
	q.takeOver.Do(func() {
		if warning != "" {
			q.dev.log.Warn(warning, "device", q.dev.attrs.Name)
		}
		q.release()
		q.mu.Lock()
		q.broken = true
		q.mu.Unlock()
		q.sendCQ.wake(q)
		if q.recvCQ != q.sendCQ {
			q.recvCQ.wake(q)
		}
	})
}

// release destroys the device's queue pair, once, so that the device touches no memory of it any
// more. No request may be posted afterwards.
func (q *qp) release() {
	q.undo.Do(func() {
		q.dev.mu.Lock()
		delete(q.dev.qps, q.c)
		q.dev.mu.Unlock()
		q.dev.regions.untie(q)
		// While the connection is being made librdmacm may use the queue pair at any event.
		// Afterwards a device that takes its time holds nobody up.
		q.id.mu.Lock()
		settled := q.id.settled
		q.id.mu.Unlock()
		if !settled {
			handling.Lock()
			defer handling.Unlock()
		}
		C.rc_destroy_qp(q.cid)
	})
}

// destroy drains and releases everything. Caller is connID.Close.
func (q *qp) destroy() {
	q.Drain()
	q.release()
	q.sendCQ.dismiss(q.sendNo)
	q.recvCQ.dismiss(q.recvNo)
	for _, p := range []unsafe.Pointer{unsafe.Pointer(&q.wrs[0]), unsafe.Pointer(&q.sges[0]),
		unsafe.Pointer(&q.scratch[0])} {
		C.free(p)
	}
	q.reserved.Release()
	leakcheck.Track(leakcheck.QP, -1)
}

// sendEnded, markerEnded, recvEnded and takeSoft are what the dispatcher learns.

func (q *qp) sendEnded(pos uint32, status verbs.Status, vendor uint32, out []completion) []completion {
	q.mu.Lock()
	defer q.mu.Unlock()
	from := len(out)
	out, ok := q.ring.complete(pos, status, vendor, out)
	if !ok {
		return out
	}
	for i := range out[from:] {
		q.judge(&out[from+i].wc)
	}
	return out
}

// judge learns from a completion whether windows can be bound. Caller holds mu.
func (q *qp) judge(wc *verbs.WorkCompletion) {
	if wc.Opcode != verbs.OpFastReg || q.dev.perIO || q.dev.proven.Load() {
		return
	}
	switch wc.Status {
	case verbs.StatusSuccess:
		q.dev.proven.Store(true)
	case verbs.StatusWRFlushErr:
	default:
		go q.dev.demote(&StatusError{Status: wc.Status, VendorErr: wc.VendorErr})
	}
}

func (q *qp) markerEnded(pos uint32, out []completion) []completion {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.ring.settle(q.ring.completeBefore(pos, out))
}

func (q *qp) recvEnded(pos uint32, wc verbs.WorkCompletion, out []completion) []completion {
	q.rqMu.Lock()
	defer q.rqMu.Unlock()
	out, _ = q.recvs.complete(pos, wc, out)
	return out
}

// takeSoft takes the completions of c that the device does not tell.
func (q *qp) takeSoft(c *completionQueue, out []completion) []completion {
	q.mu.Lock()
	broken := q.broken
	if c == q.sendCQ {
		if broken {
			out = q.ring.flush(out)
		} else {
			out = q.ring.settle(out)
		}
	}
	q.mu.Unlock()
	if broken && c == q.recvCQ {
		q.rqMu.Lock()
		out = q.recvs.flush(out)
		q.rqMu.Unlock()
	}
	return out
}

// Stats returns a snapshot of the counters. ReadRequestsServed and the counts of Terminates stay 0:
// the device answers RDMA Reads and handles Terminates without reporting them.
func (q *qp) Stats() verbs.QPStats { return q.stats.Stats() }
