package softiwarp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"runtime"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"golang.org/x/sys/unix"
)

// withControl overwrites bits of a ULPDU's control word.
func withControl(u []byte, clear, set uint16) []byte {
	c := uint16(u[0])<<8 | uint16(u[1])
	c = c&^clear | set
	u[0], u[1] = byte(c>>8), byte(c)
	return u
}

// filler returns n bytes of 0xee.
func filler(n int) []byte { return bytes.Repeat([]byte{0xee}, n) }

// A message returns a ULPDU that is sent to v.
type message func(v *endpoint) []byte

// control overwrites bits of the control word.
func (m message) control(clear, set uint16) message {
	return func(v *endpoint) []byte { return withControl(m(v), clear, set) }
}

// offset overwrites the message offset of an untagged ULPDU.
func (m message) offset(mo uint32) message {
	return func(v *endpoint) []byte {
		u := m(v)
		binary.BigEndian.PutUint32(u[14:], mo)
		return u
	}
}

// cut shortens the ULPDU to n bytes.
func (m message) cut(n int) message { return func(v *endpoint) []byte { return m(v)[:n] } }

// A stagOf returns an STag that v knows, or one that is invalid there.
type stagOf func(v *endpoint) uint32

func wkey(v *endpoint) uint32        { return v.wkey }
func staleWKey(v *endpoint) uint32   { return v.wkey - 1 }
func nextWKey(v *endpoint) uint32    { return v.wkey + 1 }
func unknownWKey(v *endpoint) uint32 { return v.wkey ^ 1<<30 }
func rkey(v *endpoint) uint32        { return v.rkey }
func unknownRKey(v *endpoint) uint32 { return v.rkey ^ 1<<30 }
func otherPD(v *endpoint) uint32     { return v.otherPD }
func otherQP(v *endpoint) uint32     { return v.otherQP }
func zeroSTag(*endpoint) uint32      { return 0 }

// taggedTo makes a last tagged segment with n bytes of data.
func taggedTo(op uint8, stag stagOf, to uint64, n int) message {
	return func(v *endpoint) []byte { return tagged(op, true, stag(v), to, filler(n)) }
}

// write makes an RDMA Write of n bytes.
func write(stag stagOf, to uint64, n int) message { return taggedTo(opWrite, stag, to, n) }

// onQueue makes a last untagged segment with n bytes of data.
func onQueue(op uint8, qn, msn uint32, n int) message {
	return func(*endpoint) []byte { return untagged(op, true, 0, qn, msn, 0, filler(n)) }
}

// send makes a segment of a Send with n bytes of data.
func send(last bool, msn, mo uint32, n int) message {
	return func(*endpoint) []byte { return untagged(opSend, last, 0, qnSend, msn, mo, filler(n)) }
}

// sendEach makes n empty Sends.
func sendEach(n int) []message {
	l := make([]message, n)
	for i := range l {
		l[i] = send(true, uint32(1+i), 0, 0)
	}
	return l
}

// splitSend makes one Send of segments with these sizes.
func splitSend(sizes ...int) []message {
	var l []message
	var mo uint32
	for i, n := range sizes {
		l = append(l, send(i == len(sizes)-1, 1, mo, n))
		mo += uint32(n)
	}
	return l
}

// sendInv makes a Send With Invalidate of 8 bytes.
func sendInv(op uint8, stag stagOf) message {
	return func(v *endpoint) []byte { return untagged(op, true, stag(v), qnSend, 1, 0, filler(8)) }
}

// read makes a Read Request.
func read(msn uint32, stag stagOf, to uint64, size uint32) message {
	return func(v *endpoint) []byte {
		return readReq(readRequest{msn: msn, size: size, srcSTag: stag(v), srcTO: to})
	}
}

