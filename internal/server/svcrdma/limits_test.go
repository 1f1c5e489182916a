package svcrdma

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// cause waits for the end of the connection and returns its cause.
func (c *rawClient) cause() error {
	c.t.Helper()
	select {
	case err := <-c.down:
		return err
	case <-time.After(kit.Timeout):
		c.t.Fatalf("connection is still open after %v", kit.Timeout)
	}
	panic("unreachable")
}

// TestIdleTimeoutNeedsNoCalls checks that IdleTimeout runs only while no call is in progress.
func TestIdleTimeoutNeedsNoCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const limit, step = time.Minute, 50 * time.Second
		c := &conn{server: &server{cfg: Config{IdleTimeout: limit, TransferTimeout: limit, CallTimeout: limit}},
			startedAt: time.Now()}
		c.ctx, c.cancel = context.WithCancelCause(t.Context())
		c.idle.start(c.age())
		go c.watch()
		for range 3 {
			time.Sleep(step)
			if !c.callBegins() {
				t.Fatal("the server executes no calls")
			}
			time.Sleep(3 * limit)
			c.callEnds()
		}
		time.Sleep(step)
		if err := context.Cause(c.ctx); err != nil {
			t.Errorf("connection ended with %v, want it open", err)
		}
		time.Sleep(step)
		if err := context.Cause(c.ctx); err != errIdle {
			t.Errorf("idle connection: got %v, want %v", err, errIdle)
		}
	})
}

// writeCall sends a WRITE whose data is a Read chunk.
func (c *rawClient) writeCall(xid uint32, seg rpcrdma.Segment) {
	c.t.Helper()
	body := rpcCall(xid, progNFS, 3, procWrite, writeHead(int(seg.Length)))
	c.sendMsg(&rpcrdma.Header{XID: xid, Reads: []rpcrdma.ReadSegment{{Position: uint32(len(body)), Segment: seg}}},
		body)
}

// TestTransferTimeoutOfRDMARead uses a client that does not answer an RDMA Read Request.
func TestTransferTimeoutOfRDMARead(t *testing.T) {
	h := &testHandler{}
	var stats Stats
	addr := startServer(t, Config{Handler: h, TransferTimeout: 100 * time.Millisecond, Stats: &stats})
	r := startRelay(t, addr)
	c := dialRaw(t, r.Addr(), ownPrivate(false, 4096))
	seg := c.register(rawChunkAt, 8192, verbs.AccessRemoteRead)
	r.toClient.closeAtNext(&r.toServer)
	c.writeCall(2, seg)
	c.cause()
	if h.calls.Load() != 0 {
		t.Errorf("got %d executed calls, want none", h.calls.Load())
	}
	waitReleased(t, &stats)
}

// waitReleased waits until the server has released every connection.
func waitReleased(t *testing.T, stats *Stats) {
	t.Helper()
	kit.Eventually(t, "release of the connections", func() bool { return stats.Connections.Load() == 0 })
}

// TestTransferTimeoutOfReply uses a client that does not read its replies.
func TestTransferTimeoutOfReply(t *testing.T) {
	var stats Stats
	addr := startServer(t, Config{Handler: &testHandler{}, TransferTimeout: 100 * time.Millisecond, Stats: &stats})
	r := startRelay(t, addr)
	c := dialRaw(t, r.Addr(), ownPrivate(false, 4096))
	seg := c.register(rawChunkAt, 1<<20, verbs.AccessRemoteWrite)
	r.toClient.close()
	for xid := range uint32(40) { // more than the socket buffers hold
		h := rpcrdma.Header{XID: xid + 1, Vers: 1, Credits: 32, Writes: []rpcrdma.Chunk{{seg}}}
		if !c.trySend(append(h.Append(nil), rpcCall(xid+1, progNFS, 3, procRead, readArgs(1<<20))...)) {
			break
		}
	}
	waitReleased(t, &stats)
}

// TestCallTimeoutEndsConnection uses a Handler that waits for the end of its context. GETATTR is
// idempotent, REMOVE is not.
func TestCallTimeoutEndsConnection(t *testing.T) {
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
	for { // a busy machine may also delay the last call by more than CallTimeout
		again := dialRaw(t, addr, ownPrivate(false, 4096))
		again.sendMsg(&rpcrdma.Header{XID: 1}, rpcCall(1, progNFS, 3, 12, nil))
		select {
		case r := <-again.got:
			if want := sunrpc.AppendAcceptedReply(nil, 1, 0); !bytes.HasSuffix(r.msg, want) {
				t.Errorf("retransmitted call: got reply %x, want %x", r.msg, want)
			}
			return
		case <-again.down:
		}
	}
}

