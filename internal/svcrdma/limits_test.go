package svcrdma

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/leakcheck"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// cause waits for the end of the connection.
func (c *rawClient) cause() error {
	c.t.Helper()
	select {
	case err := <-c.down:
		return err
	case <-time.After(testTimeout):
		c.t.Fatal("the connection lives")
	}
	panic("unreachable")
}

// TestIdleConnection: what is no call keeps no connection; calls do.
func TestIdleConnection(t *testing.T) {
	const limit = 1500 * time.Millisecond // far above what a busy machine takes for a call
	var stats Stats
	addr := startServer(t, Config{Handler: &testHandler{}, IdleTimeout: limit, Stats: &stats})
	busy := dialRaw(t, addr, ownPrivate(false, 4096))
	silent := dialRaw(t, addr, ownPrivate(false, 4096))
	noisy := dialRaw(t, addr, ownPrivate(false, 4096))
	done := (&rpcrdma.Header{XID: 1, Vers: 1, Proc: rpcrdma.ProcDone}).Append(nil)
	began := time.Now()
	for xid := uint32(1); time.Since(began) < 3*limit/2; xid++ {
		busy.exchange(&rpcrdma.Header{XID: xid}, rpcCall(xid, progNFS, 3, 0, nil))
		if time.Since(began) < limit/4 {
			noisy.sendBytes(done) // it may be gone later
		}
		time.Sleep(limit / 40)
	}
	for name, c := range map[string]*rawClient{"silent": silent, "noisy": noisy} {
		if err := c.cause(); !errors.Is(err, io.EOF) {
			t.Errorf("%s client: the connection ended with %v, want an orderly end", name, err)
		}
	}
	if err := busy.cause(); !errors.Is(err, io.EOF) { // now it is idle too
		t.Errorf("busy client, fallen silent: the connection ended with %v", err)
	}
	if n := stats.Discarded.Load(); n == 0 {
		t.Error("the noisy client was not heard")
	}
}

// TestCallIsNotIdle has a call that takes longer than the idle time limit.
func TestCallIsNotIdle(t *testing.T) {
	const limit = 50 * time.Millisecond
	addr := startServer(t, Config{IdleTimeout: limit,
		Handler: HandlerFunc(func(_ context.Context, _ netip.AddrPort, call, reply []byte) ([]byte, error) {
			time.Sleep(5 * limit)
			return sunrpc.AppendAcceptedReply(reply, binary.BigEndian.Uint32(call), 0), nil
		})})
	c := dialRaw(t, addr, ownPrivate(false, 4096))
	c.exchange(&rpcrdma.Header{XID: 1}, rpcCall(1, progNFS, 3, 0, nil))
}

// writeCall sends a WRITE whose data is a Read chunk.
func (c *rawClient) writeCall(xid uint32, seg rpcrdma.Segment) {
	c.t.Helper()
	body := rpcCall(xid, progNFS, 3, procWrite, writeHead(int(seg.Length)))
	c.sendMsg(&rpcrdma.Header{XID: xid, Reads: []rpcrdma.ReadSegment{{Position: uint32(len(body)), Segment: seg}}},
		body)
}

// TestUnansweredRead is a client that takes the RDMA Read Request and never answers.
func TestUnansweredRead(t *testing.T) {
	h := &testHandler{}
	var stats Stats
	addr := startServer(t, Config{Handler: h, TransferTimeout: time.Second, Stats: &stats})
	r := startRelay(t, addr)
	c := dialRaw(t, r.addr, ownPrivate(false, 4096))
	c.exchange(&rpcrdma.Header{XID: 1}, rpcCall(1, progNFS, 3, 0, nil))
	seg := c.register(rawChunkAt, 8192, verbs.AccessRemoteRead)
	r.toClient.shutAtNext(&r.toServer)
	c.writeCall(2, seg)
	c.cause()
	if h.calls.Load() != 1 {
		t.Errorf("%d calls executed", h.calls.Load())
	}
	waitReleased(t, &stats)
}

