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

// A test with both ends on one kernel copies data inside one memory. Some rules of the conformance
// suite need a test between two kernels: data arrives complete across packets, and an invalid key
// gives no access. One guest runs TestPeer, which executes orders that it receives in Sends, as a
// server uses RDMA for its client. Another guest runs TestWire and owns the memory.

const (
	wirePort = 20050
	// wireTimeout bounds every wait.
	wireTimeout = time.Minute
	// wireNudge is the interval of writes from the connecting side. The kernel's siw handles a
	// message that arrived during the accept only when more data arrives.
	wireNudge = 200 * time.Millisecond
	// wireMessage is the largest message in bytes, and wireReceives the number of posted Receives.
	wireMessage  = 64 << 10
	wireReceives = 8
	// wireBuffer is the size in bytes of the memory that the peer accesses.
	wireBuffer = 1<<20 + 8192
)

// The first byte of a message is its type.
const (
	wireEcho   = 'E' // the peer sends it back
	wireOrder  = 'O' // an order, in JSON
	wireResult = 'R' // its result, in JSON
)

// An order requests an access to the sender's memory.
type order struct {
	Do   string // "write", "read", or "end" to end the peer
	RKey verbs.RKey
	Addr uint64
	Len  int
	Seed byte // seed of the data to write
}

// A result is the result of an order.
type result struct {
	Status verbs.Status
	Sum    uint32 // CRC-32 of the data read
}

// A wireEnd is one end of a connection.
type wireEnd struct {
	t            *testing.T
	id           verbs.ConnID
	pd           verbs.PD
	qp           verbs.QP
	in           chan []byte // messages
	disconnected chan error
	out          verbs.SGE // buffer for Sends
	data         verbs.SGE // buffer for RDMA Reads and Writes
	caps         verbs.Caps
	last         map[verbs.MR]uint8 // key of the last registration

	dialed bool // this end connected
}

// newEnd creates the resources of id until the test ends.
func newEnd(t *testing.T, id verbs.ConnID) *wireEnd {
	t.Helper()
	e := &wireEnd{t: t, id: id, in: make(chan []byte, 4*wireReceives), disconnected: make(chan error, 1),
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
	e.out, e.data = buffer(wireMessage), buffer(wireBuffer)
	receives := buffer(wireReceives * wireMessage)
	e.qp, err = id.CreateQP(e.pd, verbs.QPInitAttr{SendCQ: cq, RecvCQ: cq, MaxSendWR: wireReceives,
		MaxRecvWR: wireReceives, MaxSendSGE: 1,
		OnDisconnect: func(cause error) { e.disconnected <- cause }})
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
	case <-time.After(wireTimeout):
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

// message returns a Send of a type and a body: bytes as they are, other values as JSON.
func (e *wireEnd) message(what byte, v any) *verbs.WorkRequest {
	body, ok := v.([]byte)
	if !ok {
		body, _ = json.Marshal(v)
	}
	n := 1 + copy(e.out.Buf[1:], body)
	e.out.Buf[0] = what
	return &verbs.WorkRequest{Opcode: verbs.OpSend, SGList: []verbs.SGE{{Buf: e.out.Buf[:n], LKey: e.out.LKey}}}
}

// next waits for a message. ok is false if the connection ends.
func (e *wireEnd) next() (m []byte, ok bool) {
	e.t.Helper()
	done := time.After(wireTimeout)
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
		case <-e.disconnected:
			return nil, false
		case <-again:
			// This write of no data fails when the connection ends.
			e.do(&verbs.WorkRequest{Opcode: verbs.OpRDMAWrite})
		case <-done:
			e.t.Fatal("got no message and no end of the connection within the timeout")
		}
	}
}

// TestPeer serves one connection after the other. It creates the file wireReady when it listens.
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
	for n, done := 0, false; !done; n++ {
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
			done = e.serveOrders()
		})
	}
}

