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

// Limits that this package sets in addition to those of the device.
const (
	// maxRegPages is the largest memory of one registration in pages. The largest NFS payload needs
	// less.
	maxRegPages = 1024
	// maxDepth is the largest depth of RDMA Reads. The connection manager keeps the depth in one
	// byte.
	maxDepth = 255
	// spareCQE is the number of entries that every CQ has beyond its depth, for the markers of
	// draining QPs. It is therefore the maximum number of QPs on one CQ.
	spareCQE = 64
	// markerWRs is the number of entries that every send queue has beyond its depth, for its
	// marker.
	markerWRs = 1
)

// A device is an RDMA device as connections see it. All connections on an RDMA device share one
// value, except in two cases: the device cannot bind windows although it reported them
// (disableWindows), or it failed (retire). Later connections then get a new value.
type device struct {
	context *deviceContext
	ctx     *C.struct_ibv_context // context.c; valid until the device is removed
	log     hclog.Logger
	attrs   verbs.DeviceAttrs
	perIO   bool // the device has no windows; memory is registered for each use
	rxe     bool // the kernel's soft RoCE device
	// withInvFlags are the flags of a completion that report a Send With Invalidate.
	withInvFlags C.uint32_t

	bindWorks atomic.Bool // a bind of a window has succeeded
	regions   regionTable

	objects struct {
		sync.Mutex
		users     int                            // connection ids, protection domains and CQs
		qps       map[*C.struct_ibv_qp]*qp       // not destroyed
		cqs       map[*completionQueue]struct{}  // not closed
		pds       map[*protectionDomain]struct{} // not deallocated
		asyncFile *os.File                       // asynchronous events; nil without users
		asyncDone chan struct{}                  // closed when the latest reader has ended
	}
}

// rxeRemoteInv gives rxe CapRemoteInv. rxe invalidates windows for the peer and reports it. But the
// kernel panics when a window is invalidated that is not bound. The peer's Send With Invalidate can
// always meet a LOCAL_INV of this side. Only tests set rxeRemoteInv.
var rxeRemoteInv bool

// deviceOf returns the current device of a context of librdmacm.
func deviceOf(ctx *C.struct_ibv_context, cfg Config) (*device, error) {
	devices.Lock()
	defer devices.Unlock()
	o, err := contextOf(ctx, cfg.Logger)
	if err != nil {
		return nil, err
	}
	if o.current != nil {
		return o.current, nil
	}
	if err := o.acquire(); err != nil {
		return nil, err
	}
	defer o.release()
	ret := C.rc_try_window(ctx)
	d, err := newDevice(o, cfg.Logger, ret != 0)
	if err != nil {
		return nil, err
	}
	o.log = cfg.Logger
	if ret != 0 {
		d.log.Info("RDMA device has no memory windows; registering memory for each use, which is slower",
			"device", d.attrs.Name, "error", errnoOf(ret))
	}
	return d, nil
}

// newDevice makes the value for new connections on o. Caller holds the lock of devices and has
// acquired o.
func newDevice(o *deviceContext, log hclog.Logger, perIO bool) (*device, error) {
	d := &device{context: o, ctx: o.c, log: log, perIO: perIO}
	d.objects.qps = make(map[*C.struct_ibv_qp]*qp)
	d.objects.cqs = make(map[*completionQueue]struct{})
	d.objects.pds = make(map[*protectionDomain]struct{})
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
		// An RDMA Read of this project has one SGE.
		MaxSGERd:        1,
		MaxQPRdAtom:     min(int(a.max_qp_rd_atom), maxDepth),
		MaxQPInitRdAtom: min(int(a.max_qp_init_rd_atom), maxDepth),
		MaxCQE:          int(a.max_cqe) - spareCQE,
		MaxMR:           int(a.max_mr),
	}
	d.withInvFlags = wcWithInv
	if a.vendor_id == rxeVendor {
		d.rxe = true
		d.withInvFlags |= wcWithInvRXE
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
	o.devices = append(o.devices, d)
	return d, nil
}

// Attrs returns the limits and capabilities.
func (d *device) Attrs() verbs.DeviceAttrs { return d.attrs }

// addUser counts a user of the device. The first user starts the reader of asynchronous events.
func (d *device) addUser() error {
	if err := d.context.acquire(); err != nil {
		return err
	}
	defer d.context.release()
	d.objects.Lock()
	defer d.objects.Unlock()
	if d.objects.asyncFile == nil {
		f, err := pollableFile(d.ctx.async_fd, "ibv_async")
		if err != nil {
			return fmt.Errorf("rdmacore: watch device %s: %w", d.attrs.Name, err)
		}
		last := d.objects.asyncDone
		d.objects.asyncFile, d.objects.asyncDone = f, make(chan struct{})
		go d.readAsyncEvents(f, last, d.objects.asyncDone)
	}
	d.objects.users++
	return nil
}

