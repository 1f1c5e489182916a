// Package sunrpc is the message layer of ONC RPC version 2 (RFC 5531): call and reply headers, the
// AUTH_NONE and AUTH_SYS credentials, and a small XDR kit (RFC 4506). It is bytes only: it opens no
// connection, starts no goroutine, and holds no lock; every function may be called from any
// goroutine.
//
// # What is where
//
//	message.go  Message, one RPC on its way through a transport (RFC 8267 §3, §4)
//	rfc5531.go  the protocol's numbers
//	call.go     AppendCall, ParseCall (RFC 5531 §9)
//	reply.go    ParseReply and the replies a server makes (RFC 5531 §9)
//	auth.go     AUTH_NONE and AUTH_SYS (RFC 5531 §8.2, appendix A)
//	errors.go   ErrMalformed, AcceptError, DeniedError
//	xdr.go      the append functions and the Decoder (RFC 4506)
//
// # Promises
//
// Nothing a peer sends makes a function of this package panic, read beyond the message, or allocate
// by a length that the message claims. Encoding appends to the caller's slice and parsing returns
// views of it, so neither allocates when the slice has room; only errors and [ParseAuthSys] do.
//
// Record marking (RFC 5531 §11) belongs to a stream, not to the message: see internal/rpctcp.
package sunrpc