// TestCallTimeoutAfterConnectionLoss checks that CallTimeout also ends a non-idempotent call whose
// connection is lost.
func TestCallTimeoutAfterConnectionLoss(t *testing.T) {
	started, ended := make(chan struct{}), make(chan struct{})
	var stats Stats
	addr := startServer(t, Config{CallTimeout: 50 * time.Millisecond, Stats: &stats,
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
	<-ended
	waitReleased(t, &stats)
}

// TestMessageMemoryLimitsConcurrentCalls gives the server memory for one call with chunks. The
// clients send many calls, and the server must execute all of them one after the other. The unused
// buffers of the first connection must not block the others.
func TestMessageMemoryLimitsConcurrentCalls(t *testing.T) {
	const size = 256 << 10
	var now, most atomic.Int64
	addr := startServer(t, Config{Credits: 16, MaxMessage: size, MessageMemory: 2 * size,
		Handler: HandlerFunc(func(_ context.Context, _ netip.AddrPort, call, reply []byte) ([]byte, error) {
			n := now.Add(1)
			defer now.Add(-1)
			for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
			}
			runtime.Gosched()
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
						t.Errorf("got reply %v, error %v; want %v", h.Proc, err, rpcrdma.ProcMsg)
					}
				case <-time.After(kit.Timeout):
					t.Errorf("no reply in %v", kit.Timeout)
					return
				}
			}
		})
		if i == 0 {
			all.Wait() // the first connection now keeps unused buffers
		}
	}
	all.Wait()
	if most.Load() != 1 {
		t.Errorf("got %d concurrent calls, want 1", most.Load())
	}
}

// TestFatalCallsGetErrChunk retransmits calls whose chunks end every connection. The server must
// reply with ERR_CHUNK after some connections (RFC 8166 §4.5.3).
func TestFatalCallsGetErrChunk(t *testing.T) {
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
		{"refused Read", 1, 1, verbs.AccessRemoteWrite,
			func(c *rawClient, seg rpcrdma.Segment) (*rpcrdma.Header, []byte) {
				return &rpcrdma.Header{XID: 1,
					Reads: []rpcrdma.ReadSegment{{Position: uint32(len(body)), Segment: seg}}}, body
			}},
		{"refused Write", 2, fatalStrikes, verbs.AccessRemoteRead,
			func(c *rawClient, seg rpcrdma.Segment) (*rpcrdma.Header, []byte) {
				return &rpcrdma.Header{XID: 2, Writes: []rpcrdma.Chunk{{seg}}},
					rpcCall(2, progNFS, 3, procRead, readArgs(100))
			}},
		{"refused invalidation", 3, fatalStrikes, verbs.AccessRemoteWrite,
			func(c *rawClient, seg rpcrdma.Segment) (*rpcrdma.Header, []byte) {
				seg.Handle ^= 0xff // another key
				return &rpcrdma.Header{XID: 3, HasReply: true, Reply: rpcrdma.Chunk{seg}},
					rpcCall(3, progNFS, 3, 1, nil)
			}},
	} {
		// The server may count the strikes after the client has reconnected, so one more connection
		// may be necessary.
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
				t.Fatalf("%s: %d connections lost, want %d before ERR_CHUNK", x.name, ends, x.ends)
			case r := <-c.got:
				want := rpcrdma.Header{XID: hd.XID, Vers: 1, Credits: defaultCredits, Proc: rpcrdma.ProcError,
					Err: rpcrdma.ErrChunk}
				if !bytes.Equal(r.msg, want.Append(nil)) || r.withInv || ends < x.ends {
					t.Errorf("%s: got reply %x after %d connections, want %x after %d", x.name, r.msg, ends,
						want.Append(nil), x.ends)
				}
			case <-time.After(kit.Timeout):
				t.Fatalf("%s: no reply in %v", x.name, kit.Timeout)
			}
			break
		}
		// After the reply, the client may reuse the XID for another call.
		rep, _, _ := c.exchange(&rpcrdma.Header{XID: x.xid}, rpcCall(x.xid, progNFS, 3, 1, []byte("args")))
		if rep.Proc != rpcrdma.ProcMsg {
			t.Errorf("%s: another call with the XID: got %v %v, want %v", x.name, rep.Proc, rep.Err, rpcrdma.ProcMsg)
		}
		c.close()
	}
}

