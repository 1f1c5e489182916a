//go:build rdmacore && cgo && linux

package rdmacore

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	provider "github.com/nfsrdmad/nfsrdmad/pkg/verbs/rdmacore"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

const (
	// attackSize is how much a call of TestAttacks reads or writes: more than goes inline, and less than an arena.
	attackSize = 40000
	// attackPatience bounds what an attacker waits for: a device may leave a bad request without an answer.
	attackPatience = 3 * time.Second
	attackDepth    = 32
	attackMessage  = 4096
	guard          = 0x55 // in memory that no server may see or change
)

// A villain serves READ and WRITE of NFSv3 as it should, one call at a time on each connection, until it is told to strike.
type villain struct {
	t  *testing.T
	l  verbs.Listener
	mu sync.Mutex

	bufs  [][]byte       // guarded by mu, as all below; freed at the end, as an attack may come by a connection that has just ended
	plan  *attack        // used up by one call
	conns []*villainConn // that live, in the order in which they were made
	held  *heldCall      // of an attack that needs two calls

	may    chan struct{}     // closed when the call has ended, its memory is what it will be, and a late attack may begin
	struck chan verbs.Status // its outcome
}

type heldCall struct {
	h   rpcrdma.Header
	msg []byte
}

type villainConn struct {
	v       *villain
	qp      verbs.QP
	calls   chan []byte
	mem     verbs.SGE // of what is sent and received
	private verbs.SGE // of RDMA Writes and Reads
}

// An attack is what no server may do.
type attack struct {
	name  string
	write bool // of the read chunk of a WRITE, else of the write chunk of a READ
	alive bool // before the call is answered, else after it has ended
	// strike does it, and says how it went. Success is a breach, but of a Write over iWARP, which is sent and no more.
	strike func(c *villainConn, s rpcrdma.Segment) verbs.Status
	// except names the devices that break the rule by themselves, with the reason.
	except map[verbs.Transport]string
	// reads: the attack is a Read.
	reads bool
	// harmless: the connection may go on.
	harmless bool
	// freed: the memory is given back, and made anew, before the strike.
	freed bool
	// reply changes the Send of the reply instead.
	reply func(wr *verbs.WorkRequest, s rpcrdma.Segment)
	// second needs two calls at a time: the strike is the reply to one with the key of the other.
	second bool
}

const (
	rxeBounds  = "a window lets the peer reach all of the memory that it is bound to"
	siwReads   = "the kernel asks for no right of a Read, only for a good key"
	rxeForeign = "the kernel lets the peer's Send With Invalidate name any window of the machine"
)

var villainous = bytes.Repeat([]byte{0xbd}, 64)

