package hostile

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/faults"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

const (
	// attackSize is the number of bytes that an attacked call reads or writes. It is more than the
	// inline threshold and less than an arena.
	attackSize = 40000
	// attackTimeout bounds one request of the server. A device may not answer a forbidden request.
	attackTimeout = 3 * time.Second
	attackDepth   = 32
	attackMessage = 16 << 10 // bytes of a Receive; the inline threshold is smaller
	attackInline  = 4096
	guard         = 0x55 // fills memory that the server must not read or change
)

// A Server answers READ and WRITE of NFSv3 correctly, one call at a time on each connection, until
// arm gives it an attack.
type Server struct {
	t  testing.TB
	l  verbs.Listener
	mu sync.Mutex

	// mu guards the fields up to held.
	plan  *attack   // the next attack; one call takes it
	conns []*conn   // open connections, in the order of their start
	held  *heldCall // first call of an attack with twoCalls

	proceed chan struct{}     // closed when the call has ended and a late attack may begin
	outcome chan verbs.Status // status of the attack
}

type heldCall struct {
	h   rpcrdma.Header
	msg []byte
}

type conn struct {
	v        *Server
	qp       verbs.QP
	calls    chan []byte
	mem      verbs.SGE // messages
	private  verbs.SGE // data of permitted RDMA Writes and Reads
	attacker *faults.Attacker
}

// Content returns the n bytes that a READ at offset off returns.
func Content(off uint64, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		o := off + uint64(i)
		b[i] = byte(o) ^ byte(o>>8)*7 ^ byte(o>>16)*31
	}
	return b
}

// right reports whether b holds the bytes that a READ at offset off returns.
func right(b []byte, off uint64) bool { return bytes.Equal(b, Content(off, len(b))) }

// Serve starts a server on addr until the test ends. Without an attack of [Attacks] the server
// follows the protocol.
func Serve(t testing.TB, p verbs.Provider, addr netip.AddrPort) *Server {
	t.Helper()
	v := &Server{t: t, proceed: make(chan struct{}), outcome: make(chan verbs.Status, 1)}
	var err error
	v.l, err = p.Listen(context.Background(), addr)
	kit.Must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	var conns sync.WaitGroup
	conns.Go(func() {
		for {
			req, err := v.l.Accept(ctx)
			if err != nil {
				return
			}
			conns.Go(func() {
				if err := v.serve(ctx, req); err != nil && ctx.Err() == nil {
					t.Errorf("server connection: %v", err)
				}
			})
		}
	})
	t.Cleanup(func() {
		cancel()
		v.l.Close()
		conns.Wait()
	})
	return v
}

// Addr returns the listen address.
func (v *Server) Addr() netip.AddrPort { return v.l.Addr() }

func (v *Server) arm(a *attack) {
	v.mu.Lock()
	v.plan = a
	v.mu.Unlock()
}

