package svcrdma

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// testHandler returns the requested number of bytes for READ. For other calls it returns status 0
// and the arguments of the call. It keeps the last call.
type testHandler struct {
	calls atomic.Int64
	mu    sync.Mutex // guards last
	last  []byte
}

func pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i>>8)
	}
	return b
}

// readResults returns a READ3resok without attributes.
func readResults(n int) []byte {
	b := sunrpc.AppendUint32(nil, 0)
	b = sunrpc.AppendUint32(b, 0)
	b = sunrpc.AppendUint32(b, uint32(n))
	b = sunrpc.AppendUint32(b, 1)
	return sunrpc.AppendOpaque(b, pattern(n))
}

func (h *testHandler) ServeRPC(_ context.Context, _ netip.AddrPort, call, reply []byte) ([]byte, error) {
	h.calls.Add(1)
	h.mu.Lock()
	h.last = append([]byte(nil), call...)
	h.mu.Unlock()
	hdr, args, err := sunrpc.ParseCall(call)
	if err != nil {
		return nil, err
	}
	reply = sunrpc.AppendAcceptedReply(reply, hdr.XID, sunrpc.Success)
	if hdr.Prog == progNFS && hdr.Vers == versNFS3 && hdr.Proc == procRead {
		d := sunrpc.NewDecoder(args)
		d.Opaque(maxHandle)
		d.Uint64()
		return append(reply, readResults(int(min(d.Uint32(), maxTestRead)))...), nil
	}
	if hdr.Prog == testProg { // the argument is the size of the results
		d := sunrpc.NewDecoder(args)
		return append(reply, pattern(int(min(d.Uint32(), maxTestRead)))...), nil
	}
	return append(sunrpc.AppendUint32(reply, 0), args...), nil
}

func (h *testHandler) lastCall() []byte {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.last
}

const testProg = 400000

// maxTestRead is the maximum size of the results of testHandler in bytes. It exceeds MaxMessage.
const maxTestRead = 2 << 20

func readArgs(n int) []byte {
	b := sunrpc.AppendOpaque(nil, []byte("handle"))
	b = sunrpc.AppendUint64(b, 0)
	return sunrpc.AppendUint32(b, uint32(n))
}

// writeHead returns a WRITE3args without the data.
func writeHead(n int) []byte {
	b := sunrpc.AppendOpaque(nil, []byte("handle12"))
	b = sunrpc.AppendUint64(b, 0)
	b = sunrpc.AppendUint32(b, uint32(n))
	b = sunrpc.AppendUint32(b, 2)
	return sunrpc.AppendUint32(b, uint32(n))
}

func TestInlineReply(t *testing.T) {
	addr := startServer(t, Config{Handler: &testHandler{}, Credits: 7})
	c := dialRaw(t, addr, ownPrivate(false, 4096))
	priv, found := rpcrdma.ParsePrivate(c.id.Peer().PrivateData)
	if !found || priv != (rpcrdma.Private{SendSize: 4096, RecvSize: 4096}) {
		t.Errorf("got private data %+v, found %v", priv, found)
	}
	_, _, r := c.exchange(&rpcrdma.Header{XID: 5}, rpcCall(5, progNFS, 3, 1, []byte("args")))
	want := rpcrdma.Header{XID: 5, Vers: 1, Credits: 7}
	rpc := append(sunrpc.AppendUint32(sunrpc.AppendAcceptedReply(nil, 5, 0), 0), "args"...)
	if wire := append(want.Append(nil), rpc...); !bytes.Equal(r.msg, wire) {
		t.Errorf("got reply\n%x, want\n%x", r.msg, wire)
	}
}

