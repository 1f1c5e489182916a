package rpcrdma

import (
	"bytes"
	"encoding/hex"
	"errors"
	"reflect"
	"strings"
	"testing"
)

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

var (
	headerOfMsg      = Header{XID: 0x12345678, Vers: 1, Credits: 64, Proc: ProcMsg}
	headerOfErrVers  = Header{XID: 4, Vers: 1, Credits: 64, Proc: ProcError, Err: ErrVers, Low: 1, High: 2}
	headerOfErrChunk = Header{XID: 5, Vers: 1, Credits: 64, Proc: ProcError, Err: ErrChunk}
)

var headerCases = []struct {
	name string
	wire string
	h    Header
}{
	{"short message", "12345678 00000001 00000040 00000000 00000000 00000000 00000000", headerOfMsg},
	{"read chunk", `00000001 00000001 00000080 00000000
		00000001 0000009c 0a0b0c01 00001000 1122334455667788
		00000001 0000009c 0a0b0c02 00000003 0000000000000004
		00000000 00000000 00000000`,
		Header{XID: 1, Vers: 1, Credits: 128, Proc: ProcMsg, Reads: []ReadSegment{
			{0x9c, Segment{0x0a0b0c01, 0x1000, 0x1122334455667788}}, {0x9c, Segment{0x0a0b0c02, 3, 4}}}}},
	{"two write chunks, one empty", `00000002 00000001 00000020 00000000 00000000
		00000001 00000002 00000007 00000064 0000000000000001 00000008 00000065 0000000000000002
		00000001 00000000
		00000000 00000000`,
		Header{XID: 2, Vers: 1, Credits: 32, Proc: ProcMsg, Writes: []Chunk{
			{{7, 100, 1}, {8, 101, 2}}, {}}}},
	{"long call and reply chunk", `00000003 00000001 00000020 00000001
		00000001 00000000 00000007 00000064 0000000000000001
		00000000 00000000
		00000001 00000001 00000009 00010000 00000000000000ff`,
		Header{XID: 3, Vers: 1, Credits: 32, Proc: ProcNoMsg, Reads: []ReadSegment{{0, Segment{7, 100, 1}}},
			HasReply: true, Reply: Chunk{{9, 65536, 255}}}},
	{"ERR_VERS", "00000004 00000001 00000040 00000004 00000001 00000001 00000002", headerOfErrVers},
	{"ERR_CHUNK", "00000005 00000001 00000040 00000004 00000002", headerOfErrChunk},
}

func TestHeaderRoundTrip(t *testing.T) {
	var reused Header
	for _, c := range headerCases {
		t.Run(c.name, func(t *testing.T) {
			wire := unhex(t, c.wire)
			if got := c.h.Append(nil); !bytes.Equal(got, wire) {
				t.Errorf("Append: got\n%x, want\n%x", got, wire)
			}
			if got := c.h.Size(); got != len(wire) {
				t.Errorf("Size: got %d, want %d", got, len(wire))
			}
			for _, after := range []string{"", "dead"} {
				n, err := reused.Decode(append(wire[:len(wire):len(wire)], unhex(t, after)...))
				if err != nil || n != len(wire) {
					t.Fatalf("Decode with %q after the header: got size %d, error %v; want %d", after, n, err,
						len(wire))
				}
				if !sameHeader(&reused, &c.h) {
					t.Errorf("Decode with %q after the header: got %+v, want %+v", after, reused, c.h)
				}
			}
		})
	}
}

func sameHeader(a, b *Header) bool {
	x, y := *a, *b
	x.segs, y.segs = nil, nil
	if len(x.Reads) == 0 && len(y.Reads) == 0 {
		x.Reads, y.Reads = nil, nil
	}
	if len(x.Writes) == 0 && len(y.Writes) == 0 {
		x.Writes, y.Writes = nil, nil
	}
	return reflect.DeepEqual(x, y)
}

