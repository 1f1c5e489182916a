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

	"github.com/nfsrdmad/nfsrdmad/internal/leakcheck"
	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/internal/base"
)

// keyBits is how many low bits of a remote key are the consumer's.
const keyBits = 8

// A regionTable finds what a remote key names.
type regionTable struct {
	mu      sync.RWMutex
	byIndex map[uint32]region // guarded by mu; by the upper bits of the key
}

func (t *regionTable) add(key verbs.RKey, r region) {
	t.mu.Lock()
	t.byIndex[uint32(key)>>keyBits] = r
	t.mu.Unlock()
}

// remove takes r off the table, unless the device has given its index to another meanwhile.
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
	// fastReg prepares a FastReg on q of one piece of memory: wr is what the device gets, or soft
	// is set when it has nothing to do. undo is for a request that was not posted.
	fastReg(q *qp, req *verbs.WorkRequest, piece []byte, wr *C.struct_rc_wr) (soft bool, status verbs.Status,
		undo func(), err error)
	// localInv prepares a LocalInv on q.
	localInv(q *qp, key verbs.RKey, wr *C.struct_rc_wr) (soft bool, status verbs.Status)
	// takeDown gives the registration up: the device is gone.
	takeDown() error
	domain() *protectionDomain
	pages() int
}

// AllocMR makes an MR for up to depth pages of one piece of memory.
func (p *protectionDomain) AllocMR(depth int) (verbs.MR, error) {
	if err := base.CheckMRDepth(Name, depth, maxRegPages); err != nil {
		return nil, err
	}
	if err := p.uses.Take(); err != nil {
		return nil, err
	}
	if p.dev.perIO {
		leakcheck.Track(leakcheck.MR, 1)
		return &useMR{pd: p, depth: depth}, nil
	}
	if err := p.dev.context.use(); err != nil {
		p.uses.Drop()
		return nil, err
	}
	defer p.dev.context.done()
	w := &window{pd: p, depth: depth, free: true}
	if err := errnoOf(C.rc_alloc_mw(p.c, &w.c)); err != nil {
		p.uses.Drop()
		return nil, fmt.Errorf("rdmacore: allocate memory window on %s: %w: %w", p.dev.attrs.Name,
			verbs.ErrNoResources, err)
	}
	w.first = verbs.RKey(w.c.rkey)
	w.key = w.first
	p.dev.regions.add(w.first, w)
	leakcheck.Track(leakcheck.MR, 1)
	return w, nil
}

// RegMR registers the arena that buf lies in, if it was not, for the life of the protection domain
// or of the arena.
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

// A window is a type-2 memory window: a FastReg binds it to its arena's registration, a LocalInv or
// the peer's Send With Invalidate unbinds it.
type window struct {
	pd    *protectionDomain
	c     *C.struct_ibv_mw
	first verbs.RKey
	depth int

	mu   sync.Mutex
	gone bool       // guarded by mu, as all below
	key  verbs.RKey // in force since the last bind that was posted
	qp   *qp        // that it was posted on
	free bool       // not bound, once what was posted is executed
	tied bool       // bound on qp, or perhaps so
	lost bool       // deallocated with its queue pair
}

func (w *window) LKey() uint32              { return 0 }
func (w *window) RKey() verbs.RKey          { return w.first }
func (w *window) domain() *protectionDomain { return w.pd }
func (w *window) pages() int                { return w.depth }

// Dereg deallocates the window, bound or not, which the device fences.
func (w *window) Dereg() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.gone {
		return fmt.Errorf("rdmacore: deallocate memory window %#08x: already deallocated: %w", uint32(w.first),
			verbs.ErrInvalid)
	}
	if err := w.dealloc(); err != nil {
		return err
	}
	w.gone, w.qp = true, nil
	w.pd.dev.regions.remove(w.first, w)
	w.pd.sweep()
	w.pd.uses.Drop()
	leakcheck.Track(leakcheck.MR, -1)
	return nil
}

// dealloc gives the window back to the device, once. Caller holds mu.
func (w *window) dealloc() error {
	if w.lost {
		return nil
	}
	if err := errnoOf(C.rc_dealloc_mw(w.c)); err != nil {
		return fmt.Errorf("rdmacore: deallocate memory window %#08x on %s: %w", uint32(w.first), w.pd.dev.attrs.Name,
			err)
	}
	w.lost, w.tied = true, false
	return nil
}

