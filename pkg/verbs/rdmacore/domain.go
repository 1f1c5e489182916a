//go:build rdmacore && cgo && linux

package rdmacore

/*
#include "shim.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"github.com/nfsrdmad/nfsrdmad/internal/leakcheck"
	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/internal/base"
)

const (
	// busyTries and busyPause are for a protection domain that the device still uses although
	// nothing of it is left.
	busyTries = 50
	busyPause = 20 * time.Millisecond
)

// A protectionDomain owns MRs and QPs, and the registrations of the arenas that they use.
type protectionDomain struct {
	dev  *device
	c    *C.struct_ibv_pd // valid until freed, or the device is gone
	uses base.Uses

	mu     sync.Mutex
	freed  bool                       // guarded by mu, as all below: c is
	arenas map[*membuf.Arena]*arenaMR // registered
	stale  []*C.struct_ibv_mr         // of freed arenas, with windows bound to them
}

// AllocPD makes a protection domain.
func (d *device) AllocPD() (verbs.PD, error) {
	if err := d.enter(); err != nil {
		return nil, err
	}
	p := &protectionDomain{dev: d, uses: base.Uses{Provider: Name}, arenas: make(map[*membuf.Arena]*arenaMR)}
	if err := p.alloc(); err != nil {
		d.leave()
		return nil, fmt.Errorf("rdmacore: allocate protection domain on %s: %w", d.attrs.Name, err)
	}
	leakcheck.Track(leakcheck.PD, 1)
	return p, nil
}

func (p *protectionDomain) alloc() error {
	d := p.dev
	if err := d.context.use(); err != nil {
		return err
	}
	defer d.context.done()
	if err := errnoOf(C.rc_alloc_pd(d.ctx, &p.c)); err != nil {
		return err
	}
	d.mu.Lock()
	d.pds[p] = struct{}{}
	d.mu.Unlock()
	return nil
}

// Dealloc releases the PD with its registrations of arenas.
func (p *protectionDomain) Dealloc() error {
	if err := p.uses.End(); err != nil {
		return err
	}
	p.mu.Lock()
	arenas := slices.Collect(maps.Keys(p.arenas))
	p.mu.Unlock()
	for _, a := range arenas {
		if x := a.Forget(p); x != nil {
			x.Detach()
		}
	}
	err := p.free()
	d := p.dev
	d.mu.Lock()
	delete(d.pds, p)
	d.mu.Unlock()
	leakcheck.Track(leakcheck.PD, -1)
	d.leave()
	if err != nil {
		return fmt.Errorf("rdmacore: deallocate protection domain on %s: %w", d.attrs.Name, err)
	}
	return nil
}

// free gives the device's protection domain back, once, with the registrations that are left.
func (p *protectionDomain) free() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.freed {
		return nil
	}
	p.freed = true
	p.sweepLocked()
	// The kernel's soft devices take a moment to let go of what a queue pair held.
	err := errnoOf(C.rc_dealloc_pd(p.c))
	for range busyTries {
		if err != syscall.EBUSY {
			break
		}
		time.Sleep(busyPause)
		err = errnoOf(C.rc_dealloc_pd(p.c))
	}
	return err
}

// takeDown frees what a device that is gone has of the protection domain.
func (p *protectionDomain) takeDown() {
	p.mu.Lock()
	var err error
	for _, m := range p.arenas {
		if m.c != nil {
			err = errors.Join(err, errnoOf(C.rc_dereg_mr(m.c)))
			m.c = nil
		}
	}
	p.mu.Unlock()
	if err = errors.Join(err, p.free()); err != nil {
		p.dev.log.Debug("a protection domain of a removed device is left to the kernel", "device", p.dev.attrs.Name,
			"error", err)
	}
	p.mu.Lock()
	p.stale = nil
	p.mu.Unlock()
}

// An arenaMR is the registration of an arena in one protection domain: with local rights, and that
// windows may be bound to it, and no remote one.
type arenaMR struct {
	pd    *protectionDomain
	arena *membuf.Arena
	c     *C.struct_ibv_mr // nil when it is no more; guarded by pd.mu, once it is made
	lkey  uint32
}

// arena returns the registration of the arena that all of b lies in, made when it is first needed.
func (p *protectionDomain) arena(b []byte) (*arenaMR, error) {
	a := membuf.ArenaOf(b)
	if a == nil {
		return nil, fmt.Errorf("rdmacore: %d octets are not in memory of AllocBuffer: %w", len(b), verbs.ErrInvalid)
	}
	x, err := a.Attached(p, func() (membuf.Attachment, error) { return p.register(a) })
	if err != nil {
		return nil, err
	}
	return x.(*arenaMR), nil
}

// register registers an arena, which is locked.
func (p *protectionDomain) register(a *membuf.Arena) (membuf.Attachment, error) {
	if err := p.dev.context.use(); err != nil {
		return nil, err
	}
	defer p.dev.context.done()
	access := C.int(accessLocalWrite)
	if !p.dev.perIO {
		access |= accessMWBind
	}
	m := &arenaMR{pd: p, arena: a}
	mem := a.Bytes()
	if err := errnoOf(C.rc_reg_mr(p.c, unsafe.Pointer(&mem[0]), C.uint64_t(len(mem)), access, &m.c)); err != nil {
		return nil, pinError(p.dev.attrs.Name, len(mem), err)
	}
	m.lkey = uint32(m.c.lkey)
	p.mu.Lock()
	p.arenas[a] = m
	p.mu.Unlock()
	return m, nil
}

// Detach deregisters the arena. While a window of a lost queue pair is still bound to it, it cannot
// be: then its pages stay pinned, and unreachable for the process, until the window is destroyed.
func (m *arenaMR) Detach() {
	p := m.pd
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.arenas, m.arena)
	if m.c == nil {
		return
	}
	if err := errnoOf(C.rc_dereg_mr(m.c)); err != nil {
		p.stale = append(p.stale, m.c)
		p.dev.log.Debug("memory is freed while a window is bound to it", "device", p.dev.attrs.Name, "error", err)
	}
	m.c = nil
}

// sweep deregisters what Detach could not.
func (p *protectionDomain) sweep() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sweepLocked()
}

func (p *protectionDomain) sweepLocked() {
	p.stale = slices.DeleteFunc(p.stale, func(c *C.struct_ibv_mr) bool { return C.rc_dereg_mr(c) == 0 })
}
