package svcrdma

import (
	"bytes"
	"slices"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

const fuzzMaxMessage = 1 << 12

// FuzzCall decodes any bytes as a message of a client and checks every offset in the call plan and
// in the reply plan.
func FuzzCall(f *testing.F) {
	body := rpcCall(7, progNFS, 3, procWrite, writeHead(100))
	seg := rpcrdma.Segment{Handle: 9, Length: 100, Offset: 1 << 40}
	at := func(pos int) rpcrdma.ReadSegment { return rpcrdma.ReadSegment{Position: uint32(pos), Segment: seg} }
	for _, h := range []rpcrdma.Header{
		{XID: 7, Vers: 1},
		{XID: 7, Vers: 1, Reads: []rpcrdma.ReadSegment{at(len(body))}},
		{XID: 7, Vers: 1, Proc: rpcrdma.ProcNoMsg, Reads: []rpcrdma.ReadSegment{at(0), at(0), at(8)}},
		{XID: 7, Vers: 1, Writes: []rpcrdma.Chunk{{seg, seg}, {}}, HasReply: true, Reply: rpcrdma.Chunk{seg}},
	} {
		f.Add(append(h.Append(nil), body...), uint16(200))
	}
	// A worker reuses its header and its plans, so they hold the items of an earlier call.
	earlier := (&rpcrdma.Header{XID: 1, Vers: 1, Proc: rpcrdma.ProcNoMsg,
		Reads:  []rpcrdma.ReadSegment{at(0), at(4), at(108)},
		Writes: []rpcrdma.Chunk{{seg, seg, seg}, {seg}}, HasReply: true, Reply: rpcrdma.Chunk{seg, seg}}).Append(nil)
	f.Fuzz(func(t *testing.T, msg []byte, n uint16) {
		var h rpcrdma.Header
		var p callPlan
		var r replyPlan
		if _, err := h.Decode(earlier); err != nil {
			t.Fatal(err)
		}
		if p.build(&h, nil, fuzzMaxMessage) != nil ||
			r.build(&h, 1, make([]byte, 250), item{100, 100}, true, replyPolicy{threshold: 300}) != nil {
			t.Fatal("cannot build the plans of the earlier call")
		}
		size, err := h.Decode(msg)
		if err != nil || h.Proc == rpcrdma.ProcError || p.build(&h, msg[size:], fuzzMaxMessage) != nil {
			return
		}
		call := runCallPlan(t, &p, &h, msg[size:])
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
		if r.build(&h, 1, reply, it, ok, replyPolicy{threshold: 1024}) == nil {
			checkReplyPlan(t, &r, &h, reply, it)
		}
	})
}

// runCallPlan runs the plan and returns the rebuilt call. The plan must set every byte once, and
// the call must equal the one from rebuildSlowly.
func runCallPlan(t *testing.T, p *callPlan, h *rpcrdma.Header, body []byte) []byte {
	if p.size > fuzzMaxMessage {
		t.Fatalf("got a call of %d bytes, want at most %d", p.size, fuzzMaxMessage)
	}
	written := make([]bool, p.size)
	mark := func(off, n int) {
		for i := off; i < off+n; i++ {
			if written[i] {
				t.Fatalf("byte %d is set twice", i)
			}
			written[i] = true
		}
	}
	for _, op := range p.reads {
		if op.seg.Length == 0 {
			t.Fatal("got a zero-length Read")
		}
		mark(op.dst, int(op.seg.Length))
	}
	for _, op := range p.copies {
		mark(op.dst, op.n)
	}
	for _, off := range p.pads {
		mark(off, 1)
	}
	if i := slices.Index(written, false); i >= 0 {
		t.Fatalf("byte %d of %d is not set", i, p.size)
	}
	call := make([]byte, p.size)
	p.rebuild(call, body)
	for _, op := range p.reads {
		for i := range int(op.seg.Length) {
			call[op.dst+i] = clientByte(op.seg.Handle, op.seg.Offset+uint64(i))
		}
	}
	if want := rebuildSlowly(h, body); !bytes.Equal(call, want) {
		t.Fatalf("rebuilt call: got\n%x, want\n%x", call, want)
	}
	return call
}

// checkReplyPlan checks the lists of the reply and that Writes and Send carry the complete reply.
func checkReplyPlan(t *testing.T, r *replyPlan, h *rpcrdma.Header, reply []byte, it item) {
	total := r.header.Size()
	if r.inline {
		total += r.payload[0].n + r.payload[1].n
	}
	if total > 1024 {
		t.Fatalf("got a Send of %d bytes, want at most 1024", total)
	}
	if !sameShape(h.Writes, r.header.Writes) || h.HasReply != r.header.HasReply ||
		!sameShape([]rpcrdma.Chunk{h.Reply}, []rpcrdma.Chunk{r.header.Reply}) || len(r.header.Reads) != 0 {
		t.Fatalf("got lists %+v for the lists %+v of the call", r.header, h)
	}
	left := r.writes
	var data, rest []byte
	for _, c := range r.header.Writes {
		var b []byte
		b, left = runWrites(t, left, c, reply)
		data = append(data, b...)
	}
	if rest, left = runWrites(t, left, r.header.Reply, reply); len(left) != 0 {
		t.Fatalf("got %d Writes that are not in the header", len(left))
	}
	if r.inline {
		rest = append(rest, reply[r.payload[0].off:][:r.payload[0].n]...)
		rest = append(rest, reply[r.payload[1].off:][:r.payload[1].n]...)
	}
	got := rest
	if len(data) > 0 {
		pad := make([]byte, sunrpc.Pad4(len(data))-len(data))
		got = slices.Concat(rest[:it.off], data, pad, rest[it.off:])
	}
	if !bytes.Equal(got, reply) {
		t.Fatalf("client got reply\n%x, want\n%x", got, reply)
	}
}

// runWrites returns the data of the Writes to chunk c and the remaining Writes. The Writes must
// fill each segment from its start up to the length in c.
func runWrites(t *testing.T, left []writeOp, c rpcrdma.Chunk, reply []byte) (data []byte, rest []writeOp) {
	for _, seg := range c {
		for used := uint32(0); used < seg.Length; left = left[1:] {
			if len(left) == 0 {
				t.Fatal("got fewer written bytes than in the header")
			}
			w := left[0]
			if w.seg.Length == 0 || w.seg.Handle != seg.Handle || w.seg.Offset != seg.Offset+uint64(used) ||
				w.seg.Length > seg.Length-used {
				t.Fatalf("got Write %+v to segment %+v after %d bytes", w, seg, used)
			}
			used += w.seg.Length
			data = append(data, reply[w.src:w.src+int(w.seg.Length)]...)
		}
	}
	return data, left
}

// clientByte returns a byte of the memory of the client.
func clientByte(handle uint32, addr uint64) byte {
	return byte(handle)*31 + byte(addr)*7 + byte(addr>>8)
}

// rebuildSlowly is a simple implementation of RFC 8166 §3.4.5: it inserts each chunk at its
// Position in the stream.
func rebuildSlowly(h *rpcrdma.Header, body []byte) (out []byte) {
	fetch := func(pos uint32) (b []byte) {
		for _, s := range h.Reads {
			for i := range s.Length {
				if s.Position == pos {
					b = append(b, clientByte(s.Handle, s.Offset+uint64(i)))
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

// sameShape reports whether the reply has the chunks of the call with segments that are not longer.
func sameShape(call, reply []rpcrdma.Chunk) bool {
	return slices.EqualFunc(call, reply, func(a, b rpcrdma.Chunk) bool {
		return slices.EqualFunc(a, b, func(a, b rpcrdma.Segment) bool {
			return a.Handle == b.Handle && a.Offset == b.Offset && b.Length <= a.Length
		})
	})
}
