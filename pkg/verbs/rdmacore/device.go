//go:build rdmacore && cgo && linux

package rdmacore

/*
#include "shim.h"
*/
import "C"

import (
	"fmt"
	"iter"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// Bounds of what is asked of a device, whatever it offers.
const (
	// maxRegPages is the largest memory of one registration, in pages: more than the largest NFS
	// payload needs.
	maxRegPages = 1024
	// maxDepth of RDMA Reads is what the connection managers' octet holds.
	maxDepth = 255
	// spareCQE is the room that every completion queue has beyond its depth, for the markers of
	// draining queue pairs: the most QPs that may share it.
	spareCQE = 64
	// markerWRs is the room that every send queue has beyond its depth, for its marker.
	markerWRs = 1
)

// A device is an RDMA device as connections see it. There is one for each that is opened, so that
// two connections on a device see the same value, until it turns out that the device is not what it
// said (demote) or has failed (retire): then later connections get another value.
type device struct {
	context *deviceContext
	ctx     *C.struct_ibv_context // in.c; valid while in is not gone
	log     hclog.Logger
	attrs   verbs.DeviceAttrs
	perIO   bool       // no windows: memory is registered for each use
	rxe     bool       // the kernel's soft RoCE device
	inv     C.uint32_t // flags of a completion that tell of a Send With Invalidate

	proven  atomic.Bool // a window was bound
	regions regionTable

	mu sync.Mutex
	// guarded by mu, as all below: connection ids, protection domains, completion queues
	users   int
	qps     map[*C.struct_ibv_qp]*qp       // that the device has
	cqs     map[*completionQueue]struct{}  // that are not closed
	pds     map[*protectionDomain]struct{} // that are not deallocated
	watch   *os.File                       // asynchronous events, while there are users
	watched chan struct{}                  // closed when their reader, the last one, has ended
}

// rxeRemoteInv lets rxe have CapRemoteInv. It does invalidate windows for the peer, and tells; but
// its kernel dies when a window that is not bound is invalidated, and there is always a time in
// which the peer's Send With Invalidate and a LOCAL_INV here can meet. Tests set it.
var rxeRemoteInv bool

// deviceOf returns the device of a context that librdmacm gave.
func deviceOf(ctx *C.struct_ibv_context, cfg Config) (*device, error) {
	devices.mu.Lock()
	defer devices.mu.Unlock()
	o, err := contextOf(ctx, cfg.Logger)
	if err != nil {
		return nil, err
	}
	if o.current != nil {
		return o.current, nil
	}
	if err := o.use(); err != nil {
		return nil, err
	}
	defer o.done()
	ret := C.rc_try_window(ctx)
	d, err := newDevice(o, cfg.Logger, ret != 0)
	if err != nil {
		return nil, err
	}
	o.log = cfg.Logger
	if ret != 0 {
		d.log.Info("RDMA device has no memory windows: memory is registered for each use, which is slower", "device",
			d.attrs.Name, "reason", errnoOf(ret))
	}
	return d, nil
}

// newDevice makes the value for new connections on o. Caller holds devices.mu and uses o.
func newDevice(o *deviceContext, log hclog.Logger, perIO bool) (*device, error) {
	d := &device{context: o, ctx: o.c, log: log, perIO: perIO, qps: make(map[*C.struct_ibv_qp]*qp),
		cqs: make(map[*completionQueue]struct{}), pds: make(map[*protectionDomain]struct{})}
	d.regions.byIndex = make(map[uint32]region)
	var a C.struct_ibv_device_attr
	if err := errnoOf(C.rc_query_device(o.c, &a)); err != nil {
		return nil, fmt.Errorf("rdmacore: query device %s: %w", o.name, err)
	}
	d.attrs = verbs.DeviceAttrs{
		Name:                  o.name,
		Transport:             verbs.TransportIB,
		Caps:                  verbs.CapFastReg | verbs.CapMemWindow2B | verbs.CapRemoteInv,
		PageSize:              os.Getpagesize(),
		MaxFastRegPageListLen: maxRegPages,
		MaxQPWR:               int(a.max_qp_wr) - markerWRs,
		MaxSendSGE:            int(a.max_sge),
		MaxRecvSGE:            1,
		// the project's RDMA Reads have one, and windows do not prefer to be small
		MaxSGERd:        1,
		MaxQPRdAtom:     min(int(a.max_qp_rd_atom), maxDepth),
		MaxQPInitRdAtom: min(int(a.max_qp_init_rd_atom), maxDepth),
		MaxCQE:          int(a.max_cqe) - spareCQE,
		MaxMR:           int(a.max_mr),
	}
	d.inv = wcWithInv
	if a.vendor_id == rxeVendor {
		d.rxe = true
		d.inv |= wcWithInvRXE
		if !rxeRemoteInv {
			d.attrs.Caps &^= verbs.CapRemoteInv
		}
	}
	if a.vendor_id == siwVendor && o.brokenOffsetCQ == nil {
		o.reserveBrokenOffset()
	}
	if C.rc_is_iwarp(o.c) != 0 {
		d.attrs.Transport = verbs.TransportIWARP
	}
	if perIO {
		d.attrs.Caps = verbs.CapFastReg | verbs.CapPerIOReg
	} else if n := int(a.max_mw); n > 0 {
		d.attrs.MaxMR = min(d.attrs.MaxMR, n)
	}
	o.current = d
	o.values = append(o.values, d)
	return d, nil
}

// Attrs tells the limits and abilities.
func (d *device) Attrs() verbs.DeviceAttrs { return d.attrs }

// enter notes a user of the device. With the first one its asynchronous events are watched.
func (d *device) enter() error {
	if err := d.context.use(); err != nil {
		return err
	}
	defer d.context.done()
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.watch == nil {
		f, err := waitable(d.ctx.async_fd, "ibv_async")
		if err != nil {
			return fmt.Errorf("rdmacore: watch device %s: %w", d.attrs.Name, err)
		}
		last := d.watched
		d.watch, d.watched = f, make(chan struct{})
		go d.watchEvents(f, last, d.watched)
	}
	d.users++
	return nil
}

// leave takes a user away. The watching ends with the last one.
func (d *device) leave() {
	d.mu.Lock()
	d.users--
	last := d.users == 0
	d.mu.Unlock()
	if last {
		d.unwatch()
		d.forget()
	}
}

// unwatch ends the watching, unless there is a user, or the device is gone.
func (d *device) unwatch() {
	d.mu.Lock()
	f, done := d.watch, d.watched
	if done == nil || d.users > 0 && !d.context.gone.Load() {
		d.mu.Unlock()
		return
	}
	if f != nil {
		d.watch = nil
		f.SetReadDeadline(time.Unix(1, 0))
	}
	d.mu.Unlock()
	<-done // also where another has ended it: after this nobody reads events of the context
	if f != nil {
		f.Close()
	}
}

// forget takes a value that is out of use, and has no user, off its device context.
func (d *device) forget() {
	devices.mu.Lock()
	defer devices.mu.Unlock()
	d.mu.Lock()
	unused := d.users == 0
	d.mu.Unlock()
	if unused && d.context.current != d {
		d.context.values = slices.DeleteFunc(d.context.values, func(v *device) bool { return v == d })
	}
}

// retire takes the device out of use: later connections get another value, if there is a device at
// all.
func (d *device) retire() {
	devices.mu.Lock()
	defer devices.mu.Unlock()
	if d.context.current == d {
		d.context.current = nil
	}
}

// demote notes that the first window could not be bound, whatever the device had said: later
// connections register memory for each use.
func (d *device) demote(why error) {
	devices.mu.Lock()
	defer devices.mu.Unlock()
	// another connection was first, or there is no device any more
	if d.context.current != d || d.context.use() != nil {
		return
	}
	defer d.context.done()
	d.log.Warn("RDMA device has memory windows and cannot bind them: memory is registered for each use from now on, which is slower",
		"device", d.attrs.Name, "error", why)
	if _, err := newDevice(d.context, d.log, true); err != nil {
		d.context.current = nil
		d.log.Error("RDMA device could not be opened again", "device", d.attrs.Name, "error", err)
	}
}

// collect lists what one of a device's maps has at one moment.
func collect[T any](d *device, seq iter.Seq[T]) []T {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Collect(seq)
}

// watchEvents reads asynchronous events, after the reader before has ended, until f's deadline is
// set.
func (d *device) watchEvents(f *os.File, last, done chan struct{}) {
	defer close(done)
	if last != nil {
		<-last
	}
	raw, err := f.SyscallConn()
	if err != nil {
		return
	}
	ev := new(C.struct_rc_async)
	for {
		var ret C.int
		err := raw.Read(func(uintptr) bool {
			ret = C.rc_next_async(d.ctx, ev)
			return ret != -C.int(syscall.EAGAIN)
		})
		if err != nil {
			return
		}
		if ret == 0 {
			d.asyncEvent(asyncKind(ev.kind), ev.qp, int(ev.port))
			C.rc_ack_async(ev)
		} else if ret != -C.int(syscall.EINTR) {
			// a device that goes away: its removal comes by the connections' events
			time.Sleep(10 * time.Millisecond)
		}
	}
}

// asyncEvent acts on an event of the device. The lock is held so that no queue pair goes meanwhile.
func (d *device) asyncEvent(kind asyncKind, cqp *C.struct_ibv_qp, port int) {
	d.log.Debug("RDMA device event", "device", d.attrs.Name, "event", kind.String(), "port", port)
	cause := &DeviceEventError{Device: d.attrs.Name, Event: kind.String()}
	d.mu.Lock()
	defer d.mu.Unlock()
	switch kind {
	case asyncCommEst: // the peer's data was faster than its word that the connection stands
		if q := d.qps[cqp]; q != nil {
			C.rc_comm_established(q.cid)
		}
	case asyncQPFatal, asyncQPReqErr, asyncQPAccessErr:
		if q := d.qps[cqp]; q != nil {
			if kind == asyncQPAccessErr {
				q.stats.RemoteAccessErrors.Add(1)
			}
			q.lost(cause, certain)
		}
	case asyncPortErr:
		cause.Event = fmt.Sprintf("port %d is down", port)
		for _, q := range d.qps {
			if q.port == port {
				q.lost(cause, certain)
			}
		}
	case asyncDeviceFatal:
		for _, q := range d.qps {
			q.lost(cause, certain)
		}
		go func() {
			d.retire()
			if !d.context.present() { // its removal is what it failed of
				d.context.remove(reasonMissing)
			}
		}()
	}
}