// serveOrders serves a connection until it ends, and reports whether the order was to end the peer.
func (e *wireEnd) serveOrders() (done bool) {
	for {
		m, ok := e.next()
		if !ok {
			return done
		}
		if m[0] == wireEcho {
			e.must(e.message(wireEcho, m[1:]))
			continue
		}
		var o order
		if err := json.Unmarshal(m[1:], &o); err != nil {
			e.t.Fatal(err)
		}
		local := verbs.SGE{Buf: e.data.Buf[:o.Len], LKey: e.data.LKey}
		var res result
		switch o.Do {
		case "write":
			pattern(local.Buf, 0, o.Seed)
			res.Status = e.do(&verbs.WorkRequest{Opcode: verbs.OpRDMAWrite, RKey: o.RKey, RemoteAddr: o.Addr,
				SGList: []verbs.SGE{local}})
		case "read":
			res.Status = e.do(&verbs.WorkRequest{Opcode: verbs.OpRDMARead, RKey: o.RKey, RemoteAddr: o.Addr,
				SGList: []verbs.SGE{local}})
			res.Sum = crc32.ChecksumIEEE(local.Buf)
		case "end":
			done = true
		}
		e.do(e.message(wireResult, res)) // fails if the order ended the connection
	}
}

// dialPeer connects to the peer.
func dialPeer(t *testing.T) *wireEnd {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), wireTimeout)
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

// order sends an order and returns its result. ok is false if the connection ends.
func (e *wireEnd) order(o order) (res result, ok bool) {
	e.t.Helper()
	e.must(e.message(wireOrder, o))
	return e.answer()
}

// answer returns the result of the order that was sent.
func (e *wireEnd) answer() (res result, ok bool) {
	e.t.Helper()
	m, ok := e.next()
	if !ok {
		return res, false
	}
	if m[0] != wireResult {
		e.t.Fatalf("got answer %q, want a result", m)
	}
	if err := json.Unmarshal(m[1:], &res); err != nil {
		e.t.Fatal(err)
	}
	return res, true
}

// window registers n bytes of the buffer, starting at off.
func (e *wireEnd) window(m verbs.MR, access verbs.Access, off, n int) (verbs.RKey, uint64) {
	e.t.Helper()
	seg := e.data.Buf[off:][:n:n]
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
	m, err := e.pd.AllocMR(wireBuffer/4096 + 1)
	if err != nil {
		e.t.Fatal(err)
	}
	e.last[m] = m.RKey().Key()
	e.t.Cleanup(func() { release(e.t, m.Dereg) })
	return m
}

// TestWire sends orders to the peer and checks their results.
func TestWire(t *testing.T) {
	t.Run("messages", testWireMessages)
	t.Run("writes", testWireWrites)
	t.Run("reads", testWireReads)
	t.Run("refused", testWireRefused)
	t.Run("end", func(t *testing.T) {
		if _, ok := dialPeer(t).order(order{Do: "end"}); !ok {
			t.Error("order to end: got a closed connection")
		}
	})
}

// wireSizes are sizes in bytes around the packet sizes of path MTUs 1024 and 4096, and around
// iWARP's segments on jumbo frames.
var wireSizes = []int{1, 2, 3, 4, 5, 1023, 1024, 1025, 4095, 4096, 4097, 8900, 9000, 12289, 65535}

