package faults

import "time"

// A kind is one fault. The fault's decisions depend on the number of its kind. The order of the
// constants must therefore not change within a version, or seeds change their meaning.
type kind uint8

const (
	disconnectEvery kind = iota
	postFail
	flushReg
	regError
	linvError
	delayReply
	loseReply
	creditLimit
	allocFail
	deregFail
	connectFail
	lateWrite
	lateRead
	staleKey
	wildWrite
	numKinds
)

// A form is the syntax of a fault's argument.
type form uint8

const (
	formEvery     form = iota // N
	formPosition              // N:K
	formDelay                 // N:D
	formLateDelay             // N or N:D
	formValue                 // C
)

var formSyntax = [...]string{"N", "N:K", "N:D", "N[:D]", "C"}

// defaultLate is the default delay of a late access after the Send. A client has fenced the memory
// of the call by that time.
const defaultLate = 5 * time.Millisecond

// A Fault describes one fault for help texts and documentation.
type Fault struct {
	// Name is the name in plans, without the argument.
	Name string
	// Syntax is the argument. N is an interval in events (~N: random with mean N). K is a position
	// in a chain, counted from 0 (*: random). D is a duration in Go's syntax. C is a number of
	// credits.
	Syntax string
	// Does describes the effect on the verbs interface.
	Does string
	// Expect describes the correct reaction of the layer above.
	Expect string
}

// faults describes all faults, indexed by kind. doc.go repeats the texts.
var faults = [numKinds]struct {
	form form
	Fault
}{
	disconnectEvery: {formEvery, Fault{Name: "disconnect-every",
		Does: "every Nth PostSend of all queue pairs ends its connection: before the post, which fails; " +
			"in the middle, so that a part is posted and the rest is accepted and flushed; or after the " +
			"post",
		Expect: "reconnect and retry the pending calls"}},
	postFail: {formPosition, Fault{Name: "post-fail",
		Does:   "every Nth chain with a position K fails at K: the requests before K are posted, the others are not",
		Expect: "release the MRs that were not registered, and disconnect or retry"}},
	flushReg: {formEvery, Fault{Name: "flush-reg",
		Does: "every Nth chain with a FastReg is accepted, but one of its FastRegs and all later requests " +
			"are flushed and the connection ends",
		Expect: "treat these MRs as being in an unknown state, recycle them, reconnect"}},
	regError: {formEvery, Fault{Name: "reg-error",
		Does: "every Nth FastReg completes with a memory bind error or local protection error, later " +
			"requests are flushed and the connection ends",
		Expect: "log an error, recycle the MR, reconnect"}},
	linvError: {formEvery, Fault{Name: "linv-error",
		Does: "every Nth LocalInv completes with an error other than a flush, later requests are flushed " +
			"and the connection ends",
		Expect: "log an error, treat the memory as not fenced until the MR is destroyed, reconnect"}},
	delayReply: {formDelay, Fault{Name: "delay-reply",
		Does:   "the Receive of every Nth message completes D later, after messages that arrived later",
		Expect: "wait without blocking other calls"}},
	loseReply: {formEvery, Fault{Name: "lose-reply",
		Does: "every Nth message is dropped and its Receive posted again; the message's invalidation " +
			"stays in effect",
		Expect: "let the call time out, disconnect, retry the call on the next connection"}},
	creditLimit: {formValue, Fault{Name: "credits",
		Does:   "the credit field of every received RPC-over-RDMA version 1 message is limited to C",
		Expect: "have at most max(C, 1) calls in flight"}},
	allocFail: {formEvery, Fault{Name: "alloc-fail",
		Does:   "every Nth AllocMR fails with ENOMEM",
		Expect: "let the call wait for a free MR, lose no call"}},
	deregFail: {formEvery, Fault{Name: "dereg-fail",
		Does: "every Nth Dereg of an MR from AllocMR fails; the MR stays valid until its protection " +
			"domain is deallocated",
		Expect: "count the MR as orphaned, reuse its memory only after the connection has ended"}},
	connectFail: {formEvery, Fault{Name: "connect-fail",
		Does:   "every Nth Connect fails as unreachable and sends nothing",
		Expect: "retry after the back-off"}},
	lateWrite: {formLateDelay, Fault{Name: "late-write",
		Does: "D (default 5ms) after every Nth Send with an RDMA Write in its chain, up to 4096 bytes of " +
			"the Write are repeated",
		Expect: "(the peer) refuse the access, count it, disconnect, return no byte of it"}},
	lateRead: {formLateDelay, Fault{Name: "late-read",
		Does: "D (default 5ms) after every Nth Send that follows an RDMA Read, the oldest RDMA Read not " +
			"yet repeated is repeated",
		Expect: "(the peer) refuse the access, count it, disconnect"}},
	staleKey: {formEvery, Fault{Name: "stale-key",
		Does: "after every Nth Send with an RDMA Write in its chain, a Write with the previous key goes " +
			"to the same address",
		Expect: "(the peer) refuse the access, count it, disconnect"}},
	wildWrite: {formEvery, Fault{Name: "wild-write",
		Does: "after every Nth Send with an RDMA Write in its chain, a Write with the same key goes to " +
			"one byte before the memory or far after it",
		Expect: "(the peer) refuse the access, count it, disconnect"}},
}

func (k kind) String() string { return faults[k].Name }

// All returns all faults, in the order in which plans print them.
func All() []Fault {
	list := make([]Fault, 0, numKinds)
	for i := range faults {
		f := faults[i].Fault
		f.Syntax = formSyntax[faults[i].form]
		list = append(list, f)
	}
	return list
}