func TestReadChunksOfAnyLength(t *testing.T) {
	h := &testHandler{}
	addr := startServer(t, Config{Handler: h})
	c := dialRaw(t, addr, ownPrivate(true, 4096))
	copy(c.mem[rawChunkAt:], pattern(1<<20))
	seg := c.register(rawChunkAt, 1<<20, verbs.AccessRemoteRead)
	xid := uint32(100)
	for _, n := range []int{1, 2, 3, 4, 5, 4093, 5000, 100001, 1 << 20} {
		for _, padded := range []bool{false, true} {
			for _, cuts := range []int{1, 3, 40} {
				xid++
				body := rpcCall(xid, progNFS, 3, procWrite, writeHead(n))
				total := n
				if padded {
					total = min(sunrpc.Pad4(n), 1<<20)
				}
				hd := rpcrdma.Header{XID: xid}
				for i := range cuts { // some segments are empty
					from, to := total*i/cuts, total*(i+1)/cuts
					hd.Reads = append(hd.Reads, rpcrdma.ReadSegment{Position: uint32(len(body)),
						Segment: rpcrdma.Segment{Handle: seg.Handle, Length: uint32(to - from),
							Offset: seg.Offset + uint64(from)}})
				}
				rep, _, _ := c.exchange(&hd, body)
				want := append(append([]byte(nil), body...), sunrpc.AppendFixed(nil, pattern(n))...)
				got := h.lastCall()
				// A pad in the chunk comes from the client and is not zero.
				if padded && len(got) == len(want) {
					copy(got[len(body)+n:], want[len(body)+n:])
				}
				// The handler returns the arguments, and large ones do not fit inline.
				if rep.Proc != rpcrdma.ProcMsg && n < 3000 {
					t.Fatalf("%d bytes, %d segments: got %v %v, want %v", n, cuts, rep.Proc, rep.Err, rpcrdma.ProcMsg)
				}
				if !bytes.Equal(got, want) {
					t.Fatalf("%d bytes, padded %v, %d segments: got another call, of %d bytes; want %d bytes", n,
						padded, cuts, len(got), len(want))
				}
			}
		}
	}
}

func TestPositionZeroChunkAndTwoPositions(t *testing.T) {
	h := &testHandler{}
	c := dialRaw(t, startServer(t, Config{Handler: h}), ownPrivate(false, 4096))
	seg := c.register(rawChunkAt, 1<<20, verbs.AccessRemoteRead)
	sub := func(from, n int) rpcrdma.Segment {
		return rpcrdma.Segment{Handle: seg.Handle, Length: uint32(n), Offset: seg.Offset + uint64(from)}
	}
	whole := rpcCall(1, progNFS, 3, procWrite, append(writeHead(6000), pattern(6000)...))
	copy(c.mem[rawChunkAt:], whole)
	c.exchange(&rpcrdma.Header{XID: 1, Proc: rpcrdma.ProcNoMsg, Reads: []rpcrdma.ReadSegment{
		{Segment: sub(0, 30)}, {Segment: sub(30, len(whole)-30)}}}, nil)
	if !bytes.Equal(h.lastCall(), whole) {
		t.Errorf("position-zero chunk: got call %x, want %x", h.lastCall(), whole)
	}

	// A long call with a reduced item: position-zero chunk and Read chunk.
	head := rpcCall(2, progNFS, 3, procWrite, writeHead(4001))
	copy(c.mem[rawChunkAt:], head)
	copy(c.mem[rawChunkAt+8192:], pattern(4001))
	c.exchange(&rpcrdma.Header{XID: 2, Proc: rpcrdma.ProcNoMsg, Reads: []rpcrdma.ReadSegment{
		{Segment: sub(0, 9)}, {Segment: sub(9, len(head)-9)}, {Position: uint32(len(head)),
			Segment: sub(8192, 4001)}}}, nil)
	if want := append(head, sunrpc.AppendFixed(nil, pattern(4001))...); !bytes.Equal(h.lastCall(), want) {
		t.Errorf("position-zero and Read chunk: got call %x, want %x", h.lastCall(), want)
	}

	// Two positions in the middle of the body of a COMPOUND (RFC 8267 §6.4).
	a, b, z := []byte("AAAABBBBCCCC"), []byte("DDDD"), []byte("EEEEFFFF")
	base := rpcCall(3, progNFS, versNFS4, 1, a)
	body := slices.Concat(base, b, z)
	copy(c.mem[rawChunkAt:], "12345678")
	p1 := len(base)
	p2 := p1 + 8 + len(b) // after 5 bytes, their pad and b
	c.exchange(&rpcrdma.Header{XID: 3, Reads: []rpcrdma.ReadSegment{
		{Position: uint32(p2), Segment: sub(0, 4)}, {Position: uint32(p1), Segment: sub(0, 5)}}}, body)
	want := slices.Concat(base, []byte("12345\x00\x00\x00"), b, []byte("1234"), z)
	if !bytes.Equal(h.lastCall(), want) {
		t.Errorf("two positions: got call\n%q, want\n%q", h.lastCall(), want)
	}
}

