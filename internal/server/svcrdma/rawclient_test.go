package svcrdma

import (
	"bytes"
	"context"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func TestMain(m *testing.M) { kit.Main(m) }

// startServer runs Serve on loopback until the test ends.
func startServer(t testing.TB, cfg Config) netip.AddrPort {
	t.Helper()
	l, err := softiwarp.New(softiwarp.Config{}).Listen(context.Background(), netip.MustParseAddrPort("127.0.0.1:0"))
	kit.Must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- Serve(ctx, l, cfg) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Serve: %v", err)
		}
		if err := l.Close(); err != nil {
			t.Errorf("close listener: %v", err)
		}
	})
	return l.Addr()
}

// received is one message from the server.
type received struct {
	status  verbs.Status
	msg     []byte
	withInv bool
	inv     verbs.RKey
}

// rawClient is an RDMA client that sends and receives arbitrary bytes.
type rawClient struct {
	t    testing.TB
	id   verbs.ActiveID
	pd   verbs.PD
	cq   verbs.CQ
	qp   verbs.QP
	got  chan received
	down chan error

	mem    []byte // for Receives, Sends and chunks
	memMR  verbs.MR
	mrs    []verbs.MR
	key    uint8
	closed sync.Once
}

// Layout of rawClient.mem.
const (
	rawRecvSize = 16 << 10
	rawRecvs    = 64
	rawSendAt   = rawRecvSize * rawRecvs
	rawSendSize = 64 << 10
	rawChunkAt  = rawSendAt + rawSendSize
	rawMem      = rawChunkAt + 2<<20
)

// dialRaw connects with this private data. The client accepts 16 concurrent RDMA Reads.
func dialRaw(t testing.TB, addr netip.AddrPort, private []byte) *rawClient {
	t.Helper()
	c := newRaw(t, addr)
	kit.Must(t, c.connect(verbs.ConnParam{PrivateData: private, ResponderResources: 16}))
	return c
}

// newRaw returns a client that is not yet connected.
func newRaw(t testing.TB, addr netip.AddrPort) *rawClient {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), kit.Timeout)
	defer cancel()
	id, err := softiwarp.New(softiwarp.Config{}).Resolve(ctx, addr)
	kit.Must(t, err)
	c := &rawClient{t: t, id: id, got: make(chan received, rawRecvs), down: make(chan error, 1)}
	t.Cleanup(c.close)
	c.pd, err = id.Device().AllocPD()
	kit.Must(t, err)
	c.cq, err = id.Device().CreateCQ(512)
	kit.Must(t, err)
	c.qp, err = id.CreateQP(c.pd, verbs.QPInitAttr{SendCQ: c.cq, RecvCQ: c.cq, MaxSendWR: 64, MaxRecvWR: rawRecvs,
		MaxSendSGE: 1, OnDisconnect: func(cause error) { c.down <- cause }})
	kit.Must(t, err)
	c.mem, err = membuf.Alloc(rawMem)
	kit.Must(t, err)
	c.memMR, err = c.pd.RegMR(c.mem)
	kit.Must(t, err)
	for i := range rawRecvs {
		c.postRecv(c.mem[i*rawRecvSize : (i+1)*rawRecvSize])
	}
	return c
}

func (c *rawClient) connect(param verbs.ConnParam) error {
	ctx, cancel := context.WithTimeout(context.Background(), kit.Timeout)
	defer cancel()
	return c.id.Connect(ctx, param)
}

func (c *rawClient) postRecv(buf []byte) {
	// An error means that the client is closing.
	_, _ = c.qp.PostRecv(&verbs.RecvRequest{SGE: verbs.SGE{Buf: buf, LKey: c.memMR.LKey()},
		Done: func(wc *verbs.WorkCompletion) {
			if wc.Status != verbs.StatusSuccess {
				return
			}
			c.got <- received{wc.Status, bytes.Clone(buf[:wc.ByteLen]), wc.WithInv, wc.InvalidatedRKey}
			c.postRecv(buf)
		}})
}

