package memreg

import (
	"crypto/rand"
	"fmt"
	"sync"

	"github.com/nfsrdmad/nfsrdmad/pkg/trace"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// Hooks are what a pool tells its owner. All are optional.
type Hooks struct {
	// Failed is told of every work completion that failed, flushes included. It is called from
	// completion handlers and must not block (S25).
	Failed func(what string, wc *verbs.WorkCompletion)
	// Trace takes the pool's events.
	Trace *trace.Ring
}

// A Pool owns the MRs of one protection domain, over all connections of a transport to one device.
// It grows on demand (S1). Its MRs are on the Lists that are bound to it. Safe for concurrent use,
// but for Recover, Check and Destroy, beside which no List may be used.
type Pool struct {
	pd     verbs.PD
	params Params
	stats  *Counters
	hooks  Hooks

	mu      sync.Mutex
	all     map[*MR]struct{} // guarded by mu
	lists   []*List          // guarded by mu
	tainted bool             // guarded by mu
}

// NewPool makes an empty pool on pd.
func NewPool(pd verbs.PD, params Params, stats *Counters, hooks Hooks) *Pool {
	return &Pool{pd: pd, params: params, stats: stats, hooks: hooks, all: map[*MR]struct{}{}}
}

func (p *Pool) completionError(what string, wc *verbs.WorkCompletion) {
	if p.hooks.Failed != nil {
		p.hooks.Failed(what, wc)
	}
}

func (p *Pool) event(k trace.Kind, xid uint32, n int) {
	p.hooks.Trace.Add(trace.Event{Kind: k, XID: xid, N: uint16(n)})
}

func (p *Pool) newMR(home *List) (*MR, error) {
	vmr, err := p.pd.AllocMR(p.params.Depth)
	if err != nil {
		return nil, fmt.Errorf("allocate MR of %d pages: %w", p.params.Depth, err)
	}
	m := &MR{pool: p, home: home, id: uint32(p.stats.Allocated.Add(1)), segs: make([][]byte, 0, 4)}
	m.bind(vmr)
	m.reg.Opcode, m.reg.Done = verbs.OpFastReg, m.regDone
	m.inv.Opcode, m.inv.Done = verbs.OpLocalInv, m.invDone
	p.mu.Lock()
	p.all[m] = struct{}{}
	p.mu.Unlock()
	p.stats.gauges[Invalid].Add(1)
	m.event(trace.Alloc, 0)
	return m, nil
}

// forget takes m out of the pool. It reports false when it is not in it.
func (p *Pool) forget(m *MR) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, ours := p.all[m]
	delete(p.all, m)
	return ours
}

// recycle destroys an MR that is condemned; a new one is made when one is needed (S14).
func (p *Pool) recycle(m *MR) {
	m.event(trace.Recycle, 0)
	if p.forget(m) && p.destroy(m) {
		p.stats.Recycled.Add(1)
	}
}

// destroy ends m, which is in the pool no more. It reports false when the provider would not: then
// the memory can be reached by any connection of this protection domain, and the pool must not see
// another.
func (p *Pool) destroy(m *MR) bool {
	err := m.vmr.Dereg()
	m.move(evDestroy)
	if err == nil {
		m.event(trace.Dereg, 0)
		return true
	}
	m.event(trace.Orphan, 0)
	p.stats.Orphaned.Add(1)
	p.mu.Lock()
	p.tainted = true
	p.mu.Unlock()
	return false
}

// recover makes an MR anew in its place (S13): the provider's MR is destroyed, which fences it, and
// another made. It reports whether there is one; if not, m is off every list.
func (p *Pool) recover(m *MR) bool {
	if m.State() == Condemned {
		p.recycle(m)
		return false
	}
	m.move(evTake)
	if m.vmr.Dereg() == nil {
		if vmr, err := p.pd.AllocMR(p.params.Depth); err == nil {
			m.bind(vmr)
			p.stats.Recovered.Add(1)
			m.event(trace.Recover, 0)
			return true
		}
		p.forget(m)
		m.move(evDestroy)
		m.event(trace.Orphan, 0)
		p.stats.Orphaned.Add(1)
		return false
	}
	p.forget(m)
	if p.destroy(m) { // it had failed only once
		p.stats.Recycled.Add(1)
	}
	return false
}