// violations are invalid messages of a peer, with the Terminate that RFC 5040, RFC 5041 and RFC
// 5044 name for each.
var violations = []struct {
	name   string
	want   termCode
	quoted int // bytes after the fixed part of the Terminate
	ulpdus []message
}{
	{"write, unknown STag", termTaggedInvalidSTag, 16, []message{write(unknownWKey, winIOVA, 8)}},
	{"write, stale key", termTaggedInvalidSTag, 16, []message{write(staleWKey, winIOVA, 8)}},
	{"write, STag 0", termTaggedInvalidSTag, 16, []message{write(zeroSTag, winIOVA, 8)}},
	{"write, wrong direction", termTaggedInvalidSTag, 16, []message{write(rkey, winIOVA, 8)}},
	{"write, other PD", termTaggedOtherStream, 16, []message{write(otherPD, winIOVA, 8)}},
	{"write, other stream", termTaggedOtherStream, 16, []message{write(otherQP, winIOVA, 8)}},
	{"write, before the window", termTaggedBounds, 16, []message{write(wkey, winIOVA-1, 8)}},
	{"write, across the end of the window", termTaggedBounds, 16, []message{write(wkey, winIOVA+winLen-7, 8)}},
	{"write, after the window", termTaggedBounds, 16, []message{write(wkey, winIOVA+winLen, 1)}},
	{"write, longer than the window", termTaggedBounds, 16, []message{write(wkey, winIOVA, 60000)}},
	{"write, offset wraps", termTaggedWrap, 16, []message{write(wkey, 1<<64-4, 8)}},
	{"write, DDP version 2", termTaggedVersion, 16, []message{write(wkey, winIOVA, 8).control(ctrlDVMask, 0x200)}},
	{"write, RDMAP version 0", termRDMAPVersion, 16, []message{write(wkey, winIOVA, 8).control(ctrlRVMask, 0)}},
	{"write, untagged", termOpcode, 20, []message{onQueue(opWrite, qnSend, 1, 8)}},
	{"Read Response without a Read", termOpcode, 16, []message{taggedTo(opReadResp, wkey, winIOVA, 8)}},
	{"Send, tagged", termOpcode, 16, []message{taggedTo(opSend, wkey, winIOVA, 8)}},
	{"Send, DDP version 0", termUntaggedVersion, 20, []message{send(true, 1, 0, 8).control(ctrlDVMask, 0)}},
	{"Send, RDMAP version 2", termRDMAPVersion, 20, []message{send(true, 1, 0, 8).control(ctrlRVMask, 0x80)}},
	{"opcode 8", termOpcode, 20, []message{onQueue(8, qnSend, 1, 0)}},
	{"opcode 11, tagged", termOpcode, 16, []message{func(*endpoint) []byte { return tagged(11, true, 1, 0, nil) }}},
	{"queue 3", termUntaggedQN, 20, []message{onQueue(opSend, 3, 1, 0)}},
	{"Send on queue 1", termOpcode, 20, []message{onQueue(opSend, qnReadReq, 1, 0)}},
	{"Send on queue 2", termOpcode, 20, []message{onQueue(opSend, qnTerminate, 1, 4)}},
	{"Read Request on queue 0", termOpcode, 20, []message{onQueue(opReadRequest, qnSend, 1, readReqHdr)}},
	{"Terminate on queue 0", termOpcode, 20, []message{onQueue(opTerminate, qnSend, 1, 4)}},
	{"Read Response, untagged", termOpcode, 20, []message{onQueue(opReadResp, qnSend, 1, 8)}},
	{"Send, MSN 0", termMSNRange, 20, []message{send(true, 0, 0, 0)}},
	{"Send, MSN repeated", termMSNRange, 20, []message{send(true, 1, 0, 0), send(true, 1, 0, 0)}},
	{"Send, MSN skipped", termMSNRange, 20, []message{send(true, 2, 0, 0)}},
	{"Send, other MSN in the second segment", termMSNRange, 20, []message{send(false, 1, 0, 4), send(true, 2, 4, 4)}},
	{"Send, MO 4 in the first segment", termMO, 20, []message{send(true, 1, 4, 4)}},
	{"Send, gap between segments", termMO, 20, []message{send(false, 1, 0, 4), send(true, 1, 8, 4)}},
	{"Send, segments overlap", termMO, 20, []message{send(false, 1, 0, 4), send(true, 1, 0, 4)}},
	{"Send, too long", termTooLong, 20, []message{send(true, 1, 0, recvSize+1)}},
	{"Send, far too long", termTooLong, 20, []message{send(true, 1, 0, 60000)}},
	{"Send, too long in the third segment", termTooLong, 20, splitSend(30, 34, 1)},
	{"Send, no Receive", termNoBuffer, 20, sendEach(numRecvs + 1)},
	{"Send With Invalidate, unknown STag", termCannotInvalidate, 20, []message{sendInv(opSendInv, unknownWKey)}},
	{"Send With Invalidate, stale key", termCannotInvalidate, 20, []message{sendInv(opSendInv, nextWKey)}},
	{"Send With Invalidate, other PD", termCannotInvalidate, 20, []message{sendInv(opSendSEInv, otherPD)}},
	{"Send With Invalidate, other stream", termCannotInvalidate, 20, []message{sendInv(opSendInv, otherQP)}},
	{"Read, unknown STag", termReadInvalidSTag, 48, []message{read(1, unknownRKey, winIOVA, 8)}},
	{"Read, other PD", termReadOtherStream, 48, []message{read(1, otherPD, winIOVA, 8)}},
	{"Read, other stream", termReadOtherStream, 48, []message{read(1, otherQP, winIOVA, 8)}},
	{"Read, wrong direction", termReadAccess, 48, []message{read(1, wkey, winIOVA, 8)}},
	{"Read, across the end of the window", termReadBounds, 48, []message{read(1, rkey, winIOVA+1, winLen)}},
	{"Read, 4 GiB", termReadBounds, 48, []message{read(1, rkey, winIOVA, 1<<32-1)}},
	{"Read, offset wraps", termReadWrap, 48, []message{read(1, rkey, 1<<64-4, 8)}},
	{"Read, MSN 2", termMSNRange, 20, []message{read(2, rkey, winIOVA, 8)}},
	{"Read, MO 4", termMO, 20, []message{read(1, rkey, winIOVA, 8).offset(4)}},
	{"Read, not last", termTooLong, 20, []message{read(1, rkey, winIOVA, 8).control(ctrlLast, 0)}},
	{"Read, too long", termTooLong, 20, []message{longRead}},
	{"Read, too short", termFPDULength, 0, []message{read(1, rkey, winIOVA, 8).cut(readReqULPDU - 1)}},
	{"Terminate, MSN 2", termMSNRange, 20, []message{onQueue(opTerminate, qnTerminate, 2, 4)}},
	{"Terminate, MO 4", termMO, 20, []message{onQueue(opTerminate, qnTerminate, 1, 4).offset(4)}},
	{"ULPDU of 0", termFPDULength, 0, []message{func(*endpoint) []byte { return []byte{} }}},
	{"ULPDU of 1", termFPDULength, 0, []message{func(*endpoint) []byte { return []byte{0x41} }}},
	{"ULPDU of 10 for a Send", termFPDULength, 0, []message{send(true, 1, 0, 0).cut(10)}},
	{"ULPDU of 13 for a Write", termFPDULength, 0, []message{write(wkey, winIOVA, 0).cut(13)}},
}

