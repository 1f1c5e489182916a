package svcrdma

import (
	"errors"
	"slices"

	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// errChunks reports chunk lists that the server cannot serve. The reply is ERR_CHUNK (RFC 8166
// §4.5.2, §4.5.3).
var errChunks = errors.New("svcrdma: unusable chunk lists")

// A readChunk is the group of segments with the same position: reads[first:first+count] of the
// sorted Read list.
type readChunk struct {
	pos    uint32
	length uint64
	first  int
	count  int
}

// A readOp is one RDMA Read of seg.Length bytes, never zero, to offset dst of the rebuilt message.
type readOp struct {
	seg rpcrdma.Segment
	dst int
}

// A copyOp copies n bytes of the inline body to offset dst of the rebuilt message.
type copyOp struct{ src, dst, n int }

// A callPlan lists the steps to rebuild the unreduced call from an inline body and a Read list.
// build reuses its slices.
type callPlan struct {
	size   int // bytes of the rebuilt message
	chunks []readChunk
	reads  []readOp
	copies []copyOp
	pads   []int // offsets of pad bytes to clear

	segs []rpcrdma.ReadSegment // Read list, sorted by position with a stable order
}

// build makes the plan or returns errChunks. It inserts each chunk at its Position in the unreduced
// stream. Segments may end anywhere, and the chunk may contain the pad or not (RFC 8166 §3.4.4,
// §3.4.5). With RDMA_NOMSG, the position-zero chunk takes the place of the body (RFC 8166 §3.5.3).
func (p *callPlan) build(h *rpcrdma.Header, body []byte, limit int) error {
	p.size, p.chunks, p.reads, p.copies, p.pads = 0, p.chunks[:0], p.reads[:0], p.copies[:0], p.pads[:0]
	p.group(h.Reads)
	rest := p.chunks
	src := source{plan: p, inline: true, left: uint64(len(body))}
	hasPZRC := len(rest) > 0 && rest[0].pos == 0
	if hasPZRC != (h.Proc == rpcrdma.ProcNoMsg) {
		return errChunks // no body, or two bodies
	}
	if hasPZRC {
		src = source{plan: p, left: rest[0].length, segs: p.segs[:rest[0].count]}
		rest = rest[1:]
	}
	total := src.left
	for _, c := range rest {
		total += c.length + 3
	}
	if total > uint64(limit) { // also prevents an int overflow below
		return errChunks
	}
	out := 0
	for _, c := range rest {
		gap := int64(c.pos) - int64(out)
		if gap < 0 || uint64(gap) > src.left {
			return errChunks // overlapping chunks, or a position after the body
		}
		src.take(int(gap), out)
		out = p.place(c, int(c.pos))
	}
	n := int(src.left)
	src.take(n, out)
	p.size = out + n
	return nil
}

// group sorts the Read list by position and groups it into chunks.
func (p *callPlan) group(reads []rpcrdma.ReadSegment) {
	p.segs = append(p.segs[:0], reads...)
	slices.SortStableFunc(p.segs, func(a, b rpcrdma.ReadSegment) int {
		switch {
		case a.Position < b.Position:
			return -1
		case a.Position > b.Position:
			return 1
		}
		return 0
	})
	for i := range p.segs {
		s := &p.segs[i]
		if i == 0 || s.Position != p.segs[i-1].Position {
			p.chunks = append(p.chunks, readChunk{pos: s.Position, first: i})
		}
		c := &p.chunks[len(p.chunks)-1]
		c.count++
		c.length += uint64(s.Length)
	}
}

// place plans the Reads of chunk c to offset out. It returns the offset after the chunk and its
// pad.
func (p *callPlan) place(c readChunk, out int) int {
	for _, s := range p.segs[c.first : c.first+c.count] {
		if s.Length == 0 {
			continue
		}
		p.reads = append(p.reads, readOp{seg: s.Segment, dst: out})
		out += int(s.Length)
	}
	for out%4 != 0 {
		p.pads = append(p.pads, out)
		out++
	}
	return out
}

// rebuild does the copies and the pads of the plan.
func (p *callPlan) rebuild(msg, body []byte) {
	for _, c := range p.copies {
		copy(msg[c.dst:c.dst+c.n], body[c.src:])
	}
	for _, off := range p.pads {
		msg[off] = 0
	}
}

// plain reports whether the inline body is the complete message.
func (p *callPlan) plain() bool { return len(p.chunks) == 0 }

// A source is the stream into which the plan inserts chunks: the inline body or the position-zero
// chunk.
type source struct {
	plan   *callPlan
	inline bool
	left   uint64
	off    int                   // bytes taken from the inline body
	segs   []rpcrdma.ReadSegment // rest of the position-zero chunk
}

// take plans the next n bytes to offset dst. n is at most left.
func (s *source) take(n, dst int) {
	s.left -= uint64(n)
	if s.inline {
		if n > 0 {
			s.plan.copies = append(s.plan.copies, copyOp{src: s.off, dst: dst, n: n})
		}
		s.off += n
		return
	}
	for n > 0 {
		seg := &s.segs[0]
		part := min(n, int(seg.Length))
		if part > 0 {
			op := readOp{seg: seg.Segment, dst: dst}
			op.seg.Length = uint32(part)
			s.plan.reads = append(s.plan.reads, op)
			seg.Length -= uint32(part)
			seg.Offset += uint64(part)
			dst += part
			n -= part
		}
		if seg.Length == 0 {
			s.segs = s.segs[1:]
		}
	}
}

// appendRefusal appends the RPC reply to an invalid call (RFC 8166 §4.5.2).
func appendRefusal(b []byte, xid uint32, err error) []byte {
	var denied *sunrpc.DeniedError
	if errors.As(err, &denied) {
		return sunrpc.AppendMismatchReply(b, xid)
	}
	return sunrpc.AppendAcceptedReply(b, xid, sunrpc.GarbageArgs)
}
