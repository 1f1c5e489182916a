package softiwarp

import (
	"bytes"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// smallBuffers is a configuration whose socket fills up soon.
var smallBuffers = Config{SocketBuffer: 16 << 10, MaxFPDU: 8192}

// zeroWrite is an RDMA Write of no octets as a peer sends it: it lets a responder speak.
func zeroWrite() []byte { return tagged(opWrite, true, 0, 0, nil) }

// eventually waits for cond.
func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(testTimeout); !cond(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", testTimeout, what)
		}
	}
}

// TestCutShortIsNoSuccess: a message that the end of the connection cuts short between two FPDUs
// does not complete as sent.
func TestCutShortIsNoSuccess(t *testing.T) {
	const size = 8 << 20
	cfg := smallBuffers
	cfg.Linger = 5 * time.Second
	p, v := connectRaw(t, cfg)
	p.send(zeroWrite())
	done := make(chan verbs.WorkCompletion, 1)
	if _, err := v.qp.PostSend(&verbs.WorkRequest{
		Opcode: verbs.OpRDMAWrite, Signaled: true, SGList: []verbs.SGE{{Buf: make([]byte, size)}}, RKey: 1,
		Done: func(wc *verbs.WorkCompletion) { done <- *wc },
	}); err != nil {
		t.Fatal(err)
	}
	if _, _, err := p.next(); err != nil { // the writer is in the middle of it
		t.Fatal(err)
	}
	time.Sleep(20 * time.Millisecond)
	drained := make(chan struct{})
	go func() { v.qp.Drain(); close(drained) }()
	eventually(t, "the QP is dead", v.qp.dead.Load)
	n, err := io.Copy(io.Discard, p.c) // lets the system call that is under way succeed
	if err != nil {
		t.Logf("the stream ended with %v", err)
	}
	p.c.Close()
	<-drained
	wc := <-done
	if n >= size {
		t.Fatal("the socket took the whole message: make it larger")
	}
	if wc.Status != verbs.StatusWRFlushErr {
		t.Errorf("RDMA Write of which %d of %d octets were sent: %v, want %v", n, size, wc.Status,
			verbs.StatusWRFlushErr)
	}
}

// TestFlushClosesTheReceiveQueue: once the flush has begun no Receive is taken any more, which
// nothing would ever complete. (fail marks the queue too, but may be overtaken by the two
// goroutines that it ends.)
func TestFlushClosesTheReceiveQueue(t *testing.T) {
	id, err := New(defaultConfig).Resolve(testContext(t), unusedPort)
	if err != nil {
		t.Fatal(err)
	}
	v := newEndpoint(t, id)
	q := v.qp
	q.mu.Lock()
	q.state, q.local = qpDead, true
	q.mu.Unlock()
	q.flush()
	close(q.ioDone)
	if _, err := q.PostRecv(&verbs.RecvRequest{Done: func(*verbs.WorkCompletion) {}}); !errors.Is(err,
		verbs.ErrQPState) {
		t.Errorf("Receive posted behind the flush: %v, want ErrQPState", err)
	}
}