func TestFatalCallsLimits(t *testing.T) {
	f := newFatalCalls()
	a, b := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	if f.isFatal(a, 1) {
		t.Error("unknown call: got fatal")
	}
	f.add(a, 1, fatalStrikes)
	f.add(a, 2, fatalStrikes-1)
	if !f.isFatal(a, 1) || f.isFatal(a, 2) || f.isFatal(b, 1) {
		t.Error("got another set of fatal calls than the one with three strikes")
	}
	f.mu.calls[fatalKey{a, 1}].Value.(*fatalCall).lastAt = time.Now().Add(-2 * fatalMaxAge)
	if f.isFatal(a, 1) {
		t.Error("call older than fatalMaxAge: got fatal")
	}
	for xid := range uint32(3 * maxFatal) {
		f.add(b, xid, 1)
	}
	if len(f.mu.calls) != maxFatal || f.mu.order.Len() != maxFatal {
		t.Errorf("got %d calls, want %d", len(f.mu.calls), maxFatal)
	}
	for xid := range uint32(3 * maxFatal) {
		f.forget(b, xid)
	}
	if len(f.mu.calls) != 0 || f.any.Load() {
		t.Errorf("got %d calls after forget, want none", len(f.mu.calls))
	}
}

func TestDuplicateRequestCacheLimits(t *testing.T) {
	d := newDRC(8)
	a, b := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	run := func(addr netip.Addr, xid uint32, msg string) (executed bool) {
		_, e, err := d.begin(t.Context(), d.key(addr, xid, []byte(msg)))
		kit.Must(t, err)
		if e != nil {
			d.finish(e, []byte("reply"))
		}
		return e != nil
	}
	run(a, 1, "call")
	for xid := range uint32(100) { // many calls of one client
		run(b, xid, "call")
	}
	if run(a, 1, "call") {
		t.Error("calls of another client evicted the reply")
	}
	if n := len(d.mu.entries); n != d.mu.replied.Len() || n > 8 || d.mu.own[b].Len() != 4 {
		t.Errorf("got %d entries, %d replies, %d of the client with many calls; want at most 8, and 4 of the client",
			n, d.mu.replied.Len(), d.mu.own[b].Len())
	}
	if run(b, 99, "call") || !run(b, 0, "call") {
		t.Error("evicted reply: got a newer one, want the oldest")
	}
	if !run(a, 1, "cal1") {
		t.Error("got the cached reply of another call")
	}
	d.maxAge = -1
	if !run(a, 1, "call") {
		t.Error("got a cached reply older than maxAge")
	}
	if _, e, _ := d.begin(t.Context(), d.key(a, 7, nil)); e == nil {
		t.Error("new call: got no entry")
	} else if d.finish(e, make([]byte, drcMaxReply+1)); d.mu.entries[e.key] != nil {
		t.Error("got a cached reply above drcMaxReply")
	}
}

// TestDuplicateRequestCacheComparesData sends WRITEs with the same XID that differ in the last
// byte.
func TestDuplicateRequestCacheComparesData(t *testing.T) {
	var seen []byte // last byte of each executed call
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
		t.Errorf("got executed calls %v, want 0 and 1 once each", seen)
	}
}

// TestTooLargeReplyGetsErrChunk checks that a reply above MaxMessage ends only its call. If it
// ended the connection, every retransmission would end another one.
func TestTooLargeReplyGetsErrChunk(t *testing.T) {
	c := dialRaw(t, startServer(t, Config{Handler: &testHandler{}, MaxMessage: 64 << 10}), ownPrivate(false, 4096))
	seg := c.register(rawChunkAt, 1<<20, verbs.AccessRemoteWrite)
	c.wantErrChunk(&rpcrdma.Header{XID: 1, HasReply: true, Reply: rpcrdma.Chunk{seg}},
		rpcCall(1, testProg, 1, 1, sunrpc.AppendUint32(nil, 70000)))
	c.exchange(&rpcrdma.Header{XID: 2}, rpcCall(2, progNFS, 3, 0, nil))
}

// TestErrReplySizeGetsErrChunk checks a Handler that returns ErrReplySize.
func TestErrReplySizeGetsErrChunk(t *testing.T) {
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

// TestMessageMemoryIsShared lets two client addresses keep all the message memory that they can
// get. They must leave memory to others.
func TestMessageMemoryIsShared(t *testing.T) {
	const buffers = 8
	m := newMemBudget(buffers)
	expired, cancel := context.WithCancel(context.Background())
	cancel()
	for i, want := range []int{buffers / 2, buffers / 4, buffers / 8} { // each at most half of what is left
		c := &conn{addr: netip.AddrFrom4([4]byte{192, 0, 2, byte(i)})}
		m.join(c)
		defer m.leave(c)
		took := 0
		for range buffers {
			if m.take(expired, c, 1) == nil {
				took++
			}
		}
		if took != want {
			t.Errorf("buffers of client %d: got %d, want %d", i, took, want)
		}
		defer m.give(c, took)
	}
}