func TestWriteChunksOfAnyLength(t *testing.T) {
	c := dialRaw(t, startServer(t, Config{Handler: &testHandler{}}), ownPrivate(false, 4096))
	seg := c.register(rawChunkAt, 1<<20, verbs.AccessRemoteWrite)
	sub := func(from, n int) rpcrdma.Segment {
		return rpcrdma.Segment{Handle: seg.Handle, Length: uint32(n), Offset: seg.Offset + uint64(from)}
	}
	xid := uint32(0)
	for _, n := range []int{0, 1, 2, 3, 4, 4097, 10002, 100003, 1<<20 - 8} {
		mem := c.mem[rawChunkAt : rawChunkAt+1<<20]
		for i := range mem {
			mem[i] = 0xee
		}
		xid++
		first := min(n, 1001)
		h := rpcrdma.Header{XID: xid, Writes: []rpcrdma.Chunk{{sub(0, first), sub(first, 0), sub(first, n-first),
			sub(n, 8)}, {sub(0, 64)}}}
		rep, body, _ := c.exchange(&h, rpcCall(xid, progNFS, 3, procRead, readArgs(n)))
		if rep.Proc != rpcrdma.ProcMsg || len(rep.Reads) != 0 || len(rep.Writes) != 2 || len(rep.Writes[0]) != 4 {
			t.Fatalf("%d bytes: got reply %+v", n, rep)
		}
		lens := [5]uint32{rep.Writes[0][0].Length, rep.Writes[0][1].Length, rep.Writes[0][2].Length,
			rep.Writes[0][3].Length, rep.Writes[1][0].Length}
		if lens != [5]uint32{uint32(first), 0, uint32(n - first), 0, 0} {
			t.Errorf("%d bytes: got segment lengths %v", n, lens)
		}
		if !bytes.Equal(mem[:n], pattern(n)) {
			t.Errorf("%d bytes: got other data than the reply", n)
		}
		if !bytes.Equal(mem[n:min(n+8, len(mem))], bytes.Repeat([]byte{0xee}, min(8, len(mem)-n))) {
			t.Errorf("%d bytes: server wrote after the end of the item", n)
		}
		if want := sunrpc.AcceptedReplySize + 20; len(body) != want ||
			binary.BigEndian.Uint32(body[want-4:]) != uint32(n) {
			t.Errorf("%d bytes: got inline part %x of %d bytes, want %d", n, body, len(body), want)
		}
	}

	// An empty chunk requests inline data (RFC 8166 §4.3.2.3).
	rep, body, _ := c.exchange(&rpcrdma.Header{XID: 900, Writes: []rpcrdma.Chunk{{}}},
		rpcCall(900, progNFS, 3, procRead, readArgs(10)))
	if want := append(sunrpc.AppendAcceptedReply(nil, 900, 0), readResults(10)...); len(rep.Writes) != 1 ||
		len(rep.Writes[0]) != 0 || !bytes.Equal(body, want) {
		t.Errorf("empty chunk: got header %+v, body %x; want body %x", rep, body, want)
	}

	// The server does not use a chunk for a result that is not eligible.
	rep, _, _ = c.exchange(&rpcrdma.Header{XID: 901, Writes: []rpcrdma.Chunk{{sub(0, 100)}}},
		rpcCall(901, progNFS, 3, 1, []byte("args")))
	if rep.Writes[0][0].Length != 0 {
		t.Errorf("GETATTR: got used chunk %+v", rep)
	}
	c.wantErrChunk(&rpcrdma.Header{XID: 902, Writes: []rpcrdma.Chunk{{sub(0, 99)}}},
		rpcCall(902, progNFS, 3, procRead, readArgs(100)))
}