func (c *rawClient) close() {
	c.closed.Do(func() {
		_ = c.id.Close()
		for _, mr := range c.mrs {
			kit.Must(c.t, mr.Dereg())
		}
		if c.memMR != nil {
			kit.Must(c.t, c.memMR.Dereg())
			membuf.Free(c.mem)
		}
		if c.cq != nil {
			kit.Must(c.t, c.cq.Close())
			kit.Must(c.t, c.pd.Dealloc())
		}
	})
}

// register registers mem[at:at+n] for access by the peer and returns its segment.
func (c *rawClient) register(at, n int, access verbs.Access) rpcrdma.Segment {
	c.t.Helper()
	mr, err := c.pd.AllocMR(600)
	kit.Must(c.t, err)
	c.mrs = append(c.mrs, mr)
	c.key++
	addr := uint64(0xabc<<32) + uint64(at)
	done := make(chan verbs.Status, 1)
	_, err = c.qp.PostSend(&verbs.WorkRequest{Opcode: verbs.OpFastReg, Signaled: true, MR: mr, NewKey: c.key,
		Access: access, IOVA: addr, Segs: [][]byte{c.mem[at : at+n]}, Done: func(
			wc *verbs.WorkCompletion) {
			done <- wc.Status
		}})
	kit.Must(c.t, err)
	if st := <-done; st != verbs.StatusSuccess {
		c.t.Fatalf("FastReg: %v", st)
	}
	return rpcrdma.Segment{Handle: uint32(mr.RKey().WithKey(c.key)), Length: uint32(n), Offset: addr}
}

func (c *rawClient) sendBytes(b []byte) {
	c.t.Helper()
	buf := c.mem[rawSendAt : rawSendAt+len(b)]
	copy(buf, b)
	done := make(chan verbs.Status, 1)
	_, err := c.qp.PostSend(&verbs.WorkRequest{Opcode: verbs.OpSend, Signaled: true,
		SGList: []verbs.SGE{{Buf: buf, LKey: c.memMR.LKey()}},
		Done:   func(wc *verbs.WorkCompletion) { done <- wc.Status }})
	kit.Must(c.t, err)
	if st := <-done; st != verbs.StatusSuccess {
		c.t.Fatalf("Send: %v", st)
	}
}

func (c *rawClient) sendMsg(h *rpcrdma.Header, body []byte) {
	c.t.Helper()
	h.Vers = max(h.Vers, 1)
	h.Credits = 32
	c.sendBytes(append(h.Append(nil), body...))
}

func (c *rawClient) receive() received {
	c.t.Helper()
	select {
	case r := <-c.got:
		return r
	case err := <-c.down:
		c.t.Fatalf("connection lost: %v", err)
	case <-time.After(kit.Timeout):
		c.t.Fatalf("no message received in %v", kit.Timeout)
	}
	panic("unreachable")
}

// exchange sends a call and returns the decoded reply.
func (c *rawClient) exchange(h *rpcrdma.Header, body []byte) (rpcrdma.Header, []byte, received) {
	c.t.Helper()
	c.sendMsg(h, body)
	r := c.receive()
	var reply rpcrdma.Header
	n, err := reply.Decode(r.msg)
	if err != nil {
		c.t.Fatalf("reply %x: %v", r.msg, err)
	}
	return reply, r.msg[n:], r
}

// rpcCall encodes a call with an AUTH_NONE credential.
func rpcCall(xid, prog, vers, proc uint32, args []byte) []byte {
	b := sunrpc.AppendCall(nil, xid, prog, vers, proc, sunrpc.AppendAuthNone(nil))
	return append(b, args...)
}

func ownPrivate(remoteInv bool, size int) []byte {
	return rpcrdma.Private{RemoteInv: remoteInv, SendSize: size, RecvSize: size}.Append(nil)
}