// Recover makes the pool fit for the next connection, after the queue pair of the last one was
// drained and closed: every MR that was registered, or on its way to be or not to be, is made anew
// or dropped (S13). When it returns every MR of the pool is INVALID. It reports whether the pool
// may serve another connection: not when an MR could not be destroyed.
func (p *Pool) Recover() (usable bool) {
	p.mu.Lock()
	lists := p.lists
	p.mu.Unlock()
	for _, l := range lists {
		l.recover()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.tainted
}

// Destroy releases every MR of the pool and unbinds its Lists. Those in use, whose queue pair must
// have been drained and closed, are recycled. It reports how many could not be destroyed.
func (p *Pool) Destroy() (orphaned int) {
	p.mu.Lock()
	all, lists := p.all, p.lists
	p.all, p.lists = map[*MR]struct{}{}, nil
	p.mu.Unlock()
	for _, l := range lists {
		l.reset()
	}
	for m := range all {
		hurt := m.State() != Invalid
		if hurt {
			m.move(evFailLI)
		}
		switch ok := p.destroy(m); {
		case !ok:
			orphaned++
			if !hurt {
				p.stats.Failed.Add(1)
			}
		case hurt:
			p.stats.Recycled.Add(1)
		}
	}
	return orphaned
}

// Check reports the first invariant that is broken, while nobody uses the pool: every MR is on one
// list, once; those free are INVALID, those registered are not; the gauges, which must be of this
// pool alone, add up to it.
func (p *Pool) Check() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	seen := make(map[*MR]bool, len(p.all))
	free := 0
	for _, l := range p.lists {
		for i, m := range append(append([]*MR(nil), l.free...), l.registered...) {
			_, ours := p.all[m]
			switch isFree := i < len(l.free); {
			case m.home != l || !ours:
				return fmt.Errorf("memreg: MR %d is on a list that is not its own", m.id)
			case seen[m]:
				return fmt.Errorf("memreg: MR %d is on two lists", m.id)
			case isFree != (m.State() == Invalid):
				return fmt.Errorf("memreg: MR %d is %v, free: %v", m.id, m.State(), isFree)
			}
			seen[m] = true
		}
		free += len(l.free)
	}
	c := p.stats
	switch {
	case len(seen) != len(p.all):
		return fmt.Errorf("memreg: %d MRs, %d of them on lists", len(p.all), len(seen))
	case c.Free() != int64(free):
		return fmt.Errorf("memreg: %d MRs are free, the gauge says %d", free, c.Free())
	case c.Total() != int64(len(p.all)):
		return fmt.Errorf("memreg: %d MRs, the gauges add up to %d", len(p.all), c.Total())
	case c.Failed.Load() != c.Recovered.Load()+c.Recycled.Load()+c.Orphaned.Load()+
		uint64(c.InState(FlushedFR)+c.InState(FlushedLI)+c.InState(Condemned)+c.InState(Recovering)):
		return fmt.Errorf("memreg: %d MRs hurt, but %d recovered, %d recycled, %d orphaned", c.Failed.Load(),
			c.Recovered.Load(), c.Recycled.Load(), c.Orphaned.Load())
	}
	return nil
}

// A keyDeck deals the 8-bit keys of an MR: all 256 in an order that the peer cannot predict, then
// all again in another, never the same twice in a row. So a stale key misses for as long as 8 bits
// allow, and a guess is no better than chance.
type keyDeck struct {
	cards [256]uint8
	next  int
	last  uint8
}

func (d *keyDeck) deal() uint8 {
	if d.next == len(d.cards) {
		d.shuffle()
	}
	d.last = d.cards[d.next]
	d.next++
	return d.last
}

func (d *keyDeck) shuffle() {
	var r [2 * len(d.cards)]byte
	rand.Read(r[:]) // never fails
	for i := range d.cards {
		d.cards[i] = uint8(i)
	}
	for i := len(d.cards) - 1; i > 0; i-- {
		// 16 random bits against at most 256 places: the bias is below 1 in 256.
		j := (int(r[2*i])<<8 | int(r[2*i+1])) % (i + 1)
		d.cards[i], d.cards[j] = d.cards[j], d.cards[i]
	}
	if d.cards[0] == d.last {
		n := 1 + int(r[0])%(len(d.cards)-1)
		d.cards[0], d.cards[n] = d.cards[n], d.cards[0]
	}
	d.next = 0
}