var attacks = []attack{
	// Those that softiwarp is held to, too.
	{name: "late write", strike: func(c *villainConn, s rpcrdma.Segment) verbs.Status { return c.write(s, 0, villainous) }},
	{name: "late write of one octet at the end", strike: func(c *villainConn, s rpcrdma.Segment) verbs.Status {
		return c.write(s, attackSize-1, villainous[:1])
	}},
	{name: "write beyond the end", strike: func(c *villainConn, s rpcrdma.Segment) verbs.Status { return c.write(s, attackSize, villainous) }},
	{name: "write before the start", strike: func(c *villainConn, s rpcrdma.Segment) verbs.Status { return c.write(s, -1, villainous) }},
	{name: "read of a write chunk", reads: true, strike: func(c *villainConn, s rpcrdma.Segment) verbs.Status { return c.read(s, 0, 64) }},
	{name: "write with the next key", strike: func(c *villainConn, s rpcrdma.Segment) verbs.Status {
		s.Handle++
		return c.write(s, 0, villainous)
	}},
	{name: "write with a neighbour's index", strike: func(c *villainConn, s rpcrdma.Segment) verbs.Status {
		s.Handle += 1 << 8
		return c.write(s, 0, villainous)
	}},
	{name: "late read", reads: true, write: true, strike: func(c *villainConn, s rpcrdma.Segment) verbs.Status { return c.read(s, 0, 64) }},
	{name: "write to a read chunk", write: true, strike: func(c *villainConn, s rpcrdma.Segment) verbs.Status { return c.write(s, 0, villainous) }},
	{name: "overlong read", reads: true, write: true, strike: func(c *villainConn, s rpcrdma.Segment) verbs.Status { return c.read(s, 0, attackSize+1) }},

	// The memory is another's by then.
	{name: "late write to freed memory", freed: true, strike: func(c *villainConn, s rpcrdma.Segment) verbs.Status { return c.write(s, 0, villainous) }},
	{name: "late read of freed memory", reads: true, write: true, freed: true, strike: func(c *villainConn, s rpcrdma.Segment) verbs.Status { return c.read(s, 0, 64) }},

	// While the key is good.
	{name: "another key of the same index, in time", alive: true, strike: func(c *villainConn, s rpcrdma.Segment) verbs.Status {
		s.Handle ^= 1
		return c.write(s, 0, villainous)
	}},
	{name: "a neighbour's index, in time", alive: true, strike: func(c *villainConn, s rpcrdma.Segment) verbs.Status {
		s.Handle -= 1 << 8
		return c.write(s, 0, villainous)
	}},
	{name: "write to a read chunk, in time", write: true, alive: true, strike: func(c *villainConn, s rpcrdma.Segment) verbs.Status {
		return c.write(s, 0, villainous)
	}},
	{name: "read of a write chunk, in time", reads: true, alive: true, strike: func(c *villainConn, s rpcrdma.Segment) verbs.Status { return c.read(s, 0, 64) },
		except: map[verbs.Transport]string{verbs.TransportIWARP: siwReads}},
	{name: "write beyond the end, in time", alive: true, strike: func(c *villainConn, s rpcrdma.Segment) verbs.Status { return c.write(s, attackSize, villainous) },
		except: map[verbs.Transport]string{verbs.TransportIB: rxeBounds}},
	{name: "overlong read, in time", reads: true, write: true, alive: true, strike: func(c *villainConn, s rpcrdma.Segment) verbs.Status { return c.read(s, 0, attackSize+1) },
		except: map[verbs.Transport]string{verbs.TransportIB: rxeBounds}},
	{name: "write with the key of another connection", alive: true, strike: func(c *villainConn, s rpcrdma.Segment) verbs.Status { return c.other().write(s, 0, villainous) }},
	{name: "read with the key of another connection", reads: true, write: true, alive: true, strike: func(c *villainConn, s rpcrdma.Segment) verbs.Status {
		return c.other().read(s, 0, 64)
	}},

	// Messages.
	{name: "the reply twice", harmless: true, strike: func(c *villainConn, s rpcrdma.Segment) verbs.Status {
		c.send(&verbs.WorkRequest{Opcode: verbs.OpSend}, c.mem.Buf[:64]) // as it was sent
		return verbs.StatusWRFlushErr
	}},
	{name: "invalidation of a key that nobody has", strike: func(c *villainConn, s rpcrdma.Segment) verbs.Status {
		c.send(&verbs.WorkRequest{Opcode: verbs.OpSendWithInv, InvalidateRKey: verbs.RKey(s.Handle ^ 1<<23)}, c.mem.Buf[:64])
		return verbs.StatusWRFlushErr // that it was taken is no breach
	}},
	{name: "invalidation of the call's key, which was not asked for", harmless: true, alive: true,
		reply: func(wr *verbs.WorkRequest, s rpcrdma.Segment) {
			wr.Opcode, wr.InvalidateRKey = verbs.OpSendWithInv, verbs.RKey(s.Handle)
		}},
	{name: "invalidation of another call's key", alive: true, second: true},
	{name: "invalidation of a key of another connection", alive: true, strike: func(c *villainConn, s rpcrdma.Segment) verbs.Status {
		c.other().send(&verbs.WorkRequest{Opcode: verbs.OpSendWithInv, InvalidateRKey: verbs.RKey(s.Handle)}, c.mem.Buf[:64])
		return verbs.StatusWRFlushErr
	}, except: map[verbs.Transport]string{verbs.TransportIB: rxeForeign}},
}

