// Package xprt is the client transport of RPC-over-RDMA version 1 (RFC 8166) on any verbs provider.
// It manages slots and credits, chooses the message form of each call, handles replies, and
// reconnects.
//
// # A call
//
//	Call: slot -> credit -> marshal + post (one chain) -> reply -> fence -> results
//	        |        |                                      |
//	        |        +-- no connection: wait here           +-- connection lost: same XID, again from "credit"
//	        +-- all slots taken: wait here
//
// Calls wait for slots and for credits fairly by user: each user has the next turn, one after the
// other, and the calls of one user are first come, first served (fair.Queue). The user is
// that of the AUTH_SYS credential. While several users make calls, each has a share of the calls in
// flight (shares.go). Keepalive calls do not wait for other calls.
//
// New allocates all slots, each with its send buffer and its list of MRs. The low bits of an XID
// are the number of its slot, so a reply finds its call without a lock or a map. A call is never
// sent twice on one connection. The worker sends a pending call again on the next connection, with
// the same XID. The duplicate request cache of the server recognizes this XID.
//
// The next process of the client can repeat a call with [Transport.Repeat], also with the same XID.
// The slots of the XIDs in Config.Reserved are for these calls until [Transport.ReleaseReserved]. A
// context that implements sunrpc.CallKeeper learns the XID of its call before the transport sends
// it.
//
// [Transport.Call] returns, also with an error, only after the server can no longer reach any
// memory of the caller (docs/features.md S9, S21). If the caller cancels a call, the transport
// fences the memory, and Call then returns. The slot and the credit stay in use until the late
// reply arrives or the connection ends, because the server still counts the call (RFC 8166 §3.3.1).
// LOCAL_INVs wait in the send queue behind earlier data. If the fence takes longer than 1 s plus
// the time of that data at 1 Mbit/s, or longer than Config.Timeout, the connection ends.
//
// A canceled call that is not on the wire yet is taken back, if the provider can
// (verbs.WithdrawingQP). Its caller returns at once, and its credit is free. Its slot stays in use
// until its requests have completed, because they still have their places in the send queue.
//
// # Credits
//
// A new connection has one credit until the first valid reply (RFC 8166 §3.3.3). A transport
// without a connection has no credits, so calls wait for credits and for the connection in one
// queue. Receives are posted again before the window grows. From 16 credits on, one is reserved for
// keepalive calls.
//
// # The send queue
//
// The type sendQueue prevents overflow, and its comment has the proof. Few Sends are signaled. A
// call whose Send is signaled ends only after that Send has completed. The device then no longer
// uses the buffers of the slot (S8).
//
// # Connections
//
// An adapter holds the resources of one device: protection domain, MR pool, message buffers. It
// outlives its connections. The worker takes a connection down in this order (S13, S16):
//
//  1. It sets the credits to zero and takes the send lock.
//  2. It drains and closes the queue pair, so the server no longer reaches any memory.
//  3. It replaces the MRs that were in use.
//  4. It wakes each call, which waits for a credit of the next connection.
//
// The pause before a reconnect is random: between a fifth of a limit and the limit, which is 5 s at
// first and grows by half up to 60 s (pace.Backoff). The clients of a server that restarts lose
// their connections at the same moment, and should not connect at the same moment again and again.
// The pause is at most 250 ms in these cases:
//
//   - The connection made progress: it answered 16 calls, or it lasted ReconnectMin and answered a
//     call or a keepalive call.
//   - The first pause would be due, and the connection answered a call or a keepalive call.
//   - The first pause would be due, and a local fault ended the connection.
//
// The transports of a daemon share [ConnectLimits] of the connects per second to one address.
//
// With several addresses ([Addresses]), an attempt that fails is followed by one to another address
// without a pause, until each was tried. An attempt then has a shorter timeout. An address that
// refused, or at which the server became silent, is avoided for a time that grows. The transports
// of a mount share this knowledge. A connection to another address than the preferred one ends when
// it is idle and the preferred one is not avoided.
//
// A panic during a call ends the connection before the caller of Call sees it, because the server
// may still reach the memory of the call. The next connection has a new adapter.
//
// The first call of a connection is a NULL call. After each idle period of KeepAlive, the transport
// sends another. If the server stays silent for that long again, the transport reconnects, even if
// no call is pending. An NFSv3 server drops a connection without calls within minutes (knfsd: 6 to
// 12), and RDMA Writes do not count as calls. The transport closes a connection after IdleTimeout
// without a call of the consumer. The next call makes a new connection.
//
// # Locks
//
//   - Transport.send (RWMutex): callers hold it for reading while they marshal and post a call. The
//     worker holds it for writing while it installs a connection or takes it down. Map and unmap
//     therefore never run concurrently with the worker (S16).
//   - slotList.mu: the calls that wait for slots. No other lock is taken while it is held.
//   - slot.mu: the state of one call. Its caller, the reply handler and the worker take it.
//   - window.mu: credits and the queue of calls that wait for them.
//   - Addresses.mu: what is known about addresses. No other lock is taken while it is held.
//   - ConnectLimits.mu: the limits of addresses. No other lock is taken while it is held.
//   - Transport.status: state and history. No other lock of this package is taken while it is held.
//
// The order is send, slot.mu, window.mu. slotList.mu comes after slot.mu. No lock is held across
// I/O, with one exception: the worker holds send while the provider drains and closes a queue pair.
// Calls have no connection during that time.
package xprt
