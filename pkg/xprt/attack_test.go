package xprt

import (
	"bytes"
	"context"
	"encoding/binary"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
)

// An attacker serves READ and WRITE of NFSv3 as it should, one call at a time, until it is told to attack: then, after it
// answered a call, it does something that no server may.
type attacker struct {
	mu     sync.Mutex
	attack func(c *attackConn, h *rpcrdma.Header) // guarded by mu; used once
	struck chan struct{}
}

type attackConn struct {
	qp   verbs.QP
	recv chan []byte
	mem  []byte
	done chan verbs.Status
}

func startAttacker(t *testing.T) (*attacker, netip.AddrPort) {
	t.Helper()
	a := &attacker{struck: make(chan struct{}, 1)}
	l, err := softiwarp.New(softiwarp.Config{}).Listen(context.Background(), netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var conns sync.WaitGroup
	conns.Go(func() {
		for {
			req, err := l.Accept(ctx)
			if err != nil {
				return
			}
			conns.Go(func() { a.serve(ctx, t, req) })
		}
	})
	t.Cleanup(func() {
		cancel()
		l.Close()
		conns.Wait()
	})
	return a, l.Addr()
}

func (a *attacker) serve(ctx context.Context, t *testing.T, req verbs.ConnRequest) {
	dev := req.Device()
	pd, err := dev.AllocPD()
	if err != nil {
		t.Error(err)
		return
	}
	cq, err := dev.CreateCQ(64)
	if err != nil {
		t.Error(err)
		return
	}
	gone := make(chan struct{})
	qp, err := req.CreateQP(pd, verbs.QPInitAttr{SendCQ: cq, RecvCQ: cq, MaxSendWR: 32, MaxRecvWR: 32, MaxSendSGE: 4,
		OnDisconnect: func(error) { close(gone) }})
	if err != nil {
		t.Error(err)
		return
	}
	c := &attackConn{qp: qp, recv: make(chan []byte, 32), mem: make([]byte, 1<<20), done: make(chan verbs.Status, 1)}
	defer func() {
		req.Close()
		cq.Close()
		if err := pd.Dealloc(); err != nil {
			t.Error(err)
		}
	}()
	for range 16 {
		r := &verbs.RecvRequest{SGE: verbs.SGE{Buf: make([]byte, 4096)}}
		r.Done = func(wc *verbs.WorkCompletion) {
			if wc.Status == verbs.StatusSuccess {
				c.recv <- bytes.Clone(r.SGE.Buf[:wc.ByteLen])
				qp.PostRecv(r)
			}
		}
		if _, err := qp.PostRecv(r); err != nil {
			t.Error(err)
			return
		}
	}
	private := rpcrdma.Private{SendSize: 4096, RecvSize: 4096}.Append(nil)
	if err := req.Accept(ctx, verbs.ConnParam{PrivateData: private, InitiatorDepth: 16}); err != nil {
		return
	}
	for {
		select {
		case call := <-c.recv:
			a.answer(c, call)
		case <-gone:
			return
		case <-ctx.Done():
			return
		}
	}
}

// do posts one request and waits for its end.
func (c *attackConn) do(wr *verbs.WorkRequest) verbs.Status {
	wr.Signaled = true
	wr.Done = func(wc *verbs.WorkCompletion) { c.done <- wc.Status }
	if _, err := c.qp.PostSend(wr); err != nil {
		return verbs.StatusWRFlushErr
	}
	return <-c.done
}

func (c *attackConn) write(s rpcrdma.Segment, at int64, data []byte) verbs.Status {
	return c.do(&verbs.WorkRequest{Opcode: verbs.OpRDMAWrite, RKey: verbs.RKey(s.Handle), RemoteAddr: s.Offset + uint64(at), SGList: []verbs.SGE{{Buf: data}}})
}

func (c *attackConn) read(s rpcrdma.Segment, at int64, n int) verbs.Status {
	return c.do(&verbs.WorkRequest{Opcode: verbs.OpRDMARead, RKey: verbs.RKey(s.Handle), RemoteAddr: s.Offset + uint64(at), SGList: []verbs.SGE{{Buf: c.mem[:n]}}})
}

func (a *attacker) answer(c *attackConn, msg []byte) {
	var h rpcrdma.Header
	n, err := h.Decode(msg)
	if err != nil {
		return
	}
	call, args, err := sunrpc.ParseCall(msg[n:])
	if err != nil {
		return
	}
	a.mu.Lock()
	attack := a.attack
	a.attack = nil
	a.mu.Unlock()

	d := sunrpc.NewDecoder(args)
	d.Opaque(64)
	off, count := d.Uint64(), d.Uint32()
	out := h
	out.Credits = 16
	out.Reads = nil
	reply := sunrpc.AppendAcceptedReply(nil, call.XID, sunrpc.Success)
	switch call.Proc {
	case 6:
		if len(h.Writes) > 0 {
			c.write(h.Writes[0][0], 0, fill(off, int(count)))
		}
		for _, v := range []uint32{0, 0, count, 0, count} {
			reply = binary.BigEndian.AppendUint32(reply, v)
		}
		if len(h.Writes) == 0 { // whatever the inline threshold is
			reply = append(reply, fill(off, int(count))...)
		}
	case 7:
		if len(h.Reads) > 0 {
			c.read(h.Reads[0].Segment, 0, int(h.Reads[0].Length))
		}
		for _, v := range []uint32{0, 0, 0, count, 2, 0, 42} {
			reply = binary.BigEndian.AppendUint32(reply, v)
		}
	}
	c.do(&verbs.WorkRequest{Opcode: verbs.OpSend, SGList: []verbs.SGE{{Buf: append(out.Append(nil), reply...)}}})
	if attack != nil {
		time.Sleep(20 * time.Millisecond) // the client has ended the call
		attack(c, &h)
		a.struck <- struct{}{}
	}
}

// TestAttacks plays a server that reaches for memory it has no right to. Each attempt must be refused by the device, end the connection, be
// counted, and leave the memory and the next call's data alone.
func TestAttacks(t *testing.T) {
	bad := bytes.Repeat([]byte{0xbd}, 64)
	const size = 40000
	cases := []struct {
		name   string
		write  bool // attack a WRITE's read chunk instead of a READ's write chunk
		attack func(c *attackConn, h *rpcrdma.Header)
	}{
		{"late write", false, func(c *attackConn, h *rpcrdma.Header) { c.write(h.Writes[0][0], 0, bad) }},
		{"late write of one octet at the end", false, func(c *attackConn, h *rpcrdma.Header) { c.write(h.Writes[0][0], size-1, bad[:1]) }},
		{"write beyond the end", false, func(c *attackConn, h *rpcrdma.Header) { c.write(h.Writes[0][0], size, bad) }},
		{"write before the start", false, func(c *attackConn, h *rpcrdma.Header) { c.write(h.Writes[0][0], -1, bad) }},
		{"read of a write chunk", false, func(c *attackConn, h *rpcrdma.Header) { c.read(h.Writes[0][0], 0, 64) }},
		{"write with the next key", false, func(c *attackConn, h *rpcrdma.Header) {
			s := h.Writes[0][0]
			s.Handle++
			c.write(s, 0, bad)
		}},
		{"write with a neighbour's index", false, func(c *attackConn, h *rpcrdma.Header) {
			s := h.Writes[0][0]
			s.Handle += 1 << 8
			c.write(s, 0, bad)
		}},
		{"late read", true, func(c *attackConn, h *rpcrdma.Header) { c.read(h.Reads[0].Segment, 0, 64) }},
		{"write to a read chunk", true, func(c *attackConn, h *rpcrdma.Header) { c.write(h.Reads[0].Segment, 0, bad) }},
		{"overlong read", true, func(c *attackConn, h *rpcrdma.Header) { c.read(h.Reads[0].Segment, 0, size+1) }},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			a, addr := startAttacker(t)
			tr := dial(t, addr, nil)
			c, ctx, fh := nfs3.NewClient(tr, nfs3.Options{}), testContext(t), testFH(t)
			buf := fill(0, size)
			a.mu.Lock()
			a.attack = tc.attack
			a.mu.Unlock()
			var r nfs3.ReadResult
			var w nfs3.WriteResult
			var err error
			if tc.write {
				err = c.Write(ctx, noCred, fh, 0, buf, nfs3.FileSync, &w)
			} else {
				err = c.Read(ctx, noCred, fh, 0, buf, &r)
			}
			if err != nil {
				t.Fatal(err)
			}
			for i := range buf {
				buf[i] = 0x55
			}
			<-a.struck
			if i := bytes.IndexFunc(buf, func(r rune) bool { return r != 0x55 }); i >= 0 {
				t.Fatalf("octet %d was changed after the call had ended", i)
			}
			next := make([]byte, size)
			if err := c.Read(ctx, noCred, fh, 3, next, &r); err != nil || !bytes.Equal(next, fill(3, size)) {
				t.Fatalf("next read: %v, or wrong octets", err)
			}
			s := tr.Stats()
			if s.RemoteAccessErrors == 0 || s.Connects < 2 {
				t.Errorf("%d accesses refused, %d connections; want at least 1 and 2", s.RemoteAccessErrors, s.Connects)
			}
		})
	}
}