// wantErrChunk sends a call and checks that the reply is an ERR_CHUNK.
func (c *rawClient) wantErrChunk(h *rpcrdma.Header, body []byte) {
	c.t.Helper()
	rep, rest, r := c.exchange(h, body)
	if rep.Proc != rpcrdma.ProcError || rep.Err != rpcrdma.ErrChunk || rep.XID != h.XID || rep.Credits == 0 ||
		len(r.msg) != rpcrdma.ErrChunkSize || len(rest) != 0 || r.withInv {
		c.t.Errorf("got reply %+v, want ERR_CHUNK", rep)
	}
}

func TestReplyChunks(t *testing.T) {
	for _, always := range []bool{false, true} {
		t.Run(fmt.Sprint("always ", always), func(t *testing.T) {
			c := dialRaw(t, startServer(t, Config{Handler: &testHandler{}, AlwaysReplyChunk: always}),
				ownPrivate(false, 4096))
			seg := c.register(rawChunkAt, 1<<20, verbs.AccessRemoteWrite)
			sub := func(from, n int) rpcrdma.Segment {
				return rpcrdma.Segment{Handle: seg.Handle, Length: uint32(n), Offset: seg.Offset + uint64(from)}
			}
			ask := func(xid uint32, n int) []byte {
				return rpcCall(xid, testProg, 1, 1, sunrpc.AppendUint32(nil, uint32(n)))
			}
			const head = sunrpc.AcceptedReplySize
			rep, body, _ := c.exchange(&rpcrdma.Header{XID: 1, HasReply: true,
				Reply: rpcrdma.Chunk{sub(0, 20), sub(20, 9000), sub(9020, 100)}}, ask(1, 8000))
			if rep.Proc != rpcrdma.ProcNoMsg || len(body) != 0 || rep.Reply[0].Length != 20 ||
				rep.Reply[1].Length != 8000+head-20 || rep.Reply[2].Length != 0 {
				t.Errorf("long reply: got header %+v", rep)
			}
			if want := append(sunrpc.AppendAcceptedReply(nil, 1, 0), pattern(8000)...); !bytes.Equal(
				c.mem[rawChunkAt:rawChunkAt+len(want)], want) {
				t.Error("long reply: got other data than the reply")
			}
			rep, body, _ = c.exchange(&rpcrdma.Header{XID: 2, HasReply: true, Reply: rpcrdma.Chunk{sub(0, 9000)}},
				ask(2, 100))
			if always != (rep.Proc == rpcrdma.ProcNoMsg) || !rep.HasReply || (rep.Reply[0].Length == 0) == always ||
				(len(body) == 0) != always {
				t.Errorf("short reply: got header %+v and %d bytes", rep, len(body))
			}

			// With both lists, the Write chunk takes the data and the Reply chunk the rest (RFC
			// 8166 §3.5.3).
			rep, _, _ = c.exchange(&rpcrdma.Header{XID: 3, Writes: []rpcrdma.Chunk{{sub(100000, 5000)}},
				HasReply: true, Reply: rpcrdma.Chunk{sub(0, 9000)}},
				rpcCall(3, progNFS, 3, procRead, readArgs(5000)))
			if rep.Writes[0][0].Length != 5000 || always != (rep.Proc == rpcrdma.ProcNoMsg) ||
				(always && rep.Reply[0].Length != head+20) {
				t.Errorf("Write and Reply chunk: got header %+v", rep)
			}

			c.wantErrChunk(&rpcrdma.Header{XID: 4, HasReply: true, Reply: rpcrdma.Chunk{sub(0, 7999)}}, ask(4, 8000))
			c.wantErrChunk(&rpcrdma.Header{XID: 5, HasReply: true}, ask(5, 8000))
			c.wantErrChunk(&rpcrdma.Header{XID: 6}, ask(6, 8000))

			// 4096 bytes fit inline, 4100 do not.
			_, body, r := c.exchange(&rpcrdma.Header{XID: 7}, ask(7, 4096-rpcrdma.MinHeaderSize-head))
			if len(r.msg) != 4096 || len(body) != 4096-rpcrdma.MinHeaderSize {
				t.Errorf("largest inline reply: got %d bytes, want 4096", len(r.msg))
			}
			c.wantErrChunk(&rpcrdma.Header{XID: 8}, ask(8, 4100-rpcrdma.MinHeaderSize-head))
		})
	}
}