// longRead makes a valid Read Request with one more byte.
func longRead(v *endpoint) []byte { return append(read(1, rkey, winIOVA, 8)(v), 0) }

// TestViolationsTerminate checks that each violation is answered with the named Terminate, and that
// no memory changes.
func TestViolationsTerminate(t *testing.T) {
	for _, crc := range []bool{false, true} {
		for _, c := range violations {
			name := c.name
			if crc {
				name += ", CRC on"
			}
			t.Run(name, func(t *testing.T) {
				cfg := defaultConfig
				cfg.CRC = crc
				p, v := connectRaw(t, cfg)
				var l [][]byte
				for _, m := range c.ulpdus {
					l = append(l, m(v))
				}
				p.send(l...)
				got, b := p.readTerminate()
				if got != c.want {
					t.Errorf("Terminate: got %+v (%s), want %+v (%s)", got, got.text(), c.want, c.want.text())
				}
				if n := len(b) - termHdr; n != c.quoted {
					t.Errorf("bytes that the Terminate quotes: got %d, want %d", n, c.quoted)
				}
				if got := v.terminate(); got != c.want {
					t.Errorf("cause: got %+v, want %+v", got, c.want)
				}
				v.id.Close()
				if !bytes.Equal(v.mem, v.clean) {
					t.Error("the registered memory was written")
				}
				if st := v.qp.Stats(); st.TerminatesSent != 1 {
					t.Errorf("TerminatesSent: got %d, want 1", st.TerminatesSent)
				}
			})
		}
	}
}