// TestStoppedReader: a peer that takes nothing any more costs a bounded queue, and Close is bounded
// too. Every request completes once.
func TestStoppedReader(t *testing.T) {
	for _, crc := range []bool{false, true} {
		cfg := smallBuffers
		cfg.CRC, cfg.Linger = crc, 50*time.Millisecond
		p, v := connectRaw(t, cfg)
		p.send(zeroWrite())
		big := make([]byte, 1<<20)
		done := make(chan verbs.Status, 100)
		posted := 0
		var err error
		for err == nil && posted < 100 {
			if _, err = v.qp.PostSend(&verbs.WorkRequest{Opcode: verbs.OpRDMAWrite, Signaled: true,
				SGList: []verbs.SGE{{Buf: big}}, RKey: 1,
				Done: func(wc *verbs.WorkCompletion) { done <- wc.Status }}); err == nil {
				posted++
			}
		}
		if !errors.Is(err, verbs.ErrQueueFull) {
			t.Fatalf("%d messages of 1 MiB posted to a peer that does not read, then: %v, want ErrQueueFull", posted,
				err)
		}
		p.mustNext() // the writer is in the queue
		// Its own requests meanwhile: they are read, checked, and bounded by the read depth.
		for i := range uint32(endpointParam.ResponderResources) {
			p.send(readReq(readRequest{msn: 1 + i, size: winLen, srcSTag: v.rkey, srcTO: winIOVA}))
		}
		p.send(untagged(opSend, true, 0, qnSend, 1, 0, []byte("x")))
		if wc := v.received(); wc.Status != verbs.StatusSuccess {
			t.Errorf("a Send while the other direction is stuck: %v", wc.Status)
		}
		p.send(readReq(readRequest{msn: uint32(endpointParam.ResponderResources) + 1, size: winLen, srcSTag: v.rkey,
			srcTO: winIOVA}))
		if said := v.terminate(); said != termNoBuffer {
			t.Errorf("one Read Request too many: the consumer was told %+v, want %+v", said, termNoBuffer)
		}
		closed := make(chan struct{})
		go func() { v.id.Close(); close(closed) }()
		select {
		case <-closed:
		case <-time.After(testTimeout):
			t.Fatal("Close hangs")
		}
		flushed := 0
		for range posted {
			if st := <-done; st == verbs.StatusWRFlushErr {
				flushed++
			}
		}
		if flushed == 0 || len(done) != 0 {
			t.Errorf("%d of %d messages were flushed, %d completed twice", flushed, posted, len(done))
		}
	}
}

// TestMessagesStayWhole: whatever is posted while a Read Response goes out follows behind its last
// segment, an RDMA Write of no octets (with which a consumer wakes a stock siw peer that left the
// first FPDU unread) like the rest; and Read Requests and send queue take turns.
func TestMessagesStayWhole(t *testing.T) {
	const size = 1 << 20
	for _, crc := range []bool{false, true} {
		cfg := smallBuffers
		cfg.CRC = crc
		p, v := connectRaw(t, cfg)
		mem := make([]byte, size)
		for i := range mem {
			mem[i] = byte(i >> 5)
		}
		_, key := v.register(verbs.AccessRemoteRead, 1, mem)
		for i := range uint32(3) {
			p.send(readReq(readRequest{msn: 1 + i, sinkSTag: 7 + i, size: size, srcSTag: key, srcTO: winIOVA}))
		}
		h, _ := p.mustNext()
		if h.op != opReadResp || h.last {
			t.Fatalf("first came %+v", h)
		}
		got := h.ulpdu - taggedHdr
		time.Sleep(10 * time.Millisecond) // fills the socket
		nop := func(*verbs.WorkCompletion) {}
		for _, wr := range []*verbs.WorkRequest{
			{Opcode: verbs.OpRDMAWrite, RKey: 1, Done: nop},
			{Opcode: verbs.OpSend, SGList: []verbs.SGE{{Buf: mem[:100000]}}, Done: nop},
			{Opcode: verbs.OpRDMAWrite, RKey: 1, Done: nop},
		} {
			if _, err := v.qp.PostSend(wr); err != nil {
				t.Fatal(err)
			}
		}
		var order []uint8 // the messages, by opcode
		open := true      // between the segments of one
		for op, stag := h.op, h.stag; len(order) < 6; {
			h, b := p.mustNext()
			if open && (h.op != op || h.tagged && h.stag != stag) {
				t.Fatalf("CRC %v: a segment of opcode %d, STag %d in the middle of a message of opcode %d, STag %d",
					crc, h.op, h.stag, op, stag)
			}
			if h.op == opReadResp {
				if !open {
					got = 0
				}
				if h.to != uint64(got) || !bytes.Equal(b, mem[got:got+len(b)]) {
					t.Fatalf("CRC %v: Read Response segment at %d, want %d, or its octets differ", crc, h.to, got)
				}
				got += len(b)
			}
			if open = !h.last; h.last {
				order = append(order, h.op)
			}
			op, stag = h.op, h.stag
		}
		if want := []uint8{opReadResp, opWrite, opSend, opWrite, opReadResp, opReadResp}; !bytes.Equal(order, want) {
			t.Errorf("CRC %v: messages went out in the order %v, want %v", crc, order, want)
		}
	}
}

