package softiwarp

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"hash/crc32"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// TestCRCMatchesRFC checks the CRC against the annotated dumps of RFC 5044.
func TestCRCMatchesRFC(t *testing.T) {
	zeros := strings.Repeat("00", 24)
	for _, c := range []struct{ name, fpdu, crc string }{
		{"Figure 5", "00000000 002a 4143 00000000 00000000 00000001 00000000" + zeros, "52239983"},
		{"Figure 6", "002a 4143 00000000 00000000 00000002 00000000 00000014" + zeros, "84925898"},
	} {
		var got [fpduCRCSize]byte
		putCRC(got[:], crc32.Checksum(kit.Unhex(c.fpdu), castagnoli))
		if hex.EncodeToString(got[:]) != c.crc {
			t.Errorf("%s: CRC: got %x, want %s", c.name, got, c.crc)
		}
		if getCRC(got[:]) != crc32.Checksum(kit.Unhex(c.fpdu), castagnoli) {
			t.Errorf("%s: getCRC: got %#x, want the stored CRC", c.name, getCRC(got[:]))
		}
	}
}

func TestPadding(t *testing.T) {
	for ulpdu, want := range map[int]int{14: 0, 15: 3, 16: 2, 17: 1, 18: 0, 46: 0, 0: 2, maxULPDU: 3, maxSentULPDU: 0} {
		if got := padding(ulpdu); got != want {
			t.Errorf("padding(%d): got %d, want %d", ulpdu, got, want)
		}
	}
}

// checkHeader checks that put writes the bytes wire, and that they decode to want. It takes the
// control word of want from wire.
func checkHeader(t *testing.T, wire string, put func(b []byte), want header) {
	t.Helper()
	b := kit.Unhex(wire)
	got := make([]byte, len(b))
	put(got)
	if !bytes.Equal(got, b) {
		t.Fatalf("encoded: got %x, want %x", got, b)
	}
	want.ctrl = binary.BigEndian.Uint16(b[fpduLenSize:])
	var h header
	h.parseControl(b)
	h.parseRest(b)
	if h != want {
		t.Errorf("decoded: got %+v, want %+v", h, want)
	}
}

// TestHeadersRoundTrip encodes and decodes the headers of RFC 5041 §4 and RFC 5040 §4.
func TestHeadersRoundTrip(t *testing.T) {
	const offset, inv = 0x1122334455667788, 0xaabbccdd
	tag := func(op uint8, last bool, stag uint32, to uint64, n int) (header, func(b []byte)) {
		h := header{ulpdu: taggedHdr + n, op: op, tagged: true, last: last, stag: stag, to: to}
		return h, func(b []byte) { putTagged(b, op, last, stag, to, n) }
	}
	send := func(op uint8, last bool, inv, msn, mo uint32, n int) (header, func(b []byte)) {
		h := header{ulpdu: untaggedHdr + n, op: op, last: last, stag: inv, msn: msn, mo: mo}
		return h, func(b []byte) { putUntagged(b, op, last, inv, qnSend, msn, mo, n) }
	}
	check := func(wire string) func(header, func(b []byte)) {
		return func(want header, put func(b []byte)) {
			t.Helper()
			checkHeader(t, wire, put, want)
		}
	}
	check("0013 c140 01020304 1122334455667788")(tag(opWrite, true, 0x01020304, offset, 5))
	check("05a2 8140 00000007 0000000000000008")(tag(opWrite, false, 7, 8, 1428))
	check("000e c142 00000009 0000000000000000")(tag(opReadResp, true, 9, 0, 0))
	check("002a 4143 00000000 00000000 00000002 00000000")(send(opSend, true, 0, 2, 0, 24))
	check("0016 0143 00000000 00000000 ffffffff 00000590")(send(opSend, false, 0, 1<<32-1, 1424, 4))
	check("0012 4144 aabbccdd 00000000 00000001 00000000")(send(opSendInv, true, inv, 1, 0, 0))
}