// waitReleased waits until the server has let go of every connection.
func waitReleased(t *testing.T, stats *Stats) {
	t.Helper()
	for deadline := time.Now().Add(testTimeout); stats.Connections.Load() != 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the connection was not released")
		}
	}
}

// TestReplyNotTaken is a client that asks for much and reads none of it.
func TestReplyNotTaken(t *testing.T) {
	var stats Stats
	addr := startServer(t, Config{Handler: &testHandler{}, TransferTimeout: 300 * time.Millisecond, Stats: &stats})
	r := startRelay(t, addr)
	c := dialRaw(t, r.addr, ownPrivate(false, 4096))
	seg := c.register(rawChunkAt, 1<<20, verbs.AccessRemoteWrite)
	r.toClient.close()
	for xid := range uint32(40) { // more than the sockets between hold
		c.sendMsg(&rpcrdma.Header{XID: xid + 1, Writes: []rpcrdma.Chunk{{seg}}},
			rpcCall(xid+1, progNFS, 3, procRead, readArgs(1<<20)))
	}
	waitReleased(t, &stats)
}

// TestCallTimeout has a Handler that answers nothing, with a call that may be cached and one that
// may not.
func TestCallTimeout(t *testing.T) {
	var calls atomic.Int64
	addr := startServer(t, Config{CallTimeout: 100 * time.Millisecond,
		Handler: HandlerFunc(func(ctx context.Context, _ netip.AddrPort, call, reply []byte) ([]byte, error) {
			if calls.Add(1) > 2 {
				return sunrpc.AppendAcceptedReply(reply, binary.BigEndian.Uint32(call), 0), nil
			}
			<-ctx.Done()
			return nil, context.Cause(ctx)
		})})
	for xid, proc := range []uint32{1, 12} { // GETATTR, REMOVE
		c := dialRaw(t, addr, ownPrivate(false, 4096))
		body := rpcCall(uint32(xid), progNFS, 3, proc, nil)
		c.sendMsg(&rpcrdma.Header{XID: uint32(xid)}, body)
		c.cause()
	}
	again := dialRaw(t, addr, ownPrivate(false, 4096))
	rep, _, _ := again.exchange(&rpcrdma.Header{XID: 1}, rpcCall(1, progNFS, 3, 12, nil))
	if rep.Proc != rpcrdma.ProcMsg || calls.Load() != 3 {
		t.Errorf("the call sent again: %v, %d executed", rep.Proc, calls.Load())
	}
}

// TestCallTimeoutOfLostClient: a call that outlives its connection does not outlive its time.
func TestCallTimeoutOfLostClient(t *testing.T) {
	started, ended := make(chan struct{}), make(chan struct{})
	var stats Stats
	addr := startServer(t, Config{CallTimeout: 300 * time.Millisecond, Stats: &stats,
		Handler: HandlerFunc(func(ctx context.Context, _ netip.AddrPort, call, reply []byte) ([]byte, error) {
			close(started)
			<-ctx.Done()
			close(ended)
			return nil, ctx.Err()
		})})
	c := dialRaw(t, addr, ownPrivate(false, 4096))
	c.sendMsg(&rpcrdma.Header{XID: 1}, rpcCall(1, progNFS, 3, 12, nil)) // REMOVE
	<-started
	c.close()
	select {
	case <-ended:
	case <-time.After(testTimeout):
		t.Fatal("the call runs on")
	}
	waitReleased(t, &stats)
}

