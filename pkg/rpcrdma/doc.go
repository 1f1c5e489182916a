// Package rpcrdma is the wire format of RPC-over-RDMA version 1 (RFC 8166) and of the private data that its
// peers exchange when they connect (RFC 8797). It holds bytes only: no I/O, no memory registration, no policy.
//
//	+----------------+----------------------------------------------+--------------------+
//	| fixed, 16 oct. | Read list, Write list, Reply chunk; or error  | RPC message (MSG)  |
//	+----------------+----------------------------------------------+--------------------+
//
// A [Header] is decoded into slices that it keeps, so that a Header which is used
// again allocates nothing. Every count that the peer sends is checked against the octets that are really there before
// anything is made from it. Nothing here is safe for concurrent use of one Header.
package rpcrdma
