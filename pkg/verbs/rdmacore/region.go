//go:build rdmacore && cgo && linux

package rdmacore

/*
#include "shim.h"
*/
import "C"

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"unsafe"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/internal/selfcheck"
	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/internal/base"
)

// keyBits is the number of low bits of a remote key that the consumer chooses.
const keyBits = 8

// A regionTable finds the region of a remote key.
type regionTable struct {
	mu      sync.RWMutex
	byIndex map[uint32]region // by the upper bits of the key; guarded by mu
}

func (t *regionTable) add(key verbs.RKey, r region) {
	t.mu.Lock()
	t.byIndex[uint32(key)>>keyBits] = r
	t.mu.Unlock()
}

// remove removes r, unless the device has already given the index of r to another region.
func (t *regionTable) remove(key verbs.RKey, r region) {
	t.mu.Lock()
	if t.byIndex[uint32(key)>>keyBits] == r {
		delete(t.byIndex, uint32(key)>>keyBits)
	}
	t.mu.Unlock()
}

func (t *regionTable) find(key verbs.RKey) region {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.byIndex[uint32(key)>>keyBits]
}

// A region is an MR that can be registered and invalidated by work requests.
type region interface {
	verbs.MR
	// fastReg prepares a FastReg of mem on q. If soft is false, the device gets wr. If soft is
	// true, the device gets nothing, and the request completes with status. undo undoes a request
	// that was not posted.
	fastReg(q *qp, req *verbs.WorkRequest, mem []byte, wr *C.struct_rc_wr) (soft bool,
		status verbs.Status, undo func(), err error)
	// localInv prepares a LocalInv on q. Its results are those of fastReg.
	localInv(q *qp, key verbs.RKey, wr *C.struct_rc_wr) (soft bool, status verbs.Status)
	// takeDown ends the registration because the device was removed.
	takeDown() error
	domain() *protectionDomain
	pages() int
}

// AllocMR makes an MR for up to depth pages of contiguous memory.
func (p *protectionDomain) AllocMR(depth int) (verbs.MR, error) {
	if err := base.CheckMRDepth(Name, depth, maxRegPages); err != nil {
		return nil, err
	}
	if err := p.uses.Take(); err != nil {
		return nil, err
	}
	if p.dev.perIO {
		selfcheck.Track(selfcheck.MR, 1)
		return &perIOMR{pd: p, depth: depth}, nil
	}
	if err := p.dev.context.acquire(); err != nil {
		p.uses.Drop()
		return nil, err
	}
	defer p.dev.context.release()
	w := &window{pd: p, depth: depth, free: true}
	if err := errnoOf(C.rc_alloc_mw(p.c, &w.c)); err != nil {
		p.uses.Drop()
		return nil, fmt.Errorf("rdmacore: allocate memory window on %s: %w: %w", p.dev.attrs.Name,
			verbs.ErrNoResources, err)
	}
	w.firstKey = verbs.RKey(w.c.rkey)
	w.key = w.firstKey
	p.dev.regions.add(w.firstKey, w)
	selfcheck.Track(selfcheck.MR, 1)
	return w, nil
}

// RegMR returns an MR for the arena that contains buf. The first call for an arena registers it.
// The registration lasts as long as the protection domain and the arena.
func (p *protectionDomain) RegMR(buf []byte) (verbs.MR, error) {
	if err := p.uses.Take(); err != nil {
		return nil, err
	}
	a, err := p.arena(buf)
	if err != nil {
		p.uses.Drop()
		return nil, err
	}
	return base.NewLocalMR(&p.uses, a.lkey), nil
}

