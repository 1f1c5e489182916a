package svcrdma

import (
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// FuzzCall puts any octets through header, call plan and reply plan and checks every offset that the device would be given.
func FuzzCall(f *testing.F) {
	body := rpcCall(7, progNFS, 3, procWrite, writeHead(100))
	seg := rpcrdma.Segment{Handle: 9, Length: 100, Offset: 1 << 40}
	for _, h := range []rpcrdma.Header{
		{XID: 7, Vers: 1}, {XID: 7, Vers: 1, Reads: []rpcrdma.ReadSegment{{Position: uint32(len(body)), Segment: seg}}},
		{XID: 7, Vers: 1, Proc: rpcrdma.ProcNoMsg, Reads: []rpcrdma.ReadSegment{{Segment: seg}, {Segment: seg}, {Position: 8, Segment: seg}}},
		{XID: 7, Vers: 1, Writes: []rpcrdma.Chunk{{seg, seg}, {}}, HasReply: true, Reply: rpcrdma.Chunk{seg}},
	} {
		f.Add(append(h.Append(nil), body...), uint16(200))
	}
	const limit = 1 << 16
	f.Fuzz(func(t *testing.T, msg []byte, n uint16) {
		var h rpcrdma.Header
		size, err := h.Decode(msg)
		if err != nil || h.Proc == rpcrdma.ProcError {
			return
		}
		var p callPlan
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
		hdr, args, err := sunrpc.ParseCall(call)
		if err != nil {
			return
		}
		checkReduction(&hdr, call, len(call)-len(args), p.chunks)

		reply := append(sunrpc.AppendAcceptedReply(nil, hdr.XID, 0), readResults(int(n))...)
		it, ok := eligibleResult(&hdr, reply)
		var r replyPlan
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
		for _, w := range r.writes {
			if w.seg.Length == 0 || w.src < 0 || w.src+int(w.seg.Length) > len(reply) {
				t.Fatalf("Write of %d octets from %d", w.seg.Length, w.src)
			}
		}
	})
}
