// Package rpcrdma is the wire format of RPC-over-RDMA version 1 (RFC 8166) and of the private data
// that its peers exchange when they connect (RFC 8797). It holds bytes only: no I/O, no memory
// registration, no policy.
//
//	+----------------+----------------------------------------------+--------------------+
//	| fixed, 16 oct. | Read list, Write list, Reply chunk; or error  | RPC message (MSG)  |
//	+----------------+----------------------------------------------+--------------------+
//
// # What is where
//
//	header.go   Header, Chunk, Segment: the transport header both ways (RFC 8166 §4.1), RDMA_ERROR (§4.5)
//	private.go  Private: connection private data (RFC 8797 §4, §5), and the inline thresholds that follow from it (§4.2)
//
// What a receiver does about a message that Decode refuses depends on its role, requester or
// responder: see pkg/xprt and internal/svcrdma. A message of fewer than 28 octets that is no
// RDMA_ERROR is one that RFC 8166 §4.5 has every receiver drop.
//
// # Promises
//
// A [Header] is decoded into slices that it keeps, so that a Header which is used again allocates
// nothing. Every count that the peer sends is checked against the octets that are really there
// before anything is made from it. Nothing here is safe for concurrent use of one Header.
package rpcrdma
