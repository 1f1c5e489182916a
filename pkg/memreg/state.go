package memreg

// A State is the state of one MR (docs/features.md S12).
//
//	  Map                      FastReg flushed or failed
//	INVALID ------------> VALID --------------------------> FLUSHED_FR
//	 ^   ^                | | |                                 |
//	 |   |  Unmap,        | | |     LOCAL_INV flushed           v
//	 |   |  LOCAL_INV,    | | +---------------------------> FLUSHED_LI
//	 |   |  remote inval. | |                                   |
//	 |   +----------------+ | LOCAL_INV failed or not posted    |
//	 |                      | (also from FLUSHED_*)             |
//	 |                      v                                   |
//	 |                  RECYCLING ----> destroyed (recycled)    |
//	 |                                                          |
//	 |  allocated again             connection ended            |
//	 +------------------ RECOVERING <---------------------------+
//	                         |      (from VALID and FLUSHED_*)
//	                         |
//	                         +---> destroyed (orphaned), if not destroyed
//	                               or not allocated again
//
// Pool.Destroy destroys an MR in any state.
type State uint32

// MR states.
const (
	Invalid    State = iota // no key reaches memory through the MR
	Valid                   // registered, or its FastReg is pending
	FlushedFR               // its FastReg was flushed or failed: it may be registered
	FlushedLI               // its LOCAL_INV was flushed: it may still be registered
	Recycling               // its LOCAL_INV failed or was not posted: the pool destroys it
	Recovering              // its connection ended: the pool destroys it and allocates another
	destroyed               // final; late completions do not change it
	numStates  = int(destroyed)
)

// States lists all states that the gauges count.
var States = [numStates]State{Invalid, Valid, FlushedFR, FlushedLI, Recycling, Recovering}

var stateNames = [...]string{
	"INVALID", "VALID", "FLUSHED_FR", "FLUSHED_LI", "RECYCLING", "RECOVERING", "destroyed",
}

func (s State) String() string { return stateNames[s] }

// failed reports whether an MR in state s cannot be used before it is replaced. Counters.Failed
// counts an MR when it enters the first of these states.
func (s State) failed() bool { return s >= FlushedFR && s <= Recovering }

// An event changes the state of an MR.
type event uint8

const (
	evMap         event = iota // received memory, a key and access rights
	evUnmap                    // released before it was posted
	evInvalidated              // LOCAL_INV completed
	evRemoteInv                // invalidated by the server's Send With Invalidate
	evFlushFR                  // FastReg was flushed or failed
	evFlushLI                  // LOCAL_INV was flushed
	evFailLI                   // LOCAL_INV failed, or could not be posted
	evRecover                  // the connection ended: recovery begins
	evRecovered                // the provider's MR was replaced
	evDestroy                  // destroyed or orphaned
	numEvents     = iota
)

var eventNames = [numEvents]string{
	"map", "unmap", "LOCAL_INV completed", "remote invalidation", "FastReg flushed",
	"LOCAL_INV flushed", "LOCAL_INV failed", "recovery began", "recovered", "destroy",
}

func (e event) String() string { return eventNames[e] }

// never marks an event that cannot occur in a state.
const never = State(255)

// transitions is the state machine: the next state by current state and event.
var transitions = [numStates][numEvents]State{
	//            map    unmap  invalid. remote   flushFR    flushLI    failLI     recover    recovered destroy
	Invalid:    {Valid, never, never, never, never, never, never, never, never, destroyed},
	Valid:      {never, Invalid, Invalid, Invalid, FlushedFR, FlushedLI, Recycling, Recovering, never, destroyed},
	FlushedFR:  {never, never, never, never, FlushedFR, FlushedLI, Recycling, Recovering, never, destroyed},
	FlushedLI:  {never, never, never, never, never, FlushedLI, Recycling, Recovering, never, destroyed},
	Recycling:  {never, never, never, never, Recycling, Recycling, Recycling, never, never, destroyed},
	Recovering: {never, never, never, never, never, never, never, never, Invalid, destroyed},
}
