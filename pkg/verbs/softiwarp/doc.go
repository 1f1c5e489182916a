// Package softiwarp is a userspace iWARP RNIC: a verbs provider that speaks MPA (RFC 5044, RFC
// 6581), DDP (RFC 5041) and RDMAP (RFC 5040) over ordinary TCP sockets. The package needs no RDMA
// card, no kernel module and no privilege, and interoperates with iWARP cards and with Linux's siw.
//
// # What it promises
//
// Fast registration is real (docs/features.md S3-S6). An STag has a 24-bit index from a CSPRNG and
// an 8-bit key of the consumer. An STag is valid on one stream, in one protection domain, for the
// registered rights and bytes. Every tagged byte is checked. The device no longer accesses the
// memory when a LocalInv has completed, when the Receive of a Send With Invalidate has completed,
// or when Dereg has returned (see the fence at mr). Dereg waits for nothing. A LocalInv waits only
// for the requests posted before it, never for a peer to take its Read Response. If the peer was
// reading or writing the memory at that moment, the transfer cannot finish and the connection ends.
// An MR is valid only on the QP that registered it; when that QP is lost the MR can only be
// deregistered.
//
// Every posted request completes exactly once. PostSend never waits for the socket. The writer
// answers the peer's RDMA Read Requests as they arrive. Consumer code can delay them only if it
// breaks the promise of verbs.QPInitAttr.InlineHandlers.
//
// Withdraw takes back a chain that no goroutine has begun to send. Its requests keep their places
// in the queue and complete in order, without effect.
//
// Input from the peer is checked as RFC 5041 §7.1 and RFC 5040 §7.2 require. Each failure is
// answered with the Terminate that the RFCs name for it (terminate.go). No input makes this package
// panic or allocate by a claimed length. No input can access memory outside a valid registration or
// a posted Receive.
//
// # Departures from the RFCs
//
//   - CRCs are off by default (RFC 5044 §4.4): a stock siw ends the connection when TCP splits an
//     FPDU's trailer. [Config.CRC] turns them on. CRCs are also used when the peer asks for them.
//   - MPA markers are not sent. A Request that demands markers is rejected, as siw does. A Reply
//     that demands them ends the attempt.
//   - The RDMA Consortium's dialect, revision 0, is refused. An initiator does not fall back to
//     revision 1, which cannot negotiate read depths (RFC 6581 §10 allows both).
//   - FPDUs are no larger than the MSS unless [Config.MaxFPDU] says so. Without CRCs several
//     FPDUs share a system call, so a TCP segment may start in the middle of one (RFC 5044 §5.1
//     prefers otherwise).
//   - A FIN of the peer ends both directions. RFC 5041 §6.2.1 would let this side continue to
//     send, which siw does not support.
//   - An RDMA Read of zero bytes completes without a Read Request.
//   - The peer may have one Read Request more than the negotiated depth outstanding, because a
//     request leaves the queue when its response starts.
//
// For stock siw, read depths are powers of two. Connects to one address run one after the other. A
// TCP connection that the peer has not answered ends without a packet, even when the process is
// killed (dial.go). The MPA Request is written with one system call. Both bit orders of a Terminate
// are understood. A stock siw peer can leave the first FPDU unread in its socket until another one
// arrives. Only the consumer knows that a reply is late; it then posts an RDMA Write of zero bytes,
// which is legal at any time. Messages are sent whole, so this Write never falls between the
// segments of a Read Response, where siw would end the connection.
//
// These protocols have no encryption and no authentication. Use a trusted network or IPsec (RFC
// 5042 §5.4).
//
// # Goroutines and locks
//
// A connection has one reader and one writer goroutine, a CQ has one dispatcher, and a listener has
// one acceptor and a bounded number of handshakes. The handlers of a CQ run one after the other: on
// the reader that has received the data if QPInitAttr.InlineHandlers is set, and else on the
// dispatcher. The writer calls no consumer code. OnDisconnect runs on a separate goroutine.
//
// A small request is sent by the goroutine that posts it, without waiting for the socket. The
// writer sends large requests, Read Responses, and what a poster could not send (inline.go).
//
//	qp.mu                state, send queue, inbound Read Requests, outstanding Reads
//	qp.rq                receive queue
//	completionQueue.mu   its ring; may be taken inside qp.mu or qp.rq
//	mr.mu                one registration; held around the non-blocking system call or copy of its data
//	stagTable.mu         STag index to MR
//	base.ConnID          addresses, queue pair and peer parameters; held while newQP runs
//
// mr.mu may be taken inside qp.mu, because PostSend executes a FastReg or LocalInv when no
// goroutine executes the send queue. qp.mu must not be taken inside mr.mu. No lock is held while
// waiting for a socket.
//
// # Files
//
//	wire.go                  DDP and RDMAP headers: RFC 5041 §4, RFC 5040 §4
//	mpa.go                   MPA frames: RFC 5044 §7.1, RFC 6581 §9
//	terminate.go             Terminate messages: RFC 5040 §4.8
//	stag.go                  registrations and checks of tagged access: RFC 5041 §7.1, RFC 5040 §7.2, RFC 5042
//	qp.go, post.go, cq.go    queues, completion, flush
//	rx.go, intake.go         the reader: validation and placement; reading the stream
//	tx.go, batch.go          the writer: send queue and Read Responses; writing the stream
//	inline.go                small requests that the goroutine of the poster sends
//	connid.go, connect.go, dial.go   the connecting side
//	listen.go                the accepting side
package softiwarp