func testWireMessages(t *testing.T) {
	e := dialPeer(t)
	for _, n := range wireSizes {
		body := make([]byte, n-1)
		pattern(body, 0, byte(n))
		e.must(e.message(wireEcho, body))
		m, ok := e.next()
		if !ok {
			t.Fatalf("message of %d bytes: got a closed connection", n)
		}
		if m[0] != wireEcho || !bytes.Equal(m[1:], body) {
			t.Errorf("message of %d bytes: got a different message of %d bytes", n, len(m))
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
			clear(e.data.Buf)
			want := make([]byte, wireBuffer)
			pattern(want[off:off+n], 0, seed)
			rkey, addr := e.window(m, verbs.AccessLocalWrite|verbs.AccessRemoteWrite, 0, wireBuffer)
			res, ok := e.order(order{"write", rkey, addr + uint64(off), n, seed})
			if !ok || res.Status != verbs.StatusSuccess {
				t.Fatalf("write of %d bytes at %d: got status %v", n, off, res.Status)
			}
			e.must(&verbs.WorkRequest{Opcode: verbs.OpLocalInv, InvalidateRKey: rkey})
			if !bytes.Equal(e.data.Buf, want) {
				t.Errorf("write of %d bytes at %d: got different data", n, off)
			}
		}
	}
}

// siwInline is a size in bytes. The kernel's siw sends smaller messages together with their header,
// and corrupts them if they cross a page boundary.
const siwInline = 128

func (e *wireEnd) iwarp() bool { return e.id.Device().Attrs().Transport == verbs.TransportIWARP }

func testWireReads(t *testing.T) {
	e := dialPeer(t)
	m := e.mr()
	pattern(e.data.Buf, 0, 0x77)
	for _, n := range append(wireSizes, 1<<20) {
		for _, off := range []int{0, 1, 4095} {
			if e.iwarp() && n < siwInline && off+n > 4096 {
				continue
			}
			rkey, addr := e.window(m, verbs.AccessRemoteRead, off, n)
			res, ok := e.order(order{Do: "read", RKey: rkey, Addr: addr, Len: n})
			if !ok || res.Status != verbs.StatusSuccess {
				t.Fatalf("read of %d bytes at %d: got status %v", n, off, res.Status)
			}
			e.must(&verbs.WorkRequest{Opcode: verbs.OpLocalInv, InvalidateRKey: rkey})
			if want := crc32.ChecksumIEEE(e.data.Buf[off : off+n]); res.Sum != want {
				t.Errorf("read of %d bytes at %d: got checksum %08x, want %08x", n, off, res.Sum, want)
			}
		}
	}
}

// refused sends an order that must fail, end the connection and change no byte. It returns false if
// the connection ended before the order was acknowledged, because the peer may not have tried then.
func (e *wireEnd) refused(o order) (tried bool) {
	e.t.Helper()
	pattern(e.data.Buf, 0, 0x11)
	want := bytes.Clone(e.data.Buf)
	status := e.do(e.message(wireOrder, o))
	if status != verbs.StatusSuccess { // flushed, or a local error if siw was still sending
		e.t.Logf("order to %s: %v", o.Do, status)
	}
	res, ok := e.answer()
	if ok && res.Status == verbs.StatusSuccess {
		e.t.Errorf("%s: got success, want an error", o.Do)
	}
	if ok {
		if _, more := e.next(); more {
			e.t.Errorf("%s: got an open connection, want its end", o.Do)
		}
	}
	if !bytes.Equal(e.data.Buf, want) {
		e.t.Errorf("%s: got changed memory", o.Do)
	}
	return status == verbs.StatusSuccess
}

// refusedTries bounds the retries after a refusal that arrives before the order's acknowledgment.
const refusedTries = 8

func testWireRefused(t *testing.T) {
	const writable, readable = verbs.AccessLocalWrite | verbs.AccessRemoteWrite, verbs.AccessRemoteRead
	for _, c := range []struct {
		name, do   string
		access     verbs.Access
		invalidate bool
		flip       verbs.RKey // bits to flip in the key
		notIWARP   bool       // the kernel's siw neither answers nor refuses this
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
				rkey, addr := e.window(e.mr(), c.access, 0, wireBuffer)
				if c.invalidate {
					e.must(&verbs.WorkRequest{Opcode: verbs.OpLocalInv, InvalidateRKey: rkey})
				}
				if e.refused(order{c.do, rkey ^ c.flip, addr, 100_000, 9}) {
					return
				}
			}
			t.Error("every connection ended before its order was acknowledged")
		})
	}
}
