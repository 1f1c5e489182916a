//go:build rdmacore && cgo && linux

package rdmacore

/*
#include <stdlib.h>
#include "shim.h"
*/
import "C"

import (
	"fmt"
	"os"
	"runtime"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"github.com/nfsrdmad/nfsrdmad/internal/selfcheck"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/internal/base"
)

// The wr_id of a request says which request a completion belongs to: the number of the QP on its
// CQ, the queue, and the position on the queue.
const (
	wrSend = iota
	wrRecv
	wrMarker      // all requests before the position have ended
	wrKindShift   = 32
	wrKindMask    = 3
	wrNumberShift = 34
	wrNumberMask  = 1<<30 - 1
)

// rearmDelay is the pause between polls of a CQ that cannot be armed.
const rearmDelay = 5 * time.Millisecond

func wrID(number uint32, kind int, pos uint32) C.uint64_t {
	return C.uint64_t(uint64(number)<<wrNumberShift | uint64(kind)<<wrKindShift | uint64(pos))
}

// A completionQueue is a CQ with its completion channel and its dispatcher. The dispatcher is the
// goroutine that polls the CQ and calls the handlers.
type completionQueue struct {
	dev     *device
	c       *C.struct_ibv_cq
	ch      *C.struct_ibv_comp_channel
	depth   int
	entries *base.CQEntries
	file    *os.File // a duplicate of the channel's descriptor, for Go's poller
	// destroyed is closed when the device's CQ is destroyed. c, ch and file are invalid afterwards.
	destroyed  chan struct{}
	done       chan struct{} // closed when the dispatcher has ended
	wakeup     chan struct{} // wakes the dispatcher once destroyed is closed
	destroyErr error         // set before destroyed is closed

	// Only the dispatcher uses these.
	wcs       []C.struct_rc_wc
	spin      spinner
	completed []completion

	qps struct {
		sync.Mutex
		byNumber      map[uint32]*qp
		next          uint32 // number to try for the next QP
		soft          []*qp  // QPs with soft completions
		deviceRemoved bool
	}
}

// CreateCQ makes a completion queue and starts its dispatcher.
func (d *device) CreateCQ(depth int) (verbs.CQ, error) {
	if err := base.CheckCQDepth(Name, depth, d.attrs.MaxCQE); err != nil {
		return nil, err
	}
	if err := d.addUser(); err != nil {
		return nil, err
	}
	c := &completionQueue{dev: d, depth: depth,
		// Each QP counts twice, once for each of its queues.
		entries:   base.NewCQEntries(Name, depth, 2*spareCQE),
		destroyed: make(chan struct{}), done: make(chan struct{}), wakeup: make(chan struct{}, 1)}
	c.qps.byNumber = make(map[uint32]*qp)
	if err := c.create(); err != nil {
		d.removeUser()
		return nil, err
	}
	selfcheck.Track(selfcheck.CQ, 1)
	go c.dispatch()
	return c, nil
}

// create creates the device's CQ with its completion channel.
func (c *completionQueue) create() error {
	d := c.dev
	if err := d.context.acquire(); err != nil {
		return err
	}
	defer d.context.release()
	err := errnoOf(C.rc_create_cq(d.ctx, C.int(c.depth+spareCQE), &c.ch, &c.c))
	if err != nil {
		return fmt.Errorf("rdmacore: create completion queue of depth %d on %s: %w: %w", c.depth, d.attrs.Name,
			verbs.ErrNoResources, err)
	}
	if c.file, err = pollableFile(c.ch.fd, "ibv_cq"); err != nil {
		C.rc_destroy_cq(c.c, c.ch)
		return fmt.Errorf("rdmacore: watch completion queue on %s: %w", d.attrs.Name, err)
	}
	batch := (*C.struct_rc_wc)(C.calloc(C.RC_POLL_BATCH, C.sizeof_struct_rc_wc))
	c.wcs = unsafe.Slice(batch, C.RC_POLL_BATCH)
	d.objects.Lock()
	d.objects.cqs[c] = struct{}{}
	d.objects.Unlock()
	return nil
}

// addQP gives q a number that no other QP of c has.
func (c *completionQueue) addQP(q *qp) uint32 {
	c.qps.Lock()
	defer c.qps.Unlock()
	for c.qps.byNumber[c.qps.next] != nil {
		c.qps.next = (c.qps.next + 1) & wrNumberMask
	}
	n := c.qps.next
	c.qps.next = (c.qps.next + 1) & wrNumberMask
	c.qps.byNumber[n] = q
	return n
}

// removeQP frees the number. The dispatcher ignores later completions with this number.
func (c *completionQueue) removeQP(number uint32) {
	c.qps.Lock()
	delete(c.qps.byNumber, number)
	c.qps.Unlock()
}

// wakeFor makes the dispatcher process q's soft completions, which the device does not report.
func (c *completionQueue) wakeFor(q *qp) {
	c.qps.Lock()
	c.qps.soft = append(c.qps.soft, q)
	c.qps.Unlock()
	c.wake()
}

// wake wakes the dispatcher.
func (c *completionQueue) wake() {
	c.file.SetReadDeadline(time.Unix(1, 0)) // fails once the device's CQ is destroyed
	select {
	case c.wakeup <- struct{}{}:
	default:
	}
}

