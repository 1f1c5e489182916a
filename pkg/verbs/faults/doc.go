// Package faults is a verbs provider that injects faults: [New] decorates any [verbs.Provider] with
// the faults of a [Plan]. The package serves tests, the lab, and operators who want to see how
// their mounts react to faults. A daemon may link the package, because it does not depend on the
// testing package. New logs a warning. A program that enables faults must also show this to its
// users.
//
// # Plans
//
// A plan is a list of words separated by commas:
//
//	seed=42,disconnect-every=100,post-fail=50:2,delay-reply=~30:20ms
//
// N is an interval in events of the fault, counted over all connections of the provider: N fires at
// every Nth event, ~N at random with mean N. K is a position in a chain of work requests, counted
// from 0; * is a random position. D is a duration.
//
// Whether a fault fires at its kth event depends only on the seed, the fault and k. The same holds
// for every other random choice. The same order of events therefore has the same faults. Without
// seed= a seed is chosen. [Plan.String] prints it with the plan, and the printed plan repeats the
// run. If several goroutines post at the same time, their order may differ between runs. The
// numbers of the events at which a fault fires do not differ.
//
// # Faults
//
//   - disconnect-every=N: every Nth PostSend of all queue pairs ends its connection: before the
//     post, which fails; in the middle, so that a part is posted and the rest is accepted and
//     flushed; or after the post. The layer above must reconnect and retry the pending calls.
//   - post-fail=N:K: every Nth chain with a position K fails at K: the requests before K are
//     posted, the others are not. The layer above must release the MRs that were not registered,
//     and disconnect or retry.
//   - flush-reg=N: every Nth chain with a FastReg is accepted, but one of its FastRegs and all
//     later requests are flushed and the connection ends. The layer above must treat these MRs as
//     being in an unknown state, recycle them, reconnect.
//   - reg-error=N: every Nth FastReg completes with a memory bind error or local protection error,
//     later requests are flushed and the connection ends. The layer above must log an error,
//     recycle the MR, reconnect.
//   - linv-error=N: every Nth LocalInv completes with an error other than a flush, later requests
//     are flushed and the connection ends. The layer above must log an error, treat the memory as
//     not fenced until the MR is destroyed, reconnect.
//   - delay-reply=N:D: the Receive of every Nth message completes D later, after messages that
//     arrived later. The layer above must wait without blocking other calls.
//   - lose-reply=N: every Nth message is dropped and its Receive posted again; the message's
//     invalidation stays in effect. The layer above must let the call time out, disconnect, retry
//     the call on the next connection.
//   - credits=C: the credit field of every received RPC-over-RDMA version 1 message is limited to
//     C. The layer above must have at most max(C, 1) calls in flight.
//   - alloc-fail=N: every Nth AllocMR fails with ENOMEM. The layer above must let the call wait for
//     a free MR, lose no call.
//   - dereg-fail=N: every Nth Dereg of an MR from AllocMR fails; the MR stays valid until its
//     protection domain is deallocated. The layer above must count the MR as orphaned, reuse its
//     memory only after the connection has ended.
//   - connect-fail=N: every Nth Connect fails as unreachable and sends nothing. The layer above
//     must retry after the back-off.
//   - late-write=N[:D]: D (default 5ms) after every Nth Send with an RDMA Write in its chain, up to
//     4096 bytes of the Write are repeated. The peer must refuse the access, count it, disconnect,
//     return no byte of it.
//   - late-read=N[:D]: D (default 5ms) after every Nth Send that follows an RDMA Read, the oldest
//     RDMA Read not yet repeated is repeated. The peer must refuse the access, count it,
//     disconnect.
//   - stale-key=N: after every Nth Send with an RDMA Write in its chain, a Write with the previous
//     key goes to the same address. The peer must refuse the access, count it, disconnect.
//   - wild-write=N: after every Nth Send with an RDMA Write in its chain, a Write with the same key
//     goes to one byte before the memory or far after it. The peer must refuse the access, count
//     it, disconnect.
//
// At most one of disconnect-every, post-fail, flush-reg, reg-error and linv-error fires for one
// chain: the first one in this order. The chain then does not count as an event of the faults after
// it.
//
// A fault that ends the connection does what a device does. The queue pair enters the error state.
// Requests that the device has not executed are flushed in the order of their posts, including
// those of earlier chains. OnDisconnect is called with an [*Error] that unwraps to the system's
// error. All errors of faults are or wrap an [*Error]. The exception is the [verbs.ErrQPState] of a
// post whose connection has ended.
//
// A server uses late-write, late-read, stale-key and wild-write to attack its clients. The
// decorator posts the attacks beside the consumer's requests. One queue pair has at most 8 attacks
// in flight; further attacks are skipped. The device limits and queue sizes are adjusted by 8.
//
// The attacks assume that a server posts the last Write of a reply in one chain with the Send. The
// attacks also assume that the first Write to a segment in that chain is at the segment's start. A
// late Write carries the data of the Write that it repeats. A late Write does no harm while the
// client has not fenced the memory. A late Write does harm if fencing fails and the memory has a
// new owner.
//
// [Provider.Counts] counts only what was done. An attack whose connection ended first is not
// counted.
//
// # Promises
//
// Without faults a decorated provider passes the conformance suite of verbstest. Work requests are
// copied and never changed. Each accepted request completes exactly once, on the decorated queue
// pair. The handlers of one completion queue run one at a time.
//
// Drain and Close return after all requests have completed. Drain and Close deliver delayed
// messages at once and cancel delayed attacks. OnDisconnect is called at most once. Each post
// allocates memory, so the decorator does not suit benchmarks.
//
// # Goroutines and locks
//
// Each delayed message and each delayed attack has a timer. One goroutine per queue pair ends a
// connection. Timers and goroutines end with the Drain or Close of their queue pair, except a call
// of OnDisconnect that is still running.
//
//	completionQueue.mu    held during each handler, which may post: lock it before queuePair.mu
//	queuePair.mu          guards the state, the order of posts and the unposted requests;
//	                      held during the inner PostSend, which does not block
//	timers.mu             guards the delayed jobs
//	protectionDomain.mu   guards the MRs whose Dereg failed by injection
//	connID.mu             guards the queue pair of a connection
//
// # Files
//
//	fault.go, plan.go         the table of faults; plans and their random choices
//	provider.go, connid.go    provider, listener, device, the ConnIDs of both sides
//	memory.go, cq.go          protection domain and MRs; the order of handlers
//	qp.go, inject.go          posting, completing, disconnecting; the choice of a chain's fault
//	attack.go, timers.go      attacks of a server; delayed jobs
package faults