// TestInterleavedReadResponse: Sends and Writes between the segments of a Read Response are taken,
// as stock siw sends and takes them.
func TestInterleavedReadResponse(t *testing.T) {
	p, v := connectRaw(t, defaultConfig)
	p.send(zeroWrite())
	sink := make([]byte, 100)
	read := make(chan verbs.WorkCompletion, 1)
	if _, err := v.qp.PostSend(&verbs.WorkRequest{Opcode: verbs.OpRDMARead, Signaled: true,
		SGList: []verbs.SGE{{Buf: sink}},
		Done:   func(wc *verbs.WorkCompletion) { read <- *wc }}); err != nil {
		t.Fatal(err)
	}
	_, b := p.mustNext()
	var r readRequest
	r.parseRDMAP(b)
	data := filler(100)
	p.send(
		tagged(opReadResp, false, r.sinkSTag, 0, data[:40]),
		untagged(opSend, false, 0, qnSend, 1, 0, []byte("be")),
		zeroWrite(),
		tagged(opReadResp, false, r.sinkSTag, 40, data[40:41]),
		untagged(opSend, true, 0, qnSend, 1, 2, []byte("tween")),
		tagged(opReadResp, false, r.sinkSTag, 41, nil),
		tagged(opWrite, true, v.wkey, winIOVA, filler(8)),
		tagged(opReadResp, true, r.sinkSTag, 41, data[41:]),
	)
	if wc := v.received(); wc.Status != verbs.StatusSuccess || string(v.bufs[0][:wc.ByteLen]) != "between" {
		t.Errorf("Receive: %+v %q", wc, v.bufs[0][:wc.ByteLen])
	}
	if wc := <-read; wc.Status != verbs.StatusSuccess || wc.ByteLen != 100 || !bytes.Equal(sink, data) {
		t.Errorf("RDMA Read: %+v %x", wc, sink)
	}
}

// TestCutOff: how a stream can end in the middle of something, and that what was under way is
// flushed.
func TestCutOff(t *testing.T) {
	half := fpdu(untagged(opSend, true, 0, qnSend, 1, 0, []byte("hello")), false)[:23]
	between := fpdu(untagged(opSend, false, 0, qnSend, 1, 0, []byte("hel")), false)
	flushedRecv := func(t *testing.T, v *endpoint) {
		t.Helper()
		v.id.Close()
		for range numRecvs {
			if wc := v.received(); wc.Status != verbs.StatusWRFlushErr {
				t.Errorf("Receive: %v, want %v", wc.Status, verbs.StatusWRFlushErr)
			}
		}
	}
	t.Run("FIN between the segments of a Send", func(t *testing.T) {
		p, v := connectRaw(t, defaultConfig)
		p.write(between)
		p.c.CloseWrite()
		if err := v.cause(); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("cause %v, want io.ErrUnexpectedEOF", err)
		}
		flushedRecv(t, v)
	})
	for name, part := range map[string][]byte{"RST in the middle of an FPDU": half,
		"RST between the segments of a Send": between} {
		t.Run(name, func(t *testing.T) {
			p, v := connectRaw(t, defaultConfig)
			p.write(part)
			eventually(t, "the FPDU has been begun", func() bool { return v.qp.Stats().BytesReceived > 0 })
			p.c.SetLinger(0)
			p.c.Close()
			var oe *net.OpError
			if err := v.cause(); !errors.As(err, &oe) {
				t.Errorf("cause %v, want a *net.OpError", err)
			}
			flushedRecv(t, v)
		})
	}
	t.Run("FIN while this side's message is stuck", func(t *testing.T) {
		cfg := smallBuffers
		cfg.Linger = 50 * time.Millisecond
		p, v := connectRaw(t, cfg)
		p.send(zeroWrite())
		done := make(chan verbs.Status, 1)
		if _, err := v.qp.PostSend(&verbs.WorkRequest{Opcode: verbs.OpRDMAWrite, Signaled: true,
			SGList: []verbs.SGE{{Buf: make([]byte, 8<<20)}}, RKey: 1,
			Done: func(wc *verbs.WorkCompletion) { done <- wc.Status }}); err != nil {
			t.Fatal(err)
		}
		if _, _, err := p.next(); err != nil {
			t.Fatal(err)
		}
		// a half-close ends the whole stream (RFC 5041 §6.2.1 would let this half go on)
		p.c.CloseWrite()
		if err := v.cause(); err != io.EOF {
			t.Errorf("cause %v, want io.EOF", err)
		}
		if st := <-done; st != verbs.StatusWRFlushErr {
			t.Errorf("the RDMA Write: %v, want %v", st, verbs.StatusWRFlushErr)
		}
		v.id.Close()
	})
}

