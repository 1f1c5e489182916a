package softiwarp

import (
	"bytes"
	"errors"
	"io"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"golang.org/x/sys/unix"
)

// smallBuffers is a configuration whose socket is full after little data.
var smallBuffers = Config{SocketBuffer: 16 << 10, MaxFPDU: 8192}

// zeroWrite returns an RDMA Write of zero bytes, which allows a responder to send.
func zeroWrite() []byte { return tagged(opWrite, true, 0, 0, nil) }

// TestTruncatedMessageFails ends the connection between two FPDUs of a message. The message must
// not complete with success.
func TestTruncatedMessageFails(t *testing.T) {
	const size = 8 << 20
	cfg := smallBuffers
	cfg.Linger = kit.Timeout
	p, v := connectRaw(t, cfg)
	p.send(zeroWrite())
	done := v.postWrite(size)
	p.mustNext() // the writer has started the message
	drained := make(chan struct{})
	go func() { v.qp.Drain(); close(drained) }()
	kit.Eventually(t, "the QP is dead", v.qp.dead.Load)
	n, err := io.Copy(io.Discard, p.c) // lets the running system call finish
	if err != nil {
		t.Logf("end of the stream: %v", err)
	}
	p.c.Close()
	<-drained
	wc := <-done
	if n >= size {
		t.Fatal("the socket accepted the whole message; use a larger one")
	}
	if wc.Status != verbs.StatusWRFlushErr {
		t.Errorf("RDMA Write with %d of %d bytes sent: got %v, want %v", n, size, wc.Status, verbs.StatusWRFlushErr)
	}
}

// TestPeerThatStopsReading checks that the send queue and Close are bounded when the peer reads
// nothing, and that every request completes once.
func TestPeerThatStopsReading(t *testing.T) {
	cfg := smallBuffers
	cfg.Linger = 50 * time.Millisecond
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
		t.Fatalf("post after %d messages of 1 MiB to a peer that does not read: got %v, want ErrQueueFull", posted,
			err)
	}
	p.mustNext() // the writer executes the send queue
	// The peer's Read Requests are still read and checked, and the read depth bounds them.
	for i := range uint32(endpointParam.ResponderResources) {
		p.send(readReq(readRequest{msn: 1 + i, size: winLen, srcSTag: v.rkey, srcTO: winIOVA}))
	}
	p.send(untagged(opSend, true, 0, qnSend, 1, 0, []byte("x")))
	if wc := v.received(); wc.Status != verbs.StatusSuccess {
		t.Errorf("Receive while this side cannot send: got %v, want success", wc.Status)
	}
	p.send(readReq(readRequest{msn: uint32(endpointParam.ResponderResources) + 1, size: winLen, srcSTag: v.rkey,
		srcTO: winIOVA}))
	if got := v.terminate(); got != termNoBuffer {
		t.Errorf("cause after one Read Request too many: got %+v, want %+v", got, termNoBuffer)
	}
	v.id.Close()
	flushed := 0
	for range posted {
		if st := <-done; st == verbs.StatusWRFlushErr {
			flushed++
		}
	}
	if flushed == 0 || len(done) != 0 {
		t.Errorf("%d of %d messages were flushed, want at least 1; %d completed twice, want 0", flushed, posted,
			len(done))
	}
}

// TestNothingIsSentAfterClose closes a connection whose peer reads nothing. The peer must not get
// the data that it has not received yet: the requests in it may be repeated on another connection.
func TestNothingIsSentAfterClose(t *testing.T) {
	cfg := smallBuffers
	cfg.Linger = 50 * time.Millisecond
	p, v := connectRaw(t, cfg)
	p.send(zeroWrite())
	done := v.postWrite(8 << 20)
	p.mustNext() // the writer is in the middle of the message
	waitForFullWindow(t, v.qp)
	v.id.Close()
	<-done
	for {
		_, _, err := p.next()
		if errors.Is(err, syscall.ECONNRESET) {
			return
		}
		if err != nil {
			t.Fatalf("end of the stream: got %v, want ECONNRESET", err)
		}
	}
}

// waitForFullWindow waits until the socket of q holds data that does not fit into the window of the
// peer. The kernel sends other data at once, also while the writer does not run.
func waitForFullWindow(t *testing.T, q *qp) {
	t.Helper()
	raw, err := q.conn.SyscallConn()
	kit.Must(t, err)
	full := 0 // consecutive polls
	kit.Eventually(t, "full window", func() bool {
		var unsent int
		kit.Must(t, raw.Control(func(fd uintptr) { unsent, err = unix.IoctlGetInt(int(fd), unix.SIOCOUTQNSD) }))
		kit.Must(t, err)
		full++
		if unsent == 0 {
			full = 0
		}
		return full == 20
	})
}

