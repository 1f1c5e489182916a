package faults

import (
	"fmt"
	"sync"
	"syscall"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// errNoMemory is what a device without room says.
var errNoMemory = fmt.Errorf("%w: %w", verbs.ErrNoResources, syscall.ENOMEM)

// A protectionDomain makes allocations fail, and keeps the MRs whose Dereg was made to fail.
type protectionDomain struct {
	p     *Provider
	inner verbs.PD

	mu      sync.Mutex
	orphans map[*memoryRegion]struct{} // guarded by mu
}

func (d *protectionDomain) AllocMR(depth int) (verbs.MR, error) {
	if n, strikes := d.p.event(allocFail); strikes {
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

// innerMR is what the inner provider knows mr as.
func innerMR(mr verbs.MR) verbs.MR {
	switch m := mr.(type) {
	case *perIORegion:
		return m.MR
	case *memoryRegion:
		return m.MR
	}
	return mr
}

// RegMR is the inner domain's: nothing that it makes has a remote right.
func (d *protectionDomain) RegMR(buf []byte) (verbs.MR, error) { return d.inner.RegMR(buf) }

// Dealloc first destroys the MRs whose Dereg was made to fail, as the teardown of a real domain
// does.
func (d *protectionDomain) Dealloc() error {
	d.mu.Lock()
	orphans := d.orphans
	d.orphans = make(map[*memoryRegion]struct{})
	d.mu.Unlock()
	for m := range orphans {
		if err := m.MR.Dereg(); err != nil {
			d.p.log.Error("memory region with an injected fault could not be deregistered", "rkey", uint32(m.RKey()),
				"error", err)
		}
	}
	return d.inner.Dealloc()
}

// A memoryRegion is an MR of AllocMR.
type memoryRegion struct {
	verbs.MR
	pd *protectionDomain
}

// Dereg may fail; the MR then lives as before, and Dereg may be tried again.
func (m *memoryRegion) Dereg() error {
	if n, strikes := m.pd.p.event(deregFail); strikes {
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
