package svcrdma

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// TestReceiveIsPostedBeforeReply keeps every credit in use: the client sends the next call directly
// after each reply. A server that posts the Receive after the reply has no buffer for this call
// (RFC 8166 §3.3.1).
func TestReceiveIsPostedBeforeReply(t *testing.T) {
	const credits, calls = 4, 500
	h := &testHandler{}
	c := dialRaw(t, startServer(t, Config{Credits: credits, Handler: h}), ownPrivate(false, 4096))
	for xid := range uint32(credits) {
		c.sendMsg(&rpcrdma.Header{XID: xid}, rpcCall(xid, progNFS, 3, 0, nil))
	}
	for xid := uint32(credits); xid < calls; xid++ {
		c.receive()
		c.sendMsg(&rpcrdma.Header{XID: xid}, rpcCall(xid, progNFS, 3, 0, nil))
	}
	for range credits {
		c.receive()
	}
	if n := h.calls.Load(); n != calls {
		t.Errorf("got %d executed calls, want %d", n, calls)
	}
}

// trySend is sendBytes on a connection that may be closed. It reports success.
func (c *rawClient) trySend(b []byte) bool {
	buf := c.mem[rawSendAt : rawSendAt+len(b)]
	copy(buf, b)
	done := make(chan verbs.Status, 1)
	_, err := c.qp.PostSend(&verbs.WorkRequest{Opcode: verbs.OpSend, Signaled: true,
		SGList: []verbs.SGE{{Buf: buf, LKey: c.memMR.LKey()}},
		Done:   func(wc *verbs.WorkCompletion) { done <- wc.Status }})
	return err == nil && <-done == verbs.StatusSuccess
}

// TestConnectionLimitPerAddress checks that one address can use half of MaxConns, and that a closed
// connection does not count.
func TestConnectionLimitPerAddress(t *testing.T) {
	var stats Stats
	addr := startServer(t, Config{Handler: &testHandler{}, MaxConns: 4, Stats: &stats})
	a := dialRaw(t, addr, nil)
	dialRaw(t, addr, nil)
	third := newRaw(t, addr)
	var refused *verbs.ConnError
	if err := third.connect(verbs.ConnParam{ResponderResources: 16}); !errors.As(err, &refused) ||
		refused.Kind != verbs.ConnRejected {
		t.Errorf("third connection of one client: got error %v, want %v", err, verbs.ConnRejected)
	}
	a.close()
	kit.Eventually(t, "connection after one was closed", func() bool {
		again := newRaw(t, addr)
		err := again.connect(verbs.ConnParam{ResponderResources: 16})
		if err != nil {
			again.close()
		}
		return err == nil
	})

	c := newConnCount(5)
	one, two := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	three := netip.MustParseAddr("192.0.2.3")
	for i, x := range []struct {
		from netip.Addr
		want bool
	}{{one, true}, {one, true}, {one, true}, {one, false}, {two, true}, {two, true}, {two, false}, {three, false}} {
		if c.admit(x.from) != x.want {
			t.Errorf("connection %d from %v: got admitted %v, want %v", i, x.from, !x.want, x.want)
		}
	}
	for _, from := range []netip.Addr{one, one, one, two, two} {
		c.leave(from)
	}
	if c.mu.all != 0 || len(c.mu.own) != 0 {
		t.Errorf("got %d connections of %d clients, want none", c.mu.all, len(c.mu.own))
	}
}

// TestReadChunkWithoutReadDepth uses a client with an IRD of 0, which accepts no RDMA Read.
func TestReadChunkWithoutReadDepth(t *testing.T) {
	c := newRaw(t, startServer(t, Config{Handler: &testHandler{}}))
	kit.Must(t, c.connect(verbs.ConnParam{}))
	seg := c.register(rawChunkAt, 4096, verbs.AccessRemoteRead)
	body := rpcCall(1, progNFS, 3, procWrite, writeHead(4096))
	c.wantErrChunk(&rpcrdma.Header{XID: 1, Reads: []rpcrdma.ReadSegment{{Position: uint32(len(body)), Segment: seg}}},
		body)
	c.exchange(&rpcrdma.Header{XID: 2}, rpcCall(2, progNFS, 3, 0, nil))
}
