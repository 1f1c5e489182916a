package rpctcp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"net"
	"runtime"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func TestReadRecord(t *testing.T) {
	long := strings.Repeat("0123456789", 20_000)
	for _, x := range []struct {
		name  string
		in    string
		limit int
		want  string
		err   error
	}{
		{"one fragment", "\x80\x00\x00\x05hello", 5, "hello", nil},
		{"three fragments", "\x00\x00\x00\x02he\x00\x00\x00\x02ll\x80\x00\x00\x01o", 5, "hello", nil},
		{"empty last fragment", "\x00\x00\x00\x05hello\x80\x00\x00\x00", 5, "hello", nil},
		{"empty record", "\x80\x00\x00\x00", 5, "", nil},
		{"longer than growStep", "\x80\x03\x0d\x40" + long, 1 << 20, long, nil},
		{"more than the limit", "\x80\x00\x00\x06hello!", 5, "", ErrRecord},
		{"more than the limit, in fragments", "\x00\x00\x00\x04hell\x80\x00\x00\x02o!", 5, "", ErrRecord},
		{"2 GiB claimed", "\xff\xff\xff\xffhello", 1 << 20, "", ErrRecord},
		{"empty fragments", strings.Repeat("\x00\x00\x00\x00", 50) + "\x80\x00\x00\x05hello", 5, "", ErrRecord},
		{"HTTP", "HTTP/1.1 400 Bad Request\r\n", 1 << 20, "", ErrRecord},
		{"empty stream", "", 5, "", io.EOF},
		{"end in the mark", "\x80\x00", 5, "", io.ErrUnexpectedEOF},
		{"end in the fragment", "\x80\x00\x00\x05hel", 5, "", io.ErrUnexpectedEOF},
		{"end before the fragment", "\x80\x00\x00\x05", 5, "", io.ErrUnexpectedEOF},
		{"end between fragments", "\x00\x00\x00\x05hello", 9, "", io.ErrUnexpectedEOF},
	} {
		for _, room := range []int{0, 3, 1 << 20} {
			r := strings.NewReader(x.in + "next")
			if x.err == io.EOF || x.err == io.ErrUnexpectedEOF {
				r = strings.NewReader(x.in)
			}
			got, err := ReadRecord(iotest.HalfReader(r), make([]byte, 0, room), x.limit)
			if !errors.Is(err, x.err) || err == nil && x.err != nil {
				t.Errorf("%s, capacity %d: got error %v, want %v", x.name, room, err, x.err)
				continue
			}
			if err == nil && (string(got) != x.want || r.Len() != len("next")) {
				t.Errorf("%s, capacity %d: got %d bytes, want %d; %d bytes unread, want 4", x.name, room, len(got),
					len(x.want), r.Len())
			}
		}
	}
}

// TestSkipReachesNextRecord skips a record that is too long and reads the next one.
func TestSkipReachesNextRecord(t *testing.T) {
	const next = "\x80\x00\x00\x04next"
	for _, x := range []struct {
		name, in string
		most     int
		err      error
	}{
		{"one fragment", "\x80\x00\x00\x06hello!", 6, nil},
		{"fragments", "\x00\x00\x00\x04hell\x00\x00\x00\x02o!\x00\x00\x00\x01!\x80\x00\x00\x00", 6, nil},
		{"longer than the maximum", "\x80\x00\x00\x07hello!!", 6, ErrRecord},
		{"2 GiB claimed", "\xff\xff\xff\xffhello", 1 << 20, ErrRecord},
		{"empty fragments", "\x00\x00\x00\x06hello!" + strings.Repeat("\x00\x00\x00\x00", 50) + "\x80\x00\x00\x00", 6,
			ErrRecord},
		{"end in the next mark", "\x00\x00\x00\x06hello!\x80\x00", 6, io.ErrUnexpectedEOF},
	} {
		in := x.in
		if x.err != io.ErrUnexpectedEOF {
			in += next
		}
		r := strings.NewReader(in)
		_, err := ReadRecord(r, nil, 5)
		var long *SizeError
		if !errors.As(err, &long) || !errors.Is(err, ErrRecord) {
			t.Errorf("%s: got error %v, want a SizeError", x.name, err)
			continue
		}
		if err := long.Skip(r, x.most); !errors.Is(err, x.err) || err == nil && x.err != nil {
			t.Errorf("%s: got error %v from Skip, want %v", x.name, err, x.err)
		} else if got, _ := ReadRecord(r, nil, 5); err == nil && string(got) != "next" {
			t.Errorf("%s: got next record %q, want next", x.name, got)
		}
	}
}

// TestReadRecordDoesNotTrustLength claims 1 GiB, sends 1000 bytes, and limits the allocated memory.
func TestReadRecordDoesNotTrustLength(t *testing.T) {
	const limit = 1 << 30
	in := binary.BigEndian.AppendUint32(nil, lastFragment|limit)
	in = append(in, make([]byte, 1000)...)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_, err := ReadRecord(bytes.NewReader(in), nil, limit)
	runtime.ReadMemStats(&after)
	if !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("got error %v, want %v", err, io.ErrUnexpectedEOF)
	}
	if grown := after.TotalAlloc - before.TotalAlloc; grown > 1<<20 {
		t.Errorf("allocated %d bytes for 1000 received bytes, want at most %d", grown, 1<<20)
	}
}

func TestWriteRecord(t *testing.T) {
	for _, x := range []struct {
		parts []string
		want  string
	}{
		{nil, "\x80\x00\x00\x00"},
		{[]string{"hello"}, "\x80\x00\x00\x05hello"},
		{[]string{"he", "", "ll", "o", "!"}, "\x80\x00\x00\x06hello!"},
	} {
		var parts [][]byte
		for _, p := range x.parts {
			parts = append(parts, []byte(p))
		}
		var got bytes.Buffer
		if err := WriteRecord(&got, parts...); err != nil || got.String() != x.want {
			t.Errorf("parts %q: got %q, error %v; want %q", x.parts, got.String(), err, x.want)
		}
	}
	if err := WriteRecord(io.Discard, make([][]byte, 6)...); !errors.Is(err, ErrRecord) {
		t.Errorf("six parts: got error %v, want %v", err, ErrRecord)
	}
	a, b := net.Pipe()
	a.Close()
	b.Close()
	if err := WriteRecord(a, []byte("x")); err == nil {
		t.Error("write to a closed connection: got no error")
	}
}

func FuzzReadRecord(f *testing.F) {
	f.Add([]byte("\x80\x00\x00\x05hello"), uint16(5))
	f.Add([]byte("\x00\x00\x00\x02he\x00\x00\x00\x02ll\x80\x00\x00\x01o"), uint16(5))
	f.Add([]byte("HTTP/1.1 400 Bad Request\r\n"), uint16(math.MaxUint16))
	f.Fuzz(func(t *testing.T, in []byte, limit uint16) {
		r := bytes.NewReader(in)
		got, err := ReadRecord(r, nil, int(limit))
		if len(got) > int(limit) || len(got) > len(in) {
			t.Fatalf("got %d bytes from %d, limit %d", len(got), len(in), limit)
		}
		if err != nil {
			return
		}
		// The record is the same after it was written as one fragment.
		var again bytes.Buffer
		kit.Must(t, WriteRecord(&again, got))
		back, err := ReadRecord(&again, nil, int(limit))
		if err != nil || !bytes.Equal(back, got) {
			t.Fatalf("read back %x, error %v; want %x", back, err, got)
		}
	})
}
