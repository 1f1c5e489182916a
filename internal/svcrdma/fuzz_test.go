package svcrdma

import (
	"bytes"
	"slices"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// FuzzCall puts any octets through header, call plan and reply plan and checks every offset that
// the device would be given.
func FuzzCall(f *testing.F) {
	body := rpcCall(7, progNFS, 3, procWrite, writeHead(100))
	seg := rpcrdma.Segment{Handle: 9, Length: 100, Offset: 1 << 40}
	for _, h := range []rpcrdma.Header{
		{XID: 7, Vers: 1}, {XID: 7, Vers: 1, Reads: []rpcrdma.ReadSegment{{Position: uint32(len(body)), Segment: seg}}},
		{XID: 7, Vers: 1, Proc: rpcrdma.ProcNoMsg, Reads: []rpcrdma.ReadSegment{{Segment: seg}, {Segment: seg},
			{Position: 8, Segment: seg}}},
		{XID: 7, Vers: 1, Writes: []rpcrdma.Chunk{{seg, seg}, {}}, HasReply: true, Reply: rpcrdma.Chunk{seg}},
	} {
		f.Add(append(h.Append(nil), body...), uint16(200))
	}
	const limit = 1 << 12
	// What a worker's last call left behind: its header and plans are used again.
	dirty := (&rpcrdma.Header{XID: 1, Vers: 1, Proc: rpcrdma.ProcNoMsg, Reads: []rpcrdma.ReadSegment{{Segment: seg},
		{Position: 4, Segment: seg}, {Position: 108, Segment: seg}},
		Writes: []rpcrdma.Chunk{{seg, seg, seg}, {seg}}, HasReply: true, Reply: rpcrdma.Chunk{seg, seg}}).Append(nil)
	f.Fuzz(func(t *testing.T, msg []byte, n uint16) {
		var h rpcrdma.Header
		var p callPlan
		var r replyPlan
		if _, err := h.Decode(dirty); err != nil {
			t.Fatal(err)
		}
		if p.build(&h, nil, limit) != nil || r.build(&h, 1, make([]byte, 250), item{100, 100}, true,
			replyPolicy{threshold: 300}) != nil {
			t.Fatal("the first call cannot be served")
		}
		size, err := h.Decode(msg)
		if err != nil || h.Proc == rpcrdma.ProcError {
			return
		}
		if p.build(&h, msg[size:], limit) != nil {
			return
		}
		if p.size > limit {
			t.Fatalf("message of %d octets", p.size)
		}
		written := make([]bool, p.size)
		mark := func(off, n int) {
			for i := off; i < off+n; i++ {
				if written[i] {
					t.Fatalf("octet %d placed twice", i)
				}
				written[i] = true
			}
		}
		for _, op := range p.reads {
			if op.seg.Length == 0 {
				t.Fatal("zero-length Read")
			}
			mark(op.dst, int(op.seg.Length))
		}
		for _, op := range p.copies {
			mark(op.dst, op.n)
		}
		for _, off := range p.pads {
			mark(off, 1)
		}
		for i, ok := range written {
			if !ok {
				t.Fatalf("octet %d of %d never placed", i, p.size)
			}
		}
		call := make([]byte, p.size)
		p.rebuild(call, msg[size:])
		for _, op := range p.reads {
			for i := range int(op.seg.Length) {
				call[op.dst+i] = octetAt(op.seg.Handle, op.seg.Offset+uint64(i))
			}
		}
		if want := rebuildSlowly(&h, msg[size:]); !bytes.Equal(call, want) {
			t.Fatalf("rebuilt\n%x, want\n%x", call, want)
		}
		hdr, args, err := sunrpc.ParseCall(call)
		if err != nil {
			return
		}
		checkReduction(&hdr, call, len(call)-len(args), p.chunks)

		reply := sunrpc.AppendAcceptedReply(nil, hdr.XID, 0)
		if hdr.Proc == procReadlink { // no attributes
			reply = sunrpc.AppendOpaque(sunrpc.AppendUint64(reply, 0), pattern(int(n)))
		} else {
			reply = append(reply, readResults(int(n))...)
		}
		it, ok := eligibleResult(&hdr, reply)
		if r.build(&h, 1, reply, it, ok, replyPolicy{threshold: 1024}) != nil {
			return
		}
		total := r.header.Size()
		if r.inline {
			total += r.payload[0].n + r.payload[1].n
		}
		if total > 1024 {
			t.Fatalf("Send of %d octets", total)
		}
		if !sameShape(h.Writes, r.header.Writes) || h.HasReply != r.header.HasReply ||
			!sameShape([]rpcrdma.Chunk{h.Reply}, []rpcrdma.Chunk{r.header.Reply}) || len(r.header.Reads) != 0 {
			t.Fatalf("lists returned %+v, were %+v", r.header, h)
		}
		// What the Writes carry, in order, is what the returned lengths say, at the segments' own
		// addresses.
		left := r.writes
		carried := func(c rpcrdma.Chunk) (b []byte) {
			for _, seg := range c {
				for used := uint32(0); used < seg.Length; left = left[1:] {
					if len(left) == 0 {
						t.Fatal("fewer octets are written than the header says")
					}
					w := left[0]
					if w.seg.Length == 0 || w.seg.Handle != seg.Handle || w.seg.Offset != seg.Offset+uint64(used) ||
						w.seg.Length > seg.Length-used {
						t.Fatalf("Write %+v into segment %+v with %d octets written", w, seg, used)
					}
					used += w.seg.Length
					b = append(b, reply[w.src:w.src+int(w.seg.Length)]...)
				}
			}
			return b
		}
		var data []byte
		for _, c := range r.header.Writes {
			data = append(data, carried(c)...)
		}
		rest := carried(r.header.Reply)
		if len(left) != 0 {
			t.Fatalf("%d Writes more than the header says", len(left))
		}
		if r.inline {
			rest = append(rest, reply[r.payload[0].off:][:r.payload[0].n]...)
			rest = append(rest, reply[r.payload[1].off:][:r.payload[1].n]...)
		}
		// Put together again it is the reply.
		whole := rest
		if len(data) > 0 {
			whole = append(append([]byte(nil), rest[:it.off]...), data...)
			whole = append(append(whole, make([]byte, sunrpc.Pad4(len(data))-len(data))...), rest[it.off:]...)
		}
		if !bytes.Equal(whole, reply) {
			t.Fatalf("the client gets\n%x, the reply is\n%x", whole, reply)
		}
	})
}

// octetAt is what the client's memory holds.
func octetAt(handle uint32, addr uint64) byte { return byte(handle)*31 + byte(addr)*7 + byte(addr>>8) }

// rebuildSlowly is RFC 8166 §3.4.5 word for word: the chunks, each behind its Position of the
// stream that has come so far.
func rebuildSlowly(h *rpcrdma.Header, body []byte) (out []byte) {
	fetch := func(pos uint32) (b []byte) {
		for _, s := range h.Reads {
			for i := range s.Length {
				if s.Position == pos {
					b = append(b, octetAt(s.Handle, s.Offset+uint64(i)))
				}
			}
		}
		return b
	}
	if h.Proc == rpcrdma.ProcNoMsg {
		body = fetch(0)
	}
	var positions []uint32
	for _, s := range h.Reads {
		if s.Position != 0 && !slices.Contains(positions, s.Position) {
			positions = append(positions, s.Position)
		}
	}
	slices.Sort(positions)
	for _, pos := range positions {
		n := int(pos) - len(out)
		out, body = append(out, body[:n]...), body[n:]
		out = append(out, fetch(pos)...)
		for len(out)%4 != 0 {
			out = append(out, 0)
		}
	}
	return append(out, body...)
}

// sameShape tells whether each segment came back at its place with its handle and address, and no
// longer than it was.
func sameShape(was, is []rpcrdma.Chunk) bool {
	return slices.EqualFunc(was, is, func(a, b rpcrdma.Chunk) bool {
		return slices.EqualFunc(a, b, func(a, b rpcrdma.Segment) bool {
			return a.Handle == b.Handle && a.Offset == b.Offset && b.Length <= a.Length
		})
	})
}
