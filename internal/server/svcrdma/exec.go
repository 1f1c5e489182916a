package svcrdma

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// An exec is the state of one call, from a received message up to the completion of the Send. Each
// credit has one exec. A worker uses it, or the completion handlers of an inline call.
type exec struct {
	c      *conn
	header rpcrdma.Header
	plan   callPlan
	rplan  replyPlan
	send   *msgBuf // buffer of the Send

	bufs     [2]*msgBuf // for the reply and for a rebuilt call
	transfer stopwatch  // runs during Reads, Writes and Sends
	calling  stopwatch  // runs during the Handler
	// detached is the context of non-idempotent calls, which continue after the end of their
	// connection. cancelDetached ends it when CallTimeout expires.
	detached       context.Context
	cancelDetached context.CancelFunc

	wrs  []verbs.WorkRequest
	sges []verbs.SGE

	readWRs   []verbs.WorkRequest
	readSGEs  []verbs.SGE
	readDone  chan verbs.Status // room for every outstanding Read
	chainDone chan verbs.Status // capacity 1: one signaled request per chain
	onChain   func(*verbs.WorkCompletion)
	onWrite   func(*verbs.WorkCompletion)
	posted    int64 // requests in the current chain
	inline    bool  // the completion handler of the chain ends the call; no worker waits for it
}

func (c *conn) newExec() (*exec, error) {
	send, err := c.makeBuf(c.sendThreshold)
	if err != nil {
		return nil, fmt.Errorf("send buffer: %w", err)
	}
	depth := cap(c.readSlot)
	x := &exec{c: c, send: send,
		wrs: make([]verbs.WorkRequest, writesPerChain), sges: make([]verbs.SGE, writesPerChain),
		readWRs: make([]verbs.WorkRequest, depth), readSGEs: make([]verbs.SGE, depth),
		readDone: make(chan verbs.Status, depth), chainDone: make(chan verbs.Status, 1)}
	x.detached, x.cancelDetached = context.WithCancel(c.srvCtx)
	x.onChain = func(wc *verbs.WorkCompletion) {
		c.sq.Release(x.posted)
		if x.inline {
			x.inlineSent(wc.Status)
		} else {
			x.chainDone <- wc.Status
		}
	}
	x.onWrite = func(wc *verbs.WorkCompletion) {} // the last request of the chain fails too
	onRead := func(wc *verbs.WorkCompletion) {
		<-c.readSlot
		x.readDone <- wc.Status
	}
	for i := range x.readWRs {
		x.readWRs[i] = verbs.WorkRequest{Opcode: verbs.OpRDMARead, Signaled: true, Done: onRead,
			SGList: x.readSGEs[i : i+1]}
	}
	return x, nil
}

// work is a worker: it processes received messages one after the other.
func (c *conn) work() {
	for r := range c.calls {
		x := c.pool.take()
		if c.ctx.Err() == nil { // otherwise no reply is possible
			if err := x.serve(r); err != nil {
				c.cancel(err) // RFC 8166 §4.5.4: without a reply the connection ends
			}
		}
		c.pool.put(x)
	}
}

// serve processes one received message. An error ends the connection.
func (x *exec) serve(r *recvBuf) error {
	msg := r.buf[:r.n]
	if len(msg) < rpcrdma.MinHeaderSize { // RFC 8166 §4.5
		return x.discard(r)
	}
	n, err := x.header.Decode(msg)
	switch {
	case x.header.Proc == rpcrdma.ProcDone, x.header.Proc == rpcrdma.ProcError:
		// RFC 8166 §4.2.4, §4.6.2. The version does not matter: an error must not cause an error.
		return x.discard(r)
	case errors.Is(err, rpcrdma.ErrBadVersion):
		return x.sendError(r, rpcrdma.ErrVers)
	case err != nil: // invalid lists, RDMA_MSGP, unknown rdma_proc: RFC 8166 §4.5.2, §4.6.1
		return x.sendError(r, rpcrdma.ErrChunk)
	}
	if !x.c.callBegins() {
		return nil // without a reply
	}
	defer x.c.callEnds()
	if x.c.fatal.isFatal(x.c.addr, x.header.XID) { // RFC 8166 §4.5.3
		// Before the reply, because the client may reuse the XID after the reply.
		x.c.fatal.forget(x.c.addr, x.header.XID)
		err := x.sendError(r, rpcrdma.ErrChunk)
		if err != nil {
			x.c.fatal.add(x.c.addr, x.header.XID, fatalStrikes)
		}
		return err
	}
	body := msg[n:]
	if x.plan.build(&x.header, body, x.c.cfg.MaxMessage) != nil || (len(x.plan.reads) > 0 && cap(x.c.readSlot) == 0) {
		return x.sendError(r, rpcrdma.ErrChunk)
	}
	bufs := x.bufs[:2]
	if x.plan.plain() {
		bufs = bufs[:1]
	}
	if err := x.c.getBufs(bufs); err != nil {
		return err
	}
	call := body
	if !x.plan.plain() {
		call = bufs[1].mem[:x.plan.size]
		x.plan.rebuild(call, body)
		if err := x.pull(bufs[1], call); err != nil {
			return err
		}
	}
	if err := x.dispatch(r, call, bufs[0]); err != nil {
		return err // the device may access the buffers until the QP is closed
	}
	x.c.putBufs(bufs)
	return nil
}

