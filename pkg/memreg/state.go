package memreg

// State of an MR (docs/features.md S12).
type State uint32

// MR states.
const (
	Invalid    State = iota // no one can reach memory through it
	Valid                   // registered, or on its way to be
	FlushedFR               // its FastReg was flushed or failed: it may or may not be registered
	FlushedLI               // its LOCAL_INV was flushed: it may or may not be invalid
	Condemned               // its LOCAL_INV failed, or could not be posted: it is to be destroyed
	Recovering              // taken aside, to be destroyed and made anew
	gone                    // destroyed; late completions find it so
	numStates  = int(gone)
)

// States are all states that an MR can be counted in.
var States = [numStates]State{Invalid, Valid, FlushedFR, FlushedLI, Condemned, Recovering}

var stateNames = [...]string{"INVALID", "VALID", "FLUSHED_FR", "FLUSHED_LI", "CONDEMNED", "RECOVERING", "destroyed"}

func (s State) String() string { return stateNames[s] }

// event is something that changes the state of an MR.
type event uint8

const (
	evMap         event = iota // given memory, a key and rights
	evUnsent                   // given back before it was posted
	evInvalidated              // its LOCAL_INV completed
	evRemoteInv                // the server's Send With Invalidate named it
	evFlushFR                  // its FastReg was flushed, or failed
	evFlushLI                  // its LOCAL_INV was flushed
	evFailLI                   // its LOCAL_INV failed, or could not be posted
	evTake                     // the connection ended: recovery takes it aside
	evRecovered                // made anew
	evDestroy                  // destroyed, or lost
	numEvents     = iota
)

var eventNames = [numEvents]string{"map", "unsent", "invalidated", "remote invalidation", "FastReg flushed",
	"LOCAL_INV flushed",
	"LOCAL_INV failed", "taken aside", "recovered", "destroyed"}

func (e event) String() string { return eventNames[e] }

// never marks what cannot happen.
const never = State(255)

// transitions is the whole state machine: the state that follows, by state and event. The drawing
// in doc.go is of this table.
var transitions = [numStates][numEvents]State{
	//            map    unsent   invalid. remote   flushFR    flushLI    failLI     take        recovered destroy
	Invalid:    {Valid, never, never, never, never, never, never, never, never, gone},
	Valid:      {never, Invalid, Invalid, Invalid, FlushedFR, FlushedLI, Condemned, Recovering, never, gone},
	FlushedFR:  {never, never, never, never, FlushedFR, FlushedLI, Condemned, Recovering, never, gone},
	FlushedLI:  {never, never, never, never, never, FlushedLI, Condemned, Recovering, never, gone},
	Condemned:  {never, never, never, never, Condemned, Condemned, Condemned, never, never, gone},
	Recovering: {never, never, never, never, never, never, never, never, Invalid, gone},
}

// hurts are the states in which an MR can be neither used nor trusted: Counters.Hurt counts the
// first of them that an MR enters.
func (s State) hurts() bool { return s >= FlushedFR && s <= Recovering }