func TestReadRequestRoundTrip(t *testing.T) {
	r := readRequest{msn: 3, sinkSTag: 0x11111111, sinkTO: 0x2222222233333333, size: 0x100000, srcSTag: 0x44444444,
		srcTO: 0x5555555566666666}
	want := kit.Unhex(`002e 4141 00000000 00000001 00000003 00000000
		11111111 2222222233333333 00100000 44444444 5555555566666666`)
	got := make([]byte, maxHeaderSize)
	putReadRequest(got, &r)
	if !bytes.Equal(got, want) {
		t.Fatalf("encoded: got %x, want %x", got, want)
	}
	back := readRequest{msn: r.msn}
	back.parseRDMAP(got[fpduLenSize+untaggedHdr:])
	if back != r {
		t.Errorf("decoded: got %+v, want %+v", back, r)
	}
}

func TestMPAFramesRoundTrip(t *testing.T) {
	req, rep := hex.EncodeToString([]byte(mpaReqKey)), hex.EncodeToString([]byte(mpaRepKey))
	client := enhanced(32, 0)
	client.data = []byte{0xf6, 0xab, 0x0e, 0x18, 1, 1, 3, 3}
	withCRC := enhanced(1, depthByULP)
	withCRC.crc = true
	accepting := peerToPeer("W", 0, 16)
	accepting.reply, accepting.crc, accepting.data = true, true, []byte{1, 2}
	for _, c := range []struct {
		name  string
		frame mpaFrame
		wire  string
	}{
		{"request of an NFS/RDMA client", client, req + "10 02 000c 0020 0000 f6ab0e1801010303"},
		{"request with CRC", withCRC, req + "50 02 0004 0001 3fff"},
		{"plain request", mpaFrame{rev: 1, data: []byte("x")}, req + "00 01 0001 78"},
		{"peer-to-peer request", peerToPeer("SWR", 1, 2), req + "10 02 0004 c001 c002"},
		{"markers", mpaFrame{markers: true, rev: 2}, req + "80 02 0000"},
		{"accepting reply", accepting, rep + "50 02 0006 8000 8010 0102"},
		{"rejecting reply", mpaFrame{reply: true, reject: true, enhanced: true, rev: 2}, rep + "30 02 0004 0000 0000"},
	} {
		t.Run(c.name, func(t *testing.T) {
			want := kit.Unhex(c.wire)
			if got := c.frame.append(nil); !bytes.Equal(got, want) {
				t.Fatalf("encoded: got %x, want %x", got, want)
			}
			got, err := readMPAFrame(iotest.OneByteReader(bytes.NewReader(want)), c.frame.reply)
			kit.Must(t, err)
			if !sameFrame(got, c.frame) {
				t.Errorf("decoded: got %+v, want %+v", got, c.frame)
			}
		})
	}
}

func sameFrame(a, b mpaFrame) bool {
	return bytes.Equal(a.append(nil), b.append(nil))
}

// TestMPAIgnoresReservedBits checks reserved bits (RFC 5044 §7.1.1), and B, C and D without A (RFC
// 6581 §9.2).
func TestMPAIgnoresReservedBits(t *testing.T) {
	req := hex.EncodeToString([]byte(mpaReqKey))
	f, err := readMPAFrame(bytes.NewReader(kit.Unhex(req+"3f 02 0004 4001 c002")), false)
	kit.Must(t, err)
	if f.reject || f.markers || f.crc || !f.enhanced || f.peer || f.rtrSend || f.rtrWrite || f.rtrRead ||
		f.ird != 1 || f.ord != 2 {
		t.Errorf("decoded: got %+v, want only enhanced, IRD 1 and ORD 2", f)
	}
	if f, err = readMPAFrame(bytes.NewReader(kit.Unhex(req+"10 01 0000")), false); err != nil || f.enhanced {
		t.Errorf("revision 1 with a reserved bit: got %+v, %v, want a plain frame", f, err)
	}
}

