// Package softiwarp is a userspace iWARP RNIC: a verbs provider that speaks MPA (RFC 5044, RFC
// 6581), DDP (RFC 5041) and RDMAP (RFC 5040) over ordinary TCP sockets. It needs no RDMA card, no
// kernel module and no privilege, and talks to iWARP cards and to Linux's siw.
//
// # What it promises
//
// Fast registration is real (docs/features.md S3-S6): an STag has a 24-bit index from a CSPRNG and
// an 8-bit key of the consumer's; it is good on one stream, in one protection domain, for the
// rights and the octets registered, and every tagged octet is checked. Once a LocalInv has
// completed, a Send With Invalidate has completed its Receive, or Dereg has returned, no octet of
// that memory moves any more (the fence, see mr). Dereg waits for nobody, and a LocalInv only for
// the requests posted before it: never for a peer to take its Read Response. What a peer had begun
// to write or to read by then cannot be finished, and ends the connection. An MR is good on the QP
// that registered it alone; when that QP is lost it can only be deregistered.
//
// Every request posted completes exactly once. PostSend never waits for the socket. RDMA Read
// Requests of the peer are answered by the writer as they come; nothing that consumer code does
// delays them.
//
// What the peer sends is checked as RFC 5041 §7.1 and RFC 5040 §7.2 ask, each failure answered with
// its own Terminate (terminate.go). Nothing it sends makes this package panic, allocate by a
// claimed length, or touch memory outside a live registration or a posted Receive.
//
// # Where it departs from the RFCs, and why
//
// CRCs are off by default (RFC 5044 §4.4): stock siw ends the connection when TCP splits an FPDU's
// trailer. [Config.CRC] turns them on, and a peer that asks for them gets them. MPA markers are not
// sent: a Request that demands them is rejected, as siw does; a Reply that does ends the attempt.
// The RDMA Consortium's dialect, revision 0, is refused, and an initiator does not fall back to
// revision 1, which has no read depths to agree on (RFC 6581 §10 allows both). FPDUs are no larger
// than the MSS unless [Config.MaxFPDU] says so, but without CRCs several share a system call, so
// that TCP segments need not begin with one (RFC 5044 §5.1 prefers it). A FIN of the peer ends both
// directions; RFC 5041 §6.2.1 would let this side's go on, which siw does not understand. An RDMA
// Read of no octets completes without a Read Request. One Read Request more than the negotiated
// depth may be under way: a request has left the queue when its answer begins.
//
// Towards stock siw: read depths are powers of two; connects to one address are made one after the
// other, and a TCP connection that the peer has not answered ends without a word, even when the
// process is killed (dial.go); the request leaves in one write; both bit orders of a Terminate are
// understood. Such a peer can leave the first FPDU in its socket until another comes. Only the
// consumer knows that an answer is late; it posts an RDMA Write of no octets, which is legal at any
// time: messages are sent whole, one after the other, so that it never falls between the segments
// of a Read Response, where siw would end the connection.
//
// There is no encryption and no authentication in these protocols: use a trusted network or IPsec
// (RFC 5042 §5.4).
//
// # Goroutines and locks
//
// A connection has one reader and one writer goroutine, a CQ one dispatcher, a listener one
// acceptor and a bounded number of handshakes. Reader and writer call no consumer code. Handlers
// run on the dispatcher, OnDisconnect on a goroutine of its own.
//
//	qp.mu                state, send queue, inbound Read Requests, outstanding Reads
//	qp.rqMu              receive queue
//	completionQueue.mu   its ring; may be taken inside qp.mu or qp.rqMu
//	mr.mu                one registration; held around the non-blocking system call or copy that moves its octets
//	stagTable.mu         STag index to MR
//	base.ConnID          address, queue pair and peer parameters of a connection; held while newQP runs
//
// mr.mu may be taken inside qp.mu (PostSend executes a FastReg or LocalInv itself when the writer
// is not in the send queue); never the other way round. No lock is held while waiting for a socket.
//
// # Files
//
//	wire.go, mpa.go, terminate.go   wire formats: RFC 5041 §4, RFC 5040 §4; RFC 5044 §7.1, RFC 6581 §9; RFC 5040 §4.8
//	stag.go                         registrations, the checks on tagged access: RFC 5041 §7.1, RFC 5040 §7.2, RFC 5042
//	qp.go, post.go, cq.go           queues, completion, flush
//	rx.go, intake.go                the reader: validation and placement; the octets
//	tx.go, batch.go                 the writer: send queue and Read Responses; the octets
//	connid.go, connect.go, dial.go  the connecting side
//	listen.go                       the accepting side
package softiwarp
