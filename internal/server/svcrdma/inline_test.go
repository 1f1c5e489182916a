package svcrdma

import (
	"bytes"
	"context"
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// A tryHandler executes READ in TryServe. Its other calls wait for release.
type tryHandler struct {
	testHandler
	release chan struct{}
}

func (h *tryHandler) TryServe(peer netip.AddrPort, call, reply []byte) ([]byte, bool) {
	hdr, _, err := sunrpc.ParseCall(call)
	if err != nil || hdr.Proc != procRead {
		return nil, false
	}
	out, err := h.testHandler.ServeRPC(context.Background(), peer, call, reply)
	return out, err == nil
}

func (h *tryHandler) ServeRPC(ctx context.Context, peer netip.AddrPort, call, reply []byte) ([]byte, error) {
	if hdr, _, _ := sunrpc.ParseCall(call); hdr.Proc != procRead {
		<-h.release
	}
	return h.testHandler.ServeRPC(ctx, peer, call, reply)
}

// readOf sends a READ of n bytes with a Write chunk of room bytes and checks the data.
func (c *rawClient) readOf(xid uint32, seg rpcrdma.Segment, room, n int) {
	c.t.Helper()
	seg.Length = uint32(room)
	mem := c.mem[rawChunkAt : rawChunkAt+n]
	clear(mem)
	rep, _, _ := c.exchange(&rpcrdma.Header{XID: xid, Writes: []rpcrdma.Chunk{{seg}}},
		rpcCall(xid, progNFS, 3, procRead, readArgs(n)))
	if rep.Proc != rpcrdma.ProcMsg || rep.XID != xid || rep.Writes[0][0].Length != uint32(n) ||
		!bytes.Equal(mem, pattern(n)) {
		c.t.Fatalf("READ %d of %d bytes: got %+v, or other data", xid, n, rep)
	}
}

// TestSmallCallsDoNotWaitForOthers checks that READs are answered while another call of the
// connection waits, and that each of them gives its buffers back.
func TestSmallCallsDoNotWaitForOthers(t *testing.T) {
	const reads = 100
	h := &tryHandler{release: make(chan struct{})}
	c := dialRaw(t, startServer(t, Config{Handler: h, Credits: 4}), ownPrivate(false, 4096))
	seg := c.register(rawChunkAt, 1<<20, verbs.AccessRemoteWrite)
	c.sendMsg(&rpcrdma.Header{XID: 2}, rpcCall(2, progNFS, 3, 1, nil))
	for i := range uint32(reads) {
		c.readOf(4+i, seg, 4096, 4096)
	}
	c.readOf(900, seg, inlineReply+4, 4096) // a large chunk
	close(h.release)
	if r := c.receive(); binary.BigEndian.Uint32(r.msg) != 2 || h.calls.Load() != reads+2 {
		t.Errorf("GETATTR: got reply %x and %d calls, want %d calls", r.msg, h.calls.Load(), reads+2)
	}
}

// TestSmallCallWithoutRoomGetsErrChunk checks a small call whose reply fits neither the chunks nor
// a Send.
func TestSmallCallWithoutRoomGetsErrChunk(t *testing.T) {
	h := &tryHandler{}
	c := dialRaw(t, startServer(t, Config{Handler: h}), ownPrivate(false, 4096))
	seg := c.register(rawChunkAt, 1<<20, verbs.AccessRemoteWrite)
	c.readOf(1, seg, 4096, 4096)
	seg.Length = 99
	for xid := uint32(2); xid < 10; xid++ {
		c.wantErrChunk(&rpcrdma.Header{XID: xid, Writes: []rpcrdma.Chunk{{seg}}},
			rpcCall(xid, progNFS, 3, procRead, readArgs(100)))
	}
	c.readOf(20, seg, 4096, 4096)
}
