package memreg

import "sync/atomic"

// State of an MR (features.md S12).
type State uint32

// MR states.
const (
	Invalid   State = iota // no one can reach memory through it
	Valid                  // registered, or on its way to be
	FlushedFR              // its FastReg was flushed
	FlushedLI              // its LOCAL_INV was flushed
	gone                   // destroyed; late completions find it so
	numStates = int(gone)
)

var stateNames = [...]string{"INVALID", "VALID", "FLUSHED_FR", "FLUSHED_LI", "destroyed"}

func (s State) String() string { return stateNames[s] }

// Counters live as long as a mount, across connections (features.md S23). Safe for concurrent use.
type Counters struct {
	Allocated      atomic.Uint64 // MRs ever made
	Recycled       atomic.Uint64 // destroyed because their state was not certain
	Orphaned       atomic.Uint64 // whose destruction failed
	Recovered      atomic.Uint64 // made anew in place
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
