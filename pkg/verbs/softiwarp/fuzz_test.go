package softiwarp

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"math/rand/v2"
	"net"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// fuzzFrames is the body of both MPA targets. Reading must not panic, and an accepted frame must
// encode to the bytes that were read.
func fuzzFrames(f *testing.F, reply bool) {
	for _, x := range []mpaFrame{
		{enhanced: true, rev: 2, ird: 32, data: []byte{0xf6, 0xab, 0x0e, 0x18, 1, 1, 3, 3}},
		{rev: 1, crc: true}, {rev: 2, markers: true, enhanced: true, peer: true, rtrRead: true, ird: depthByULP},
		{rev: 2, reject: true, enhanced: true, data: make([]byte, maxULPData)},
	} {
		x.reply = reply
		b := x.append(nil)
		f.Add(b)
		f.Add(b[:len(b)-1])
		x.reply = !reply
		f.Add(x.append(nil))
	}
	f.Add([]byte("HTTP/1.1 200 OK\r\n\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := bytes.NewReader(b)
		x, err := readMPAFrame(r, reply)
		if err != nil {
			return
		}
		used := b[:len(b)-r.Len()]
		if len(x.data) > maxPrivateData || x.reply != reply {
			t.Fatalf("accepted an invalid frame: %+v", x)
		}
		if got := x.append(nil); len(got) != len(used) || !bytes.Equal(got[:mpaKeySize], used[:mpaKeySize]) ||
			!bytes.Equal(got[mpaHdrSize+enhSize*btoi(x.enhanced):], used[mpaHdrSize+enhSize*btoi(x.enhanced):]) {
			t.Fatalf("encoded frame: got %x, want %x", got, used)
		}
	})
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

func FuzzMPARequest(f *testing.F) { fuzzFrames(f, false) }
func FuzzMPAReply(f *testing.F)   { fuzzFrames(f, true) }

func FuzzTerminate(f *testing.F) {
	for _, s := range []string{
		"20020000", "02020000", "21060000", "1202c000001a414300000000000000000000004800000000",
		"0102e000002e414100000000000000010000000700000000", "11000300", "", "ff",
	} {
		f.Add(kit.Unhex(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		code, _ := decodeTerminate(b)
		if code.layer > 0xf || code.etype > 0xf || code.asError(false).Error() == "" {
			t.Fatalf("decodeTerminate(%x): got %+v", b, code)
		}
	})
}

// STags of the fuzzed endpoint. The STags are fixed, so that a corpus can contain them.
const (
	fuzzWrite = 0x00000111
	fuzzRead  = 0x00000222
	fuzzRecv  = 4096 // bytes of each Receive
)

// fixSTag gives m a known STag.
func fixSTag(m verbs.MR, stag uint32) {
	x := m.(*mr)
	t := &x.pd.dev.table
	t.remove(x)
	t.mu.Lock()
	x.first = verbs.RKey(stag)
	t.mu.mrs[stag>>stagKeyBits] = x
	t.mu.Unlock()
	x.mu.Lock()
	x.mu.stag = stag
	x.mu.Unlock()
}

// addDDPSeeds adds streams with messages of every kind to the corpus of FuzzDDPStream.
func addDDPSeeds(f *testing.F) {
	ulpdu := func(us ...[]byte) (b []byte) {
		for _, u := range us {
			b = binary.BigEndian.AppendUint16(b, uint16(len(u)))
			b = append(b, u...)
		}
		return b
	}
	write := tagged(opWrite, true, fuzzWrite, winIOVA+100, bytes.Repeat([]byte{0xbb}, 900))
	read := readReq(readRequest{msn: 1, sinkSTag: 7, size: 100, srcSTag: fuzzRead, srcTO: winIOVA})
	send := untagged(opSend, true, 0, qnSend, 1, 0, []byte("hello"))
	for _, s := range [][]byte{
		ulpdu(write, send), ulpdu(read, write, read),
		ulpdu(untagged(opSend, false, 0, qnSend, 1, 0, []byte("he")), write,
			untagged(opSendInv, true, fuzzWrite, qnSend, 1, 2, []byte("llo")), write),
		ulpdu(untagged(opTerminate, true, 0, qnTerminate, 1, 0, []byte{0x11, 0, 0xc0, 0})),
		ulpdu(tagged(opReadResp, true, 1, 0, nil)),
		ulpdu(tagged(opWrite, true, fuzzWrite, winIOVA+winLen-1, []byte{1, 2})),
		{0, 0},
	} {
		f.Add(s, true, false, uint16(5))
		f.Add(s, true, true, uint16(0))
	}
	f.Add(fpdu(write, false), false, false, uint16(33))
	f.Add(append(fpdu(read, false), fpdu(send, false)...), false, false, uint16(7))
}

// frame returns the FPDUs of a list of ULPDUs, each after a length of two bytes.
func frame(ulpdus []byte, crc bool) (stream []byte) {
	for len(ulpdus) >= fpduLenSize {
		n := min(int(binary.BigEndian.Uint16(ulpdus)), len(ulpdus)-fpduLenSize)
		stream = append(stream, fpdu(ulpdus[fpduLenSize:][:n], crc)...)
		ulpdus = ulpdus[fpduLenSize+n:]
	}
	return stream
}

// FuzzDDPStream sends a stream to a QP with valid registrations. The QP must not panic or hang, and
// may write only the window for writing and the Receives. If framed, the data is a list of ULPDUs,
// each after a length of two bytes, and the test adds pads and CRCs. Run it with -fuzzminimizetime
// 1x: the coverage of one input varies because of the goroutines, so minimizing does not work.
func FuzzDDPStream(f *testing.F) {
	addDDPSeeds(f)
	ctx := context.Background()
	var listeners [2]verbs.Listener
	for i := range listeners {
		l, err := New(Config{Linger: 10 * time.Millisecond, CRC: i == 1}).Listen(ctx, loopback)
		kit.Must(f, err)
		f.Cleanup(func() { l.Close() })
		listeners[i] = l
	}
	f.Fuzz(func(t *testing.T, data []byte, framed, crc bool, cut uint16) {
		l := listeners[btoi(crc)]
		// Use many source addresses, because closed connections occupy the ports of one.
		from := &net.TCPAddr{IP: net.IPv4(127, byte(rand.Uint32()), byte(rand.Uint32()), 1)}
		c, err := net.DialTCP("tcp", from, net.TCPAddrFromAddrPort(l.Addr()))
		kit.Must(t, err)
		defer c.Close()
		c.Write((&mpaFrame{enhanced: true, rev: 2, ird: 4, ord: 4, crc: crc}).append(nil))
		r, err := l.Accept(ctx)
		kit.Must(t, err)
		v := newEndpointOf(t, r, fuzzRecv)
		kit.Must(t, r.Accept(ctx, endpointParam))
		v.mem = bytes.Repeat([]byte{0x31}, guard+winLen+guard)
		v.clean = bytes.Clone(v.mem)
		source := bytes.Clone(v.mem)
		wm, _ := v.register(verbs.AccessRemoteWrite, 1, v.mem[guard:][:99], v.mem[guard+99:][:winLen-99])
		rm, _ := v.register(verbs.AccessRemoteRead, 2, source[guard:][:winLen])
		fixSTag(wm, fuzzWrite)
		fixSTag(rm, fuzzRead)
		stream := data
		if framed {
			stream = frame(data, crc)
		}
		go io.Copy(io.Discard, c)
		at := min(int(cut), len(stream))
		c.Write(stream[:at])
		c.Write(stream[at:])
		c.CloseWrite()
		v.cause()
		v.id.Close()
		if !bytes.Equal(source, bytes.Repeat([]byte{0x31}, len(source))) {
			t.Error("the memory registered for reading was written")
		}
		copy(v.mem[guard:][:winLen], v.clean[guard:])
		if !bytes.Equal(v.mem, v.clean) {
			t.Error("memory next to the window was written")
		}
		wm.Dereg() // the next run uses the same STags
		rm.Dereg()
	})
}
