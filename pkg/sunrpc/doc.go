// Package sunrpc implements the messages of ONC RPC version 2 (RFC 5531): call and reply headers,
// the AUTH_NONE and AUTH_SYS credentials, and basic XDR types (RFC 4506). It does no I/O, starts no
// goroutine and has no lock. Every function is safe for concurrent use.
//
// # Files
//
//	message.go  Message: one RPC with the memory for its arguments and results (RFC 8267 §3, §4)
//	keeper.go   CallKeeper: calls that the next process of the client can repeat
//	rfc5531.go  numbers of the protocol
//	call.go     AppendCall, ParseCall (RFC 5531 §9)
//	reply.go    ParseReply and the replies of a server (RFC 5531 §9)
//	auth.go     AUTH_NONE and AUTH_SYS (RFC 5531 §8.2, appendix A)
//	errors.go   ErrMalformed, AcceptError, DeniedError
//	xdr.go      append functions and Decoder (RFC 4506)
//
// # Promises
//
// Input from a peer cannot make a function panic, read past the message, or allocate the length
// that the message claims. Encoding appends to a slice of the caller, and parsing returns slices of
// the message. Only errors allocate when the slice has enough capacity.
//
// Record marking (RFC 5531 §11) is part of the stream, not of the message: see internal/rpctcp.
package sunrpc