// dispatch polls the device's CQ until the CQ is destroyed. Afterwards it processes only soft
// completions, until c is closed.
func (c *completionQueue) dispatch() {
	defer close(c.done)
	c.poll()
	c.destroy()
	for !c.entries.Closed() {
		<-c.wakeup
		for c.handleSoft() {
		}
	}
}

// destroy destroys the device's CQ.
func (c *completionQueue) destroy() {
	c.file.Close()
	c.destroyErr = errnoOf(C.rc_destroy_cq(c.c, c.ch))
	C.free(unsafe.Pointer(&c.wcs[0]))
	c.c, c.wcs = nil, nil
	close(c.destroyed)
}

// takeDown destroys the CQ of a removed device. The caller must have destroyed the device's queue
// pairs.
func (c *completionQueue) takeDown() {
	c.qps.Lock()
	c.qps.deviceRemoved = true
	c.qps.Unlock()
	c.wake()
	<-c.destroyed
}

// poll processes completions until c is closed or the device is removed. It sleeps on the
// completion channel while there is none.
func (c *completionQueue) poll() {
	raw, err := c.file.SyscallConn()
	if err != nil {
		return
	}
	for {
		if c.pollOnce() {
			c.spin.foundCompletions()
			continue
		}
		c.qps.Lock()
		removed := c.qps.deviceRemoved
		c.qps.Unlock()
		if removed || c.entries.Closed() {
			return
		}
		if c.spin.pollAgain(time.Now()) {
			runtime.Gosched()
			continue
		}
		if C.rc_arm_cq(c.c) != 0 { // the device may be about to be removed
			time.Sleep(rearmDelay)
			continue
		}
		if c.pollOnce() { // a completion that came before the CQ was armed causes no event
			continue
		}
		c.spin.beginSleep(time.Now())
		err := raw.Read(func(uintptr) bool { return C.rc_take_cq_event(c.ch) != -C.int(syscall.EAGAIN) })
		// wake sets the deadline after it has stored its reason. The next poll sees the reason.
		if err != nil {
			c.file.SetReadDeadline(time.Time{})
		}
		c.spin.endSleep(time.Now())
	}
}

// pollOnce processes the available completions, and reports whether there were any.
func (c *completionQueue) pollOnce() bool {
	n := int(C.rc_poll_cq(c.c, &c.wcs[0]))
	for i := range max(n, 0) {
		c.handle(&c.wcs[i])
	}
	return c.handleSoft() || n > 0
}

// handleSoft processes the soft completions, and reports whether there were any.
func (c *completionQueue) handleSoft() bool {
	c.qps.Lock()
	qps := c.qps.soft
	c.qps.soft = nil
	c.qps.Unlock()
	for _, q := range qps {
		c.deliver(q, q.softCompletions(c, c.completed[:0]))
	}
	return len(qps) > 0
}

// handle processes a completion of the device.
func (c *completionQueue) handle(w *C.struct_rc_wc) {
	id := uint64(w.wr_id)
	c.qps.Lock()
	q := c.qps.byNumber[uint32(id>>wrNumberShift)]
	c.qps.Unlock()
	if q == nil {
		return
	}
	status, vendor := statusOf(uint32(w.status)), uint32(w.vendor_err)
	if status != verbs.StatusSuccess {
		q.requestFailed(status, vendor)
	}
	pos := uint32(id)
	out := c.completed[:0]
	switch id >> wrKindShift & wrKindMask {
	case wrSend:
		out = q.sendCompleted(pos, status, vendor, out)
	case wrMarker:
		out = q.markerCompleted(pos, out)
	case wrRecv:
		wc := verbs.WorkCompletion{Status: status, VendorErr: vendor}
		if status == verbs.StatusSuccess {
			wc.ByteLen = uint32(w.byte_len)
			if w.flags&c.dev.withInvFlags != 0 {
				wc.WithInv, wc.InvalidatedRKey = true, verbs.RKey(w.invalidated_rkey)
				q.stats.RemoteInvalidates.Add(1)
				if r, ok := c.dev.regions.find(wc.InvalidatedRKey).(*window); ok {
					r.invalidatedByPeer(q, wc.InvalidatedRKey)
				}
			}
			q.stats.BytesReceived.Add(uint64(wc.ByteLen))
		}
		out = q.recvCompleted(pos, wc, out)
	}
	c.deliver(q, out)
}

// deliver calls the handlers of q's completions.
func (c *completionQueue) deliver(q *qp, out []completion) {
	for i := range out {
		e := &out[i]
		if e.done != nil {
			e.wc.QP = q
			if e.wc.Opcode == verbs.OpRecv {
				q.stats.RecvCompletions.Add(1)
			} else {
				q.stats.SendCompletions.Add(1)
			}
			e.done(&e.wc)
		}
		q.progress.Add(1)
		q.inflight.Done()
		*e = completion{}
	}
	c.completed = out[:0]
}

// Close stops the dispatcher and waits for it. A handler must not call Close.
func (c *completionQueue) Close() error {
	first, err := c.entries.Close()
	if err != nil {
		return err
	}
	if !first {
		<-c.done
		return nil
	}
	c.wake()
	<-c.done
	d := c.dev
	d.objects.Lock()
	delete(d.objects.cqs, c)
	d.objects.Unlock()
	selfcheck.Track(selfcheck.CQ, -1)
	d.removeUser()
	if c.destroyErr != nil {
		return fmt.Errorf("rdmacore: destroy completion queue on %s: %w", d.attrs.Name, c.destroyErr)
	}
	return nil
}