func TestInvalidCRCTerminates(t *testing.T) {
	cfg := defaultConfig
	cfg.CRC = true
	for _, at := range []int{0, 2, 8, 16, 25, -1} { // from the length field to the CRC
		p, v := connectRaw(t, cfg)
		b := fpdu(tagged(opWrite, true, v.wkey, winIOVA, filler(21)), true)
		if at < 0 {
			at += len(b)
		}
		b[at] ^= 1
		if at == 0 {
			b = append(b, make([]byte, 300)...) // the length is now 256 more
		}
		p.write(b)
		if got, _ := p.readTerminate(); got != termCRC {
			t.Errorf("bit flipped in byte %d: Terminate: got %+v, want %+v", at, got, termCRC)
		}
		v.id.Close()
		if !bytes.Equal(v.mem, v.clean) {
			t.Errorf("bit flipped in byte %d: the registered memory was written", at)
		}
	}
}

// TestUnusualMessagesAreAccepted sends messages that are unusual but valid.
func TestUnusualMessagesAreAccepted(t *testing.T) {
	p, v := connectRaw(t, defaultConfig)
	p.send(
		// zero-length Write: nothing is checked
		tagged(opWrite, true, 0xdeadbeef, 1<<64-1, nil),
		// zero-length Read: nothing is checked
		readReq(readRequest{msn: 1, sinkSTag: 5, sinkTO: 6, srcSTag: 0xdeadbeef, srcTO: 7}),
		untagged(opSend, true, 0, qnSend, 1, 0, nil),
		// the Invalidate field has no meaning in this message
		untagged(opSendSE, true, 0x77, qnSend, 2, 0, []byte("abc")),
		withControl(untagged(opSend, true, 0, qnSend, 3, 0, []byte("reserved bits")), 0, 0x3c00|0x30),
	)
	if h, b := p.mustNext(); h.op != opReadResp || !h.last || h.stag != 5 || h.to != 6 || len(b) != 0 {
		t.Errorf("answer to a zero-length Read: got %+v %x, want an empty Read Response", h, b)
	}
	for i, want := range []string{"", "abc", "reserved bits"} {
		if wc := v.received(); wc.Status != verbs.StatusSuccess || string(v.bufs[i][:wc.ByteLen]) != want ||
			wc.WithInv {
			t.Errorf("Receive %d: got %+v %q, want %q", i, wc, v.bufs[i], want)
		}
	}
	// The STag is in both segments of the Send With Invalidate. The STag is invalid when the
	// Receive completes.
	p.send(untagged(opSendSEInv, false, v.wkey, qnSend, 4, 0, []byte("in")),
		untagged(opSendSEInv, true, v.wkey, qnSend, 4, 2, []byte("val")))
	if wc := v.received(); !wc.WithInv || uint32(wc.InvalidatedRKey) != v.wkey ||
		string(v.bufs[3][:wc.ByteLen]) != "inval" {
		t.Errorf("Receive of a Send With Invalidate: got %+v", wc)
	}
	p.send(tagged(opWrite, true, v.wkey, winIOVA, filler(1)))
	if got, _ := p.readTerminate(); got != termTaggedInvalidSTag {
		t.Errorf("Terminate of a Write after Send With Invalidate: got %+v, want %+v", got, termTaggedInvalidSTag)
	}
}

// exchange returns a stream with messages of all kinds, and the memory that results from it.
func exchange(v *endpoint) (stream []byte, want []byte) {
	data := make([]byte, 301)
	for i := range data {
		data[i] = byte(i)
	}
	crc := v.qp.crc
	for _, u := range [][]byte{
		tagged(opWrite, false, v.wkey, winIOVA+650, data[:100]),
		untagged(opSend, false, 0, qnSend, 1, 0, data[:31]),
		tagged(opWrite, true, v.wkey, winIOVA+750, data[100:]), // between the segments of a Send
		untagged(opSend, true, 0, qnSend, 1, 31, data[31:33]),
		readReq(readRequest{msn: 1, sinkSTag: 9, size: 303, srcSTag: v.rkey, srcTO: winIOVA + 649}),
		untagged(opSendInv, true, v.wkey, qnSend, 2, 0, data[:1]),
	} {
		stream = append(stream, fpdu(u, crc)...)
	}
	want = bytes.Clone(v.clean)
	copy(want[guard+650:], data)
	return stream, want
}

