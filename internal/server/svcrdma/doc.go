// Package svcrdma implements the server side of RPC-over-RDMA version 1 (RFC 8166) with the NFSv3
// binding of RFC 8267 and the private data of RFC 8797. It uses the interfaces of pkg/verbs and has
// no knowledge of file systems. A [Handler] receives each call as the unreduced RPC message that a
// TCP server would receive, and returns the unreduced reply.
//
//	Receive ─► decode header ─► plan ─► RDMA Reads ─► rebuilt call ─► Handler (or duplicate request cache)
//	  ▲            │              │                                       │
//	  │         discard,       ERR_CHUNK                               reply
//	  │         ERR_VERS                                                  │
//	  └── re-posted before the Send ◄── Send ◄── RDMA Writes ◄── plan ◄───┘
//
// # Files
//
//	server.go    Serve, Config: accept loop, limits, shutdown
//	conn.go      one connection: private data (RFC 8797 §4), credits (RFC 8166 §3.3.1), Receives, release
//	watch.go     timeouts of idle and stalled connections
//	msgbuf.go    buffers of unreduced messages
//	membudget.go memory limit of the buffers of all connections
//	inline.go    small calls that the completion handler of their Receive executes
//	exec.go      one call, from its Receive to the completion of its Send; RDMA_ERROR (RFC 8166 §4.5)
//	callplan.go  Read list and inline body to unreduced call (RFC 8166 §3.4.5, §3.5.3)
//	replyplan.go Write list and Reply chunk (RFC 8166 §3.4.6, §3.5.3, §4.3), Send With Invalidate (RFC 8797 §4.1)
//	binding.go   DDP-eligible items of NFSv3 (RFC 8267 §4, §6.1)
//	drc.go       duplicate request cache
//	fatal.go     calls whose chunks end their connection every time (RFC 8166 §4.5.3)
//
// # Promises
//
// Input from a client cannot make the server panic, wait without end, or allocate the length that
// the input claims:
//
//   - Memory: MaxMessage limits one message, and MessageMemory limits all of them. Credits limits
//     the Receives and the calls in progress, and MaxConns the connections. The duplicate request
//     cache has limits for number, size, age and the share of one client.
//   - Time: a connection without a call ends after IdleTimeout. It ends after TransferTimeout when
//     the client does not answer RDMA Reads or does not accept a reply. It ends after CallTimeout
//     when the Handler does not return.
//
// The server checks every chunk before the first RDMA operation, and never reads or writes a
// zero-length segment. No Send exceeds the inline threshold of the peer. The client has no access
// to the memory of the server, because only the server issues RDMA Reads and Writes. The server
// replies with ERR_CHUNK when it cannot serve the chunks of a call. If the call ends its connection
// first, the reply follows when the client sends the call again. The server never replies to an
// RDMA_ERROR or to an RPC reply. Serve releases every verbs resource before it returns.
//
// One client address can use at most half of the connections and of the duplicate request cache. A
// full server ends the oldest connection without any call to admit a new client. A client address
// gets more message memory only while it has no more than is left for others (fair.Pool). A
// client that does not answer RDMA Reads, or does not accept replies, keeps its memory until
// TransferTimeout, and leaves as much to others as it has.
//
// # Locks and goroutines
//
// Each connection has one goroutine, which owns the resources and checks the timeouts, and Credits
// workers with one call each. The completion handler of a Receive executes a small call if the
// Handler can do so without waiting ([QuickHandler]), and gives the others to the workers. The
// completion handler of the Send ends such a call, and otherwise wakes the worker. Each call has
// one exec, which owns its buffers. Completion handlers do not wait.
//
//   - conn.pool holds the execs without a call.
//   - conn.messages holds the message buffers, and conn.replied the XIDs of the last replies.
//   - memBudget.mu guards the list of connections. conn.messages may be locked while it is held.
//   - connCount.mu, drc.mu and fatalCalls.mu guard counts and caches. No other lock is taken while
//     one of them is held. fatalCalls.mu may be taken while conn.replied is locked.
//
// No lock is held during a call, during a post, or during a wait for memory.
package svcrdma
