package svcrdma

import (
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// A writeOp is one RDMA Write: seg.Length octets, never zero, from reply[src:].
type writeOp struct {
	seg rpcrdma.Segment
	src int
}

// A span is a part of the unreduced reply: reply[off:off+n].
type span struct{ off, n int }

// A replyPlan says how an unreduced reply goes back. Its slices are reused.
type replyPlan struct {
	header  rpcrdma.Header
	writes  []writeOp
	payload [2]span // what is left after reduction: in front of the item, and behind its pad
	inline  bool    // payload goes in the Send; else it went to the Reply chunk
	segs    []rpcrdma.Segment
}

// replyPolicy is what the connection and the configuration say about replies.
type replyPolicy struct {
	threshold        int // largest Send, header included
	alwaysReplyChunk bool
}

// build makes the plan from the call's header (whose chunks it copies back with the lengths used),
// or returns errChunks when the reply does not go into what the client offered. Nothing was written
// then (RFC 8166 §4.5.3).
func (p *replyPlan) build(call *rpcrdma.Header, credits uint32, reply []byte, it item, hasItem bool,
	pol replyPolicy) error {
	p.writes, p.segs = p.writes[:0], p.segs[:0]
	p.payload = [2]span{{0, len(reply)}, {}}
	p.header.Reset()
	p.header.XID, p.header.Vers, p.header.Credits = call.XID, call.Vers, credits
	p.copyLists(call)

	// The first chunk takes the only eligible result of an NFSv3 procedure; one without segments
	// asks for it inline (RFC 8166 §4.3.2.3).
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

// copyLists gives the reply's header the Write list and the Reply chunk of the call. The Read list
// stays empty (RFC 8166 §4.3.1).
func (p *replyPlan) copyLists(call *rpcrdma.Header) {
	n := len(call.Reply)
	for _, c := range call.Writes {
		n += len(c)
	}
	if cap(p.segs) < n { // so that chunks made below keep pointing into it
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

// fillLists plans the Writes and sets every segment's length to what it carries (RFC 8166 §3.4.6,
// §4.3.3).
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

// fill writes the parts into the chunk, segment after segment without holes; segments not reached
// get length 0.
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

// invalidateHandle is the one handle that all segments of the call carry, if they do and there is
// any: the STag that Send With Invalidate may name (RFC 8797 §4.1; like Linux, a call with several
// handles gets a plain Send).
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
