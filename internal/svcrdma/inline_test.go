package svcrdma

import (
	"bytes"
	"context"
	"encoding/binary"
	"net/netip"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// A tryHandler executes READ in TryServe. Its other calls wait for release.
type tryHandler struct {
	testHandler
	release  chan struct{}
	onWorker atomic.Int64 // READs that a worker executed
	inline   atomic.Int64 // READs that a completion handler executed
	refuse   atomic.Bool  // TryServe executes nothing
}

func (h *tryHandler) TryServe(peer netip.AddrPort, call, reply []byte) ([]byte, bool) {
	hdr, _, err := sunrpc.ParseCall(call)
	if err != nil || hdr.Proc != procRead || h.refuse.Load() {
		return nil, false
	}
	stack := make([]byte, 64<<10)
	if strings.Contains(string(stack[:runtime.Stack(stack, false)]), "(*conn).received(") {
		h.inline.Add(1)
	}
	out, err := h.testHandler.ServeRPC(context.Background(), peer, call, reply)
	return out, err == nil
}

func (h *tryHandler) ServeRPC(ctx context.Context, peer netip.AddrPort, call, reply []byte) ([]byte, error) {
	hdr, _, _ := sunrpc.ParseCall(call)
	if hdr.Proc == procRead {
		h.onWorker.Add(1)
	} else {
		select {
		case <-h.release:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
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

// TestSmallCallsRunInHandler checks that the handler of a Receive executes small calls while other
// calls of the connection wait, and that each of them gives its buffers back.
func TestSmallCallsRunInHandler(t *testing.T) {
	const reads = 100
	h := &tryHandler{release: make(chan struct{})}
	stats := new(Stats)
	c := dialRaw(t, startServer(t, Config{Handler: h, Credits: 4, Stats: stats}), ownPrivate(false, 4096))
	seg := c.register(rawChunkAt, 1<<20, verbs.AccessRemoteWrite)
	c.readOf(1, seg, 4096, 4096) // a worker allocates the first buffer
	c.sendMsg(&rpcrdma.Header{XID: 2}, rpcCall(2, progNFS, 3, 1, nil))
	c.readOf(3, seg, 4096, 4096) // GETATTR has the buffer, so this READ may need another worker
	before := h.onWorker.Load()
	for i := range uint32(reads) {
		c.readOf(4+i, seg, 4096, 4096)
	}
	// A READ that arrives before the Send of the last reply has completed may need a new buffer.
	if n := h.onWorker.Load() - before; n > 3 || h.inline.Load() < reads-3 {
		t.Errorf("%d small READs: %d executed by workers, %d by completion handlers; want at most 3 by workers", reads,
			n, h.inline.Load())
	}
	before = h.onWorker.Load()
	c.readOf(900, seg, inlineReply+4, 4096) // a large chunk
	if n := h.onWorker.Load() - before; n != 1 {
		t.Errorf("READ with a large chunk: executed %d times by a worker, want 1", n)
	}
	h.refuse.Store(true)
	c.readOf(901, seg, 4096, 4096)
	if n := h.onWorker.Load() - before; n != 2 {
		t.Errorf("READ that has to wait: executed %d times by a worker, want 1", n-1)
	}
	close(h.release)
	if r := c.receive(); binary.BigEndian.Uint32(r.msg) != 2 {
		t.Errorf("GETATTR: got reply %x", r.msg)
	}
	if n := stats.Calls.Load(); n != reads+5 {
		t.Errorf("Stats.Calls: got %d, want %d", n, reads+5)
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