func TestDecodeRejectsInvalidHeaders(t *testing.T) {
	const (
		msg      = "00000001 00000001 00000001 00000000 "
		noMsg    = "00000001 00000001 00000001 00000001 "
		segment  = "00000001 00000001 0000000000000001"
		errorMsg = "00000001 00000001 00000001 00000004 "
		zeros    = " 00000000 00000000 00000000"
	)
	cases := []struct {
		name, wire string
		err        error
	}{
		{"empty", "", ErrShort},
		{"15 bytes", "00000001 00000001 00000001 000000", ErrShort},
		{"MSG of 27 bytes", msg + "00000000 00000000 000000", ErrShort},
		{"version 0", "00000001 00000000 00000001 00000000 00000000 00000000 00000000", ErrBadVersion},
		{"version 2", "00000001 00000002 00000001 00000000 00000000 00000000 00000000", ErrBadVersion},
		{"MSGP", "00000001 00000001 00000001 00000002 00000000 00000000 00000000", ErrBadProc},
		{"DONE", "00000001 00000001 00000001 00000003", ErrBadProc},
		{"unknown rdma_err", errorMsg + "00000003", ErrBadError},
		{"truncated ERR_VERS", errorMsg + "00000001 00000001", ErrShort},
		{"discriminator 2", msg + "00000002 00000000 00000000", ErrBadChunks},
		{"discriminator 2 of a read segment", msg + "00000002 00000000 " + segment + zeros, ErrBadChunks},
		{"discriminator 2 of a write chunk", msg + "00000000 00000002 00000001 " + segment + zeros, ErrBadChunks},
		{"discriminator 2 of a reply chunk", msg + "00000000 00000000 00000002 00000001 " + segment, ErrBadChunks},
		{"read position 3", msg + "00000001 00000003 " + segment + " 00000000 00000000 00000000", ErrBadChunks},
		{"write chunk with count 2^32-1", msg + "00000000 00000001 ffffffff 00000000", ErrBadChunks},
		{"reply chunk with a missing segment", noMsg + "00000000 00000000 00000001 00000002 " + segment, ErrBadChunks},
		{"truncated lists", msg + "00000001 00000000 " + segment, ErrBadChunks},
	}
	var h Header
	for _, c := range cases {
		if _, err := h.Decode(unhex(t, c.wire)); !errors.Is(err, c.err) {
			t.Errorf("%s: got %v, want %v", c.name, err, c.err)
		}
	}
}

// TestDecodeRejectsPrefixes cuts each header after every byte.
func TestDecodeRejectsPrefixes(t *testing.T) {
	var h Header
	for _, c := range headerCases {
		wire := unhex(t, c.wire)
		for n := range wire {
			want := ErrBadChunks
			if n < MinHeaderSize {
				want = ErrShort
			}
			if _, err := h.Decode(wire[:n]); !errors.Is(err, want) {
				t.Errorf("%s: first %d of %d bytes: got %v, want %v", c.name, n, len(wire), err, want)
			}
		}
	}
}

// TestDecodeDoesNotTrustSegmentCount checks that Decode stores no segment of a chunk whose count is
// larger than the message allows.
func TestDecodeDoesNotTrustSegmentCount(t *testing.T) {
	for _, count := range []string{"00000003", "00000010", "10000001", "ffffffff"} {
		var h Header
		wire := unhex(t, "00000001 00000001 00000001 00000000 00000000 00000001"+count+
			"00000007 00000064 0000000000000001 00000000 00000000 00000000 00000000")
		if _, err := h.Decode(wire); !errors.Is(err, ErrBadChunks) || len(h.segs) != 0 {
			t.Errorf("%s segments: got error %v, %d segments stored; want %v, 0", count, err, len(h.segs), ErrBadChunks)
		}
	}
}

// TestDecodeAllocatesForTheMessage checks that the size of the message, and nothing in it, decides
// how much memory Decode allocates.
func TestDecodeAllocatesForTheMessage(t *testing.T) {
	var h Header
	wire := unhex(t, headerCases[2].wire)
	for _, size := range []int{len(wire), 1024, len(wire)} {
		before := cap(h.segs)
		if _, err := h.Decode(append(wire[:len(wire):len(wire)], make([]byte, size-len(wire))...)); err != nil {
			t.Fatal(err)
		}
		if got, want := cap(h.segs), max(before, size/SegmentSize); got != want {
			t.Errorf("message of %d bytes: got room for %d segments, want %d", size, got, want)
		}
	}
}

func TestChunkLength(t *testing.T) {
	c := Chunk{{Length: 1<<32 - 1}, {Length: 3}, {Length: 10}}
	if got, want := c.Length(), uint64(1<<32+12); got != want {
		t.Errorf("got %d, want %d", got, want)
	}
}

func TestDecodeIntoUsedHeaderDoesNotAllocate(t *testing.T) {
	wire := unhex(t, headerCases[2].wire)
	var h Header
	if _, err := h.Decode(wire); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 0, 256)
	if n := testing.AllocsPerRun(100, func() {
		if _, err := h.Decode(wire); err != nil {
			t.Fatal(err)
		}
		buf = h.Append(buf[:0])
	}); n != 0 {
		t.Errorf("got %v allocations, want 0", n)
	}
}