// TestMessageMemory gives the server memory for one call with chunks at a time, and clients that
// want much more. All are served, one after the other, also the one that finds all the memory kept
// by another connection.
func TestMessageMemory(t *testing.T) {
	const size = 256 << 10
	var now, most atomic.Int64
	before := leakcheck.Count(leakcheck.Buffer)
	var buffers atomic.Int64
	addr := startServer(t, Config{Credits: 16, MaxMessage: size, MessageMemory: 2 * size,
		Handler: HandlerFunc(func(_ context.Context, _ netip.AddrPort, call, reply []byte) ([]byte, error) {
			n := now.Add(1)
			defer now.Add(-1)
			for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
			}
			buffers.Store(max(buffers.Load(), leakcheck.Count(leakcheck.Buffer)-before))
			time.Sleep(time.Millisecond)
			return sunrpc.AppendAcceptedReply(reply, binary.BigEndian.Uint32(call), 0), nil
		})})
	var all sync.WaitGroup
	for i := range uint32(3) {
		c := dialRaw(t, addr, ownPrivate(false, 4096))
		seg := c.register(rawChunkAt, 100<<10, verbs.AccessRemoteRead)
		all.Go(func() {
			for j := range uint32(16) {
				c.writeCall(100*i+j, seg)
			}
			for range 16 {
				select {
				case r := <-c.got:
					var h rpcrdma.Header
					if _, err := h.Decode(r.msg); err != nil || h.Proc != rpcrdma.ProcMsg {
						t.Errorf("reply %v, error %v", h.Proc, err)
					}
				case <-time.After(testTimeout):
					t.Error("no answer")
					return
				}
			}
		})
		if i == 0 {
			all.Wait() // so that the first keeps buffers, idle, when the others come
		}
	}
	all.Wait()
	if most.Load() != 1 {
		t.Errorf("%d calls held memory at a time, want 1", most.Load())
	}
	// Each connection: the client's region, the Receives, one buffer for each of 16 Sends.
	if limit := int64(3*(2+16) + 2); buffers.Load() > limit {
		t.Errorf("%d buffers at a time, want at most %d", buffers.Load(), limit)
	}
}

// TestHopelessCalls are calls whose chunks end the connection each time (RFC 8166 §4.5.3): the loop
// is broken.
func TestHopelessCalls(t *testing.T) {
	h := &testHandler{}
	addr := startServer(t, Config{Handler: h, RemoteInv: true})
	body := rpcCall(1, progNFS, 3, procWrite, writeHead(4096))
	for _, x := range []struct {
		name  string
		xid   uint32
		ends  int
		offer verbs.Access
		call  func(c *rawClient, seg rpcrdma.Segment) (*rpcrdma.Header, []byte)
	}{
		{"Read that the client refuses", 1, 1, verbs.AccessRemoteWrite,
			func(c *rawClient, seg rpcrdma.Segment) (*rpcrdma.Header, []byte) {
				return &rpcrdma.Header{XID: 1,
					Reads: []rpcrdma.ReadSegment{{Position: uint32(len(body)), Segment: seg}}}, body
			}},
		{"Write that the client refuses", 2, fatalStrikes, verbs.AccessRemoteRead,
			func(c *rawClient, seg rpcrdma.Segment) (*rpcrdma.Header, []byte) {
				return &rpcrdma.Header{XID: 2, Writes: []rpcrdma.Chunk{{seg}}}, rpcCall(2, progNFS, 3, procRead,
					readArgs(100))
			}},
		{"invalidation that the client refuses", 3, fatalStrikes, verbs.AccessRemoteWrite,
			func(c *rawClient, seg rpcrdma.Segment) (*rpcrdma.Header, []byte) {
				seg.Handle ^= 0xff // another key
				return &rpcrdma.Header{XID: 3, HasReply: true, Reply: rpcrdma.Chunk{seg}}, rpcCall(3, progNFS, 3, 1,
					nil)
			}},
	} {
		// Which reply was refused is learned beside the connection's end, so that one more may be
		// needed.
		ends, c := 0, (*rawClient)(nil)
		for {
			c = dialRaw(t, addr, ownPrivate(true, 4096))
			hd, msg := x.call(c, c.register(rawChunkAt, 4096, x.offer))
			c.sendMsg(hd, msg)
			select {
			case <-c.down:
				c.close()
				if ends++; ends < 3*x.ends+3 {
					continue
				}
				t.Fatalf("%s: %d connections lost, and no end to it", x.name, ends)
			case r := <-c.got:
				want := rpcrdma.Header{XID: hd.XID, Vers: 1, Credits: defaultCredits, Proc: rpcrdma.ProcError,
					Err: rpcrdma.ErrChunk}
				if !bytes.Equal(r.msg, want.Append(nil)) || r.withInv || ends < x.ends {
					t.Errorf("%s: answer %x after %d connections, want %x after %d", x.name, r.msg, ends,
						want.Append(nil), x.ends)
				}
			case <-time.After(testTimeout):
				t.Fatalf("%s: no answer", x.name)
			}
			break
		}
		// The answer is given once: the XID is free for another call.
		rep, _, _ := c.exchange(&rpcrdma.Header{XID: x.xid}, rpcCall(x.xid, progNFS, 3, 1, []byte("args")))
		if rep.Proc != rpcrdma.ProcMsg {
			t.Errorf("%s: another call with the XID: %v %v", x.name, rep.Proc, rep.Err)
		}
		c.close()
	}
}

