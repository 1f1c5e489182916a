//go:build rdmacore && cgo && linux

package rdmacore

/*
#include "shim.h"
*/
import "C"

import (
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// Bounds of what is asked of a device, whatever it offers.
const (
	// maxRegPages is the largest memory of one registration, in pages: more than the largest NFS payload needs.
	maxRegPages = 1024
	// maxDepth of RDMA Reads is what the connection managers' octet holds.
	maxDepth = 255
	// spareCQE is the room that every completion queue has beyond its depth, for the markers of draining queue pairs: the most QPs that may share it.
	spareCQE = 64
	// busyTries and busyPause are for a protection domain that the device still uses although nothing of it is left.
	busyTries = 50
	busyPause = 20 * time.Millisecond
	// markerWRs is the room that every send queue has beyond its depth, for its marker.
	markerWRs = 1
)

// A device is one opened RDMA device. There is one for each context of libibverbs, so that two connections on a device see the same value, until
// it turns out that the device is not what it said (demote) or has failed (retire): then later connections get another value.
type device struct {
	ctx   *C.struct_ibv_context
	log   hclog.Logger
	attrs verbs.DeviceAttrs
	perIO bool // no windows: memory is registered for each use
	siw   bool
	inv   C.uint32_t // flags of a completion that tell of a Send With Invalidate

	proven  atomic.Bool // a window was bound
	regions regionTable

	mu      sync.Mutex
	users   int                      // guarded by mu: connection ids, protection domains, completion queues
	retired bool                     // guarded by mu
	held    **C.struct_ibv_context   // guarded by mu: keeps librdmacm from closing ctx
	qps     map[*C.struct_ibv_qp]*qp // guarded by mu
	watch   *os.File                 // guarded by mu: asynchronous events, while there are users
	watched chan struct{}            // guarded by mu: closed when their reader has ended
}

// rxeRemoteInv lets rxe have CapRemoteInv. It does invalidate windows for the peer, and tells; but its kernel dies when a window that is not bound
// is invalidated, and there is always a time in which the peer's Send With Invalidate and a LOCAL_INV here can meet. Tests set it.
var rxeRemoteInv bool

var devices struct {
	mu  sync.Mutex
	all map[*C.struct_ibv_context]*device // guarded by mu
}

// deviceOf returns the device of a context.
func deviceOf(ctx *C.struct_ibv_context, cfg Config) (*device, error) {
	devices.mu.Lock()
	defer devices.mu.Unlock()
	if d := devices.all[ctx]; d != nil {
		return d, nil
	}
	ret := C.rc_try_window(ctx)
	d, err := newDevice(ctx, cfg.Logger, ret != 0)
	if err != nil {
		return nil, err
	}
	d.fillFirstPages()
	if ret != 0 {
		d.log.Info("RDMA device has no memory windows: memory is registered for each use, which is slower", "device", d.attrs.Name, "reason", errnoOf(ret))
	}
	return d, nil
}

// newDevice makes the value for ctx. Caller holds devices.mu.
func newDevice(ctx *C.struct_ibv_context, log hclog.Logger, perIO bool) (*device, error) {
	d := &device{ctx: ctx, log: log, perIO: perIO, qps: make(map[*C.struct_ibv_qp]*qp)}
	d.regions.byIndex = make(map[uint32]region)
	var a C.struct_ibv_device_attr
	name := C.GoString(C.rc_device_name(ctx))
	if err := errnoOf(C.rc_query_device(ctx, &a)); err != nil {
		return nil, fmt.Errorf("rdmacore: query device %s: %w", name, err)
	}
	d.attrs = verbs.DeviceAttrs{
		Name:                  name,
		Transport:             verbs.TransportIB,
		Caps:                  verbs.CapFastReg | verbs.CapMemWindow2B | verbs.CapRemoteInv,
		PageSize:              os.Getpagesize(),
		MaxFastRegPageListLen: maxRegPages,
		MaxQPWR:               int(a.max_qp_wr) - markerWRs,
		MaxSendSGE:            int(a.max_sge),
		MaxRecvSGE:            1,
		MaxSGERd:              1, // the project's RDMA Reads have one, and windows do not prefer to be small
		MaxQPRdAtom:           min(int(a.max_qp_rd_atom), maxDepth),
		MaxQPInitRdAtom:       min(int(a.max_qp_init_rd_atom), maxDepth),
		MaxCQE:                int(a.max_cqe) - spareCQE,
		MaxMR:                 int(a.max_mr),
	}
	d.inv = wcWithInv
	if a.vendor_id == rxeVendor {
		d.inv |= wcWithInvRXE
		if !rxeRemoteInv {
			d.attrs.Caps &^= verbs.CapRemoteInv
		}
	}
	d.siw = a.vendor_id == siwVendor
	if C.rc_is_iwarp(ctx) != 0 {
		d.attrs.Transport = verbs.TransportIWARP
	}
	if perIO {
		d.attrs.Caps = verbs.CapFastReg | verbs.CapPerIOReg
	} else if n := int(a.max_mw); n > 0 {
		d.attrs.MaxMR = min(d.attrs.MaxMR, n)
	}
	var n C.int
	if d.held = C.rc_devices(&n); d.held == nil {
		return nil, fmt.Errorf("rdmacore: hold device %s open: %w", name, syscall.ENODEV)
	}
	if devices.all == nil {
		devices.all = make(map[*C.struct_ibv_context]*device)
	}
	devices.all[ctx] = d
	return d, nil
}

// Attrs tells the limits and abilities.
func (d *device) Attrs() verbs.DeviceAttrs { return d.attrs }

// enter notes a user of the device. With the first one its asynchronous events are watched.
func (d *device) enter() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.users == 0 {
		if d.held == nil {
			return fmt.Errorf("rdmacore: device %s is gone: %w", d.attrs.Name, syscall.ENODEV)
		}
		f, err := waitable(d.ctx.async_fd, "ibv_async")
		if err != nil {
			return fmt.Errorf("rdmacore: watch device %s: %w", d.attrs.Name, err)
		}
		d.watch, d.watched = f, make(chan struct{})
		go d.watchEvents(f, d.watched)
	}
	d.users++
	return nil
}