func TestPrivateData(t *testing.T) {
	mine := Private{RemoteInv: true, SendSize: 4096, RecvSize: 4096}
	if got, want := mine.Append(nil), unhex(t, "f6ab0e18 01 01 03 03"); !bytes.Equal(got, want) {
		t.Errorf("Append: got %x, want %x", got, want)
	}
	for _, c := range []struct{ size, want int }{
		{0, 1024}, {1023, 1024}, {2047, 1024}, {2048, 2048}, {5000, 4096}, {262144, 262144}, {263168, 262144},
	} {
		p, _ := ParsePrivate(Private{SendSize: c.size, RecvSize: c.size}.Append(nil))
		if p.SendSize != c.want || p.RecvSize != c.want {
			t.Errorf("sizes of %d: got %d, %d; want %d", c.size, p.SendSize, p.RecvSize, c.want)
		}
	}
	remoteInv := Private{RemoteInv: true, SendSize: 1024, RecvSize: 65536}
	cases := []struct {
		name, wire string
		want       Private
		found      bool
	}{
		{"stock Linux server", "f6ab0e18 01 00 03 03", Private{SendSize: 4096, RecvSize: 4096}, true},
		{"after other data, at an odd offset, with a pad", "0102 f6ab0e18 01 01 00 3f 0000", remoteInv, true},
		{"reserved flags are ignored", "f6ab0e18 01 fe ff ff", Private{SendSize: 262144, RecvSize: 262144}, true},
		{"version 2", "f6ab0e18 02 01 03 03", DefaultPrivate, false},
		{"version 1 after version 2", "f6ab0e18 02 00 00 00 f6ab0e18 01 01 00 3f", remoteInv, true},
		{"truncated", "f6ab0e18 01 01 03", DefaultPrivate, false},
		{"empty", "", DefaultPrivate, false},
	}
	for _, c := range cases {
		if got, found := ParsePrivate(unhex(t, c.wire)); got != c.want || found != c.found {
			t.Errorf("%s: got %+v, found %v; want %+v, %v", c.name, got, found, c.want, c.found)
		}
	}
	if s, r := Thresholds(mine, Private{SendSize: 1024, RecvSize: 8192}); s != 4096 || r != 1024 {
		t.Errorf("Thresholds: got %d, %d; want 4096, 1024", s, r)
	}
}

func FuzzHeader(f *testing.F) {
	for _, c := range headerCases {
		f.Add(unhex(f, c.wire))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var h, again Header
		n, err := h.Decode(b)
		// The size of the message limits the decoded lists, even after an error.
		if len(h.Reads)*ReadSegmentSize > len(b) || len(h.Writes)*ChunkHeadSize > len(b) ||
			len(h.segs)*SegmentSize > len(b) {
			t.Fatalf("%d bytes: got %d read segments, %d write chunks, %d segments", len(b), len(h.Reads),
				len(h.Writes), len(h.segs))
		}
		if err != nil {
			if n != 0 || h.HasReply && len(b) < MinHeaderSize {
				t.Fatalf("got size %d with error %v, want 0", n, err)
			}
			return
		}
		if n != h.Size() {
			t.Fatalf("Decode: got size %d, want %d", n, h.Size())
		}
		for cut := n - 1; cut >= 0 && cut >= n-ReadSegmentSize; cut-- {
			if _, err := again.Decode(b[:cut]); err == nil {
				t.Fatalf("first %d of %d bytes: got no error", cut, n)
			}
		}
		wire := h.Append(nil)
		if !bytes.Equal(wire, b[:n]) {
			t.Fatalf("encoded again: got %x, want %x", wire, b[:n])
		}
		if _, err := again.Decode(wire); err != nil || !sameHeader(&h, &again) {
			t.Fatalf("decoded again: got %+v, error %v; want %+v", again, err, h)
		}
	})
}

func FuzzPrivate(f *testing.F) {
	f.Add([]byte{0xf6, 0xab, 0x0e, 0x18, 1, 1, 3, 3})
	f.Fuzz(func(t *testing.T, b []byte) {
		p, found := ParsePrivate(b)
		at := bytes.Index(b, []byte{0xf6, 0xab, 0x0e, 0x18, privateVersion})
		if present := at >= 0 && len(b)-at >= PrivateSize; found != present || !found && p != DefaultPrivate {
			t.Fatalf("got %+v, found %v; the message is at offset %d of %d bytes", p, found, at, len(b))
		}
		if !found {
			return
		}
		want := append([]byte(nil), b[at:at+PrivateSize]...)
		want[5] &= flagRemoteInv // the other flags are reserved
		if got := p.Append(nil); !bytes.Equal(got, want) {
			t.Fatalf("encoded again: got %x, want %x", got, want)
		}
		if s, r := Thresholds(p, DefaultPrivate); s != DefaultInline || r != DefaultInline {
			t.Fatalf("Thresholds with DefaultPrivate: got %d, %d; want %d", s, r, DefaultInline)
		}
	})
}
