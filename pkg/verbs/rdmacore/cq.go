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

	"github.com/nfsrdmad/nfsrdmad/internal/leakcheck"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/internal/base"
)

// What a completion is of, in its wr_id: the queue pair's number on its completion queue, the
// queue, and the position on it.
const (
	wrSend = iota
	wrRecv
	wrMarker      // everything before the position has ended
	wrKindShift   = 32
	wrKindMask    = 3
	wrNumberShift = 34
	wrNumberMask  = 1<<30 - 1
)

// armPause is between looks at a queue of which the device will not tell when there is something.
const armPause = 5 * time.Millisecond

func wrID(number uint32, kind int, pos uint32) C.uint64_t {
	return C.uint64_t(uint64(number)<<wrNumberShift | uint64(kind)<<wrKindShift | uint64(pos))
}

// A completionQueue is a CQ with its completion channel, and the goroutine that polls it and calls
// handlers.
type completionQueue struct {
	dev     *device
	c       *C.struct_ibv_cq
	ch      *C.struct_ibv_comp_channel
	depth   int
	entries *base.CQEntries
	file    *os.File // stands for the channel in Go's poller
	// closed when the device's queue is destroyed, and nothing above is of use any more
	freed chan struct{}
	done  chan struct{} // closed when the dispatcher has ended
	soft  chan struct{} // wakes the dispatcher then
	err   error         // of the destruction; set before freed is closed
	wcs   []C.struct_rc_wc
	spin  spinner
	out   []completion // the dispatcher's

	mu     sync.Mutex
	qps    map[uint32]*qp // by number; guarded by mu, as all below
	number uint32
	wakers []*qp // have something that the device does not tell
	gone   bool  // the device is
}

// CreateCQ makes a completion queue and starts its dispatcher.
func (d *device) CreateCQ(depth int) (verbs.CQ, error) {
	if err := base.CheckCQDepth(Name, depth, d.attrs.MaxCQE); err != nil {
		return nil, err
	}
	if err := d.enter(); err != nil {
		return nil, err
	}
	c := &completionQueue{dev: d, depth: depth,
		// each QP counts twice: its two queues
		entries: base.NewCQEntries(Name, depth, 2*spareCQE), freed: make(chan struct{}), done: make(chan struct{}),
		soft: make(chan struct{}, 1), qps: make(map[uint32]*qp)}
	if err := c.create(); err != nil {
		d.leave()
		return nil, err
	}
	leakcheck.Track(leakcheck.CQ, 1)
	go c.dispatch()
	return c, nil
}

// create makes the device's queue.
func (c *completionQueue) create() error {
	d := c.dev
	if err := d.context.use(); err != nil {
		return err
	}
	defer d.context.done()
	err := errnoOf(C.rc_create_cq(d.ctx, C.int(c.depth+spareCQE), &c.ch, &c.c))
	if err != nil {
		return fmt.Errorf("rdmacore: create completion queue of depth %d on %s: %w: %w", c.depth, d.attrs.Name,
			verbs.ErrNoResources, err)
	}
	if c.file, err = waitable(c.ch.fd, "ibv_cq"); err != nil {
		C.rc_destroy_cq(c.c, c.ch)
		return fmt.Errorf("rdmacore: watch completion queue on %s: %w", d.attrs.Name, err)
	}
	batch := (*C.struct_rc_wc)(C.calloc(C.RC_POLL_BATCH, C.sizeof_struct_rc_wc))
	c.wcs = unsafe.Slice(batch, C.RC_POLL_BATCH)
	d.mu.Lock()
	d.cqs[c] = struct{}{}
	d.mu.Unlock()
	return nil
}

// enroll gives q a number.
func (c *completionQueue) enroll(q *qp) uint32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.qps[c.number] != nil {
		c.number = (c.number + 1) & wrNumberMask
	}
	n := c.number
	c.number = (c.number + 1) & wrNumberMask
	c.qps[n] = q
	return n
}

// dismiss takes the number back: completions that come for it are nobody's.
func (c *completionQueue) dismiss(number uint32) {
	c.mu.Lock()
	delete(c.qps, number)
	c.mu.Unlock()
}

// wake has the dispatcher look at q's software completions.
func (c *completionQueue) wake(q *qp) {
	c.mu.Lock()
	c.wakers = append(c.wakers, q)
	c.mu.Unlock()
	c.rouse()
}

// rouse wakes the dispatcher.
func (c *completionQueue) rouse() {
	c.file.SetReadDeadline(time.Unix(1, 0)) // fails when the device's queue is destroyed
	select {
	case c.soft <- struct{}{}:
	default:
	}
}