// checkExchange checks the outcome of talk.
func checkExchange(t *testing.T, p *rawPeer, v *endpoint, want []byte) {
	t.Helper()
	if wc := v.received(); wc.Status != verbs.StatusSuccess || wc.ByteLen != 33 || v.bufs[0][32] != 32 {
		t.Fatalf("first Receive: got %+v, want 33 bytes", wc)
	}
	if wc := v.received(); wc.Status != verbs.StatusSuccess || wc.ByteLen != 1 || !wc.WithInv {
		t.Fatalf("second Receive: got %+v, want 1 byte and an invalidation", wc)
	}
	if !bytes.Equal(v.mem, want) {
		t.Fatal("memory after the RDMA Write differs from the expected content")
	}
	if h, b := p.mustNext(); h.op != opReadResp || h.stag != 9 || h.to != 0 || !h.last ||
		!bytes.Equal(b, want[guard+649:][:303]) {
		t.Fatalf("Read Response: got %+v with %d bytes, want STag 9 with the registered data", h, len(b))
	}
}

// TestStreamMaySplitAnywhere sends the stream byte by byte. The reader takes each byte before the
// next one is sent.
func TestStreamMaySplitAnywhere(t *testing.T) {
	for _, crc := range []bool{false, true} {
		cfg := defaultConfig
		cfg.CRC = crc
		p, v := connectRaw(t, cfg)
		s, want := exchange(v)
		raw, err := v.qp.conn.SyscallConn()
		kit.Must(t, err)
		unread := 0
		taken := func() bool {
			kit.Must(t, raw.Control(func(fd uintptr) { unread, err = unix.IoctlGetInt(int(fd), unix.SIOCINQ) }))
			kit.Must(t, err)
			return unread == 0
		}
		for i := range s {
			p.write(s[i : i+1])
			for !taken() {
				runtime.Gosched()
			}
		}
		checkExchange(t, p, v, want)
	}
}

// TestAllFPDUSizesAreAccepted sends segments up to the limit of the length field.
func TestAllFPDUSizesAreAccepted(t *testing.T) {
	for _, crc := range []bool{false, true} {
		cfg := defaultConfig
		cfg.CRC = crc
		p, v := connectRaw(t, cfg)
		mem := make([]byte, 1<<17)
		_, key := v.register(verbs.AccessRemoteWrite, 1, mem[:70001], mem[70001:])
		want := make([]byte, len(mem))
		for i, n := range []int{1, 7, 333, 1421, 1424, 4096, 16384, 65508, 65520, maxULPDU - taggedHdr} {
			d := bytes.Repeat([]byte{byte(i + 1)}, n)
			copy(want[60000-i:], d)
			p.send(tagged(opWrite, true, key, winIOVA+60000-uint64(i), d))
		}
		p.send(untagged(opSend, true, 0, qnSend, 1, 0, nil))
		v.received()
		if !bytes.Equal(mem, want) {
			t.Errorf("CRC %v: the memory differs from the sent data", crc)
		}
	}
}

// TestInvalidateDuringWrite invalidates the MR while only a part of an FPDU has arrived. LocalInv
// and Dereg must return at once, and the rest of the FPDU must not be placed.
func TestInvalidateDuringWrite(t *testing.T) {
	for _, dereg := range []bool{false, true} {
		p, v := connectRaw(t, defaultConfig)
		b := fpdu(tagged(opWrite, true, v.wkey, winIOVA, filler(1500)), false)
		p.write(b[:700])
		kit.Eventually(t, "begun FPDU", func() bool { return v.qp.Stats().BytesReceived > 0 })
		if dereg {
			kit.Must(t, v.wmr.Dereg())
		} else if wc := v.run(&verbs.WorkRequest{Opcode: verbs.OpLocalInv,
			InvalidateRKey: verbs.RKey(v.wkey)}); wc.Status != verbs.StatusSuccess {
			t.Fatalf("LocalInv: got %v, want success", wc.Status)
		}
		copy(v.mem, v.clean) // the memory belongs to the test again
		p.write(b[700:])
		if got, _ := p.readTerminate(); got != termTaggedInvalidSTag {
			t.Errorf("Terminate: got %+v, want %+v", got, termTaggedInvalidSTag)
		}
		v.id.Close()
		if !bytes.Equal(v.mem, v.clean) {
			t.Error("data was placed after the invalidation")
		}
		if v.qp.Stats().RemoteAccessErrors == 0 {
			t.Error("RemoteAccessErrors: got 0, want at least 1")
		}
	}
}