func TestInlineThresholdWithoutPrivateData(t *testing.T) {
	c := dialRaw(t, startServer(t, Config{Handler: &testHandler{}, RemoteInv: true}), nil)
	_, _, r := c.exchange(&rpcrdma.Header{XID: 1}, rpcCall(1, testProg, 1, 1, sunrpc.AppendUint32(nil, 1024-52)))
	if len(r.msg) != 1024 {
		t.Errorf("got reply of %d bytes, want 1024", len(r.msg))
	}
	c.wantErrChunk(&rpcrdma.Header{XID: 2}, rpcCall(2, testProg, 1, 1, sunrpc.AppendUint32(nil, 1024-51)))
}

func TestInvalidMessagesGetErrors(t *testing.T) {
	h := &testHandler{}
	c := dialRaw(t, startServer(t, Config{Handler: h}), ownPrivate(false, 4096))
	call := func(xid uint32) []byte { return rpcCall(xid, progNFS, 3, 0, nil) }
	be := binary.BigEndian

	raw := func(words ...uint32) (b []byte) {
		for _, w := range words {
			b = be.AppendUint32(b, w)
		}
		return b
	}
	expect := func(name string, send, want []byte) {
		t.Helper()
		c.sendBytes(send)
		if got := c.receive().msg; !bytes.Equal(got, want) {
			t.Errorf("%s: got %x, want %x", name, got, want)
		}
	}
	errChunk := func(xid uint32) []byte { return raw(xid, 1, 64, 4, 2) }
	expect("version 2", raw(1, 2, 8, 0, 0, 0, 0), raw(1, 2, 64, 4, 1, 1, 1))
	expect("MSGP", raw(2, 1, 8, 2, 0, 0, 0), errChunk(2))
	expect("rdma_proc 77", raw(3, 1, 8, 77, 0, 0, 0), errChunk(3))
	expect("discriminator 2", raw(4, 1, 8, 0, 2, 0, 0), errChunk(4))
	expect("missing segments", raw(5, 1, 8, 0, 0, 1, 0xffffffff, 0, 0), errChunk(5))
	expect("position 3", raw(6, 1, 8, 0, 1, 3, 9, 4, 0, 1, 0, 0, 0), errChunk(6))
	expect("NOMSG without lists", raw(7, 1, 8, 1, 0, 0, 0), errChunk(7))
	expect("position after the body", append(raw(8, 1, 8, 0, 1, 400, 9, 4, 0, 1, 0, 0, 0), call(8)...), errChunk(8))
	expect("chunk of 4 GiB", append(raw(9, 1, 8, 0, 1, 40, 9, 0xffffffff, 0, 1, 0, 0, 0), call(9)...), errChunk(9))
	expect("different XIDs", append(raw(10, 1, 8, 0, 0, 0, 0), call(11)...), errChunk(10))
	expect("MSG with a position-zero chunk", append(raw(12, 1, 8, 0, 1, 0, 9, 4, 0, 1, 0, 0, 0), call(12)...),
		errChunk(12))
	expect("empty body", raw(13, 1, 8, 0, 0, 0, 0), errChunk(13))

	msg := raw(14, 1, 64, 0, 0, 0, 0)
	expect("truncated call header", append(raw(14, 1, 8, 0, 0, 0, 0), raw(14, 0, 2, progNFS)...),
		append(append([]byte(nil), msg...), sunrpc.AppendAcceptedReply(nil, 14, sunrpc.GarbageArgs)...))
	otherVersion := call(14)
	be.PutUint32(otherVersion[8:], 3)
	expect("RPC version 3", append(raw(14, 1, 8, 0, 0, 0, 0), otherVersion...),
		append(append([]byte(nil), msg...), sunrpc.AppendMismatchReply(nil, 14)...))

	// The server discards these messages and replies to the next call.
	c.sendBytes(raw(20, 1, 8, 3, 0, 0, 0))
	c.sendBytes(raw(21, 1, 8, 4, 1, 1, 1))
	c.sendBytes(raw(25, 2, 8, 4, 1, 1, 1)) // an RDMA_ERROR of another version
	c.sendBytes(raw(22, 1, 8, 0, 0, 0)[:27-4])
	c.sendBytes([]byte{1})
	c.sendBytes(append(raw(23, 1, 8, 0, 0, 0, 0), sunrpc.AppendAcceptedReply(nil, 23, 0)...))
	rep, _, _ := c.exchange(&rpcrdma.Header{XID: 24}, call(24))
	if rep.XID != 24 || h.calls.Load() != 1 {
		t.Errorf("got reply with XID %d, %d executed calls; want 24, 1", rep.XID, h.calls.Load())
	}
}

