package memreg

import "sync/atomic"

// Counters count the MRs of a mount across its connections and pools (docs/features.md S23). Safe
// for concurrent use.
type Counters struct {
	Allocated atomic.Uint64 // MRs allocated

	// Failed counts MRs whose state became uncertain. Recovered, Recycled and Orphaned are the
	// outcomes. Their sum equals Failed when no failed MR is pending.
	Failed    atomic.Uint64
	Recovered atomic.Uint64 // replaced in place after their connection ended
	Recycled  atomic.Uint64 // destroyed because their LOCAL_INV failed or could not be posted
	Orphaned  atomic.Uint64 // could not be destroyed or replaced

	LocalInvNeeded atomic.Uint64 // LOCAL_INVs posted
	RemoteInv      atomic.Uint64 // MRs invalidated by the server
	MapErrors      atomic.Uint64 // failed allocations and registrations

	gauges [numStates]atomic.Int64
	free   atomic.Int64
}

// InState returns the current number of MRs in state s.
func (c *Counters) InState(s State) int64 { return c.gauges[s].Load() }

// Free returns the current number of MRs on free lists.
func (c *Counters) Free() int64 { return c.free.Load() }

// Total returns the current number of MRs.
func (c *Counters) Total() int64 {
	var n int64
	for i := range c.gauges {
		n += c.gauges[i].Load()
	}
	return n
}
