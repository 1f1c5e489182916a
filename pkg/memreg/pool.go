package memreg

import (
	"crypto/rand"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// An MR is one memory region of a pool with the work requests that register and invalidate it.
type MR struct {
	pool  *Pool
	vmr   verbs.MR
	state atomic.Uint32
	deck  keyDeck

	segs   [][]byte // page list of the registration in force
	handle verbs.RKey
	length uint32
	iova   uint64

	reg, inv verbs.WorkRequest
	onFenced func(ok bool) // set on the last LOCAL_INV of a chain
}

// Handle, Length and Offset are what goes into an RPC-over-RDMA segment.
func (m *MR) Handle() uint32 { return uint32(m.handle) }

// Length of the registration in octets.
func (m *MR) Length() uint32 { return m.length }

// Offset is the registered address.
func (m *MR) Offset() uint64 { return m.iova }

// State of the MR.
func (m *MR) State() State { return State(m.state.Load()) }

// move changes the state and the gauges. A destroyed MR stays destroyed.
func (m *MR) move(to State) {
	for {
		from := State(m.state.Load())
		if from == gone || from == to {
			return
		}
		if m.state.CompareAndSwap(uint32(from), uint32(to)) {
			m.pool.stats.gauges[from].Add(-1)
			if to != gone {
				m.pool.stats.gauges[to].Add(1)
			}
			return
		}
	}
}

// regDone is called when a FastReg failed or was flushed: it is never signaled.
func (m *MR) regDone(wc *verbs.WorkCompletion) {
	if wc.Status == verbs.StatusSuccess {
		return
	}
	m.move(FlushedFR)
	m.pool.completionError("fastreg", wc)
}

func (m *MR) invDone(wc *verbs.WorkCompletion) {
	ok := wc.Status == verbs.StatusSuccess
	if !ok {
		m.move(FlushedLI)
		m.pool.completionError("localinv", wc)
	}
	if f := m.onFenced; f != nil {
		m.onFenced = nil
		f(ok)
	}
}

// A Pool owns the MRs of one connection. It grows on demand (S1). Safe for concurrent use.
type Pool struct {
	pd     verbs.PD
	params Params
	stats  *Counters
	onErr  func(what string, wc *verbs.WorkCompletion)

	mu  sync.Mutex
	all map[*MR]struct{} // guarded by mu
}

// NewPool makes an empty pool on pd. onErr, if not nil, is told of every work completion that failed, flushes
// included; it is called from completion handlers and must not block (S25).
func NewPool(pd verbs.PD, params Params, stats *Counters, onErr func(what string, wc *verbs.WorkCompletion)) *Pool {
	return &Pool{pd: pd, params: params, stats: stats, onErr: onErr, all: map[*MR]struct{}{}}
}

func (p *Pool) completionError(what string, wc *verbs.WorkCompletion) {
	if p.onErr != nil {
		p.onErr(what, wc)
	}
}

func (p *Pool) newMR() (*MR, error) {
	vmr, err := p.pd.AllocMR(p.params.Depth)
	if err != nil {
		return nil, fmt.Errorf("allocate MR of %d pages: %w", p.params.Depth, err)
	}
	m := &MR{pool: p, vmr: vmr, segs: make([][]byte, 0, 4)}
	m.deck.last = vmr.RKey().Key()
	m.deck.next = len(m.deck.cards)
	m.reg.Opcode, m.reg.MR, m.reg.Done = verbs.OpFastReg, vmr, m.regDone
	m.inv.Opcode, m.inv.Done = verbs.OpLocalInv, m.invDone
	p.mu.Lock()
	p.all[m] = struct{}{}
	p.mu.Unlock()
	p.stats.Allocated.Add(1)
	p.stats.gauges[Invalid].Add(1)
	return m, nil
}

// recycle destroys an MR whose state is not certain (S14). When it returns true the memory is fenced.
func (p *Pool) recycle(m *MR) bool {
	p.mu.Lock()
	_, ours := p.all[m]
	delete(p.all, m)
	p.mu.Unlock()
	if !ours {
		return true
	}
	return p.destroy(m, true)
}

func (p *Pool) destroy(m *MR, hurt bool) bool {
	m.move(gone)
	if err := m.vmr.Dereg(); err != nil {
		p.stats.Orphaned.Add(1)
		return false
	}
	if hurt {
		p.stats.Recycled.Add(1)
	}
	return true
}

// Destroy releases every MR of the pool, after its queue pair has been drained and closed. The Lists
// made on it must be Reset and not be used again. It reports how many MRs could not be destroyed.
func (p *Pool) Destroy() (orphaned int) {
	p.mu.Lock()
	all := p.all
	p.all = nil
	p.mu.Unlock()
	for m := range all {
		if !p.destroy(m, m.State() != Invalid) {
			orphaned++
		}
	}
	return orphaned
}

// A keyDeck deals the 8-bit keys of an MR: all 256 in an order that the peer cannot predict, then all again in
// another, never the same twice in a row. So a stale key misses for as long as 8 bits allow, and a guess is no better than chance.
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