// TestMessagesAreNotInterleaved posts requests while a Read Response is sent. The requests must
// follow the last segment of the response. One of them is an RDMA Write of zero bytes, with which a
// consumer wakes a stock siw peer that left the first FPDU unread. Read Responses and the send
// queue alternate.
func TestMessagesAreNotInterleaved(t *testing.T) {
	const size = 1 << 20
	p, v := connectRaw(t, smallBuffers)
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
		t.Fatalf("first FPDU: got %+v, want a Read Response with more segments", h)
	}
	got := h.ulpdu - taggedHdr
	nop := func(*verbs.WorkCompletion) {}
	for _, wr := range []*verbs.WorkRequest{
		{Opcode: verbs.OpRDMAWrite, RKey: 1, Done: nop},
		{Opcode: verbs.OpSend, SGList: []verbs.SGE{{Buf: mem[:100000]}}, Done: nop},
		{Opcode: verbs.OpRDMAWrite, RKey: 1, Done: nop},
	} {
		_, err := v.qp.PostSend(wr)
		kit.Must(t, err)
	}
	var order []uint8 // opcodes of the whole messages
	open := true      // a message has more segments
	for op, stag := h.op, h.stag; len(order) < 6; {
		h, b := p.mustNext()
		if open && (h.op != op || h.tagged && h.stag != stag) {
			t.Fatalf("got a segment of opcode %d, STag %d inside a message of opcode %d, STag %d", h.op, h.stag,
				op, stag)
		}
		if h.op == opReadResp {
			if !open {
				got = 0
			}
			if h.to != uint64(got) || !bytes.Equal(b, mem[got:got+len(b)]) {
				t.Fatalf("Read Response segment: got offset %d, want %d with the registered data", h.to, got)
			}
			got += len(b)
		}
		if open = !h.last; h.last {
			order = append(order, h.op)
		}
		op, stag = h.op, h.stag
	}
	if want := []uint8{opReadResp, opWrite, opSend, opWrite, opReadResp, opReadResp}; !bytes.Equal(order, want) {
		t.Errorf("order of the messages: got %v, want %v", order, want)
	}
}

// TestInterleavedReadResponseIsAccepted sends Sends and Writes between the segments of a Read
// Response. A stock siw sends and accepts them.
func TestInterleavedReadResponseIsAccepted(t *testing.T) {
	p, v := connectRaw(t, defaultConfig)
	p.send(zeroWrite())
	sink := make([]byte, 100)
	read := v.post(&verbs.WorkRequest{Opcode: verbs.OpRDMARead, SGList: []verbs.SGE{{Buf: sink}}})
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
		t.Errorf("Receive: got %+v %q, want success and \"between\"", wc, v.bufs[0][:wc.ByteLen])
	}
	if wc := <-read; wc.Status != verbs.StatusSuccess || wc.ByteLen != 100 || !bytes.Equal(sink, data) {
		t.Errorf("RDMA Read: got %+v %x, want success and %x", wc, sink, data)
	}
}

// TestAccessDoesNotWrap checks offsets and lengths at the end of the 64-bit address space.
func TestAccessDoesNotWrap(t *testing.T) {
	pd := &protectionDomain{dev: New(defaultConfig).(*provider).dev}
	q := &qp{dev: pd.dev, pd: pd}
	const top = 1<<64 - 1
	for _, c := range []struct {
		iova   uint64
		length int
		to, n  uint64
		want   denial
	}{
		{top - 100, 100, top - 100, 100, granted}, // up to the last address but one
		{top - 100, 100, top, 1, denyWrap},
		{top - 100, 100, top - 1, 2, denyWrap},
		{top - 100, 100, top - 100, 101, denyWrap},
		{top - 100, 100, top - 101, 1, denyBounds},
		{top - 100, 100, 0, 1, denyBounds},
		{top - 100, 100, top - 50, 1<<32 - 1, denyWrap},
		{0, 100, 0, 100, granted},
		{0, 100, 99, 2, denyBounds},
		{0, 100, top, 1, denyWrap},
		{0, 100, top - 1, 1, denyBounds},
		{0, 100, 0, 1<<32 - 1, denyBounds},
	} {
		vm, err := pd.AllocMR(1)
		kit.Must(t, err)
		m := vm.(*mr)
		stag := uint32(m.first)
		m.register(q, stag, verbs.AccessRemoteWrite, c.iova, [][]byte{make([]byte, c.length)})
		if _, got := q.access(stag, c.to, c.n, verbs.AccessRemoteWrite); got != c.want {
			t.Errorf("access to [%#x, +%d) of a registration of [%#x, +%d): got %d, want %d", c.to, c.n, c.iova,
				c.length, got,
				c.want)
		}
		if err := m.Dereg(); err != nil {
			t.Error(err)
		}
	}
}

// TestTerminateBeforeResetIsCause sends a Terminate and then a reset, as siw does when it has
// unread data. The cause must be the Terminate, even when the writer sees the reset before the
// reader.
func TestTerminateBeforeResetIsCause(t *testing.T) {
	for i := range 5 {
		p, v := connectRaw(t, smallBuffers)
		p.send(zeroWrite())
		v.postWrite(8 << 20)
		p.mustNext() // leaves the rest unread
		p.send(untagged(opTerminate, true, 0, qnTerminate, 1, 0,
			kit.Unhex("21020300 001a 4143 00000000 00000000 00000048 00000000")))
		p.c.SetLinger(0)
		p.c.Close()
		var te *verbs.TerminateError
		if err := v.cause(); !errors.As(err, &te) || te.Local {
			t.Errorf("round %d: cause: got %v, want the peer's Terminate", i, err)
		}
		v.id.Close()
	}
}
