package svcrdma

import (
	"fmt"
	"net/netip"
	"sync"

	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// inlineReply is the largest Write list and Reply chunk, in bytes, of a call that the completion
// handler of its Receive executes. It bounds how long the other messages of the connection wait.
const inlineReply = 32 << 10

// A QuickHandler is a Handler that can execute some calls without waiting. The server executes
// small calls with TryServe in the completion handler of their Receive, which saves the switches to
// a worker and back.
type QuickHandler interface {
	Handler
	// TryServe executes a call like ServeRPC if the call does not have to wait, for a disk or for
	// another call. For other calls ok is false and TryServe has no effect. The server may pass the
	// same call to TryServe and then to ServeRPC.
	TryServe(peer netip.AddrPort, call, reply []byte) (out []byte, ok bool)
}

// An execPool holds the execs without a call.
type execPool struct {
	sync.Mutex
	returned sync.Cond
	free     []*exec // most recently used last, because its memory is in the processor's cache
}

// take waits for an exec. The holders of execs release them at the latest when the queue pair is
// closed.
func (p *execPool) take() *exec {
	p.Lock()
	defer p.Unlock()
	for len(p.free) == 0 {
		p.returned.Wait()
	}
	return p.pop()
}

// tryTake returns nil if all execs have a call.
func (p *execPool) tryTake() *exec {
	p.Lock()
	defer p.Unlock()
	if len(p.free) == 0 {
		return nil
	}
	return p.pop()
}

func (p *execPool) pop() *exec {
	n := len(p.free) - 1
	x := p.free[n]
	p.free = p.free[:n]
	return x
}

func (p *execPool) put(x *exec) {
	p.Lock()
	p.free = append(p.free, x)
	p.Unlock()
	p.returned.Signal()
}

// received handles the completion of a Receive: it executes a small call and gives the others to
// the workers.
func (c *conn) received(r *recvBuf) {
	if c.quick != nil {
		if x := c.pool.tryTake(); x != nil {
			if c.ctx.Err() == nil && x.tryServe(r) {
				return
			}
			c.pool.put(x)
		}
	}
	c.calls <- r
}

// tryServe executes a call and posts its reply without waiting. The handler of the last request
// then ends the call (inlineSent). If that is not possible, tryServe returns false and a worker
// executes the call.
func (x *exec) tryServe(r *recvBuf) bool {
	c, msg := x.c, r.buf[:r.n]
	if len(msg) < rpcrdma.MinHeaderSize {
		return false
	}
	n, err := x.header.Decode(msg)
	if err != nil || x.header.Proc != rpcrdma.ProcMsg || len(x.header.Reads) > 0 || !smallReply(&x.header) ||
		c.fatal.any.Load() || c.cfg.Hooks.Reply != nil {
		return false
	}
	call := msg[n:]
	hdr, _, err := sunrpc.ParseCall(call)
	if err != nil || hdr.XID != x.header.XID || cacheable(&hdr) || !c.takeUnused(x.bufs[:1]) {
		return false
	}
	if !c.callBegins() {
		c.putBufs(x.bufs[:1])
		return false
	}
	reply, ok := x.tryHandle(call)
	if !ok || !x.startReply(r, &hdr, reply) {
		c.callEnds()
		c.putBufs(x.bufs[:1])
		return false
	}
	return true
}

// smallReply reports whether the chunks for the reply of a call are small.
func smallReply(h *rpcrdma.Header) bool {
	n := h.Reply.Length()
	for _, w := range h.Writes {
		n += w.Length()
	}
	return n <= inlineReply
}

// tryHandle calls the QuickHandler. The reply is in x.bufs[0].
func (x *exec) tryHandle(call []byte) (reply []byte, ok bool) {
	mem := x.bufs[0].mem
	x.calling.start(x.c.age())
	reply, ok = x.c.quick.TryServe(x.c.peer, call, mem[:0])
	x.calling.stop()
	return reply, ok && len(reply) > 0 && len(reply) <= len(mem) && &reply[0] == &mem[0]
}

// startReply posts the reply as one chain. It returns false, without effect, if that would have to
// wait or if the reply is an error.
func (x *exec) startReply(r *recvBuf, hdr *sunrpc.CallHeader, reply []byte) bool {
	c := x.c
	if x.planReply(hdr, reply) != nil || len(x.rplan.writes) >= writesPerChain ||
		!c.sq.TryAcquire(int64(len(x.rplan.writes)+1)) {
		return false
	}
	c.cfg.Stats.Calls.Add(1)
	x.posted = 0
	for i := range x.rplan.writes {
		x.addWrite(x.bufs[0], reply, &x.rplan.writes[i])
	}
	x.addSend(x.encode(reply))
	c.recordReply(x.header.XID)
	c.repost(r)
	x.transfer.start(c.age())
	x.inline = true
	if err := x.postChain(); err != nil { // the device may have some of the requests until the QP is closed
		x.endInline(err)
	}
	return true
}

// inlineSent ends a call whose reply startReply has posted.
func (x *exec) inlineSent(st verbs.Status) {
	var err error
	if st == verbs.StatusSuccess {
		x.c.putBufs(x.bufs[:1])
	} else {
		err = fmt.Errorf("send reply: %v", st)
	}
	x.endInline(err)
}

// endInline releases the exec of an inline call. An error ends the connection.
func (x *exec) endInline(err error) {
	c := x.c
	if err != nil {
		c.cancel(err)
	}
	x.inline = false
	x.transfer.stop()
	c.callEnds()
	c.pool.put(x)
}