// msgTypeOffset is the offset of msg_type in an RPC message (RFC 5531 §9).
const msgTypeOffset = 4

func isReply(body []byte) bool {
	return len(body) >= msgTypeOffset+4 && binary.BigEndian.Uint32(body[msgTypeOffset:]) == sunrpc.MsgReply
}

func (x *exec) discard(r *recvBuf) error {
	x.c.cfg.Stats.Discarded.Add(1)
	x.c.repost(r)
	return nil
}

// pull does the RDMA Reads of the plan and waits for their completion.
func (x *exec) pull(buf *msgBuf, call []byte) error {
	c := x.c
	x.transfer.start(c.age())
	defer x.transfer.stop()
	var failed verbs.Status
	out := 0
	wait := func() {
		if st := <-x.readDone; st != verbs.StatusSuccess && failed == verbs.StatusSuccess {
			failed = st
		}
		out--
	}
	var postErr error
	for i := range x.plan.reads {
		op := &x.plan.reads[i]
		// A request is reusable after its Read has completed. Reads complete in order.
		for out == len(x.readWRs) {
			wait()
		}
		if failed != verbs.StatusSuccess {
			break
		}
		select {
		case c.readSlot <- struct{}{}:
		case <-c.ctx.Done():
			postErr = context.Cause(c.ctx)
		}
		if postErr != nil {
			break
		}
		wr := &x.readWRs[i%len(x.readWRs)]
		wr.SGList[0] = verbs.SGE{Buf: call[op.dst : op.dst+int(op.seg.Length)], LKey: buf.mr.LKey()}
		wr.RemoteAddr, wr.RKey = op.seg.Offset, verbs.RKey(op.seg.Handle)
		if _, postErr = c.qp.PostSend(wr); postErr != nil {
			<-c.readSlot
			break
		}
		out++
		c.cfg.Stats.ReadBytes.Add(uint64(op.seg.Length))
	}
	for out > 0 {
		wait()
	}
	switch {
	case postErr != nil:
		return fmt.Errorf("post RDMA Read: %w", postErr)
	case failed != verbs.StatusSuccess:
		if failed == verbs.StatusRemAccessErr { // the client refused this Read; see fatal.go
			c.fatal.add(c.addr, x.header.XID, fatalStrikes)
		}
		return fmt.Errorf("RDMA Read of a call chunk: %v", failed)
	}
	return nil
}