// A window is a type-2 memory window. A FastReg binds it to the registration of its arena. A
// LocalInv or the peer's Send With Invalidate unbinds it.
type window struct {
	pd       *protectionDomain
	c        *C.struct_ibv_mw
	firstKey verbs.RKey
	depth    int

	mu           sync.Mutex // guards all fields below
	deregistered bool
	key          verbs.RKey // of the last bind that was posted
	qp           *qp        // of the last bind that was posted
	free         bool       // not bound once all posted requests are executed
	maybeBound   bool       // bound on qp, or possibly bound
	deallocated  bool       // on the device
}

func (w *window) LKey() uint32              { return 0 }
func (w *window) RKey() verbs.RKey          { return w.firstKey }
func (w *window) domain() *protectionDomain { return w.pd }
func (w *window) pages() int                { return w.depth }

// Dereg deallocates the window, bound or not. The device guarantees that the peer cannot access the
// memory afterwards.
func (w *window) Dereg() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.deregistered {
		return fmt.Errorf("rdmacore: deallocate memory window %#08x: already deallocated: %w", uint32(w.firstKey),
			verbs.ErrInvalid)
	}
	if err := w.dealloc(); err != nil {
		return err
	}
	w.deregistered, w.qp = true, nil
	w.pd.dev.regions.remove(w.firstKey, w)
	w.pd.deregisterStale()
	w.pd.uses.Drop()
	selfcheck.Track(selfcheck.MR, -1)
	return nil
}

// dealloc deallocates the window on the device. It does nothing if that is done already. Caller
// holds mu.
func (w *window) dealloc() error {
	if w.deallocated {
		return nil
	}
	if err := errnoOf(C.rc_dealloc_mw(w.c)); err != nil {
		return fmt.Errorf("rdmacore: deallocate memory window %#08x on %s: %w", uint32(w.firstKey), w.pd.dev.attrs.Name,
			err)
	}
	w.deallocated, w.maybeBound = true, false
	return nil
}

// deallocWindowsOf deallocates the windows that are or may be bound on q, which is in the error
// state. A device may refuse to destroy a queue pair with bound windows, or need a minute for it.
// The consumer could only deregister these windows anyway.
func (t *regionTable) deallocWindowsOf(q *qp) {
	t.mu.RLock()
	var list []*window
	for _, r := range t.byIndex {
		if w, ok := r.(*window); ok {
			list = append(list, w)
		}
	}
	t.mu.RUnlock()
	for _, w := range list {
		w.mu.Lock()
		if w.qp == q && w.maybeBound {
			if err := w.dealloc(); err != nil {
				w.pd.dev.log.Error("deallocate window of lost connection", "error", err)
			}
		}
		w.mu.Unlock()
	}
}

// takeDown ends every registration of a removed device. If that fails, the kernel releases the
// registration.
func (t *regionTable) takeDown(log hclog.Logger) {
	t.mu.RLock()
	list := slices.Collect(maps.Values(t.byIndex))
	t.mu.RUnlock()
	for _, r := range list {
		if err := r.takeDown(); err != nil {
			log.Debug("deregister memory of removed device; the kernel releases it", "error", err)
		}
	}
}

func (w *window) takeDown() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	err := w.dealloc()
	w.deallocated, w.maybeBound = true, false
	return err
}

func (m *perIOMR) takeDown() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	err := m.unregister()
	if m.c != nil {
		m.markInvalid()
	}
	return err
}

// localInvExecuted records that a LocalInv of key was executed.
func (w *window) localInvExecuted(key verbs.RKey) {
	w.mu.Lock()
	if w.key == key {
		w.maybeBound = false
	}
	w.mu.Unlock()
}

