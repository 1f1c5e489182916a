// Package rpcrdma implements the wire format of RPC-over-RDMA version 1 (RFC 8166) and of its
// connection private data (RFC 8797). It does no I/O, registers no memory and makes no policy.
//
//	+-----------------+----------------------------------------------+--------------------+
//	| fixed, 16 bytes | Read list, Write list, Reply chunk; or error | RPC message (MSG)  |
//	+-----------------+----------------------------------------------+--------------------+
//
// # Files
//
//	header.go   Header, Chunk, Segment: transport header (RFC 8166 §4.1), RDMA_ERROR (§4.5)
//	private.go  Private: connection private data (RFC 8797 §4, §5), inline thresholds (§4.2)
//
// The reaction to an invalid message depends on the role of the receiver, requester or responder:
// see pkg/xprt and internal/svcrdma. Every receiver drops a message of fewer than 28 bytes that is
// not an RDMA_ERROR (RFC 8166 §4.5).
//
// # Promises
//
// A [Header] keeps its slices, so decoding into the same Header again does not allocate. Decoding
// checks every count from the peer against the size of the message before it uses the count. A
// Header is not safe for concurrent use.
package rpcrdma