func TestIneligibleReductionIsRefused(t *testing.T) {
	h := &testHandler{}
	c := dialRaw(t, startServer(t, Config{Handler: h}), ownPrivate(false, 4096))
	seg := c.register(rawChunkAt, 4096, verbs.AccessRemoteRead)
	seg.Length = 8
	body := rpcCall(1, progNFS, 3, 1, sunrpc.AppendUint32(nil, 8)) // handle of GETATTR
	_, got, _ := c.exchange(&rpcrdma.Header{XID: 1,
		Reads: []rpcrdma.ReadSegment{{Position: uint32(len(body)), Segment: seg}}}, body)
	if !bytes.Equal(got, sunrpc.AppendAcceptedReply(nil, 1, sunrpc.GarbageArgs)) {
		t.Errorf("reduced handle: got reply %x, want GARBAGE_ARGS", got)
	}
	// The chunk is shorter than the item.
	body = rpcCall(2, progNFS, 3, procWrite, writeHead(100))
	_, got, _ = c.exchange(&rpcrdma.Header{XID: 2,
		Reads: []rpcrdma.ReadSegment{{Position: uint32(len(body)), Segment: seg}}}, body)
	if !bytes.Equal(got, sunrpc.AppendAcceptedReply(nil, 2, sunrpc.GarbageArgs)) {
		t.Errorf("short chunk: got reply %x, want GARBAGE_ARGS", got)
	}
	if h.calls.Load() != 0 {
		t.Errorf("got %d executed calls, want none", h.calls.Load())
	}
}