func TestFatalCallsBounded(t *testing.T) {
	f := newFatalCalls()
	a, b := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	if f.hopeless(a, 1) {
		t.Error("a call nobody knows is hopeless")
	}
	f.add(a, 1, fatalStrikes)
	f.add(a, 2, fatalStrikes-1)
	if !f.hopeless(a, 1) || f.hopeless(a, 2) || f.hopeless(b, 1) {
		t.Error("the wrong call is hopeless")
	}
	f.calls[fatalKey{a, 1}].Value.(*fatalCall).at = time.Now().Add(-2 * fatalMaxAge)
	if f.hopeless(a, 1) {
		t.Error("remembered for ever")
	}
	for xid := range uint32(3 * maxFatal) {
		f.add(b, xid, 1)
	}
	if len(f.calls) != maxFatal || f.order.Len() != maxFatal {
		t.Errorf("%d calls kept, want %d", len(f.calls), maxFatal)
	}
	for xid := range uint32(3 * maxFatal) {
		f.forget(b, xid)
	}
	if len(f.calls) != 0 || f.any.Load() {
		t.Errorf("%d calls left", len(f.calls))
	}
}

func TestDuplicateRequestBounds(t *testing.T) {
	d := newDRC(8)
	a, b := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	run := func(addr netip.Addr, xid uint32, msg string) (executed bool) {
		_, e, err := d.begin(t.Context(), d.key(addr, xid, []byte(msg)))
		if err != nil {
			t.Fatal(err)
		}
		if e != nil {
			d.finish(e, []byte("reply"))
		}
		return e != nil
	}
	run(a, 1, "call")
	for xid := range uint32(100) { // one client's flood
		run(b, xid, "call")
	}
	if run(a, 1, "call") {
		t.Error("another client's flood pushed out the reply")
	}
	if n := len(d.entries); n != d.answers.Len() || n > 8 || d.own[b].Len() != 4 {
		t.Errorf("%d entries, %d answers, %d of the client that floods; want at most 8, and 4", n, d.answers.Len(),
			d.own[b].Len())
	}
	if run(b, 99, "call") || !run(b, 0, "call") {
		t.Error("not the oldest was pushed out")
	}
	if !run(a, 1, "cal1") {
		t.Error("answered for another call")
	}
	d.maxAge = 0
	time.Sleep(time.Millisecond)
	if !run(a, 1, "call") {
		t.Error("kept for ever")
	}
	if _, e, _ := d.begin(t.Context(), d.key(a, 7, nil)); e == nil {
		t.Error("no entry")
	} else if d.finish(e, make([]byte, drcMaxReply+1)); d.entries[e.key] != nil {
		t.Error("a reply of any size is kept")
	}
}

