package memreg

import "sync/atomic"

// Counters live as long as a mount, across connections and pools (docs/features.md S23). Safe for
// concurrent use.
type Counters struct {
	Allocated atomic.Uint64 // MRs ever made
	// whose state became uncertain: Recovered + Recycled + Orphaned, once all are dealt with
	Failed    atomic.Uint64
	Recovered atomic.Uint64 // of those: made anew in place, after their connection ended
	// of those: destroyed, as their LOCAL_INV failed or could not be posted
	Recycled       atomic.Uint64
	Orphaned       atomic.Uint64 // of those, or at the end: could not be destroyed or not made anew
	LocalInvNeeded atomic.Uint64 // LOCAL_INVs posted
	RemoteInv      atomic.Uint64 // invalidated by the server
	MapErrors      atomic.Uint64

	gauges [numStates]atomic.Int64
	free   atomic.Int64
}

// InState is the number of MRs in state s now.
func (c *Counters) InState(s State) int64 { return c.gauges[s].Load() }

// Free is the number of MRs on free lists now.
func (c *Counters) Free() int64 { return c.free.Load() }

// Total is the number of MRs that exist now.
func (c *Counters) Total() int64 {
	var n int64
	for i := range c.gauges {
		n += c.gauges[i].Load()
	}
	return n
}
