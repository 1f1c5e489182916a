// Package faults is a verbs provider that breaks another on purpose: [New] decorates any
// [verbs.Provider] with the faults of a [Plan], for tests, for the lab and for operators who want
// to see how their mounts take them. It does not depend on the testing package, so that a daemon
// may link it; whoever turns it on must say so loudly, and New itself logs a warning.
//
// # Plans
//
// A plan is words with a comma between them:
//
//	seed=42,disconnect-every=100,post-fail=50:2,delay-reply=~30:20ms
//
// N is an interval, counted in the events that the fault can strike, over all connections of the
// provider: N strikes at exactly every Nth, ~N at random with mean N. K is a position in a chain of
// work requests, from 0, or * for a random one. D is a duration. Whether the event numbered k of a
// fault is struck, and every other choice, is a function of the seed, the fault and k alone: the
// same order of events meets the same faults. Without seed= one is chosen; [Plan.String] prints it
// with the rest, and what it prints repeats the run. With several goroutines that post at the same
// time the order of events is theirs, and only the ordinals are the same.
//
// # Faults
//
//   - disconnect-every=N: every Nth PostSend of all queue pairs tears its connection down, before the post
//     (which fails), in the middle of it (a part is posted, the rest is accepted and flushed) or after it. The
//     layer above is to reconnect, and send the calls again that were under way.
//   - post-fail=N:K: every Nth chain that has a position K fails there: what stands before K is posted, K and
//     what follows is not. The layer above is to give the MRs that were not registered back, and end the
//     connection or send again.
//   - flush-reg=N: every Nth chain with a FastReg is accepted, but from one of its FastRegs on it is flushed
//     and the connection ends. The layer above is to treat the MRs from there on as in an unknown state,
//     recycle them, reconnect.
//   - reg-error=N: every Nth FastReg completes with a memory bind or local protection error, what follows is
//     flushed and the connection ends. The layer above is to log it as an error, recycle the MR, reconnect.
//   - linv-error=N: every Nth LocalInv completes with an error that is no flush, what follows is flushed and
//     the connection ends. The layer above is to log it as an error, take the memory as not fenced until the MR
//     is destroyed, reconnect.
//   - delay-reply=N:D: the Receive of every Nth message completes D later; others overtake it and keep their
//     order. The layer above is to wait, without holding other calls up.
//   - lose-reply=N: every Nth message is swallowed, its Receive posted again; an invalidation that came with it
//     stays done. The layer above is to time the call out, end the connection and send the call again on the
//     next one.
//   - credits=C: the credit field of every RPC-over-RDMA version 1 message received is cut to C. The layer
//     above is to have no more than max(C, 1) calls under way.
//   - alloc-fail=N: every Nth AllocMR fails with ENOMEM. The layer above is to let the call wait for an MR that
//     is free; lose none.
//   - dereg-fail=N: every Nth Dereg of an MR of AllocMR fails; the MR lives on until its protection domain is
//     deallocated. The layer above is to count the MR as orphaned and let nobody have its memory before the
//     connection is gone.
//   - connect-fail=N: every Nth Connect fails as unreachable, and sends nothing. The layer above is to try
//     again after the back-off.
//   - late-write=N[:D]: D (5ms) after every Nth Send with an RDMA Write in its chain, the Write is done again,
//     up to a page of it. The peer is to refuse it, count it, end the connection, hand out no octet of it.
//   - late-read=N[:D]: D (5ms) after every Nth Send that follows an RDMA Read, the oldest Read that was not yet
//     repeated is. The peer is to refuse it, count it, end the connection.
//   - stale-key=N: every Nth Send with an RDMA Write in its chain is followed by a Write to the same address
//     with the key before. The peer is to refuse it, count it, end the connection.
//   - wild-write=N: every Nth Send with an RDMA Write in its chain is followed by a Write with its key one
//     octet before its memory, or far behind it. The peer is to refuse it, count it, end the connection.
//
// A chain can be struck by one of disconnect-every, post-fail, flush-reg, reg-error and linv-error
// only, the first of them in this order; it is then no event for those behind it. Faults that end
// the connection do what a device does: the queue pair goes to the error state, what the device has
// not executed is flushed, requests of earlier chains included, in the order posted; OnDisconnect
// is called with an [*Error] that unwraps to the system's error. All errors that faults return are,
// or wrap, an [*Error], but for the [verbs.ErrQPState] of a post that found its connection torn
// down.
//
// late-write, late-read, stale-key and wild-write are for the side that a server decorates; it is
// the peer that must withstand them. They are posted beside the consumer's requests, at most 8 at a
// time on one queue pair, more are left out; the devices' and queues' limits are lowered and raised
// by so many. They take it that a server posts the last Write of a reply in one chain with the
// Send, and that the first Write of a segment in that chain is at the segment's start. The data of
// a late Write are those that it repeats, so that it harms nobody when the client has not fenced
// the memory yet, and whoever got the memory next when the fence does not hold.
//
// Only what was done is counted ([Provider.Counts]): a Write whose connection had ended before it
// was due is not.
//
// # What it promises
//
// Without faults a decorated provider passes the conformance suite of verbstest. Work requests are
// copied, never changed. Each request posted completes exactly once, on the decorated queue pair,
// and handlers of one completion queue run one at a time. Drain and Close return when that has
// happened: a message that is being delayed is then delivered at once, an attack that is put off is
// dropped. OnDisconnect is called at most once. It allocates for every post; it is not for
// benchmarks.
//
// # Goroutines and locks
//
// A timer for each message delayed and each attack put off, and one goroutine that ends a
// connection; all of them end with the Drain or Close of their queue pair, but for a call of
// OnDisconnect that is still running.
//
//	completionQueue.mu    held around each handler, which may post: taken before queuePair.mu
//	queuePair.mu          the state, the order of posts, the requests that will never reach the device; held around the inner PostSend, which never waits
//	timers.mu             what is put off
//	protectionDomain.mu   MRs whose Dereg was made to fail
//	connID.mu             the queue pair of a connection
//
// # Files
//
//	fault.go, plan.go         the table of faults; plans and what is drawn from their seeds
//	provider.go, connid.go    provider, listener, device, both sides' ConnIDs
//	memory.go, cq.go          protection domain and MRs; the order of handlers
//	qp.go, decide.go          posting, completing, the end of a connection; which fault has a chain
//	attack.go, timers.go      the faults of a server; what is put off
package faults