// leave takes a user away. The watching ends with the last one, and so does a retired device.
func (d *device) leave() {
	d.mu.Lock()
	d.users--
	if d.users > 0 {
		d.mu.Unlock()
		return
	}
	f, done := d.watch, d.watched
	f.SetReadDeadline(time.Unix(1, 0))
	d.mu.Unlock()
	<-done
	f.Close()
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.retired && d.users == 0 && d.held != nil {
		C.rc_free_devices(d.held)
		d.held = nil
	}
}

// retire takes the device out of use: later connections get another value, if there is a device at all.
func (d *device) retire() {
	devices.mu.Lock()
	if devices.all[d.ctx] == d {
		delete(devices.all, d.ctx)
	}
	devices.mu.Unlock()
	d.mu.Lock()
	d.retired = true
	d.mu.Unlock()
}

// demote notes that the first window could not be bound, whatever the device had said: later connections register memory for each use.
func (d *device) demote(why error) {
	d.retire()
	devices.mu.Lock()
	defer devices.mu.Unlock()
	if devices.all[d.ctx] != nil { // another connection was first
		return
	}
	d.log.Warn("RDMA device has memory windows and cannot bind them: memory is registered for each use from now on, which is slower",
		"device", d.attrs.Name, "error", why)
	if _, err := newDevice(d.ctx, d.log, true); err != nil {
		d.log.Error("RDMA device could not be opened again", "device", d.attrs.Name, "error", err)
	}
}

// watchEvents reads asynchronous events until f's deadline is set.
func (d *device) watchEvents(f *os.File, done chan struct{}) {
	defer close(done)
	raw, err := f.SyscallConn()
	if err != nil {
		return
	}
	var kind, port C.int32_t
	var cqp *C.struct_ibv_qp
	for {
		var ret C.int
		err := raw.Read(func(uintptr) bool {
			ret = C.rc_next_async(d.ctx, &kind, &cqp, &port)
			return ret != -C.int(syscall.EAGAIN)
		})
		if err != nil {
			return
		}
		if ret == 0 {
			d.asyncEvent(asyncKind(kind), cqp, int(port))
		} else if ret != -C.int(syscall.EINTR) {
			time.Sleep(10 * time.Millisecond) // a device that goes away: its removal comes by the connections' events
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
				q.stats.accessErrors.Add(1)
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
		go d.retire()
	}
}

// A protectionDomain owns MRs and QPs, and the registrations of the arenas that they use.
type protectionDomain struct {
	dev *device
	c   *C.struct_ibv_pd

	mu     sync.Mutex
	uses   int                       // guarded by mu: MRs and QPs
	gone   bool                      // guarded by mu
	arenas map[*verbs.Arena]struct{} // guarded by mu: registered
	stale  []*C.struct_ibv_mr        // guarded by mu: of freed arenas, with windows bound to them
}

// AllocPD makes a protection domain.
func (d *device) AllocPD() (verbs.PD, error) {
	if err := d.enter(); err != nil {
		return nil, err
	}
	p := &protectionDomain{dev: d, arenas: make(map[*verbs.Arena]struct{})}
	if err := errnoOf(C.rc_alloc_pd(d.ctx, &p.c)); err != nil {
		d.leave()
		return nil, fmt.Errorf("rdmacore: allocate protection domain on %s: %w", d.attrs.Name, err)
	}
	verbs.Track(verbs.KindPD, 1)
	return p, nil
}

func (p *protectionDomain) take() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.gone {
		return fmt.Errorf("rdmacore: protection domain was deallocated: %w", verbs.ErrInvalid)
	}
	p.uses++
	return nil
}

