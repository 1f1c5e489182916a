package memreg

import (
	"sync/atomic"

	"github.com/nfsrdmad/nfsrdmad/internal/selfcheck"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/trace"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// An MR is one memory region of a pool, with the work requests that register and invalidate it.
type MR struct {
	pool  *Pool
	list  *List // changes only while the MR is free
	id    uint32
	vmr   verbs.MR
	perIO verbs.PerIOMR // vmr if the device registers memory for each use, else nil
	state atomic.Uint32
	keys  *keyHistory // of the index of vmr; nil if the device chooses the keys

	// The current registration.
	segs   [][]byte
	handle verbs.RKey
	length uint32
	iova   uint64
	xid    uint32
	mapped bool // a map event was recorded, and its unmap event was not
	posted bool // part of a chain that was given to the provider

	reg, inv verbs.WorkRequest
	onFenced func(ok bool) // set on the last LOCAL_INV of a chain
}

// Handle returns the STag for an RPC-over-RDMA segment.
func (m *MR) Handle() uint32 { return uint32(m.handle) }

// Length returns the length of the registration in bytes.
func (m *MR) Length() uint32 { return m.length }

// Offset returns the registered address.
func (m *MR) Offset() uint64 { return m.iova }

// State returns the current state. Safe for concurrent use.
func (m *MR) State() State { return State(m.state.Load()) }

// apply changes the state and the gauges as the table of transitions says. A destroyed MR stays
// destroyed. An event that the table does not allow changes nothing, and stops the process if the
// invariant checks are on.
func (m *MR) apply(e event) {
	for {
		from := State(m.state.Load())
		if from == destroyed {
			return
		}
		to := transitions[from][e]
		if to == never {
			if selfcheck.On() {
				selfcheck.Failf("MR %d: event %q is not allowed in state %v", m.id, e, from)
			}
			return
		}
		if from == to {
			return
		}
		if m.state.CompareAndSwap(uint32(from), uint32(to)) {
			c := m.pool.stats
			c.gauges[from].Add(-1)
			if to != destroyed {
				c.gauges[to].Add(1)
			}
			if to.failed() && !from.failed() {
				c.MRsFailed.Add(1)
			}
			return
		}
	}
}

// attach makes vmr, which was just allocated, the provider's MR of m.
func (m *MR) attach(vmr verbs.MR) {
	m.vmr, m.reg.MR = vmr, vmr
	if m.pool.params.PerIO {
		m.perIO = vmr.(verbs.PerIOMR)
		return
	}
	m.keys = m.pool.keysOf(vmr)
}

// event records a trace event of m and its RPC.
func (m *MR) event(k trace.Kind, status verbs.Status) {
	if r := m.pool.hooks.Trace; r != nil {
		r.Add(trace.Event{Kind: k, Status: uint8(status), XID: m.xid, MR: m.id, Handle: uint32(m.handle)})
	}
}

// unmapped records the unmap event of m, once for each map event.
func (m *MR) unmapped() {
	if m.mapped {
		m.mapped = false
		m.event(trace.Unmap, 0)
	}
}

// regDone handles a FastReg that failed or was flushed. FastRegs are never signaled, so a
// successful one has no completion.
func (m *MR) regDone(wc *verbs.WorkCompletion) {
	if wc.Status == verbs.StatusSuccess {
		return
	}
	m.event(trace.WCFastReg, wc.Status)
	m.apply(evFlushFR)
	m.pool.completionError("fastreg", wc)
}

func (m *MR) invDone(wc *verbs.WorkCompletion) {
	ok := wc.Status == verbs.StatusSuccess
	switch {
	case ok && m.list.abandoned:
		m.event(trace.WCLocalInvWake, wc.Status)
	case ok:
		m.event(trace.WCLocalInvDone, wc.Status)
	case wc.Status == verbs.StatusWRFlushErr:
		m.event(trace.WCLocalInv, wc.Status)
		m.apply(evFlushLI)
	default:
		m.event(trace.WCLocalInv, wc.Status)
		m.apply(evFailLI)
	}
	if !ok {
		m.pool.completionError("localinv", wc)
	}
	if f := m.onFenced; f != nil {
		m.onFenced = nil
		f(ok)
	}
}