// untie deallocates the windows that are, or may be, bound on q, which is dead: a device may
// refuse, or take a minute, to destroy a queue pair before. They could only have been destroyed in
// any case.
func (t *regionTable) untie(q *qp) {
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
		if w.qp == q && w.tied {
			if err := w.dealloc(); err != nil {
				w.pd.dev.log.Error("a window of a lost connection stays", "error", err)
			}
		}
		w.mu.Unlock()
	}
}

// takeDown gives up every registration of a device that is gone: what it does not take is the
// kernel's to release.
func (t *regionTable) takeDown(log hclog.Logger) {
	t.mu.RLock()
	list := slices.Collect(maps.Values(t.byIndex))
	t.mu.RUnlock()
	for _, r := range list {
		if err := r.takeDown(); err != nil {
			log.Debug("a registration of a removed device is left to the kernel", "error", err)
		}
	}
}

func (w *window) takeDown() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	err := w.dealloc()
	w.lost, w.tied = true, false
	return err
}

func (m *useMR) takeDown() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	err := m.unregister()
	if m.c != nil {
		m.invalid()
	}
	return err
}

// unbound notes that a LocalInv of key was executed.
func (w *window) unbound(key verbs.RKey) {
	w.mu.Lock()
	if w.key == key {
		w.tied = false
	}
	w.mu.Unlock()
}

func (w *window) fastReg(q *qp, req *verbs.WorkRequest, piece []byte, wr *C.struct_rc_wr) (bool, verbs.Status, func(),
	error) {
	a, err := w.pd.arena(piece)
	if err != nil {
		return false, 0, nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.gone || w.lost {
		return false, 0, nil, q.checks.Invalid(req, "the MR was destroyed, or lost with its connection")
	}
	if !w.free { // not every device says so by itself
		return true, verbs.StatusMWBindErr, func() {}, nil
	}
	lastKey, lastQP, lastTied := w.key, w.qp, w.tied
	w.key, w.qp, w.free, w.tied = w.first.WithKey(req.NewKey), q, false, true
	wr.opcode = C.IBV_WR_BIND_MW
	wr.mw, wr.mr = w.c, a.c
	wr.rkey = C.uint32_t(w.key)
	wr.bind_addr, wr.bind_len = C.uint64_t(uintptr(unsafe.Pointer(unsafe.SliceData(piece)))), C.uint64_t(len(piece))
	wr.bind_access = C.uint32_t(windowAccess(req.Access))
	return false, 0, func() {
		w.mu.Lock()
		w.key, w.qp, w.free, w.tied = lastKey, lastQP, true, lastTied
		w.mu.Unlock()
	}, nil
}

// localInv checks what not every device does: that the key is in force, and was made valid on this
// queue pair.
func (w *window) localInv(q *qp, key verbs.RKey, wr *C.struct_rc_wr) (bool, verbs.Status) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.gone || w.lost || w.pd != q.pd || w.qp != q || w.key != key {
		return true, verbs.StatusLocQPOpErr
	}
	if w.free {
		// Nothing to invalidate, and rxe dies of it; but something must take the request's place in
		// the queue. An empty RDMA Write is nothing to the peer.
		wr.opcode = C.IBV_WR_RDMA_WRITE
		return false, 0
	}
	w.free = true
	wr.opcode, wr.invalidate = C.IBV_WR_LOCAL_INV, C.uint32_t(key)
	return false, 0
}

// invalidated notes that the peer has invalidated key on q.
func (w *window) invalidated(q *qp, key verbs.RKey) {
	w.mu.Lock()
	if w.qp == q && w.key == key {
		w.free, w.tied = true, false
	}
	w.mu.Unlock()
}

// A useMR is an MR of a device without windows: a registration of its own for each use, with remote
// rights, that ends with the use.
type useMR struct {
	pd    *protectionDomain
	depth int

	mu     sync.Mutex
	gone   bool             // guarded by mu, as all below
	c      *C.struct_ibv_mr // nil while it is invalid
	key    verbs.RKey
	access verbs.Access
	piece  []byte
	qp     *qp        // that its FastReg was posted on
	last   verbs.RKey // of the use before
	lastQP *qp
}

func (m *useMR) LKey() uint32              { return 0 }
func (m *useMR) domain() *protectionDomain { return m.pd }
func (m *useMR) pages() int                { return m.depth }

func (m *useMR) RKey() verbs.RKey {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.key
}