// dispatch executes the rebuilt call and sends the reply. buf is for the reply.
func (x *exec) dispatch(r *recvBuf, call []byte, buf *msgBuf) error {
	if isReply(call) { // this server makes no reverse-direction calls (RFC 8167 §4.1)
		return x.discard(r)
	}
	hdr, args, err := sunrpc.ParseCall(call)
	// RFC 8166 §4.2.1: rdma_xid equals the XID of the RPC message.
	if len(call) < sunrpc.SizeUint32 || hdr.XID != x.header.XID {
		return x.sendError(r, rpcrdma.ErrChunk)
	}
	x.c.cfg.Stats.Calls.Add(1)
	var reply []byte
	switch {
	case err != nil:
		reply = appendRefusal(buf.mem[:0], hdr.XID, err)
	case !checkReduction(&hdr, call, len(call)-len(args), x.plan.chunks): // RFC 8166 §6.1
		reply = appendRefusal(buf.mem[:0], hdr.XID, nil)
	default:
		reply, err = x.execute(&hdr, call, buf.mem[:0])
		switch {
		case errors.Is(err, ErrReplySize):
			return x.tooLarge(r, &hdr, err)
		case err != nil:
			return fmt.Errorf("RPC program %d procedure %d: %w", hdr.Prog, hdr.Proc, err)
		}
	}
	if len(reply) > len(buf.mem) {
		return x.tooLarge(r, &hdr, fmt.Errorf("%w: %d bytes, maximum is %d", ErrReplySize, len(reply), len(buf.mem)))
	}
	if len(reply) > 0 && &reply[0] != &buf.mem[0] {
		reply = buf.mem[:copy(buf.mem, reply)] // the device reads only registered memory
	}
	return x.reply(r, &hdr, buf, reply)
}

// tooLarge sends ERR_CHUNK for a call whose reply is too large. A retransmission would have the
// same result (RFC 8166 §4.5.3).
func (x *exec) tooLarge(r *recvBuf, hdr *sunrpc.CallHeader, err error) error {
	x.c.log.Warn("reply is too large, sending ERR_CHUNK", "peer", x.c.peer, "program", hdr.Prog, "procedure",
		hdr.Proc, "error",
		err)
	return x.sendError(r, rpcrdma.ErrChunk)
}

// execute executes the call or returns its cached reply.
func (x *exec) execute(hdr *sunrpc.CallHeader, call, room []byte) ([]byte, error) {
	c := x.c
	if !cacheable(hdr) {
		return x.handle(c.ctx, call, room)
	}
	cached, entry, err := c.drc.begin(c.ctx, c.drc.key(c.addr, hdr.XID, call))
	if err != nil {
		return nil, err
	}
	if entry == nil {
		c.cfg.Stats.CachedCalls.Add(1)
		return append(room, cached...), nil
	}
	var reply []byte
	defer func() { c.drc.finish(entry, reply) }()
	reply, err = x.handle(x.detached, call, room)
	if err != nil {
		reply = nil
	}
	return reply, err
}

// handle calls the Handler. The goroutine of the connection ends ctx when CallTimeout expires.
func (x *exec) handle(ctx context.Context, call, room []byte) ([]byte, error) {
	x.calling.start(x.c.age())
	defer x.calling.stop()
	return x.c.cfg.Handler.ServeRPC(ctx, x.c.peer, call, room)
}

// reply sends the unreduced reply, inline or with the chunks of the call.
func (x *exec) reply(r *recvBuf, hdr *sunrpc.CallHeader, buf *msgBuf, reply []byte) error {
	if x.planReply(hdr, reply) != nil {
		return x.sendError(r, rpcrdma.ErrChunk)
	}
	if hook := x.c.cfg.Hooks.Reply; hook != nil {
		switch hook(&x.rplan.header) {
		case Drop:
			return x.discard(r)
		case Disconnect:
			return errors.New("fault hook ends the connection")
		}
	}
	if err := x.push(buf, reply); err != nil {
		return err
	}
	return x.sendOut(r, x.encode(reply))
}

// planReply makes the plan of a reply, or returns errChunks.
func (x *exec) planReply(hdr *sunrpc.CallHeader, reply []byte) error {
	c := x.c
	it, hasItem := item{}, false
	if len(x.header.Writes) > 0 {
		it, hasItem = eligibleResult(hdr, reply)
	}
	pol := replyPolicy{threshold: c.sendThreshold, alwaysReplyChunk: c.cfg.AlwaysReplyChunk}
	return x.rplan.build(&x.header, uint32(c.cfg.Credits), reply, it, hasItem, pol)
}

// A sendMsg is the Send of a reply.
type sendMsg struct {
	data       []byte
	opcode     verbs.Opcode
	invalidate uint32 // handle for OpSendWithInv
}