// serve serves one connection.
func (v *Server) serve(ctx context.Context, req verbs.ConnRequest) (err error) {
	dev := req.Device()
	pd, err := dev.AllocPD()
	if err != nil {
		return errors.Join(err, req.Close())
	}
	cq, err := dev.CreateCQ(2 * attackDepth)
	if err != nil {
		return errors.Join(err, req.Close(), pd.Dealloc())
	}
	c := &conn{v: v, calls: make(chan []byte, attackDepth)}
	var mrs []verbs.MR
	var bufs [][]byte
	memory := func(n int) verbs.SGE {
		b, e := membuf.Alloc(n)
		if e != nil {
			err = errors.Join(err, e)
			return verbs.SGE{}
		}
		bufs = append(bufs, b)
		m, e := pd.RegMR(b)
		if e != nil {
			err = errors.Join(err, e)
			return verbs.SGE{}
		}
		mrs = append(mrs, m)
		return verbs.SGE{Buf: b, LKey: m.LKey()}
	}
	c.mem, c.private = memory(attackMessage), memory(1<<20)
	in := memory(attackDepth / 2 * attackMessage)
	attacker, e := faults.NewAttacker(pd)
	c.attacker, err = attacker, errors.Join(err, e)
	defer func() {
		v.forget(c)
		err = errors.Join(err, req.Close(), cq.Close())
		for _, m := range mrs {
			err = errors.Join(err, m.Dereg())
		}
		if attacker != nil {
			err = errors.Join(err, attacker.Close())
		}
		err = errors.Join(err, pd.Dealloc())
		for _, b := range bufs {
			membuf.Free(b)
		}
	}()
	if err != nil {
		return err
	}
	gone := make(chan struct{})
	if c.qp, err = req.CreateQP(pd, verbs.QPInitAttr{SendCQ: cq, RecvCQ: cq, MaxSendWR: attackDepth,
		MaxRecvWR: attackDepth, MaxSendSGE: 1,
		OnDisconnect: func(error) { close(gone) }}); err != nil {
		return err
	}
	if err := c.postReceives(in); err != nil {
		return err
	}
	private := rpcrdma.Private{SendSize: attackInline, RecvSize: attackInline}.Append(nil)
	if req.Accept(ctx, verbs.ConnParam{PrivateData: private, InitiatorDepth: 16}) != nil {
		return nil // the client's attempt may be over
	}
	v.mu.Lock()
	v.conns = append(v.conns, c)
	v.mu.Unlock()
	for {
		select {
		case msg := <-c.calls:
			v.answer(ctx, c, msg)
		case <-gone:
			return nil
		case <-ctx.Done():
			return nil
		}
	}
}

// postReceives posts the Receives of the connection in the memory in.
func (c *conn) postReceives(in verbs.SGE) error {
	for i := range attackDepth / 2 {
		r := &verbs.RecvRequest{SGE: verbs.SGE{Buf: in.Buf[i*attackMessage : (i+1)*attackMessage], LKey: in.LKey}}
		r.Done = func(wc *verbs.WorkCompletion) {
			if wc.Status == verbs.StatusSuccess {
				c.calls <- bytes.Clone(r.SGE.Buf[:wc.ByteLen])
				c.qp.PostRecv(r)
			}
		}
		if _, err := c.qp.PostRecv(r); err != nil {
			return err
		}
	}
	return nil
}

func (v *Server) forget(c *conn) {
	v.mu.Lock()
	v.conns = slices.DeleteFunc(v.conns, func(x *conn) bool { return x == c })
	v.mu.Unlock()
}

// other returns the connection of the other client.
func (c *conn) other() *conn {
	c.v.mu.Lock()
	defer c.v.mu.Unlock()
	for _, x := range c.v.conns {
		if x != c {
			return x
		}
	}
	c.v.t.Error("server has no other connection")
	return c
}

// do posts one request and returns its status.
func (c *conn) do(wr *verbs.WorkRequest) verbs.Status {
	wr.Signaled = true
	ended := make(chan verbs.Status, 1)
	wr.Done = func(wc *verbs.WorkCompletion) { ended <- wc.Status }
	if _, err := c.qp.PostSend(wr); err != nil {
		return verbs.StatusWRFlushErr
	}
	return c.wait(wr.Opcode, ended)
}

// wait waits for the status of a posted request. After attackTimeout it drains the queue pair,
// which completes the request.
func (c *conn) wait(op verbs.Opcode, ended <-chan verbs.Status) verbs.Status {
	select {
	case st := <-ended:
		return st
	case <-time.After(attackTimeout):
		c.v.t.Logf("%v: no completion within %v", op, attackTimeout)
		c.qp.Drain()
		return <-ended
	}
}

// transfer writes data to the client's memory, or fills data from it, with a permitted request.
func (c *conn) transfer(op verbs.Opcode, s rpcrdma.Segment, data []byte) verbs.Status {
	b := verbs.SGE{Buf: c.private.Buf[:len(data)], LKey: c.private.LKey}
	copy(b.Buf, data)
	st := c.do(&verbs.WorkRequest{Opcode: op, RKey: verbs.RKey(s.Handle), RemoteAddr: s.Offset,
		SGList: []verbs.SGE{b}})
	copy(data, b.Buf)
	return st
}

