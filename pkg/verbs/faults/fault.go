package faults

import "time"

// A kind is one fault. Its number is part of every decision, so that a seed means the same in every
// run of a version.
type kind uint8

const (
	disconnectEvery kind = iota
	postFail
	flushReg
	regError
	linvError
	delayReply
	loseReply
	creditCut
	allocFail
	deregFail
	connectFail
	lateWrite
	lateRead
	staleKey
	wildWrite
	numKinds
)

// A form is what stands behind the name of a fault in a plan.
type form uint8

const (
	formEvery     form = iota // N
	formPosition              // N:K
	formDelay                 // N:D
	formLateDelay             // N or N:D
	formValue                 // C
)

var formSyntax = [...]string{"N", "N:K", "N:D", "N[:D]", "C"}

// defaultLate is how long after the Send a late access comes unless the plan says otherwise: long
// enough for a client to fence what the Send was the answer for.
const defaultLate = 5 * time.Millisecond

// A Fault describes one fault for help texts and documentation.
type Fault struct {
	// Name as plans spell it, without the argument.
	Name string
	// Syntax is the argument: N an interval in events (~N a random one of mean N), K a position in
	// a chain counted from 0 (* a random one), D a duration as Go writes it, C a number of credits.
	Syntax string
	// Does tells what happens at the level of verbs.
	Does string
	// Expect tells what the layer above is to make of it.
	Expect string
}

// faults is the table of all faults, by kind. doc.go repeats it in prose.
var faults = [numKinds]struct {
	form form
	Fault
}{
	disconnectEvery: {formEvery, Fault{Name: "disconnect-every",
		Does:   "every Nth PostSend of all queue pairs tears its connection down, before the post (which fails), in the middle of it (a part is posted, the rest is accepted and flushed) or after it",
		Expect: "reconnect, and send the calls again that were under way"}},
	postFail: {formPosition, Fault{Name: "post-fail",
		Does:   "every Nth chain that has a position K fails there: what stands before K is posted, K and what follows is not",
		Expect: "give the MRs that were not registered back, and end the connection or send again"}},
	flushReg: {formEvery, Fault{Name: "flush-reg",
		Does:   "every Nth chain with a FastReg is accepted, but from one of its FastRegs on it is flushed and the connection ends",
		Expect: "treat the MRs from there on as in an unknown state, recycle them, reconnect"}},
	regError: {formEvery, Fault{Name: "reg-error",
		Does:   "every Nth FastReg completes with a memory bind or local protection error, what follows is flushed and the connection ends",
		Expect: "log it as an error, recycle the MR, reconnect"}},
	linvError: {formEvery, Fault{Name: "linv-error",
		Does:   "every Nth LocalInv completes with an error that is no flush, what follows is flushed and the connection ends",
		Expect: "log it as an error, take the memory as not fenced until the MR is destroyed, reconnect"}},
	delayReply: {formDelay, Fault{Name: "delay-reply",
		Does:   "the Receive of every Nth message completes D later; others overtake it and keep their order",
		Expect: "wait; other calls are not held up"}},
	loseReply: {formEvery, Fault{Name: "lose-reply",
		Does:   "every Nth message is swallowed, its Receive posted again; an invalidation that came with it stays done",
		Expect: "time the call out, end the connection and send the call again on the next one"}},
	creditCut: {formValue, Fault{Name: "credits",
		Does:   "the credit field of every RPC-over-RDMA version 1 message received is cut to C",
		Expect: "have no more than max(C, 1) calls under way"}},
	allocFail: {formEvery, Fault{Name: "alloc-fail",
		Does:   "every Nth AllocMR fails with ENOMEM",
		Expect: "let the call wait for an MR that is free; lose none"}},
	deregFail: {formEvery, Fault{Name: "dereg-fail",
		Does:   "every Nth Dereg of an MR of AllocMR fails; the MR lives on until its protection domain is deallocated",
		Expect: "count the MR as orphaned and let nobody have its memory before the connection is gone"}},
	connectFail: {formEvery, Fault{Name: "connect-fail",
		Does:   "every Nth Connect fails as unreachable, and sends nothing",
		Expect: "try again after the back-off"}},
	lateWrite: {formLateDelay, Fault{Name: "late-write",
		Does:   "D (5ms) after every Nth Send with an RDMA Write in its chain, the Write is done again, up to a page of it",
		Expect: "(at the peer) refuse it, count it, end the connection, hand out no octet of it"}},
	lateRead: {formLateDelay, Fault{Name: "late-read",
		Does:   "D (5ms) after every Nth Send that follows an RDMA Read, the oldest Read that was not yet repeated is",
		Expect: "(at the peer) refuse it, count it, end the connection"}},
	staleKey: {formEvery, Fault{Name: "stale-key",
		Does:   "every Nth Send with an RDMA Write in its chain is followed by a Write to the same address with the key before",
		Expect: "(at the peer) refuse it, count it, end the connection"}},
	wildWrite: {formEvery, Fault{Name: "wild-write",
		Does:   "every Nth Send with an RDMA Write in its chain is followed by a Write with its key one octet before its memory, or far behind it",
		Expect: "(at the peer) refuse it, count it, end the connection"}},
}

func (k kind) String() string { return faults[k].Name }

// All lists every fault, in the order in which plans print them.
func All() []Fault {
	list := make([]Fault, 0, numKinds)
	for i := range faults {
		f := faults[i].Fault
		f.Syntax = formSyntax[faults[i].form]
		list = append(list, f)
	}
	return list
}