func (w *window) fastReg(q *qp, req *verbs.WorkRequest, mem []byte, wr *C.struct_rc_wr) (bool, verbs.Status,
	func(), error) {
	a, err := w.pd.arena(mem)
	if err != nil {
		return false, 0, nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.deregistered || w.deallocated {
		return false, 0, nil, q.checks.Invalid(req, "MR was deregistered or its connection was lost")
	}
	if !w.free { // not every device rejects a second bind
		return true, verbs.StatusMWBindErr, func() {}, nil
	}
	lastKey, lastQP, lastMaybeBound := w.key, w.qp, w.maybeBound
	w.key, w.qp, w.free, w.maybeBound = w.firstKey.WithKey(req.NewKey), q, false, true
	wr.opcode = C.IBV_WR_BIND_MW
	wr.mw, wr.mr = w.c, a.c
	wr.rkey = C.uint32_t(w.key)
	wr.bind_addr, wr.bind_len = C.uint64_t(uintptr(unsafe.Pointer(unsafe.SliceData(mem)))), C.uint64_t(len(mem))
	wr.bind_access = C.uint32_t(windowAccess(req.Access))
	return false, 0, func() {
		w.mu.Lock()
		w.key, w.qp, w.free, w.maybeBound = lastKey, lastQP, true, lastMaybeBound
		w.mu.Unlock()
	}, nil
}

// localInv checks two conditions that not every device checks: key must be the current key, and its
// bind must have been posted on this queue pair.
func (w *window) localInv(q *qp, key verbs.RKey, wr *C.struct_rc_wr) (bool, verbs.Status) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.deregistered || w.deallocated || w.pd != q.pd || w.qp != q || w.key != key {
		return true, verbs.StatusLocQPOpErr
	}
	if w.free {
		// There is nothing to invalidate, and on rxe the kernel would panic. An empty RDMA Write,
		// which has no effect on the peer, takes the place of the request in the queue.
		wr.opcode = C.IBV_WR_RDMA_WRITE
		return false, 0
	}
	w.free = true
	wr.opcode, wr.invalidate = C.IBV_WR_LOCAL_INV, C.uint32_t(key)
	return false, 0
}

// invalidatedByPeer records that the peer has invalidated key on q.
func (w *window) invalidatedByPeer(q *qp, key verbs.RKey) {
	w.mu.Lock()
	if w.qp == q && w.key == key {
		w.free, w.maybeBound = true, false
	}
	w.mu.Unlock()
}

// A perIOMR is an MR of a device without windows. Each use has a separate registration with remote
// rights, which ends with the use.
type perIOMR struct {
	pd    *protectionDomain
	depth int

	mu           sync.Mutex // guards all fields below
	deregistered bool
	c            *C.struct_ibv_mr // nil while the MR is invalid
	key          verbs.RKey
	access       verbs.Access
	mem          []byte
	qp           *qp        // of its FastReg; nil before
	lastKey      verbs.RKey // of the previous use
	lastQP       *qp        // of the previous use
}

func (m *perIOMR) LKey() uint32              { return 0 }
func (m *perIOMR) domain() *protectionDomain { return m.pd }
func (m *perIOMR) pages() int                { return m.depth }

func (m *perIOMR) RKey() verbs.RKey {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.key
}

// Register registers seg, which must be contiguous memory of a membuf arena, and returns its key.
// The MR must be invalid.
func (m *perIOMR) Register(access verbs.Access, seg []byte) (verbs.RKey, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.deregistered:
		return 0, fmt.Errorf("rdmacore: register memory: MR was deregistered: %w", verbs.ErrInvalid)
	case m.c != nil:
		return 0, fmt.Errorf("rdmacore: register memory: MR is already valid: %w", verbs.ErrInvalid)
	case len(seg) == 0 || len(seg) > m.depth*m.pd.dev.attrs.PageSize:
		return 0, fmt.Errorf("rdmacore: register %d bytes: want 1 byte to %d pages: %w", len(seg), m.depth,
			verbs.ErrInvalid)
	case membuf.ArenaOf(seg) == nil:
		return 0, fmt.Errorf("rdmacore: register %d bytes: memory is not in a membuf arena: %w", len(seg),
			verbs.ErrInvalid)
	}
	if err := m.register(access, seg); err != nil {
		return 0, err
	}
	return m.key, nil
}

