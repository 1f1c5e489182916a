// Package svcrdma is the server end of RPC-over-RDMA version 1 (RFC 8166) with the NFSv3 binding of
// RFC 8267 and the private data of RFC 8797, on the interfaces of pkg/verbs. It knows no file
// system: a [Handler] is given each call as the unreduced RPC message that a TCP server would see,
// and returns the unreduced reply.
//
//	Receive ─► decode header ─► plan ─► RDMA Reads ─► rebuilt call ─► Handler (or duplicate request cache)
//	  ▲            │              │                                       │
//	  │         discard,       ERR_CHUNK                               reply
//	  │         ERR_VERS                                                  │
//	  └── re-posted before the Send ◄── Send ◄── RDMA Writes ◄── plan ◄───┘
//
// # What is where
//
//	server.go    Serve, Config: accept loop, limits, orderly end
//	conn.go      one connection: private data (RFC 8797 §4), credits (RFC 8166 §3.3.1), Receives, teardown
//	watch.go     time limits: idle and stalled connections
//	msgbuf.go    the buffers that hold unreduced messages
//	membudget.go how many of them all connections may have together
//	exec.go      one call from its Receive to the completion of its Send; RDMA_ERROR (RFC 8166 §4.5)
//	callplan.go  Read list and inline body into the unreduced stream (RFC 8166 §3.4.5, §3.5.3)
//	replyplan.go Write list and Reply chunk (RFC 8166 §3.4.6, §3.5.3, §4.3), Send With Invalidate (RFC 8797 §4.1)
//	binding.go   DDP-eligible items of NFSv3 (RFC 8267 §4, §6.1)
//	drc.go       duplicate request cache
//	fatal.go     calls whose chunks end the connection again and again (RFC 8166 §4.5.3)
//
// # Promises
//
// Nothing a client sends makes the server panic, wait for ever, or allocate by a length that it
// claims:
//
//   - memory: one message is bounded by Config.MaxMessage, all of them together by MessageMemory; Receives and calls in progress by
//     Credits, connections by MaxConns, the duplicate request cache by number, size, age and share of one client;
//   - time: a connection without a call ends after IdleTimeout; RDMA Reads that are not answered and replies that are not taken end
//     theirs after TransferTimeout; a call that the Handler does not answer ends its connection after CallTimeout.
//
// Every chunk is checked before the first RDMA operation; a zero-length segment is never read from
// nor written to. No Send is larger than the peer's inline threshold. No memory of the server is
// ever open to the client: RDMA Reads and Writes are the server's own. What cannot be answered
// because of the client's chunks is answered with ERR_CHUNK, at the latest when the client comes
// back with it; an RDMA_ERROR and an RPC reply are never answered. When Serve returns, every verbs
// resource that it made is released.
//
// One client address has at most half of the connections and of the duplicate request cache.
// Fairness beyond that is not promised: clients that use all the memory for as long as the time
// limits let them delay the others.
//
// # Locks and goroutines
//
// Each connection has one goroutine that owns its resources and keeps its time limits, and Credits
// workers, one call each at a time. A worker owns its buffers; completion handlers only pass
// tokens. conn.mu guards the lists of buffers and of the XIDs answered last; memBudget.mu, under
// which conn.mu may be taken, the list of connections; connCount.mu, drc.mu and fatalCalls.mu,
// under none of which another is taken, the counts and caches. conn.mu may be held around
// fatalCalls.mu. None of them is held while a call runs, across a post, or while waiting for
// memory.
package svcrdma