func TestInvalidMPAFramesFail(t *testing.T) {
	req, rep := hex.EncodeToString([]byte(mpaReqKey)), hex.EncodeToString([]byte(mpaRepKey))
	for _, c := range []struct {
		name, wire string
		reply      bool
		want       error
	}{
		{"HTTP", hex.EncodeToString([]byte("HTTP/1.1 400 Bad Request\r\n")), true, errMPAKey},
		{"one wrong byte", "4d50ff", true, errMPAKey},
		{"both initiators", req + "10 02 0004 0000 0000", true, errMPABoth},
		{"reply to a listener", rep + "10 02 0004 0000 0000", false, errMPAKey},
		{"revision 0", req + "40 00 0000", false, errMPARevision},
		{"revision 3", req + "40 03 0000", false, errMPARevision},
		{"513 bytes of private data", req + "00 01 0201", false, errMPALength},
		{"enhanced without enhanced data", req + "10 02 0003 000000", false, errMPAShort},
	} {
		if _, err := readMPAFrame(bytes.NewReader(kit.Unhex(c.wire)), c.reply); !errors.Is(err, c.want) {
			t.Errorf("%s: got %v, want %v", c.name, err, c.want)
		}
	}
	whole := kit.Unhex(req + "10 02 0005 0000 0000 00")
	for n := range whole {
		if _, err := readMPAFrame(bytes.NewReader(whole[:n]), false); err == nil {
			t.Errorf("frame of %d of %d bytes: got nil, want an error", n, len(whole))
		}
	}
}

func TestDepthNegotiation(t *testing.T) {
	const byULP = depthByULP
	for _, c := range []struct {
		name     string
		req      mpaFrame
		own      depths
		want     depths
		ird, ord uint16
	}{
		{"NFS server", mpaFrame{ird: 32}, depths{0, 16}, depths{0, 16}, 0, 16},
		{"initiator's IRD is smaller", mpaFrame{ird: 4, ord: 3}, depths{1, 16}, depths{4, 4}, 4, 4},
		{"rounded up", mpaFrame{ird: 1}, depths{20, 0}, depths{32, 0}, 32, 0},
		{"limit", mpaFrame{ird: 0x3ffe, ord: 0x3ffe}, depths{200, 200}, depths{128, 128}, 128, 128},
		{"left to the ULP", mpaFrame{ird: byULP, ord: byULP}, depths{2, 3}, depths{2, 3}, byULP, byULP},
	} {
		d, ird, ord := answerDepths(&c.req, c.own, maxReadDepth)
		if d != c.want || ird != c.ird || ord != c.ord {
			t.Errorf("responder, %s: got %+v, reply %d %d, want %+v, reply %d %d", c.name, d, ird, ord, c.want, c.ird,
				c.ord)
		}
	}
	for _, c := range []struct {
		name      string
		rep       mpaFrame
		own, want depths
		ok        bool
	}{
		{"as requested", mpaFrame{ird: 8, ord: 8}, depths{8, 8}, depths{8, 8}, true},
		{"responder offers less", mpaFrame{ird: 2, ord: 1}, depths{8, 8}, depths{8, 2}, true},
		{"responder requires more", mpaFrame{ird: 8, ord: 20}, depths{8, 8}, depths{32, 8}, true},
		{"responder requires too much", mpaFrame{ord: 200}, depths{8, 8}, depths{8, 8}, false},
		{"left to the ULP", mpaFrame{ird: byULP, ord: byULP}, depths{2, 3}, depths{2, 3}, true},
	} {
		d, ok := adoptDepths(&c.rep, c.own, maxReadDepth)
		if ok != c.ok || ok && d != c.want {
			t.Errorf("initiator, %s: got %+v, %v, want %+v, %v", c.name, d, ok, c.want, c.ok)
		}
	}
}