// TestAttacks plays a server that reaches for memory it has no right to, on a device of the kernel's. No attempt may succeed, or change or tell
// memory; the calls that it meets, and those after it, have their data.
func TestAttacks(t *testing.T) {
	addr := inGuest(t)
	kind := mustResolve(t).Attrs().Transport
	for _, a := range attacks {
		t.Run(a.name, func(t *testing.T) {
			if why := a.except[kind]; why != "" {
				t.Skipf("%v: %s", kind, why)
			}
			a.play(t, addr, kind)
		})
	}
}

// play is one attack, with a client and a server of its own.
func (a *attack) play(t *testing.T, addr netip.Addr, kind verbs.Transport) {
	v := startVillain(t, addr)
	// The other connection first: its keys are the server's as well.
	other, tr := villainClient(t, v), villainClient(t, v)
	c := nfs3.NewClient(tr, nfs3.Options{})
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	buf, err := verbs.AllocBuffer(attackSize)
	if err != nil {
		t.Fatal(err)
	}
	free := func() { verbs.FreeBuffer(buf) }
	defer func() { free() }()
	v.arm(a)

	var both sync.WaitGroup
	if a.second {
		second := arena(t, attackSize)
		both.Go(func() {
			var r nfs3.ReadResult
			if err := c.Read(ctx, cred, villainFH(), attackSize, second, &r); err != nil || !right(second[:r.N], attackSize) || r.N != attackSize {
				t.Errorf("the other call: %v, or wrong octets", err)
			}
		})
	}
	if a.write {
		block(buf, 0, 0)
		var w nfs3.WriteResult
		err = c.Write(ctx, cred, villainFH(), 0, buf, nfs3.FileSync, &w)
	} else {
		var r nfs3.ReadResult
		if err = c.Read(ctx, cred, villainFH(), 0, buf, &r); err == nil && (r.N != attackSize || !right(buf, 0)) {
			t.Error("the call has wrong octets")
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	both.Wait()
	if a.freed {
		free()
		if buf, err = verbs.AllocBuffer(attackSize); err != nil { // where the other was, most likely
			free = func() {}
			t.Fatal(err)
		}
	}
	for i := range buf {
		buf[i] = guard
	}
	close(v.may)
	select {
	case st := <-v.struck:
		if st == verbs.StatusSuccess && !a.harmless && (a.reads || kind == verbs.TransportIB) {
			t.Error("the attack succeeded")
		}
		t.Logf("the attacker was told: %v", st)
	case <-ctx.Done():
		t.Fatal("the attack was not made")
	}
	time.Sleep(50 * time.Millisecond) // what was let in is placed
	if i := bytes.IndexFunc(buf, func(r rune) bool { return r != guard }); i >= 0 {
		t.Fatalf("octet %d was changed after the call had ended", i)
	}
	for name, x := range map[string]*xprt.Transport{"attacked": tr, "other": other} {
		next := arena(t, attackSize)
		var r nfs3.ReadResult
		if err := nfs3.NewClient(x, nfs3.Options{}).Read(ctx, cred, villainFH(), 4096, next, &r); err != nil || r.N != attackSize || !right(next, 4096) {
			t.Errorf("next read on the %s connection: %v, or wrong octets", name, err)
		}
	}
	connects := tr.Stats().Connects + other.Stats().Connects
	if !a.harmless && connects < 3 {
		t.Errorf("%d connections were made, want one more than two: the attack has to end one", connects)
	}
	if s := tr.Stats(); s.MRsHurt != s.MRsRecovered+s.MRsRecycled+s.MRsOrphaned {
		t.Errorf("hurt MRs: %d, recovered %d, recycled %d, orphaned %d", s.MRsHurt, s.MRsRecovered, s.MRsRecycled, s.MRsOrphaned)
	}
}

func villainFH() nfs3.FH {
	fh, err := nfs3.NewFH([]byte("villain's file"))
	if err != nil {
		panic(err)
	}
	return fh
}

// right reports whether b is what a READ at off gives.
func right(b []byte, off uint64) bool {
	want := make([]byte, len(b))
	block(want, off, 0)
	return bytes.Equal(b, want)
}

// villainClient is a transport of ours, that has heard the server.
func villainClient(t *testing.T, v *villain) *xprt.Transport {
	t.Helper()
	tr, err := xprt.New(xprt.Config{Provider: devices(t), Addr: v.l.Addr(), Slots: 16, ReconnectMin: 20 * time.Millisecond, ReconnectMax: time.Second,
		Logger: hclog.New(&hclog.LoggerOptions{Level: hclog.Info, Output: t.Output()})})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tr.Close() })
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for try := 0; ; try++ {
		err := tr.Connect(ctx)
		if err == nil {
			break
		}
		if try == 10 || !errors.Is(err, syscall.EADDRNOTAVAIL) { // siw, now and then: the connection manager's choice of a port was taken
			t.Fatal(err)
		}
		time.Sleep(100 * time.Millisecond)
	}
	var r nfs3.ReadResult
	b := arena(t, 100)
	if err := nfs3.NewClient(tr, nfs3.Options{}).Read(ctx, cred, villainFH(), 0, b, &r); err != nil {
		t.Fatal(err)
	}
	return tr
}

