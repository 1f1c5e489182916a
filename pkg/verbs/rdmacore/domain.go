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

	"github.com/nfsrdmad/nfsrdmad/internal/selfcheck"
	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/internal/base"
)

const (
	// The kernel's soft devices may report EBUSY for a short time after the last object of a
	// protection domain was destroyed.
	deallocTries      = 50
	deallocRetryDelay = 20 * time.Millisecond
)

// A protectionDomain owns MRs, QPs, and the registrations of the arenas that they use.
type protectionDomain struct {
	dev  *device
	c    *C.struct_ibv_pd // valid until registrations.freed is set
	uses base.Uses

	registrations struct {
		sync.Mutex
		freed  bool // c is deallocated
		arenas map[*membuf.Arena]*arenaMR
		stale  []*C.struct_ibv_mr // MRs of freed arenas to which a window was still bound
	}
}

// AllocPD makes a protection domain.
func (d *device) AllocPD() (verbs.PD, error) {
	if err := d.addUser(); err != nil {
		return nil, err
	}
	p := &protectionDomain{dev: d, uses: base.Uses{Provider: Name}}
	p.registrations.arenas = make(map[*membuf.Arena]*arenaMR)
	if err := p.alloc(); err != nil {
		d.removeUser()
		return nil, fmt.Errorf("rdmacore: allocate protection domain on %s: %w", d.attrs.Name, err)
	}
	selfcheck.Track(selfcheck.PD, 1)
	return p, nil
}

func (p *protectionDomain) alloc() error {
	d := p.dev
	if err := d.context.acquire(); err != nil {
		return err
	}
	defer d.context.release()
	if err := errnoOf(C.rc_alloc_pd(d.ctx, &p.c)); err != nil {
		return err
	}
	d.objects.Lock()
	d.objects.pds[p] = struct{}{}
	d.objects.Unlock()
	return nil
}

// Dealloc deallocates the PD and deregisters its arenas. It fails while MRs or QPs use the PD.
func (p *protectionDomain) Dealloc() error {
	if err := p.uses.End(); err != nil {
		return err
	}
	p.registrations.Lock()
	arenas := slices.Collect(maps.Keys(p.registrations.arenas))
	p.registrations.Unlock()
	for _, a := range arenas {
		if x := a.Forget(p); x != nil {
			x.Detach()
		}
	}
	err := p.free()
	d := p.dev
	d.objects.Lock()
	delete(d.objects.pds, p)
	d.objects.Unlock()
	selfcheck.Track(selfcheck.PD, -1)
	d.removeUser()
	if err != nil {
		return fmt.Errorf("rdmacore: deallocate protection domain on %s: %w", d.attrs.Name, err)
	}
	return nil
}

// free deallocates the device's protection domain and deregisters the stale registrations. Only the
// first call has an effect.
func (p *protectionDomain) free() error {
	p.registrations.Lock()
	defer p.registrations.Unlock()
	if p.registrations.freed {
		return nil
	}
	p.registrations.freed = true
	p.deregisterStaleLocked()
	err := errnoOf(C.rc_dealloc_pd(p.c))
	for range deallocTries {
		if !errors.Is(err, syscall.EBUSY) {
			break
		}
		time.Sleep(deallocRetryDelay)
		err = errnoOf(C.rc_dealloc_pd(p.c))
	}
	return err
}

// takeDown destroys the protection domain of a removed device and its registrations.
func (p *protectionDomain) takeDown() {
	p.registrations.Lock()
	var err error
	for _, m := range p.registrations.arenas {
		if m.c != nil {
			err = errors.Join(err, errnoOf(C.rc_dereg_mr(m.c)))
			m.c = nil
		}
	}
	p.registrations.Unlock()
	if err = errors.Join(err, p.free()); err != nil {
		p.dev.log.Debug("deallocate protection domain of removed device; the kernel releases it",
			"device", p.dev.attrs.Name, "error", err)
	}
	p.registrations.Lock()
	p.registrations.stale = nil
	p.registrations.Unlock()
}

// An arenaMR is the registration of an arena in one protection domain. It has local rights and no
// remote ones. On a device with windows it also has the right to bind windows.
type arenaMR struct {
	pd    *protectionDomain
	arena *membuf.Arena
	c     *C.struct_ibv_mr // nil once deregistered; guarded by pd.registrations
	lkey  uint32
}

// arena returns the registration of the arena that contains all of b. The first call for an arena
// registers it.
func (p *protectionDomain) arena(b []byte) (*arenaMR, error) {
	a := membuf.ArenaOf(b)
	if a == nil {
		return nil, fmt.Errorf("rdmacore: register %d bytes: memory is not in a membuf arena: %w", len(b),
			verbs.ErrInvalid)
	}
	x, err := a.Attached(p, func() (membuf.Attachment, error) { return p.register(a) })
	if err != nil {
		return nil, err
	}
	return x.(*arenaMR), nil
}

// Prepare registers the arena that contains all of mem, so that windows can be bound to it. A
// device without windows needs no preparation, because its MRs register the memory themselves.
func (p *protectionDomain) Prepare(mem []byte) error {
	if p.dev.perIO {
		return nil
	}
	_, err := p.arena(mem)
	return err
}

// register registers a. membuf holds the lock of a during the call.
func (p *protectionDomain) register(a *membuf.Arena) (membuf.Attachment, error) {
	if err := p.dev.context.acquire(); err != nil {
		return nil, err
	}
	defer p.dev.context.release()
	access := C.int(accessLocalWrite)
	if !p.dev.perIO {
		access |= accessMWBind
	}
	m := &arenaMR{pd: p, arena: a}
	mem := a.Bytes()
	if err := errnoOf(C.rc_reg_mr(p.c, unsafe.Pointer(&mem[0]), C.uint64_t(len(mem)), access, &m.c)); err != nil {
		return nil, registrationError(p.dev.attrs.Name, len(mem), err)
	}
	m.lkey = uint32(m.c.lkey)
	p.registrations.Lock()
	p.registrations.arenas[a] = m
	p.registrations.Unlock()
	return m, nil
}

// Detach deregisters the arena. This fails while a window of a lost queue pair is still bound to
// the arena. Its pages then stay pinned until the window is deallocated, but the process can no
// longer reach them.
func (m *arenaMR) Detach() {
	p := m.pd
	p.registrations.Lock()
	defer p.registrations.Unlock()
	delete(p.registrations.arenas, m.arena)
	if m.c == nil {
		return
	}
	if err := errnoOf(C.rc_dereg_mr(m.c)); err != nil {
		p.registrations.stale = append(p.registrations.stale, m.c)
		p.dev.log.Debug("deregister arena; retrying when its windows are deallocated",
			"device", p.dev.attrs.Name, "error", err)
	}
	m.c = nil
}

// deregisterStale retries to deregister the registrations for which Detach failed.
func (p *protectionDomain) deregisterStale() {
	p.registrations.Lock()
	defer p.registrations.Unlock()
	p.deregisterStaleLocked()
}

// deregisterStaleLocked is deregisterStale for a caller that holds the lock.
func (p *protectionDomain) deregisterStaleLocked() {
	p.registrations.stale = slices.DeleteFunc(p.registrations.stale, func(c *C.struct_ibv_mr) bool {
		return C.rc_dereg_mr(c) == 0
	})
}
