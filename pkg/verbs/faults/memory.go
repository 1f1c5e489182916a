package faults

import (
	"fmt"
	"sync"
	"syscall"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// errNoMemory is the error of a device that has no resources left.
var errNoMemory = fmt.Errorf("%w: %w", verbs.ErrNoResources, syscall.ENOMEM)

// A protectionDomain injects allocation failures and holds the MRs whose Dereg failed by injection.
type protectionDomain struct {
	p     *Provider
	inner verbs.PD

	mu      sync.Mutex
	orphans map[*memoryRegion]struct{} // guarded by mu
}

func (d *protectionDomain) AllocMR(depth int) (verbs.MR, error) {
	if n, fires := d.p.event(allocFail); fires {
		d.p.count(allocFail, n)
		return nil, injectedError(allocFail, n, errNoMemory)
	}
	m, err := d.inner.AllocMR(depth)
	if err != nil {
		return nil, err
	}
	r := &memoryRegion{MR: m, pd: d}
	if inner, ok := m.(verbs.PerIOMR); ok {
		return &perIORegion{memoryRegion: r, inner: inner}, nil
	}
	return r, nil
}

// A perIORegion is a memoryRegion of a device that registers memory for each use.
type perIORegion struct {
	*memoryRegion
	inner verbs.PerIOMR
}

func (m *perIORegion) Register(access verbs.Access, seg []byte) (verbs.RKey, error) {
	return m.inner.Register(access, seg)
}

func (m *perIORegion) Unregister() error { return m.inner.Unregister() }

// innerMR returns the inner provider's MR for mr.
func innerMR(mr verbs.MR) verbs.MR {
	switch m := mr.(type) {
	case *perIORegion:
		return m.MR
	case *memoryRegion:
		return m.MR
	}
	return mr
}

// RegMR calls the inner domain. RegMR has no faults because its MRs have no remote access.
func (d *protectionDomain) RegMR(buf []byte) (verbs.MR, error) { return d.inner.RegMR(buf) }

// Prepare calls the inner domain, if it is a PreparingPD.
func (d *protectionDomain) Prepare(mem []byte) error {
	if inner, ok := d.inner.(verbs.PreparingPD); ok {
		return inner.Prepare(mem)
	}
	return nil
}

// Dealloc first deregisters the MRs whose Dereg failed by injection. The teardown of a real domain
// also destroys them.
func (d *protectionDomain) Dealloc() error {
	d.mu.Lock()
	orphans := d.orphans
	d.orphans = make(map[*memoryRegion]struct{})
	d.mu.Unlock()
	for m := range orphans {
		if err := m.MR.Dereg(); err != nil {
			d.p.log.Error("deregister memory region with injected fault", "rkey", uint32(m.RKey()),
				"error", err)
		}
	}
	return d.inner.Dealloc()
}

// A memoryRegion is an MR from AllocMR.
type memoryRegion struct {
	verbs.MR
	pd *protectionDomain
}

// Dereg may fail by injection. The MR then stays valid, and Dereg can be retried.
func (m *memoryRegion) Dereg() error {
	if n, fires := m.pd.p.event(deregFail); fires {
		m.pd.mu.Lock()
		m.pd.orphans[m] = struct{}{}
		m.pd.mu.Unlock()
		m.pd.p.count(deregFail, n)
		return injectedError(deregFail, n, syscall.EBUSY)
	}
	m.pd.mu.Lock()
	delete(m.pd.orphans, m)
	m.pd.mu.Unlock()
	return m.MR.Dereg()
}
