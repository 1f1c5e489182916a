// Package svcrdma is the server end of RPC-over-RDMA version 1 (RFC 8166) with the NFSv3 binding of RFC 8267 and the
// private data of RFC 8797, on the interfaces of pkg/verbs. It knows no file system: a [Handler] is given each call as
// the unreduced RPC message that a TCP server would see, and returns the unreduced reply.
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
//	conn.go      one connection: private data (RFC 8797 §4), credits (RFC 8166 §3.3.1), buffers, teardown
//	exec.go      one call from its Receive to the completion of its Send; RDMA_ERROR (RFC 8166 §4.5)
//	callplan.go  Read list and inline body into the unreduced stream (RFC 8166 §3.4.5, §3.5.3)
//	replyplan.go Write list and Reply chunk (RFC 8166 §3.4.6, §3.5.3, §4.3), Send With Invalidate (RFC 8797 §4.1)
//	binding.go   DDP-eligible items of NFSv3 (RFC 8267 §4, §6.1)
//	drc.go       duplicate request cache
//
// # Promises
//
// Nothing a client sends makes the server panic, wait for ever, or allocate by a length that it claims: messages are bounded
// by Config.MaxMessage, concurrency by Config.Credits, connections by Config.MaxConns. Every chunk is checked before the first
// RDMA operation; a zero-length segment is never read from nor written to. No Send is larger than the peer's inline
// threshold. When Serve returns, every verbs resource that it made is released.
//
// # Locks and goroutines
//
// Each connection has one goroutine that owns its resources and up to Credits workers, one call each at a time. A worker
// owns its buffers; completion handlers only pass tokens. conn.mu guards the free list of message buffers and is
// never held across a post. drc.mu guards the cache and is never held while a call runs.
package svcrdma
