package memreg

import (
	"sync/atomic"

	"github.com/nfsrdmad/nfsrdmad/internal/verify"
	"github.com/nfsrdmad/nfsrdmad/pkg/trace"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// An MR is one memory region of a pool with the work requests that register and invalidate it.
type MR struct {
	pool  *Pool
	home  *List // the only list that it is ever on
	id    uint32
	vmr   verbs.MR
	perIO verbs.PerIOMR // vmr, on a device that registers for each use; else nil
	state atomic.Uint32
	deck  keyDeck

	segs   [][]byte // page list of the registration in force
	handle verbs.RKey
	length uint32
	iova   uint64
	xid    uint32
	posted bool // on a chain that was given to the provider since arm

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

// move changes the state as the table says, and the gauges with it. A destroyed MR stays destroyed.
// What the table does not have leaves the state alone, and stops a process that verifies.
func (m *MR) move(e event) {
	for {
		from := State(m.state.Load())
		if from == gone {
			return
		}
		to := transitions[from][e]
		if to == never {
			if verify.On() {
				verify.Failf("MR %d: %v in state %v", m.id, e, from)
			}
			return
		}
		if from == to {
			return
		}
		if m.state.CompareAndSwap(uint32(from), uint32(to)) {
			c := m.pool.stats
			c.gauges[from].Add(-1)
			if to != gone {
				c.gauges[to].Add(1)
			}
			if to.hurts() && !from.hurts() {
				c.Failed.Add(1)
			}
			return
		}
	}
}

// bind takes a provider's MR that was just made.
func (m *MR) bind(vmr verbs.MR) {
	m.vmr, m.reg.MR = vmr, vmr
	if m.pool.params.PerIO {
		m.perIO = vmr.(verbs.PerIOMR)
	}
	m.deck.last = vmr.RKey().Key()
	m.deck.next = len(m.deck.cards)
}

// event is e of this MR and its RPC.
func (m *MR) event(k trace.Kind, status verbs.Status) {
	if r := m.pool.hooks.Trace; r != nil {
		r.Add(trace.Event{Kind: k, Status: uint8(status), XID: m.xid, MR: m.id, Handle: uint32(m.handle)})
	}
}

// regDone is called when a FastReg failed or was flushed: it is never signaled.
func (m *MR) regDone(wc *verbs.WorkCompletion) {
	if wc.Status == verbs.StatusSuccess {
		return
	}
	m.event(trace.WCFastReg, wc.Status)
	m.move(evFlushFR)
	m.pool.completionError("fastreg", wc)
}

func (m *MR) invDone(wc *verbs.WorkCompletion) {
	ok := wc.Status == verbs.StatusSuccess
	switch {
	case ok && m.home.left:
		m.event(trace.WCLocalInvWake, wc.Status)
	case ok:
		m.event(trace.WCLocalInvDone, wc.Status)
	case wc.Status == verbs.StatusWRFlushErr:
		m.event(trace.WCLocalInv, wc.Status)
		m.move(evFlushLI)
	default:
		m.event(trace.WCLocalInv, wc.Status)
		m.move(evFailLI)
	}
	if !ok {
		m.pool.completionError("localinv", wc)
	}
	if f := m.onFenced; f != nil {
		m.onFenced = nil
		f(ok)
	}
}
