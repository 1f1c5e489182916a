//go:build rdmacore && cgo && linux

package rdmacore

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"net/netip"
	"os"
	"testing"
	"time"
	"unsafe"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// Rules of the conformance suite that two kernels can keep or break differently from one that talks
// to itself, which then copies in its memory: what is sent, read and written arrives whole across
// packets, and a key that is not in force reaches nothing. One guest runs TestPeer, which does what
// it is told in Sends, as a server does RDMA for its client; another runs TestWire, whose memory it
// is.

const (
	wirePort = 20050
	// wirePatience bounds every wait.
	wirePatience = time.Minute
	// wireNudge is when the side that connected gives a sign of life: the kernel's siw looks at the
	// first message that came while it was still accepting only when more comes.
	wireNudge = 200 * time.Millisecond
	// wireMessage is the largest message in octets, and wireReceives how many a receiver is ready
	// for.
	wireMessage  = 64 << 10
	wireReceives = 8
	// wireRoom is the memory in octets that the peer reaches.
	wireRoom = 1<<20 + 8192
)

// Messages begin with an octet that says what they are.
const (
	wireEcho   = 'E' // to be sent back
	wireOrder  = 'O' // an order, in JSON
	wireResult = 'R' // its result, in JSON
)

// An order tells the peer to reach the sender's memory.
type order struct {
	Do   string // "write", "read", or "end" for the peer's own end
	RKey verbs.RKey
	Addr uint64
	Len  int
	Seed byte // of what is to be written
}

// A result is what came of it.
type result struct {
	Status verbs.Status
	Sum    uint32 // CRC-32 of what was read
}

// A wireEnd is one end of a connection.
type wireEnd struct {
	t    *testing.T
	id   verbs.ConnID
	pd   verbs.PD
	qp   verbs.QP
	in   chan []byte // messages
	gone chan error
	out  verbs.SGE // what is sent from
	room verbs.SGE // what is read from and written to
	caps verbs.Caps
	last map[verbs.MR]uint8 // key of the registration before

	dialed bool // this end connected
}

// newEnd gives id what it needs, until the test ends.
func newEnd(t *testing.T, id verbs.ConnID) *wireEnd {
	t.Helper()
	e := &wireEnd{t: t, id: id, in: make(chan []byte, 4*wireReceives), gone: make(chan error, 1),
		caps: id.Device().Attrs().Caps, last: make(map[verbs.MR]uint8)}
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	var err error
	e.pd, err = id.Device().AllocPD()
	check(err)
	t.Cleanup(func() { release(t, e.pd.Dealloc) })
	cq, err := id.Device().CreateCQ(4 * wireReceives)
	check(err)
	t.Cleanup(func() { release(t, cq.Close) })
	buffer := func(n int) verbs.SGE {
		b := arena(t, n)
		m, err := e.pd.RegMR(b)
		check(err)
		t.Cleanup(func() { release(t, m.Dereg) })
		return verbs.SGE{Buf: b, LKey: m.LKey()}
	}
	e.out, e.room = buffer(wireMessage), buffer(wireRoom)
	receives := buffer(wireReceives * wireMessage)
	e.qp, err = id.CreateQP(e.pd, verbs.QPInitAttr{SendCQ: cq, RecvCQ: cq, MaxSendWR: wireReceives,
		MaxRecvWR: wireReceives, MaxSendSGE: 1,
		OnDisconnect: func(cause error) { e.gone <- cause }})
	check(err)
	t.Cleanup(func() { release(t, id.Close) })
	for i := range wireReceives {
		sge := verbs.SGE{Buf: receives.Buf[i*wireMessage:][:wireMessage], LKey: receives.LKey}
		rr := &verbs.RecvRequest{SGE: sge}
		rr.Done = func(wc *verbs.WorkCompletion) {
			if wc.Status == verbs.StatusSuccess {
				e.in <- bytes.Clone(sge.Buf[:wc.ByteLen])
				e.qp.PostRecv(rr)
			}
		}
		_, err := e.qp.PostRecv(rr)
		check(err)
	}
	return e
}

func release(t *testing.T, f func() error) {
	if err := f(); err != nil {
		t.Errorf("release: %v", err)
	}
}