// removeUser removes a user. The last user stops the reader of asynchronous events.
func (d *device) removeUser() {
	d.objects.Lock()
	d.objects.users--
	last := d.objects.users == 0
	d.objects.Unlock()
	if last {
		d.stopAsyncReader()
		d.dropIfUnused()
	}
}

// stopAsyncReader stops the reader of asynchronous events and waits for it. It does nothing while
// the device has users and is not removed.
func (d *device) stopAsyncReader() {
	d.objects.Lock()
	f, done := d.objects.asyncFile, d.objects.asyncDone
	if done == nil || d.objects.users > 0 && !d.context.gone.Load() {
		d.objects.Unlock()
		return
	}
	if f != nil {
		d.objects.asyncFile = nil
		f.SetReadDeadline(time.Unix(1, 0))
	}
	d.objects.Unlock()
	<-done // no goroutine reads events of the context afterwards
	if f != nil {
		f.Close()
	}
}

// dropIfUnused removes d from its device context if d is not current and has no users.
func (d *device) dropIfUnused() {
	devices.Lock()
	defer devices.Unlock()
	d.objects.Lock()
	unused := d.objects.users == 0
	d.objects.Unlock()
	if unused && d.context.current != d {
		d.context.devices = slices.DeleteFunc(d.context.devices, func(v *device) bool { return v == d })
	}
}

// retire makes later connections get a new value for the RDMA device, if it still exists.
func (d *device) retire() {
	devices.Lock()
	defer devices.Unlock()
	if d.context.current == d {
		d.context.current = nil
	}
}

// disableWindows is called when the first bind of a window failed although the device reported
// windows. Later connections register memory for each use.
func (d *device) disableWindows(cause error) {
	devices.Lock()
	defer devices.Unlock()
	// Another connection has replaced d already, or the device was removed.
	if d.context.current != d || d.context.acquire() != nil {
		return
	}
	defer d.context.release()
	d.log.Warn("RDMA device cannot bind memory windows; registering memory for each use, which is slower",
		"device", d.attrs.Name, "error", cause)
	if _, err := newDevice(d.context, d.log, true); err != nil {
		d.context.current = nil
		d.log.Error("open RDMA device again", "device", d.attrs.Name, "error", err)
	}
}

// snapshot returns the values of seq, which iterates over a map in d.objects.
func snapshot[T any](d *device, seq iter.Seq[T]) []T {
	d.objects.Lock()
	defer d.objects.Unlock()
	return slices.Collect(seq)
}

// readAsyncEvents reads asynchronous events until a deadline is set on f. It first waits until the
// previous reader, which closes last, has ended.
func (d *device) readAsyncEvents(f *os.File, last, done chan struct{}) {
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
			// The device may be about to be removed. The connections' events report the removal.
			time.Sleep(10 * time.Millisecond)
		}
	}
}

// asyncEvent processes an event of the device. It holds the lock, so that no queue pair is
// destroyed during the call.
func (d *device) asyncEvent(kind asyncKind, cqp *C.struct_ibv_qp, port int) {
	d.log.Debug("RDMA device event", "device", d.attrs.Name, "event", kind.String(), "port", port)
	cause := &DeviceEventError{Device: d.attrs.Name, Event: kind.String()}
	d.objects.Lock()
	defer d.objects.Unlock()
	switch kind {
	case asyncCommEst: // data arrived before the message that establishes the connection
		if q := d.objects.qps[cqp]; q != nil {
			C.rc_comm_established(q.cid)
		}
	case asyncQPFatal, asyncQPReqErr, asyncQPAccessErr:
		if q := d.objects.qps[cqp]; q != nil {
			if kind == asyncQPAccessErr {
				q.stats.RemoteAccessErrors.Add(1)
			}
			q.disconnect(cause, certain)
		}
	case asyncPortErr:
		cause.Event = fmt.Sprintf("port %d is down", port)
		for _, q := range d.objects.qps {
			if q.port == port {
				q.disconnect(cause, certain)
			}
		}
	case asyncDeviceFatal:
		for _, q := range d.objects.qps {
			q.disconnect(cause, certain)
		}
		go func() {
			d.retire()
			if !d.context.present() { // the device failed because it was removed
				d.context.remove(reasonMissing)
			}
		}()
	}
}