func TestSendWithInvalidate(t *testing.T) {
	for _, tc := range []struct{ server, client, want bool }{
		{true, true, true},
		{true, false, false},
		{false, true, false},
	} {
		c := dialRaw(t, startServer(t, Config{Handler: &testHandler{}, RemoteInv: tc.server}),
			ownPrivate(tc.client, 4096))
		seg := c.register(rawChunkAt, 4096, verbs.AccessRemoteWrite)
		_, _, r := c.exchange(&rpcrdma.Header{XID: 1, Writes: []rpcrdma.Chunk{{seg}}},
			rpcCall(1, progNFS, 3, procRead, readArgs(100)))
		if r.withInv != tc.want || (tc.want && r.inv != verbs.RKey(seg.Handle)) {
			t.Errorf("%+v: got invalidation %v of %#x, want %#x", tc, r.withInv, uint32(r.inv), seg.Handle)
		}
		a := c.register(rawChunkAt, 4096, verbs.AccessRemoteWrite)
		b := c.register(rawChunkAt+4096, 4096, verbs.AccessRemoteWrite)
		_, _, r = c.exchange(&rpcrdma.Header{XID: 2, Writes: []rpcrdma.Chunk{{a, b}}},
			rpcCall(2, progNFS, 3, procRead, readArgs(100)))
		if r.withInv {
			t.Errorf("%+v: got an invalidation for a call with two handles", tc)
		}
		_, _, r = c.exchange(&rpcrdma.Header{XID: 3}, rpcCall(3, progNFS, 3, 0, nil))
		if r.withInv {
			t.Errorf("%+v: got an invalidation for a call without chunks", tc)
		}
		c.close()
	}
}

func TestDuplicateRequestGetsCachedReply(t *testing.T) {
	h := &testHandler{}
	addr := startServer(t, Config{Handler: h, CachedReplies: 2})
	remove := func(xid uint32) []byte { return rpcCall(xid, progNFS, 3, 12, []byte("name")) }
	ask := func(body []byte, reply bool) []byte {
		c := dialRaw(t, addr, ownPrivate(false, 4096)) // another connection, another port
		defer c.close()
		hd := rpcrdma.Header{XID: binary.BigEndian.Uint32(body)}
		if reply {
			hd.HasReply, hd.Reply = true, rpcrdma.Chunk{c.register(rawChunkAt, 4096, verbs.AccessRemoteWrite)}
		}
		rep, got, _ := c.exchange(&hd, body)
		if rep.Credits != 64 || rep.HasReply != reply {
			t.Errorf("got header %+v, want 64 credits and HasReply %v", rep, reply)
		}
		return got
	}
	first := ask(remove(1), false)
	if got := ask(remove(1), true); !bytes.Equal(first, got) || h.calls.Load() != 1 {
		t.Errorf("retransmission: got reply %x, %d executed calls; want %x, 1", got, h.calls.Load(), first)
	}
	ask(rpcCall(1, progNFS, 3, 12, []byte("emit")), false) // another call with the same XID
	ask(remove(2), false)
	if h.calls.Load() != 3 {
		t.Errorf("got %d executed calls, want 3", h.calls.Load())
	}
	ask(remove(1), false) // the two other replies evicted the first one
	if h.calls.Load() != 4 {
		t.Errorf("after eviction: got %d executed calls, want 4", h.calls.Load())
	}
	ask(rpcCall(9, progNFS, 3, 1, nil), false)
	ask(rpcCall(9, progNFS, 3, 1, nil), false)
	if h.calls.Load() != 6 {
		t.Errorf("GETATTR twice: got %d executed calls, want 6", h.calls.Load())
	}
}