// encode encodes the planned reply into the buffer of the Send.
func (x *exec) encode(reply []byte) sendMsg {
	c, p := x.c, &x.rplan
	out := p.header.Append(x.send.mem[:0])
	if p.inline {
		for _, s := range p.payload {
			out = append(out, reply[s.off:s.off+s.n]...)
		}
	} else {
		c.cfg.Stats.ReplyChunks.Add(1)
	}
	if c.remoteInv {
		if h, ok := invalidateHandle(&x.header); ok {
			c.cfg.Stats.RemoteInvalidates.Add(1)
			return sendMsg{data: out, opcode: verbs.OpSendWithInv, invalidate: h}
		}
	}
	return sendMsg{data: out, opcode: verbs.OpSend}
}

// push posts the RDMA Writes of the reply plan in chains and waits for each chain. The requests of
// the last chain stay in x.wrs[:x.posted], and sendOut posts them with the Send.
func (x *exec) push(buf *msgBuf, reply []byte) error {
	x.posted = 0
	for _, op := range x.rplan.writes {
		if x.posted == writesPerChain-1 { // keep room for the Send
			x.wrs[x.posted-1].Signaled = true
			x.wrs[x.posted-1].Done = x.onChain
			if err := x.post(); err != nil {
				return err
			}
		}
		x.addWrite(buf, reply, &op)
	}
	return nil
}

// addWrite adds an RDMA Write to the current chain.
func (x *exec) addWrite(buf *msgBuf, reply []byte, op *writeOp) {
	i := x.posted
	x.sges[i] = verbs.SGE{Buf: reply[op.src : op.src+int(op.seg.Length)], LKey: buf.mr.LKey()}
	x.wrs[i] = verbs.WorkRequest{Opcode: verbs.OpRDMAWrite, Done: x.onWrite, SGList: x.sges[i : i+1],
		RemoteAddr: op.seg.Offset, RKey: verbs.RKey(op.seg.Handle)}
	x.posted++
	x.c.cfg.Stats.WrittenBytes.Add(uint64(op.seg.Length))
}

// sendOut posts the Send after the Writes that push left, and waits for the completion. It posts
// the Receive before the Send (RFC 8166 §3.3.1). All buffers are reusable after the completion.
func (x *exec) sendOut(r *recvBuf, m sendMsg) error {
	x.addSend(m)
	x.c.recordReply(x.header.XID)
	x.c.repost(r)
	return x.post()
}

// addSend adds the Send to the current chain.
func (x *exec) addSend(m sendMsg) {
	i := x.posted
	x.sges[i] = verbs.SGE{Buf: m.data, LKey: x.send.mr.LKey()}
	x.wrs[i] = verbs.WorkRequest{Opcode: m.opcode, Signaled: true, Done: x.onChain, SGList: x.sges[i : i+1],
		InvalidateRKey: verbs.RKey(m.invalidate)}
	x.posted++
}

// post posts x.wrs[:x.posted] as one chain and waits for its last request, which is signaled.
func (x *exec) post() error {
	c := x.c
	x.transfer.start(c.age())
	defer x.transfer.stop()
	if err := c.sq.Acquire(c.ctx, x.posted); err != nil {
		return context.Cause(c.ctx)
	}
	if err := x.postChain(); err != nil {
		return err
	}
	st := <-x.chainDone
	x.posted = 0
	if st != verbs.StatusSuccess {
		return fmt.Errorf("send reply: %v", st)
	}
	return nil
}

// postChain posts x.wrs[:x.posted], for which the caller has acquired entries of the send queue.
func (x *exec) postChain() error {
	c, n := x.c, x.posted
	for i := range n - 1 {
		x.wrs[i].Next = &x.wrs[i+1]
	}
	x.wrs[n-1].Next = nil
	if _, err := c.qp.PostSend(&x.wrs[0]); err != nil {
		c.sq.Release(n)
		return fmt.Errorf("post reply: %w", err)
	}
	return nil
}

// sendError sends an RDMA_ERROR with the XID and the rdma_vers of the call and the usual credits
// (RFC 8166 §4.5).
func (x *exec) sendError(r *recvBuf, code rpcrdma.ErrCode) error {
	x.c.cfg.Stats.RDMAErrors.Add(1)
	h := rpcrdma.Header{XID: x.header.XID, Vers: x.header.Vers, Credits: uint32(x.c.cfg.Credits),
		Proc: rpcrdma.ProcError, Err: code, Low: rpcrdma.Version, High: rpcrdma.Version}
	x.posted = 0
	return x.sendOut(r, sendMsg{data: h.Append(x.send.mem[:0]), opcode: verbs.OpSend})
}