// register is Register after the checks. Caller holds mu.
func (m *perIOMR) register(access verbs.Access, seg []byte) error {
	if err := m.pd.dev.context.acquire(); err != nil {
		return err
	}
	defer m.pd.dev.context.release()
	if err := errnoOf(C.rc_reg_mr(m.pd.c, unsafe.Pointer(unsafe.SliceData(seg)), C.uint64_t(len(seg)),
		C.int(regionAccess(access)), &m.c)); err != nil {
		m.c = nil
		return registrationError(m.pd.dev.attrs.Name, len(seg), err)
	}
	m.pd.dev.regions.remove(m.lastKey, m)
	m.key, m.access, m.mem, m.qp = verbs.RKey(m.c.rkey), access, seg, nil
	m.pd.dev.regions.add(m.key, m)
	return nil
}

// Unregister ends the registration. It does nothing if the MR is invalid.
func (m *perIOMR) Unregister() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.unregister()
}

// unregister is Unregister for a caller that holds mu.
func (m *perIOMR) unregister() error {
	if m.c == nil {
		return nil
	}
	if err := errnoOf(C.rc_dereg_mr(m.c)); err != nil {
		return fmt.Errorf("rdmacore: deregister MR %#08x on %s: %w", uint32(m.key), m.pd.dev.attrs.Name, err)
	}
	m.markInvalid()
	return nil
}

// markInvalid records that the registration has ended. Caller holds mu.
func (m *perIOMR) markInvalid() {
	m.lastKey, m.lastQP = m.key, m.qp
	m.c, m.key, m.mem, m.qp = nil, 0, nil, nil
}

// Dereg deregisters the MR and ends its registration, if it has one.
func (m *perIOMR) Dereg() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.deregistered {
		return fmt.Errorf("rdmacore: deregister MR: already deregistered: %w", verbs.ErrInvalid)
	}
	if err := m.unregister(); err != nil {
		return err
	}
	m.deregistered = true
	m.pd.dev.regions.remove(m.lastKey, m)
	m.pd.uses.Drop()
	selfcheck.Track(selfcheck.MR, -1)
	return nil
}

func (m *perIOMR) fastReg(q *qp, req *verbs.WorkRequest, mem []byte, _ *C.struct_rc_wr) (bool, verbs.Status,
	func(), error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.deregistered:
		return true, 0, nil, q.checks.Invalid(req, "MR was deregistered")
	case m.c == nil:
		if err := m.register(req.Access, mem); err != nil {
			return true, 0, nil, err
		}
		m.qp = q
		return true, verbs.StatusSuccess, func() { m.Unregister() }, nil
	case m.qp != nil:
		return true, verbs.StatusMWBindErr, func() {}, nil // already valid
	case m.access != req.Access || len(m.mem) != len(mem) || unsafe.SliceData(m.mem) != unsafe.SliceData(mem):
		return true, 0, nil, q.checks.Invalid(req, "MR is registered for other memory or rights")
	}
	m.qp = q
	return true, verbs.StatusSuccess, func() {
		m.mu.Lock()
		m.qp = nil
		m.mu.Unlock()
	}, nil
}

// localInv ends the registration immediately. Only the peer's access ends. Requests posted before
// do not use this registration.
func (m *perIOMR) localInv(q *qp, key verbs.RKey, _ *C.struct_rc_wr) (bool, verbs.Status) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.c == nil && !m.deregistered && m.lastKey == key && m.lastQP == q: // already invalid
		return true, verbs.StatusSuccess
	case m.deregistered || m.c == nil || m.pd != q.pd || m.qp != q || m.key != key:
		return true, verbs.StatusLocQPOpErr
	}
	if err := m.unregister(); err != nil {
		m.pd.dev.log.Error("deregister memory", "device", m.pd.dev.attrs.Name, "error", err)
		return true, verbs.StatusLocProtErr
	}
	return true, verbs.StatusSuccess
}