// TestInvalidateDuringRead invalidates the MR while the peer does not take its Read Response.
// LocalInv must not wait for the peer. The stream then ends, and must not contain data that the
// memory holds later.
func TestInvalidateDuringRead(t *testing.T) {
	const size, secret = 4 << 20, 0x5e
	cfg := defaultConfig
	cfg.SocketBuffer = 16 << 10
	cfg.MaxFPDU = 8192
	p, v := connectRaw(t, cfg)
	mem := make([]byte, size)
	_, key := v.register(verbs.AccessRemoteRead, 1, mem)
	p.send(readReq(readRequest{msn: 1, sinkSTag: 1, size: size, srcSTag: key, srcTO: winIOVA}))
	if _, _, err := p.next(); err != nil { // the response has started
		t.Fatal(err)
	}
	if wc := v.run(&verbs.WorkRequest{Opcode: verbs.OpLocalInv,
		InvalidateRKey: verbs.RKey(key)}); wc.Status != verbs.StatusSuccess {
		t.Fatalf("LocalInv: got %v, want success", wc.Status)
	}
	for i := range mem {
		mem[i] = secret
	}
	rest, err := io.ReadAll(p.c)
	if err != nil {
		t.Logf("end of the stream: %v", err)
	}
	if len(rest) >= size {
		t.Fatal("the socket accepted the whole response; use a larger one")
	}
	if bytes.Contains(rest, bytes.Repeat([]byte{secret}, 16)) {
		t.Error("the stream contains data from after LocalInv")
	}
	v.cause()
}

// TestEndOfStreamIsCause ends the stream without a Terminate, and checks the cause. The Receives
// that hold no message are flushed.
func TestEndOfStreamIsCause(t *testing.T) {
	whole := fpdu(untagged(opSend, true, 0, qnSend, 1, 0, []byte("hello")), false)
	between := fpdu(untagged(opSend, false, 0, qnSend, 1, 0, []byte("hel")), false)
	const header, payload = 10, 23
	for _, c := range []struct {
		name  string
		sent  []byte
		reset bool
		want  error // nil stands for any *net.OpError
		recvs int   // that complete with success
	}{
		{"FIN", whole, false, io.EOF, 1},
		{"FIN in a header", whole[:header], false, io.ErrUnexpectedEOF, 0},
		{"FIN in the data", whole[:payload], false, io.ErrUnexpectedEOF, 0},
		{"FIN between the segments of a Send", between, false, io.ErrUnexpectedEOF, 0},
		{"RST in the data", whole[:payload], true, nil, 0},
		{"RST between the segments of a Send", between, true, nil, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, v := connectRaw(t, defaultConfig)
			p.write(c.sent)
			if c.reset {
				kit.Eventually(t, "begun FPDU", func() bool { return v.qp.Stats().BytesReceived > 0 })
				p.c.SetLinger(0)
			}
			p.c.Close()
			err := v.cause()
			var oe *net.OpError
			if c.want != nil && !errors.Is(err, c.want) || c.want != io.EOF && !errors.As(err, &oe) {
				t.Errorf("cause: got %v, want %v", err, c.want)
			}
			v.id.Close()
			for i := range numRecvs {
				want := verbs.StatusWRFlushErr
				if i < c.recvs {
					want = verbs.StatusSuccess
				}
				if wc := v.received(); wc.Status != want {
					t.Errorf("Receive %d: got %v, want %v", i, wc.Status, want)
				}
			}
		})
	}
}