func startVillain(t *testing.T, addr netip.Addr) *villain {
	t.Helper()
	p, err := provider.New(provider.Config{})
	if err != nil {
		t.Fatal(err)
	}
	v := &villain{t: t, may: make(chan struct{}), struck: make(chan verbs.Status, 1)}
	if v.l, err = p.Listen(context.Background(), netip.AddrPortFrom(addr, 0)); err != nil {
		t.Fatal(err)
	}
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
					t.Errorf("the attacker's own: %v", err)
				}
			})
		}
	})
	t.Cleanup(func() {
		cancel()
		v.l.Close()
		conns.Wait()
		for _, b := range v.bufs {
			verbs.FreeBuffer(b)
		}
	})
	return v
}

func (v *villain) arm(a *attack) {
	v.mu.Lock()
	v.plan = a
	v.mu.Unlock()
}

// serve is one connection.
func (v *villain) serve(ctx context.Context, req verbs.ConnRequest) (err error) {
	dev := req.Device()
	pd, err := dev.AllocPD()
	if err != nil {
		return errors.Join(err, req.Close())
	}
	cq, err := dev.CreateCQ(2 * attackDepth)
	if err != nil {
		return errors.Join(err, req.Close(), pd.Dealloc())
	}
	c := &villainConn{v: v, calls: make(chan []byte, attackDepth)}
	var mrs []verbs.MR
	memory := func(n int) verbs.SGE {
		b, e := verbs.AllocBuffer(n)
		if e != nil {
			err = errors.Join(err, e)
			return verbs.SGE{}
		}
		v.mu.Lock()
		v.bufs = append(v.bufs, b)
		v.mu.Unlock()
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
	defer func() {
		v.forget(c)
		err = errors.Join(err, req.Close(), cq.Close())
		for _, m := range mrs {
			err = errors.Join(err, m.Dereg())
		}
		err = errors.Join(err, pd.Dealloc())
	}()
	if err != nil {
		return err
	}
	gone := make(chan struct{})
	if c.qp, err = req.CreateQP(pd, verbs.QPInitAttr{SendCQ: cq, RecvCQ: cq, MaxSendWR: attackDepth, MaxRecvWR: attackDepth, MaxSendSGE: 1,
		OnDisconnect: func(error) { close(gone) }}); err != nil {
		return err
	}
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
	private := rpcrdma.Private{SendSize: attackMessage, RecvSize: attackMessage}.Append(nil)
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

func (v *villain) forget(c *villainConn) {
	v.mu.Lock()
	v.conns = slices.DeleteFunc(v.conns, func(x *villainConn) bool { return x == c })
	v.mu.Unlock()
}

// other is the first connection that is not c: that of the other transport.
func (c *villainConn) other() *villainConn {
	c.v.mu.Lock()
	defer c.v.mu.Unlock()
	for _, x := range c.v.conns {
		if x != c {
			return x
		}
	}
	c.v.t.Error("there is no other connection")
	return c
}

// do posts one request and waits for its end, or, where the device has nothing to say of it, ends the connection.
func (c *villainConn) do(wr *verbs.WorkRequest) verbs.Status {
	wr.Signaled = true
	ended := make(chan verbs.Status, 1)
	wr.Done = func(wc *verbs.WorkCompletion) { ended <- wc.Status }
	if _, err := c.qp.PostSend(wr); err != nil {
		return verbs.StatusWRFlushErr
	}
	select {
	case st := <-ended:
		return st
	case <-time.After(attackPatience):
		c.v.t.Logf("%v: no answer within %v", wr.Opcode, attackPatience)
		c.qp.Drain()
		return <-ended
	}
}

func (c *villainConn) write(s rpcrdma.Segment, at int64, data []byte) verbs.Status {
	b := verbs.SGE{Buf: c.private.Buf[:len(data)], LKey: c.private.LKey}
	copy(b.Buf, data)
	return c.do(&verbs.WorkRequest{Opcode: verbs.OpRDMAWrite, RKey: verbs.RKey(s.Handle), RemoteAddr: s.Offset + uint64(at), SGList: []verbs.SGE{b}})
}

// read reads, and takes what it sees of memory that it should not for a success.
func (c *villainConn) read(s rpcrdma.Segment, at int64, n int) verbs.Status {
	b := verbs.SGE{Buf: c.private.Buf[:n], LKey: c.private.LKey}
	clear(b.Buf)
	st := c.do(&verbs.WorkRequest{Opcode: verbs.OpRDMARead, RKey: verbs.RKey(s.Handle), RemoteAddr: s.Offset + uint64(at), SGList: []verbs.SGE{b}})
	if bytes.IndexByte(b.Buf, guard) >= 0 && bytes.Count(b.Buf, []byte{guard}) == n {
		return verbs.StatusSuccess
	}
	return st
}

func (c *villainConn) send(wr *verbs.WorkRequest, msg []byte) verbs.Status {
	n := copy(c.mem.Buf, msg)
	wr.SGList = []verbs.SGE{{Buf: c.mem.Buf[:n], LKey: c.mem.LKey}}
	if wr.Opcode == 0 {
		wr.Opcode = verbs.OpSend
	}
	return c.do(wr)
}

// answer serves a call, and strikes if it is the one.
func (v *villain) answer(ctx context.Context, c *villainConn, msg []byte) {
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
	if a != nil && a.second && v.held == nil { // wait for the second
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
	case a == nil || !a.alive:
	case a.second:
		how.Opcode, how.InvalidateRKey = verbs.OpSendWithInv, verbs.RKey(held.h.Writes[0][0].Handle)
	case a.reply != nil:
		a.reply(how, seg)
	default:
		v.struck <- a.strike(c, seg)
	}

	out := h
	out.Credits = attackDepth / 2
	out.Reads = nil
	reply := sunrpc.AppendAcceptedReply(nil, call.XID, sunrpc.Success)
	switch call.Proc {
	case 6: // READ
		data := make([]byte, count)
		block(data, off, 0)
		if len(h.Writes) > 0 {
			c.write(seg, 0, data)
		}
		for _, x := range []uint32{0, 0, count, 0, count} {
			reply = binary.BigEndian.AppendUint32(reply, x)
		}
		if len(h.Writes) == 0 {
			reply = append(reply, data...)
			reply = append(reply, make([]byte, -len(data)&3)...)
		}
	case 7: // WRITE
		if len(h.Reads) > 0 {
			if st := c.read(seg, 0, int(seg.Length)); st == verbs.StatusSuccess && !right(c.private.Buf[:count], off) {
				v.t.Error("the server reads wrong octets of a WRITE")
			}
		}
		for _, x := range []uint32{0, 0, 0, count, 2, 0, 42} {
			reply = binary.BigEndian.AppendUint32(reply, x)
		}
	}
	st := c.send(how, append(out.Append(nil), reply...))
	switch {
	case a == nil:
	case a.second:
		v.struck <- verbs.StatusWRFlushErr
		v.answer(ctx, c, held.msg)
	case a.alive && a.reply != nil:
		v.struck <- st
	case a.alive:
	default:
		select {
		case <-v.may:
			v.struck <- a.strike(c, seg)
		case <-ctx.Done():
		}
	}
}
