// Package xprt is the client end of RPC-over-RDMA version 1 (RFC 8166) on any verbs provider:
// slots, credits, the choice of the message form, the reply handler, and the worker that connects
// again.
//
// # A call
//
//	Call: slot -> credit -> marshal + post (one chain) -> reply -> fence -> results
//	        |        |                                      |
//	        |        +-- no connection: wait here           +-- connection lost: same XID, from "credit" on
//	        +-- all slots taken: wait here
//
// Each slot is made once, with its send buffer and its list of MRs. Its XIDs carry the slot's
// number in their low bits, so that a reply finds its call without a lock or a map. A call is never
// sent twice on one connection; it is sent again, with the same XID, on the next one, where the
// server's duplicate request cache finds it.
//
// [Transport.Call] returns only when no octet of the caller's memory can be reached by the server
// any more, whatever the outcome (docs/features.md S9, S21). A call that its caller gives up is
// fenced and left at once; its slot and its credit stay taken until the late reply comes or the
// connection ends, since the server still counts it (RFC 8166 §3.3.1).
//
// # Credits
//
// A new connection has one credit until the first valid reply (RFC 8166 §3.3.3); without a
// connection there are none, so the queue for credits is also the queue for the connection.
// Receives are posted again before the window widens. From 16 credits on one is kept for liveness
// calls.
//
// # The send queue
//
// sendqueue.go keeps it from overflowing, with the proof. Few Sends are signaled; a call whose Send
// is signaled ends only when that has completed too, so nothing of the slot is used again before
// the device has let go of it (S8).
//
// # Connections
//
// What is made for a device (adapter.go: protection domain, MR pool, message buffers) outlives its
// connections. The worker takes a connection down in this order: no credits; the send lock; the
// queue pair drained and closed, so that the server reaches nothing; MRs that were in use made
// anew; then each call is told, and waits for a credit of the next connection (S13, S16). Back-off
// is 5 s, doubled up to 60 s; none after a connection that answered a call, or liveness calls for a
// while, nor after a first one that answered a liveness call alone or whose loss is of our own
// making.
//
// The first call of a connection is a NULL, and after each silence of KeepAlive another: a server
// that stays silent for as long again is taken for dead, whether calls wait or not. An NFSv3 server
// drops a connection that makes no calls within minutes (knfsd: 6 to 12), and RDMA Writes do not
// count. A connection without a call of the consumer for IdleTimeout is closed; the next call makes
// a new one.
//
// # Locks
//
//   - Transport.send (RWMutex): held for reading while a call is marshaled and posted, for writing by the worker while it takes a
//     connection down or puts one up, so that map and unmap never run beside it (S16).
//   - slot.mu: the state of one call. Taken by its caller, by the reply handler and by the worker.
//   - window.mu: credits and the queue for them.
//
// Order: send, then slot.mu, then window.mu. None is held across I/O, but send by the worker while
// it has a queue pair drained and closed, for as long as the provider takes: calls have no
// connection then anyhow.
package xprt
