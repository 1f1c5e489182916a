package memreg

import (
	"sync/atomic"

	"github.com/nfsrdmad/nfsrdmad/pkg/observe/stats"
)

// Counts count MRs (docs/features.md S23); Metrics says what each counts. N is atomic.Uint64 in
// [Counters], and uint64 in a copy. MRsFailed is the sum of MRsRecovered, MRsRecycled and
// MRsOrphaned when no failed MR is pending.
type Counts[N atomic.Uint64 | uint64] struct {
	MRsAllocated, MRsFailed, MRsRecovered, MRsRecycled, MRsOrphaned N
	LocalInvNeeded, RemoteInvalidations, MapErrors                  N
}

// Metrics returns the counters.
func (c *Counts[N]) Metrics() []stats.Metric {
	return []stats.Metric{
		stats.New("mrs_allocated_total", "Allocations of memory regions.", &c.MRsAllocated),
		stats.New("mrs_failed_total", "Memory regions in an unknown state after a flush, an error or a lost "+
			"connection: sum of recovered, recycled and orphaned.", &c.MRsFailed),
		stats.New("mrs_recovered_total", "Memory regions replaced after a lost connection.", &c.MRsRecovered),
		stats.New("mrs_recycled_total", "Memory regions destroyed because their invalidation failed.",
			&c.MRsRecycled),
		stats.New("mrs_orphaned_total", "Memory regions that could not be destroyed or replaced.", &c.MRsOrphaned),
		stats.New("local_inv_needed_total", "Memory regions that the client had to invalidate.", &c.LocalInvNeeded),
		stats.New("remote_invalidations_total", "Memory regions invalidated by servers with Send With Invalidate.",
			&c.RemoteInvalidations),
		stats.New("map_errors_total", "Registrations that failed: refused by the device, or no memory region left.",
			&c.MapErrors),
	}
}

// Counters count the MRs of a mount across its connections and pools. Safe for concurrent use.
type Counters struct {
	Counts[atomic.Uint64]

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