// do posts a request and waits for its completion.
func (e *wireEnd) do(wr *verbs.WorkRequest) verbs.Status {
	e.t.Helper()
	done := make(chan verbs.Status, 1)
	wr.Signaled, wr.Done = true, func(wc *verbs.WorkCompletion) { done <- wc.Status }
	if _, err := e.qp.PostSend(wr); err != nil {
		if errors.Is(err, verbs.ErrQPState) {
			return verbs.StatusWRFlushErr
		}
		e.t.Fatalf("post %v: %v", wr.Opcode, err)
	}
	select {
	case s := <-done:
		return s
	case <-time.After(wirePatience):
		e.t.Fatalf("%v did not complete", wr.Opcode)
		return 0
	}
}

func (e *wireEnd) must(wr *verbs.WorkRequest) {
	e.t.Helper()
	if s := e.do(wr); s != verbs.StatusSuccess {
		e.t.Fatalf("%v: %v", wr.Opcode, s)
	}
}

// message makes a Send of what and, if it is no octets alone, v in JSON.
func (e *wireEnd) message(what byte, v any) *verbs.WorkRequest {
	body, ok := v.([]byte)
	if !ok {
		body, _ = json.Marshal(v)
	}
	n := 1 + copy(e.out.Buf[1:], body)
	e.out.Buf[0] = what
	return &verbs.WorkRequest{Opcode: verbs.OpSend, SGList: []verbs.SGE{{Buf: e.out.Buf[:n], LKey: e.out.LKey}}}
}

// next waits for a message; ok is false when the connection ended instead.
func (e *wireEnd) next() (m []byte, ok bool) {
	e.t.Helper()
	over := time.After(wirePatience)
	var again <-chan time.Time
	if e.dialed && e.iwarp() {
		tick := time.NewTicker(wireNudge)
		defer tick.Stop()
		again = tick.C
	}
	for {
		select {
		case m = <-e.in:
			return m, true
		case <-e.gone:
			return nil, false
		case <-again:
			// of nothing; fails when the connection ends
			e.do(&verbs.WorkRequest{Opcode: verbs.OpRDMAWrite})
		case <-over:
			e.t.Fatal("neither a message nor the end of the connection came")
		}
	}
}

// TestPeer does what it is told, over one connection after the other. It makes the file wireReady
// when it listens.
func TestPeer(t *testing.T) {
	addr := inGuest(t)
	ctx, cancel := context.WithTimeout(context.Background(), runLimit)
	defer cancel()
	l, err := devices(t).Listen(ctx, netip.AddrPortFrom(addr, wirePort))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := os.WriteFile(wireReady, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for n, over := 0, false; !over; n++ {
		req, err := l.Accept(ctx)
		if err != nil {
			t.Fatal(err)
		}
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			e := newEnd(t, req)
			if err := req.Accept(ctx, verbs.ConnParam{ResponderResources: 4, InitiatorDepth: 4}); err != nil {
				t.Error(err)
				return
			}
			over = e.obey()
		})
	}
}

// obey serves a connection until its end, and tells whether that is the peer's own.
func (e *wireEnd) obey() (over bool) {
	for {
		m, ok := e.next()
		if !ok {
			return over
		}
		if m[0] == wireEcho {
			e.must(e.message(wireEcho, m[1:]))
			continue
		}
		var o order
		if err := json.Unmarshal(m[1:], &o); err != nil {
			e.t.Fatal(err)
		}
		local := verbs.SGE{Buf: e.room.Buf[:o.Len], LKey: e.room.LKey}
		var res result
		switch o.Do {
		case "write":
			block(local.Buf, 0, o.Seed)
			res.Status = e.do(&verbs.WorkRequest{Opcode: verbs.OpRDMAWrite, RKey: o.RKey, RemoteAddr: o.Addr,
				SGList: []verbs.SGE{local}})
		case "read":
			res.Status = e.do(&verbs.WorkRequest{Opcode: verbs.OpRDMARead, RKey: o.RKey, RemoteAddr: o.Addr,
				SGList: []verbs.SGE{local}})
			res.Sum = crc32.ChecksumIEEE(local.Buf)
		case "end":
			over = true
		}
		e.do(e.message(wireResult, res)) // fails where what was ordered did
	}
}