// Register registers seg and returns its key.
func (m *useMR) Register(access verbs.Access, seg []byte) (verbs.RKey, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.gone:
		return 0, fmt.Errorf("rdmacore: register: the MR was destroyed: %w", verbs.ErrInvalid)
	case m.c != nil:
		return 0, fmt.Errorf("rdmacore: register: the MR is valid: %w", verbs.ErrInvalid)
	case len(seg) == 0 || len(seg) > m.depth*m.pd.dev.attrs.PageSize:
		return 0, fmt.Errorf("rdmacore: register %d octets: the MR is %d pages deep: %w", len(seg), m.depth,
			verbs.ErrInvalid)
	case membuf.ArenaOf(seg) == nil:
		return 0, fmt.Errorf("rdmacore: register: %d octets are not in memory of AllocBuffer: %w", len(seg),
			verbs.ErrInvalid)
	}
	if err := m.register(access, seg); err != nil {
		return 0, err
	}
	return m.key, nil
}

// register is Register, checked. Caller holds mu.
func (m *useMR) register(access verbs.Access, seg []byte) error {
	if err := m.pd.dev.context.use(); err != nil {
		return err
	}
	defer m.pd.dev.context.done()
	if err := errnoOf(C.rc_reg_mr(m.pd.c, unsafe.Pointer(unsafe.SliceData(seg)), C.uint64_t(len(seg)),
		C.int(regionAccess(access)), &m.c)); err != nil {
		m.c = nil
		return pinError(m.pd.dev.attrs.Name, len(seg), err)
	}
	m.pd.dev.regions.remove(m.last, m)
	m.key, m.access, m.piece, m.qp = verbs.RKey(m.c.rkey), access, seg, nil
	m.pd.dev.regions.add(m.key, m)
	return nil
}

// Unregister ends the registration.
func (m *useMR) Unregister() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.unregister()
}

// unregister makes m invalid. Caller holds mu.
func (m *useMR) unregister() error {
	if m.c == nil {
		return nil
	}
	if err := errnoOf(C.rc_dereg_mr(m.c)); err != nil {
		return fmt.Errorf("rdmacore: deregister MR %#08x on %s: %w", uint32(m.key), m.pd.dev.attrs.Name, err)
	}
	m.invalid()
	return nil
}

// invalid notes that there is no registration any more. Caller holds mu.
func (m *useMR) invalid() {
	m.last, m.lastQP = m.key, m.qp
	m.c, m.key, m.piece, m.qp = nil, 0, nil, nil
}

// Dereg ends the MR with its registration, if it has one.
func (m *useMR) Dereg() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.gone {
		return fmt.Errorf("rdmacore: deregister MR: already deregistered: %w", verbs.ErrInvalid)
	}
	if err := m.unregister(); err != nil {
		return err
	}
	m.gone = true
	m.pd.dev.regions.remove(m.last, m)
	m.pd.uses.Drop()
	leakcheck.Track(leakcheck.MR, -1)
	return nil
}

func (m *useMR) fastReg(q *qp, req *verbs.WorkRequest, piece []byte, _ *C.struct_rc_wr) (bool, verbs.Status, func(),
	error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.gone:
		return true, 0, nil, q.checks.Invalid(req, "the MR was destroyed")
	case m.c == nil:
		if err := m.register(req.Access, piece); err != nil {
			return true, 0, nil, err
		}
		m.qp = q
		return true, verbs.StatusSuccess, func() { m.Unregister() }, nil
	case m.qp != nil:
		return true, verbs.StatusMWBindErr, func() {}, nil // valid already
	case m.access != req.Access || len(m.piece) != len(piece) || unsafe.SliceData(m.piece) != unsafe.SliceData(piece):
		return true, 0, nil, q.checks.Invalid(req, "the MR is registered for other memory or rights")
	}
	m.qp = q
	return true, verbs.StatusSuccess, func() {
		m.mu.Lock()
		m.qp = nil
		m.mu.Unlock()
	}, nil
}

// localInv ends the registration at once: it is the peer's access alone that ends, and what was
// posted before does not use it.
func (m *useMR) localInv(q *qp, key verbs.RKey, _ *C.struct_rc_wr) (bool, verbs.Status) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.c == nil && !m.gone && m.last == key && m.lastQP == q: // invalid already
		return true, verbs.StatusSuccess
	case m.gone || m.c == nil || m.pd != q.pd || m.qp != q || m.key != key:
		return true, verbs.StatusLocQPOpErr
	}
	if err := m.unregister(); err != nil {
		m.pd.dev.log.Error("memory could not be deregistered", "device", m.pd.dev.attrs.Name, "error", err)
		return true, verbs.StatusLocProtErr
	}
	return true, verbs.StatusSuccess
}
