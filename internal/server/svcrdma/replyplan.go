package svcrdma

import (
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// A writeOp is one RDMA Write of seg.Length bytes, never zero, from reply[src:].
type writeOp struct {
	seg rpcrdma.Segment
	src int
}

// A span is a part of the unreduced reply: reply[off:off+n].
type span struct{ off, n int }

// A replyPlan lists the steps to send an unreduced reply. build reuses its slices.
type replyPlan struct {
	header  rpcrdma.Header
	writes  []writeOp
	payload [2]span // reply without the item: the parts before the item and after its pad
	inline  bool    // the Send carries payload; otherwise the Reply chunk does
	segs    []rpcrdma.Segment
}

// replyPolicy holds the parameters of the connection for replies.
type replyPolicy struct {
	threshold        int // maximum size of a Send with the header
	alwaysReplyChunk bool
}

// build makes the plan, or returns errChunks when the reply does not fit the chunks of the call.
// The header of the reply contains these chunks with the used lengths. Nothing is written before
// build succeeds (RFC 8166 §4.5.3).
func (p *replyPlan) build(call *rpcrdma.Header, credits uint32, reply []byte, it item, hasItem bool,
	pol replyPolicy) error {
	p.writes, p.segs = p.writes[:0], p.segs[:0]
	p.payload = [2]span{{0, len(reply)}, {}}
	p.header.Reset()
	p.header.XID, p.header.Vers, p.header.Credits = call.XID, call.Vers, credits
	p.copyLists(call)

	// The first chunk is for the only eligible result of an NFSv3 procedure. A chunk without
	// segments requests inline data (RFC 8166 §4.3.2.3).
	if hasItem && len(p.header.Writes) > 0 && len(p.header.Writes[0]) > 0 {
		if p.header.Writes[0].Length() < uint64(it.n) {
			return errChunks
		}
		end := min(it.off+sunrpc.Pad4(it.n), len(reply))
		p.payload = [2]span{{0, it.off}, {end, len(reply) - end}}
	} else {
		hasItem = false
	}
	left := p.payload[0].n + p.payload[1].n
	fits := p.header.Size()+left <= pol.threshold
	p.inline = fits && !(call.HasReply && pol.alwaysReplyChunk)
	p.header.Proc = rpcrdma.ProcMsg
	if !p.inline {
		if !call.HasReply || p.header.Reply.Length() < uint64(left) || p.header.Size() > pol.threshold {
			return errChunks
		}
		p.header.Proc = rpcrdma.ProcNoMsg
	}
	p.fillLists(it, hasItem)
	return nil
}

// copyLists copies the Write list and the Reply chunk of the call to the header of the reply. The
// Read list stays empty (RFC 8166 §4.3.1).
func (p *replyPlan) copyLists(call *rpcrdma.Header) {
	n := len(call.Reply)
	for _, c := range call.Writes {
		n += len(c)
	}
	if cap(p.segs) < n { // segs must not grow while chunks refer to it
		p.segs = make([]rpcrdma.Segment, 0, n)
	}
	for _, c := range call.Writes {
		p.header.Writes = append(p.header.Writes, p.copyChunk(c))
	}
	if call.HasReply {
		p.header.Reply, p.header.HasReply = p.copyChunk(call.Reply), true
	}
}

func (p *replyPlan) copyChunk(c rpcrdma.Chunk) rpcrdma.Chunk {
	start := len(p.segs)
	p.segs = append(p.segs, c...)
	return rpcrdma.Chunk(p.segs[start:len(p.segs):len(p.segs)])
}

// fillLists plans the Writes and sets the length of every segment to the number of bytes written
// (RFC 8166 §3.4.6, §4.3.3).
func (p *replyPlan) fillLists(it item, hasItem bool) {
	for i, c := range p.header.Writes {
		if i == 0 && hasItem {
			p.fill(c, span(it))
		} else {
			p.fill(c)
		}
	}
	if !p.header.HasReply {
		return
	}
	if p.inline {
		p.fill(p.header.Reply)
	} else {
		p.fill(p.header.Reply, p.payload[0], p.payload[1])
	}
}

// fill plans Writes of the parts to the segments of the chunk in order, without gaps. Unused
// segments get length 0.
func (p *replyPlan) fill(c rpcrdma.Chunk, parts ...span) {
	for i := range c {
		seg := &c[i]
		room, used := seg.Length, uint32(0)
		for used < room && len(parts) > 0 {
			n := uint32(min(uint64(room-used), uint64(parts[0].n)))
			if n > 0 {
				p.writes = append(p.writes, writeOp{
					seg: rpcrdma.Segment{Handle: seg.Handle, Length: n, Offset: seg.Offset + uint64(used)},
					src: parts[0].off,
				})
				used += n
				parts[0].off += int(n)
				parts[0].n -= int(n)
			}
			if parts[0].n == 0 {
				parts = parts[1:]
			}
		}
		seg.Length = used
	}
}

// invalidateHandle returns the handle for Send With Invalidate (RFC 8797 §4.1). ok is false if the
// call has no segment or segments with different handles. As on Linux, the reply is then a Send.
func invalidateHandle(call *rpcrdma.Header) (handle uint32, ok bool) {
	same := func(h uint32) bool {
		if ok && h != handle {
			return false
		}
		handle, ok = h, true
		return true
	}
	for i := range call.Reads {
		if !same(call.Reads[i].Handle) {
			return 0, false
		}
	}
	for _, c := range call.Writes {
		for i := range c {
			if !same(c[i].Handle) {
				return 0, false
			}
		}
	}
	for i := range call.Reply {
		if !same(call.Reply[i].Handle) {
			return 0, false
		}
	}
	return handle, ok
}