// dialPeer connects to the peer.
func dialPeer(t *testing.T) *wireEnd {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), wirePatience)
	defer cancel()
	id, err := devices(t).Resolve(ctx, netip.AddrPortFrom(inGuest(t), wirePort))
	if err != nil {
		t.Fatal(err)
	}
	e := newEnd(t, id)
	e.dialed = true
	if err := id.Connect(ctx, verbs.ConnParam{ResponderResources: 4, InitiatorDepth: 4}); err != nil {
		t.Fatal(err)
	}
	return e
}

// order has the peer do something, and returns what came of it; ok is false when the connection
// ended over it.
func (e *wireEnd) order(o order) (res result, ok bool) {
	e.t.Helper()
	e.must(e.message(wireOrder, o))
	return e.answer()
}

// answer is what came of an order.
func (e *wireEnd) answer() (res result, ok bool) {
	e.t.Helper()
	m, ok := e.next()
	if !ok {
		return res, false
	}
	if m[0] != wireResult {
		e.t.Fatalf("the peer answers %q", m)
	}
	if err := json.Unmarshal(m[1:], &res); err != nil {
		e.t.Fatal(err)
	}
	return res, true
}

// window registers n octets of the room from off on.
func (e *wireEnd) window(m verbs.MR, access verbs.Access, off, n int) (verbs.RKey, uint64) {
	e.t.Helper()
	seg := e.room.Buf[off:][:n:n]
	addr := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(seg))))
	key := e.last[m] + 1
	e.last[m] = key
	e.must(&verbs.WorkRequest{Opcode: verbs.OpFastReg, MR: m, NewKey: key, Access: access, IOVA: addr,
		Segs: [][]byte{seg}})
	if e.caps.Has(verbs.CapPerIOReg) {
		return m.RKey(), addr
	}
	return m.RKey().WithKey(key), addr
}

func (e *wireEnd) mr() verbs.MR {
	e.t.Helper()
	m, err := e.pd.AllocMR(wireRoom/4096 + 1)
	if err != nil {
		e.t.Fatal(err)
	}
	e.last[m] = m.RKey().Key()
	e.t.Cleanup(func() { release(e.t, m.Dereg) })
	return m
}

// TestWire tells the peer what to do, and looks at what it did.
func TestWire(t *testing.T) {
	t.Run("messages", testWireMessages)
	t.Run("writes", testWireWrites)
	t.Run("reads", testWireReads)
	t.Run("refused", testWireRefused)
	t.Run("end", func(t *testing.T) {
		if _, ok := dialPeer(t).order(order{Do: "end"}); !ok {
			t.Error("the connection ended early")
		}
	})
}

// wireSizes are in octets: both sides of what fits one packet, for path MTUs of 1024 and 4096 and
// for iWARP's segments on jumbo frames.
var wireSizes = []int{1, 2, 3, 4, 5, 1023, 1024, 1025, 4095, 4096, 4097, 8900, 9000, 12289, 65535}

func testWireMessages(t *testing.T) {
	e := dialPeer(t)
	for _, n := range wireSizes {
		body := make([]byte, n-1)
		block(body, 0, byte(n))
		e.must(e.message(wireEcho, body))
		m, ok := e.next()
		if !ok {
			t.Fatalf("the connection ended over a message of %d octets", n)
		}
		if m[0] != wireEcho || !bytes.Equal(m[1:], body) {
			t.Errorf("a message of %d octets came back as %d others", n, len(m))
		}
	}
}

func testWireWrites(t *testing.T) {
	e := dialPeer(t)
	m := e.mr()
	seed := byte(0)
	for _, n := range append(wireSizes, 1<<20) {
		for _, off := range []int{0, 1, 4095} {
			seed++
			clear(e.room.Buf)
			want := make([]byte, wireRoom)
			block(want[off:off+n], 0, seed)
			rkey, addr := e.window(m, verbs.AccessLocalWrite|verbs.AccessRemoteWrite, 0, wireRoom)
			res, ok := e.order(order{"write", rkey, addr + uint64(off), n, seed})
			if !ok || res.Status != verbs.StatusSuccess {
				t.Fatalf("%d octets at %d: %v", n, off, res.Status)
			}
			e.must(&verbs.WorkRequest{Opcode: verbs.OpLocalInv, InvalidateRKey: rkey})
			if !bytes.Equal(e.room.Buf, want) {
				t.Errorf("%d octets at %d: the memory is not what was written", n, off)
			}
		}
	}
}