func (c *conn) send(wr *verbs.WorkRequest, msg []byte) verbs.Status {
	n := copy(c.mem.Buf, msg)
	wr.SGList = []verbs.SGE{{Buf: c.mem.Buf[:n], LKey: c.mem.LKey}}
	if wr.Opcode == 0 {
		wr.Opcode = verbs.OpSend
	}
	return c.do(wr)
}

// answer serves a call, and attacks if arm was called before.
func (v *Server) answer(ctx context.Context, c *conn, msg []byte) {
	var h rpcrdma.Header
	n, err := h.Decode(msg)
	if err != nil {
		return
	}
	call, args, err := sunrpc.ParseCall(msg[n:])
	if err != nil {
		return
	}
	d := sunrpc.NewDecoder(args)
	d.Opaque(64)
	off, count := d.Uint64(), d.Uint32()
	var a *attack
	var seg rpcrdma.Segment
	if len(h.Writes) > 0 {
		seg = h.Writes[0][0]
	} else if len(h.Reads) > 0 {
		seg = h.Reads[0].Segment
	}
	v.mu.Lock()
	if seg.Length > 0 {
		a, v.plan = v.plan, nil
	}
	if a != nil && a.twoCalls && v.held == nil { // keep it until the second call
		v.held = &heldCall{h: h, msg: msg}
		v.plan = a
		v.mu.Unlock()
		return
	}
	held := v.held
	v.held = nil
	v.mu.Unlock()

	how := &verbs.WorkRequest{Opcode: verbs.OpSend}
	switch {
	case a == nil || !a.pending:
	case a.twoCalls:
		how.Opcode, how.InvalidateRKey = verbs.OpSendWithInv, verbs.RKey(held.h.Writes[0][0].Handle)
	case a.invalidates:
		how.Opcode, how.InvalidateRKey = verbs.OpSendWithInv, verbs.RKey(seg.Handle)
	default:
		v.outcome <- a.run(c, seg)
	}

	out := h
	out.Credits = attackDepth / 2
	out.Reads = nil
	reply := sunrpc.AppendAcceptedReply(nil, call.XID, sunrpc.Success)
	switch call.Proc {
	case uint32(nfs3.ProcRead):
		data := Content(off, int(count))
		if len(h.Writes) > 0 {
			c.transfer(verbs.OpRDMAWrite, seg, data)
		}
		for _, x := range []uint32{0, 0, count, 0, count} {
			reply = binary.BigEndian.AppendUint32(reply, x)
		}
		if len(h.Writes) == 0 {
			reply = append(reply, data...)
			reply = append(reply, make([]byte, -len(data)&3)...)
		}
	case uint32(nfs3.ProcWrite):
		if len(h.Reads) > 0 {
			data := make([]byte, seg.Length)
			st := c.transfer(verbs.OpRDMARead, seg, data)
			if st == verbs.StatusSuccess && !right(data[:count], off) {
				v.t.Error("server read wrong bytes of a WRITE")
			}
		}
		for _, x := range []uint32{0, 0, 0, count, 2, 0, 42} {
			reply = binary.BigEndian.AppendUint32(reply, x)
		}
	}
	st := c.send(how, append(out.Append(nil), reply...))
	if a != nil {
		v.afterReply(ctx, c, a, seg, held, st)
	}
}

// afterReply attacks when the call has ended, and reports the status of attacks that changed the
// reply. st is the status of the reply.
func (v *Server) afterReply(ctx context.Context, c *conn, a *attack, seg rpcrdma.Segment, held *heldCall,
	st verbs.Status) {
	switch {
	case a.twoCalls:
		v.outcome <- verbs.StatusWRFlushErr
		v.answer(ctx, c, held.msg)
	case a.invalidates:
		v.outcome <- st
	case a.pending:
	default:
		select {
		case <-v.proceed:
			v.outcome <- a.run(c, seg)
		case <-ctx.Done():
		}
	}
}
