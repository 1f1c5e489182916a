package memreg

import (
	"fmt"
	"slices"
	"sync"

	"github.com/nfsrdmad/nfsrdmad/pkg/observe/trace"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// Hooks report the events of a pool to its owner. All are optional.
type Hooks struct {
	// Failed receives every failed work completion, flushes included. Completion handlers call it,
	// so it must not block (S25).
	Failed func(what string, wc *verbs.WorkCompletion)
	// Trace receives the trace events of the pool.
	Trace *trace.Ring
}

// A Pool owns the MRs of one protection domain, across all connections of a transport to one
// device. It grows on demand (S1). Each MR belongs to one List of the pool, and may move to another
// List when the device has no more MRs. Methods are safe for concurrent use, except Recover, Check
// and Destroy: no List may be in use while they run.
type Pool struct {
	pd     verbs.PD
	params Params
	stats  *Counters
	hooks  Hooks

	mrs struct {
		sync.Mutex
		all      map[*MR]struct{}
		lists    []*List
		retired  []retiredIndex // oldest first
		unusable bool           // an MR could not be destroyed
	}
}

// NewPool returns an empty pool on pd.
func NewPool(pd verbs.PD, params Params, stats *Counters, hooks Hooks) *Pool {
	p := &Pool{pd: pd, params: params, stats: stats, hooks: hooks}
	p.mrs.all = map[*MR]struct{}{}
	return p
}

func (p *Pool) completionError(what string, wc *verbs.WorkCompletion) {
	if p.hooks.Failed != nil {
		p.hooks.Failed(what, wc)
	}
}

func (p *Pool) event(k trace.Kind, xid uint32, n int) {
	p.hooks.Trace.Add(trace.Event{Kind: k, XID: xid, N: uint16(n)})
}

func (p *Pool) addList(l *List) {
	p.mrs.Lock()
	defer p.mrs.Unlock()
	p.mrs.lists = append(p.mrs.lists, l)
}

func (p *Pool) newMR(l *List) (*MR, error) {
	vmr, err := p.pd.AllocMR(p.params.Depth)
	if err != nil {
		return nil, fmt.Errorf("allocate MR of %d pages: %w", p.params.Depth, err)
	}
	m := &MR{pool: p, list: l, id: uint32(p.stats.MRsAllocated.Add(1)), segs: make([][]byte, 0, 4)}
	m.attach(vmr)
	m.reg.Opcode, m.reg.Done = verbs.OpFastReg, m.regDone
	m.inv.Opcode, m.inv.Done = verbs.OpLocalInv, m.invDone
	p.mrs.Lock()
	p.mrs.all[m] = struct{}{}
	p.mrs.Unlock()
	p.stats.gauges[Invalid].Add(1)
	m.event(trace.Alloc, 0)
	return m, nil
}

// popFree removes a free MR of any list. It returns nil if no MR is free.
func (p *Pool) popFree() *MR {
	p.mrs.Lock()
	lists := p.mrs.lists // only grows
	p.mrs.Unlock()
	for _, l := range lists {
		if m := l.popFree(); m != nil {
			return m
		}
	}
	return nil
}

// remove takes m out of the pool. It reports whether m was in the pool.
func (p *Pool) remove(m *MR) bool {
	p.mrs.Lock()
	defer p.mrs.Unlock()
	_, ok := p.mrs.all[m]
	delete(p.mrs.all, m)
	return ok
}

// recycle destroys an MR in state RECYCLING. The pool allocates another on demand (S14).
func (p *Pool) recycle(m *MR) {
	m.event(trace.Recycle, 0)
	if p.remove(m) && p.destroy(m) {
		p.stats.MRsRecycled.Add(1)
	}
}

// destroy destroys m, which was already removed from the pool. It reports false if the provider
// returns an error. The pool must then not serve another connection, because any connection of the
// protection domain may still reach the memory.
func (p *Pool) destroy(m *MR) bool {
	m.unmapped()
	err := m.vmr.Dereg()
	m.apply(evDestroy)
	if err == nil {
		p.retireKeys(m)
		m.event(trace.Dereg, 0)
		return true
	}
	p.orphan(m)
	p.mrs.Lock()
	p.mrs.unusable = true
	p.mrs.Unlock()
	return false
}

func (p *Pool) orphan(m *MR) {
	m.event(trace.Orphan, 0)
	p.stats.MRsOrphaned.Add(1)
}

// recover destroys the provider's MR of m, which fences the memory, and allocates another in its
// place (S13). If it reports false, the caller must drop m.
func (p *Pool) recover(m *MR) bool {
	if m.State() == Recycling {
		p.recycle(m)
		return false
	}
	m.apply(evRecover)
	m.unmapped()
	if m.vmr.Dereg() == nil {
		p.retireKeys(m)
		if vmr, err := p.pd.AllocMR(p.params.Depth); err == nil {
			m.attach(vmr)
			p.stats.MRsRecovered.Add(1)
			m.event(trace.Recover, 0)
			return true
		}
		p.remove(m)
		m.apply(evDestroy)
		p.orphan(m)
		return false
	}
	p.remove(m)
	if p.destroy(m) { // the second attempt succeeded
		p.stats.MRsRecycled.Add(1)
	}
	return false
}

// Recover prepares the pool for the next connection. Call it after the queue pair of the last
// connection was drained and closed. It replaces or drops every MR that may be registered (S13), so
// that every MR of the pool is then INVALID. It returns false if an MR could not be destroyed; the
// pool must then not serve another connection.
func (p *Pool) Recover() (usable bool) {
	p.mrs.Lock()
	lists := p.mrs.lists
	p.mrs.Unlock()
	for _, l := range lists {
		l.recover()
	}
	p.mrs.Lock()
	defer p.mrs.Unlock()
	return !p.mrs.unusable
}

// Destroy destroys every MR of the pool and detaches its Lists. MRs in use count as recycled; their
// queue pair must have been drained and closed. Destroy returns how many MRs it could not destroy.
func (p *Pool) Destroy() (orphaned int) {
	p.mrs.Lock()
	all, lists := p.mrs.all, p.mrs.lists
	p.mrs.all, p.mrs.lists = map[*MR]struct{}{}, nil
	p.mrs.Unlock()
	for _, l := range lists {
		l.reset()
	}
	for m := range all {
		inUse := m.State() != Invalid
		if inUse {
			m.apply(evFailLI)
		}
		switch ok := p.destroy(m); {
		case !ok:
			orphaned++
			if !inUse {
				p.stats.MRsFailed.Add(1)
			}
		case inUse:
			p.stats.MRsRecycled.Add(1)
		}
	}
	return orphaned
}

// Check returns an error for the first invariant that does not hold:
//
//   - each MR is on exactly one list, and only there;
//   - free MRs are INVALID, registered ones are not;
//   - the gauges equal the numbers of the pool. The pool must be the only one that uses them.
func (p *Pool) Check() error {
	p.mrs.Lock()
	defer p.mrs.Unlock()
	seen := make(map[*MR]bool, len(p.mrs.all))
	free := 0
	for _, l := range p.mrs.lists {
		for i, m := range slices.Concat(l.free.mrs, l.registered) {
			_, known := p.mrs.all[m]
			switch isFree := i < len(l.free.mrs); {
			case m.list != l || !known:
				return fmt.Errorf("memreg: MR %d is on a list of another slot or pool", m.id)
			case seen[m]:
				return fmt.Errorf("memreg: MR %d is on two lists", m.id)
			case isFree != (m.State() == Invalid):
				return fmt.Errorf("memreg: MR %d is %v, on the free list: %v", m.id, m.State(), isFree)
			}
			seen[m] = true
		}
		free += len(l.free.mrs)
	}
	c := p.stats
	switch {
	case len(seen) != len(p.mrs.all):
		return fmt.Errorf("memreg: pool has %d MRs, its lists have %d", len(p.mrs.all), len(seen))
	case c.Free() != int64(free):
		return fmt.Errorf("memreg: free lists have %d MRs, gauge of free MRs is %d", free, c.Free())
	case c.Total() != int64(len(p.mrs.all)):
		return fmt.Errorf("memreg: pool has %d MRs, sum of gauges is %d", len(p.mrs.all), c.Total())
	}
	return c.checkFailed()
}

// checkFailed returns an error unless each failed MR is pending or has one outcome.
func (c *Counters) checkFailed() error {
	pending := uint64(0)
	for _, s := range States {
		if s.failed() {
			pending += uint64(c.InState(s))
		}
	}
	failed, orphaned := c.MRsFailed.Load(), c.MRsOrphaned.Load()
	recovered, recycled := c.MRsRecovered.Load(), c.MRsRecycled.Load()
	if failed != recovered+recycled+orphaned+pending {
		return fmt.Errorf("memreg: %d MRs failed, but %d recovered + %d recycled + %d orphaned + %d pending",
			failed, recovered, recycled, orphaned, pending)
	}
	return nil
}