// siwInline is in octets: the kernel's siw sends as few together with their header, and copies them
// wrongly where they cross a page.
const siwInline = 128

func (e *wireEnd) iwarp() bool { return e.id.Device().Attrs().Transport == verbs.TransportIWARP }

func testWireReads(t *testing.T) {
	e := dialPeer(t)
	m := e.mr()
	block(e.room.Buf, 0, 0x77)
	for _, n := range append(wireSizes, 1<<20) {
		for _, off := range []int{0, 1, 4095} {
			if e.iwarp() && n < siwInline && off+n > 4096 {
				continue
			}
			rkey, addr := e.window(m, verbs.AccessRemoteRead, off, n)
			res, ok := e.order(order{Do: "read", RKey: rkey, Addr: addr, Len: n})
			if !ok || res.Status != verbs.StatusSuccess {
				t.Fatalf("%d octets at %d: %v", n, off, res.Status)
			}
			e.must(&verbs.WorkRequest{Opcode: verbs.OpLocalInv, InvalidateRKey: rkey})
			if want := crc32.ChecksumIEEE(e.room.Buf[off : off+n]); res.Sum != want {
				t.Errorf("%d octets at %d: the sum of what the peer read is %08x, want %08x", n, off, res.Sum, want)
			}
		}
	}
}

// refused has the peer try what must fail, and end the connection, without an octet changed. It
// returns false when the connection ended before it was known here that the peer has the order:
// then nobody knows whether it tried.
func (e *wireEnd) refused(o order) (tried bool) {
	e.t.Helper()
	block(e.room.Buf, 0, 0x11)
	want := bytes.Clone(e.room.Buf)
	status := e.do(e.message(wireOrder, o))
	if status != verbs.StatusSuccess { // flushed, or, where siw was still at it, a local error
		e.t.Logf("the order to %s: %v", o.Do, status)
	}
	res, ok := e.answer()
	if ok && res.Status == verbs.StatusSuccess {
		e.t.Errorf("%s succeeded", o.Do)
	}
	if ok {
		if _, more := e.next(); more {
			e.t.Errorf("%s: the connection goes on", o.Do)
		}
	}
	if !bytes.Equal(e.room.Buf, want) {
		e.t.Errorf("%s changed the memory", o.Do)
	}
	return status == verbs.StatusSuccess
}

// refusedTries is how often a refusal may come before the acknowledgment of the order.
const refusedTries = 8

func testWireRefused(t *testing.T) {
	const writable, readable = verbs.AccessLocalWrite | verbs.AccessRemoteWrite, verbs.AccessRemoteRead
	for _, c := range []struct {
		name, do   string
		access     verbs.Access
		invalidate bool
		flip       verbs.RKey // of the key
		notIWARP   bool       // siw neither answers nor refuses this
	}{
		{name: "write, invalidated key", do: "write", access: writable, invalidate: true},
		{name: "read, invalidated key", do: "read", access: readable, invalidate: true},
		{name: "write, another key", do: "write", access: writable, flip: 1},
		{name: "read, another key", do: "read", access: readable, flip: 1},
		{name: "write, another index", do: "write", access: writable, flip: 0x800},
		{name: "write, no right", do: "write", access: readable},
		{name: "read, no right", do: "read", access: writable, notIWARP: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			for range refusedTries {
				e := dialPeer(t)
				if c.notIWARP && e.iwarp() {
					t.Skip("the kernel's siw neither answers nor refuses this")
				}
				rkey, addr := e.window(e.mr(), c.access, 0, wireRoom)
				if c.invalidate {
					e.must(&verbs.WorkRequest{Opcode: verbs.OpLocalInv, InvalidateRKey: rkey})
				}
				if e.refused(order{c.do, rkey ^ c.flip, addr, 100_000, 9}) {
					return
				}
			}
			t.Error("the connection ended before each order was acknowledged")
		})
	}
}