// dispatch polls the device's queue, and when the device is gone what is flushed here.
func (c *completionQueue) dispatch() {
	defer close(c.done)
	c.poll()
	c.free()
	for !c.entries.Closed() {
		<-c.soft
		for c.handleSoft() {
		}
	}
}

// free destroys the device's queue.
func (c *completionQueue) free() {
	c.file.Close()
	c.err = errnoOf(C.rc_destroy_cq(c.c, c.ch))
	C.free(unsafe.Pointer(&c.wcs[0]))
	c.c, c.wcs = nil, nil
	close(c.freed)
}

// takeDown destroys the device's queue, of a device that is gone, and whose queue pairs are.
func (c *completionQueue) takeDown() {
	c.mu.Lock()
	c.gone = true
	c.mu.Unlock()
	c.rouse()
	<-c.freed
}

// poll polls, and sleeps on the channel while nothing comes, until the queue is closed or the
// device gone.
func (c *completionQueue) poll() {
	raw, err := c.file.SyscallConn()
	if err != nil {
		return
	}
	for {
		if c.round() {
			c.spin.hit()
			continue
		}
		c.mu.Lock()
		gone := c.gone
		c.mu.Unlock()
		if gone || c.entries.Closed() {
			return
		}
		if c.spin.again(time.Now()) {
			runtime.Gosched()
			continue
		}
		if C.rc_arm_cq(c.c) != 0 { // a device that is going: it may tell nothing any more
			time.Sleep(armPause)
			continue
		}
		if c.round() { // what came before it was armed makes no event
			continue
		}
		c.spin.sleeps(time.Now())
		err := raw.Read(func(uintptr) bool { return C.rc_take_cq_event(c.ch) != -C.int(syscall.EAGAIN) })
		// woken by a deadline: what it was for is seen by the next round, or wakes again
		if err != nil {
			c.file.SetReadDeadline(time.Time{})
		}
		c.spin.woken(time.Now())
	}
}

// round handles what is there, and reports whether there was anything.
func (c *completionQueue) round() bool {
	n := int(C.rc_poll_cq(c.c, &c.wcs[0]))
	for i := range max(n, 0) {
		c.handle(&c.wcs[i])
	}
	return c.handleSoft() || n > 0
}

// handleSoft handles what the device does not tell, and reports whether there was anything.
func (c *completionQueue) handleSoft() bool {
	c.mu.Lock()
	wakers := c.wakers
	c.wakers = nil
	c.mu.Unlock()
	for _, q := range wakers {
		c.deliver(q, q.takeSoft(c, c.out[:0]))
	}
	return len(wakers) > 0
}

func (c *completionQueue) handle(w *C.struct_rc_wc) {
	id := uint64(w.wr_id)
	c.mu.Lock()
	q := c.qps[uint32(id>>wrNumberShift)]
	c.mu.Unlock()
	if q == nil {
		return
	}
	status, vendor := statusOf(uint32(w.status)), uint32(w.vendor_err)
	if status != verbs.StatusSuccess {
		q.failed(status, vendor)
	}
	pos := uint32(id)
	out := c.out[:0]
	switch id >> wrKindShift & wrKindMask {
	case wrSend:
		out = q.sendEnded(pos, status, vendor, out)
	case wrMarker:
		out = q.markerEnded(pos, out)
	case wrRecv:
		wc := verbs.WorkCompletion{Status: status, VendorErr: vendor}
		if status == verbs.StatusSuccess {
			wc.ByteLen = uint32(w.byte_len)
			if w.flags&c.dev.inv != 0 {
				wc.WithInv, wc.InvalidatedRKey = true, verbs.RKey(w.invalidated_rkey)
				q.stats.RemoteInvalidates.Add(1)
				if r, ok := c.dev.regions.find(wc.InvalidatedRKey).(*window); ok {
					r.invalidated(q, wc.InvalidatedRKey)
				}
			}
			q.stats.BytesReceived.Add(uint64(wc.ByteLen))
		}
		out = q.recvEnded(pos, wc, out)
	}
	c.deliver(q, out)
}

// deliver calls the handlers.
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
	c.out = out[:0]
}

// Close stops the dispatcher and waits for it. Not from a handler.
func (c *completionQueue) Close() error {
	first, err := c.entries.Close()
	if err != nil {
		return err
	}
	if !first {
		<-c.done
		return nil
	}
	c.rouse()
	<-c.done
	d := c.dev
	d.mu.Lock()
	delete(d.cqs, c)
	d.mu.Unlock()
	leakcheck.Track(leakcheck.CQ, -1)
	d.leave()
	if c.err != nil {
		return fmt.Errorf("rdmacore: destroy completion queue on %s: %w", d.attrs.Name, c.err)
	}
	return nil
}