// TestDuplicateRequestData: two WRITEs that differ in their last octet only are two calls, even
// under one XID.
func TestDuplicateRequestData(t *testing.T) {
	var seen []byte // the last octet of each call executed
	var mu sync.Mutex
	c := dialRaw(t, startServer(t, Config{Handler: HandlerFunc(func(_ context.Context, _ netip.AddrPort, call,
		reply []byte) ([]byte, error) {
		mu.Lock()
		defer mu.Unlock()
		seen = append(seen, call[len(call)-1])
		return sunrpc.AppendAcceptedReply(reply, binary.BigEndian.Uint32(call), 0), nil
	})}), ownPrivate(false, 4096))
	seg := c.register(rawChunkAt, 8192, verbs.AccessRemoteRead)
	for _, last := range []byte{0, 1, 1} {
		c.mem[rawChunkAt+8191] = last
		c.writeCall(1, seg)
		c.receive()
	}
	mu.Lock()
	defer mu.Unlock()
	if !bytes.Equal(seen, []byte{0, 1}) {
		t.Errorf("calls executed: %v, want each of the two once", seen)
	}
}

// TestReplyBeyondLimit: a reply that no message holds is an error of its call, not of the
// connection, which the client would lose again and again.
func TestReplyBeyondLimit(t *testing.T) {
	c := dialRaw(t, startServer(t, Config{Handler: &testHandler{}, MaxMessage: 64 << 10}), ownPrivate(false, 4096))
	seg := c.register(rawChunkAt, 1<<20, verbs.AccessRemoteWrite)
	c.wantErrChunk(&rpcrdma.Header{XID: 1, HasReply: true, Reply: rpcrdma.Chunk{seg}},
		rpcCall(1, testProg, 1, 1, sunrpc.AppendUint32(nil, 70000)))
	c.exchange(&rpcrdma.Header{XID: 2}, rpcCall(2, progNFS, 3, 0, nil))
}

// TestReplyNotHandedOver: the same of a handler that says so itself.
func TestReplyNotHandedOver(t *testing.T) {
	h := &testHandler{}
	c := dialRaw(t, startServer(t, Config{Handler: HandlerFunc(func(ctx context.Context, peer netip.AddrPort, call,
		reply []byte) ([]byte, error) {
		if binary.BigEndian.Uint32(call) == 1 {
			return nil, fmt.Errorf("backend: %w", ErrReplySize)
		}
		return h.ServeRPC(ctx, peer, call, reply)
	})}), ownPrivate(false, 4096))
	c.wantErrChunk(&rpcrdma.Header{XID: 1}, rpcCall(1, testProg, 1, 1, sunrpc.AppendUint32(nil, 100)))
	c.exchange(&rpcrdma.Header{XID: 2}, rpcCall(2, progNFS, 3, 0, nil))
}

// TestNeverAnswersErrors: neither an RDMA_ERROR of whatever version nor a reverse-direction reply
// is answered.
func TestNeverAnswersErrors(t *testing.T) {
	var stats Stats
	c := dialRaw(t, startServer(t, Config{Handler: &testHandler{}, Stats: &stats}), ownPrivate(false, 4096))
	be := binary.BigEndian
	var b []byte
	for _, w := range []uint32{1, 2, 8, uint32(rpcrdma.ProcError), 1, 1, 1} {
		b = be.AppendUint32(b, w)
	}
	c.sendBytes(b)
	h := rpcrdma.Header{XID: 2, Vers: 1}
	c.sendBytes(append(h.Append(nil), sunrpc.AppendAcceptedReply(nil, 3, 0)...)) // its XIDs differ
	rep, _, r := c.exchange(&rpcrdma.Header{XID: 4}, rpcCall(4, progNFS, 3, 0, nil))
	if rep.XID != 4 || stats.Discarded.Load() != 2 || stats.RDMAErrors.Load() != 0 {
		t.Errorf("answer %x; %d discarded, %d errors sent", bytes.TrimSpace(r.msg), stats.Discarded.Load(),
			stats.RDMAErrors.Load())
	}
}