func TestTerminateRoundTrip(t *testing.T) {
	write := make([]byte, fpduLenSize+taggedHdr)
	putTagged(write, opWrite, true, 0x0a0b0c0d, 0x99, 100)
	ofWrite := &terminate{code: termTaggedBounds}
	ofWrite.quote(write, &header{ulpdu: taggedHdr + 100, tagged: true})
	send := make([]byte, fpduLenSize+untaggedHdr)
	putUntagged(send, opSend, true, 0, qnSend, 5, 0, 8)
	ofSend := &terminate{code: termNoBuffer}
	ofSend.quote(send, &header{ulpdu: untaggedHdr + 8})
	ofRead := &terminate{code: termReadBounds}
	ofRead.quoteRead(&readRequest{msn: 2, sinkSTag: 1, sinkTO: 2, size: 3, srcSTag: 4, srcTO: 5})
	const untagged = "4147 00000000 00000002 00000001 00000000"
	const sendHdr = "001a 4143 00000000 00000000 00000005 00000000"
	const readHdr = "002e 4141 00000000 00000001 00000002 00000000" +
		"00000001 0000000000000002 00000003 00000004 0000000000000005"
	for _, c := range []struct {
		name string
		x    *terminate
		wire string
	}{
		{"no header", &terminate{code: termCRC}, "0016" + untagged + "20 02 00 00"},
		{"tagged", ofWrite, "0026" + untagged + "11 01 c0 00 0072 c140 0a0b0c0d 0000000000000099"},
		{"untagged", ofSend, "002a" + untagged + "12 02 c0 00" + sendHdr},
		{"Read Request", ofRead, "0046" + untagged + "01 01 e0 00" + readHdr},
	} {
		t.Run(c.name, func(t *testing.T) {
			var b [fpduLenSize + maxTermULPDU]byte
			n := c.x.encode(b[:])
			if want := kit.Unhex(c.wire); !bytes.Equal(b[:n], want) {
				t.Fatalf("encoded: got %x, want %x", b[:n], want)
			}
			if code, _ := decodeTerminate(b[fpduLenSize+untaggedHdr : n]); code != c.x.code {
				t.Errorf("decoded: got %+v, want %+v", code, c.x.code)
			}
		})
	}
}

// TestDecodeTerminate decodes messages in the RFC's bit order and messages recorded from a stock
// siw.
func TestDecodeTerminate(t *testing.T) {
	quotedRead := "002e 4141 00000000 00000001 00000007 00000000" + strings.Repeat("00", readReqHdr)
	const quoted = "0013 c140 01020304 1122334455667788"
	for _, c := range []struct {
		name, wire string
		want       termCode
		msn        uint32
	}{
		{"RFC, CRC", "20020000", termCRC, 0},
		{"siw, CRC", "02020000", termCRC, 0},
		{"RFC, insufficient IRD", "20060000", termInsufficientIRD, 0},
		{"siw, no buffer", "21020300 001a 4143 00000000 00000000 00000048 00000000", termNoBuffer, 0},
		{"siw, MSN", "21030300", termMSNRange, 0},
		{"siw, DDP version, no header", "21060000", termUntaggedVersion, 0},
		{"siw, cannot invalidate", "20090300", termCode{layerRDMAP, 2, 9}, 0},
		{"siw, unknown STag", "11000300" + quoted, termTaggedInvalidSTag, 0},
		{"siw, Read Response without a Read", "01000300" + quoted, termCode{layerDDP, 0, 0}, 0},
		{"RFC, Read access", "0102e000" + quotedRead, termReadAccess, 7},
		{"siw, Read access", "10020700" + quotedRead, termReadAccess, 7},
		{"RFC, local catastrophic", "00000000", termLocalCatastrophic, 0},
		{"short", "2002", termUnspecified, 0},
		{"empty", "", termUnspecified, 0},
	} {
		if code, msn := decodeTerminate(kit.Unhex(c.wire)); code != c.want || msn != c.msn {
			t.Errorf("%s: got %+v, Read %d, want %+v, Read %d", c.name, code, msn, c.want, c.msn)
		}
	}
}

func TestMULPDUNeedsNoPad(t *testing.T) {
	for emss, want := range map[int]int{1448: 1442, 1460: 1454, 1461: 1454, 536: 530, 88: 130, 0: 130,
		65483: maxSentULPDU, 1 << 20: maxSentULPDU} {
		if got := mulpdu(emss); got != want {
			t.Errorf("mulpdu(%d): got %d, want %d", emss, got, want)
		}
		if padding(want) != 0 {
			t.Errorf("padding(%d): got %d, want 0", want, padding(want))
		}
	}
}