func (p *protectionDomain) drop() {
	p.mu.Lock()
	p.uses--
	p.mu.Unlock()
}

// Dealloc releases the PD with its registrations of arenas.
func (p *protectionDomain) Dealloc() error {
	p.mu.Lock()
	switch {
	case p.gone:
		p.mu.Unlock()
		return fmt.Errorf("rdmacore: protection domain was deallocated: %w", verbs.ErrInvalid)
	case p.uses > 0:
		defer p.mu.Unlock()
		return fmt.Errorf("rdmacore: deallocate protection domain: %d MRs and QPs use it: %w", p.uses, verbs.ErrBusy)
	}
	p.gone = true
	arenas := p.arenas
	p.arenas = nil
	p.mu.Unlock()
	for a := range arenas {
		if x := a.Forget(p); x != nil {
			x.Detach()
		}
	}
	p.sweep()
	// The kernel's soft devices take a moment to let go of what a queue pair held.
	err := errnoOf(C.rc_dealloc_pd(p.c))
	for range busyTries {
		if err != syscall.EBUSY {
			break
		}
		time.Sleep(busyPause)
		err = errnoOf(C.rc_dealloc_pd(p.c))
	}
	verbs.Track(verbs.KindPD, -1)
	p.dev.leave()
	if err != nil {
		return fmt.Errorf("rdmacore: deallocate protection domain on %s: %w", p.dev.attrs.Name, err)
	}
	return nil
}

// An arenaMR is the registration of an arena in one protection domain: with local rights, and that windows may be bound to it, and no remote one.
type arenaMR struct {
	pd    *protectionDomain
	arena *verbs.Arena
	c     *C.struct_ibv_mr
	lkey  uint32
}

// arena returns the registration of the arena that all of b lies in, made when it is first needed.
func (p *protectionDomain) arena(b []byte) (*arenaMR, error) {
	a := verbs.ArenaOf(b)
	if a == nil {
		return nil, fmt.Errorf("rdmacore: %d octets are not in memory of AllocBuffer: %w", len(b), verbs.ErrInvalid)
	}
	x, err := a.Attached(p, func() (verbs.Attachment, error) { return p.register(a) })
	if err != nil {
		return nil, err
	}
	return x.(*arenaMR), nil
}

// register registers an arena, which is locked.
func (p *protectionDomain) register(a *verbs.Arena) (verbs.Attachment, error) {
	access := C.int(accessLocalWrite)
	if !p.dev.perIO {
		access |= accessMWBind
	}
	m := &arenaMR{pd: p, arena: a}
	mem := a.Bytes()
	if err := errnoOf(C.rc_reg_mr(p.c, unsafe.Pointer(&mem[0]), C.uint64_t(len(mem)), access, &m.c)); err != nil {
		return nil, pinError(len(mem), err)
	}
	m.lkey = uint32(m.c.lkey)
	p.mu.Lock()
	p.arenas[a] = struct{}{}
	p.mu.Unlock()
	return m, nil
}

// Detach deregisters the arena. While a window of a lost queue pair is still bound to it, it cannot be: then its pages stay pinned, and
// unreachable for the process, until the window is destroyed.
func (m *arenaMR) Detach() {
	p := m.pd
	err := errnoOf(C.rc_dereg_mr(m.c))
	p.mu.Lock()
	delete(p.arenas, m.arena)
	if err != nil {
		p.stale = append(p.stale, m.c)
	}
	p.mu.Unlock()
	if err != nil {
		p.dev.log.Debug("memory is freed while a window is bound to it", "device", p.dev.attrs.Name, "error", err)
	}
}

// sweep deregisters what Detach could not.
func (p *protectionDomain) sweep() {
	p.mu.Lock()
	defer p.mu.Unlock()
	left := p.stale[:0]
	for _, c := range p.stale {
		if C.rc_dereg_mr(c) != 0 {
			left = append(left, c)
		}
	}
	p.stale = left
}