// TestBoundsNearTheEnd: offsets and lengths at the top of the 64-bit space do not wrap into a
// registration.
func TestBoundsNearTheEnd(t *testing.T) {
	pd := &protectionDomain{dev: New(defaultConfig).(*provider).dev}
	q := &qp{dev: pd.dev, pd: pd}
	const top = 1<<64 - 1
	for _, c := range []struct {
		iova   uint64
		length int
		to, n  uint64
		want   denial
	}{
		{top - 100, 100, top - 100, 100, granted}, // up to the last octet but one that can be named
		{top - 100, 100, top - 1, 1, granted},
		{top - 100, 100, top, 1, denyWrap},
		{top - 100, 100, top - 1, 2, denyWrap},
		{top - 100, 100, top - 100, 101, denyWrap},
		{top - 100, 100, top - 101, 1, denyBounds},
		{top - 100, 100, top - 101, 103, denyWrap},
		{top - 100, 100, 0, 1, denyBounds},
		{top - 100, 100, top - 50, 1<<32 - 1, denyWrap},
		{0, 100, 0, 100, granted},
		{0, 100, 99, 1, granted},
		{0, 100, 100, 1, denyBounds},
		{0, 100, 99, 2, denyBounds},
		{0, 100, top, 1, denyWrap},
		{0, 100, top - 1, 1, denyBounds},
		{0, 100, 1 << 63, 1, denyBounds},
		{0, 100, 0, 1<<32 - 1, denyBounds},
	} {
		vm, err := pd.AllocMR(1)
		if err != nil {
			t.Fatal(err)
		}
		m := vm.(*mr)
		stag := uint32(m.first)
		m.register(q, stag, verbs.AccessRemoteWrite, c.iova, [][]byte{make([]byte, c.length)})
		if _, got := q.access(stag, c.to, c.n, verbs.AccessRemoteWrite); got != c.want {
			t.Errorf("[%#x, +%d) of a registration of [%#x, +%d): %d, want %d", c.to, c.n, c.iova, c.length, got,
				c.want)
		}
		if err := m.Dereg(); err != nil {
			t.Error(err)
		}
	}
}

// TestTerminateBeforeReset: a peer that sends a Terminate and then resets, as siw does when it
// leaves octets unread, has said why: the consumer is told that, whichever of reader and writer
// meets the reset first.
func TestTerminateBeforeReset(t *testing.T) {
	for i := range 60 {
		p, v := connectRaw(t, smallBuffers)
		p.send(zeroWrite())
		if _, err := v.qp.PostSend(&verbs.WorkRequest{Opcode: verbs.OpRDMAWrite,
			SGList: []verbs.SGE{{Buf: make([]byte, 8<<20)}}, RKey: 1,
			Done: func(*verbs.WorkCompletion) {}}); err != nil {
			t.Fatal(err)
		}
		p.mustNext() // the rest is left unread
		p.send(untagged(opTerminate, true, 0, qnTerminate, 1, 0,
			unhex(t, "21020300 001a 4143 00000000 00000000 00000048 00000000")))
		p.c.SetLinger(0)
		p.c.Close()
		var te *verbs.TerminateError
		if err := v.cause(); !errors.As(err, &te) || te.Local {
			t.Errorf("round %d: cause %v, want the peer's Terminate", i, err)
		}
		v.id.Close()
	}
}