func TestDuplicateRequestWaitsForCallInProgress(t *testing.T) {
	var calls atomic.Int64
	hold := make(chan struct{})
	started := make(chan struct{}, 2)
	var stats Stats
	addr := startServer(t, Config{Stats: &stats, Handler: HandlerFunc(func(_ context.Context, _ netip.AddrPort, call,
		reply []byte) ([]byte, error) {
		calls.Add(1)
		started <- struct{}{}
		<-hold
		return append(sunrpc.AppendAcceptedReply(reply, binary.BigEndian.Uint32(call), 0), 0, 0, 0, 9), nil
	})})
	body := rpcCall(1, progNFS, 3, 12, []byte("name"))
	a := dialRaw(t, addr, ownPrivate(false, 4096))
	a.sendMsg(&rpcrdma.Header{XID: 1}, body)
	<-started
	a.close() // while the call is in progress
	b := dialRaw(t, addr, ownPrivate(false, 4096))
	b.sendMsg(&rpcrdma.Header{XID: 1}, body)
	kit.Eventually(t, "second call", func() bool { return stats.Calls.Load() == 2 })
	close(hold)
	if r := b.receive(); !bytes.HasSuffix(r.msg, []byte{0, 0, 0, 9}) || calls.Load() != 1 {
		t.Errorf("got reply %x, %d executed calls; want 1", r.msg, calls.Load())
	}
}

// TestCallsRunConcurrently uses all credits with calls that wait for each other.
func TestCallsRunConcurrently(t *testing.T) {
	const credits = 16
	var arrived sync.WaitGroup
	arrived.Add(credits)
	c := dialRaw(t, startServer(t, Config{Credits: credits,
		Handler: HandlerFunc(func(_ context.Context, _ netip.AddrPort, call, reply []byte) ([]byte, error) {
			arrived.Done()
			arrived.Wait() // until all calls are in progress
			return sunrpc.AppendAcceptedReply(reply, binary.BigEndian.Uint32(call), 0), nil
		})}), ownPrivate(false, 4096))
	for i := range uint32(credits) {
		c.sendMsg(&rpcrdma.Header{XID: i + 1}, rpcCall(i+1, progNFS, 3, 0, nil))
	}
	seen := map[uint32]bool{}
	for range credits {
		seen[binary.BigEndian.Uint32(c.receive().msg)] = true
	}
	if len(seen) != credits {
		t.Errorf("got replies to %d calls, want %d", len(seen), credits)
	}
}

func TestReplyHookDropsAndDisconnects(t *testing.T) {
	c := dialRaw(t, startServer(t, Config{Handler: &testHandler{}, Hooks: Hooks{Reply: func(h *rpcrdma.Header) Verdict {
		switch h.XID {
		case 1:
			return Drop
		case 3:
			return Disconnect
		}
		return Send
	}}}), ownPrivate(false, 4096))
	c.sendMsg(&rpcrdma.Header{XID: 1}, rpcCall(1, progNFS, 3, 0, nil))
	if rep, _, _ := c.exchange(&rpcrdma.Header{XID: 2}, rpcCall(2, progNFS, 3, 0, nil)); rep.XID != 2 {
		t.Errorf("got reply with XID %d, want 2", rep.XID)
	}
	c.sendMsg(&rpcrdma.Header{XID: 3}, rpcCall(3, progNFS, 3, 0, nil))
	select {
	case <-c.down:
	case <-time.After(kit.Timeout):
		t.Errorf("connection is still open %v after Disconnect", kit.Timeout)
	}
}

func TestServeRejectsInvalidConfig(t *testing.T) {
	h := &testHandler{}
	for _, cfg := range []Config{
		{},
		{Handler: h, Credits: -1},
		{Handler: h, Credits: 2000},
		{Handler: h, InlineBytes: 512},
		{Handler: h, InlineBytes: 1500},
		{Handler: h, InlineBytes: 1 << 17},
		{Handler: h, MaxMessage: 100},
		{Handler: h, ReadDepth: 500},
		{Handler: h, ReadDepth: 12},
		{Handler: h, MaxConns: -1},
		{Handler: h, MessageMemory: 1 << 20},
		{Handler: h, CachedReplies: -1},
		{Handler: h, IdleTimeout: -1},
		{Handler: h, TransferTimeout: -1},
		{Handler: h, CallTimeout: -1},
	} {
		if Serve(context.Background(), nil, cfg) == nil {
			t.Errorf("%+v: got no error", cfg)
		}
	}
}
