package rpctcp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
)

// Record marking (RFC 5531 §11): each fragment is preceded by a word whose top bit marks the
// record's last fragment and whose other bits are the fragment's length.
const (
	MarkSize     = 4
	lastFragment = 1 << 31
	maxFragment  = lastFragment - 1
)

// ErrRecord is wrapped by errors about the framing itself: the peer does not speak RPC over TCP, or
// sends more than the reader takes.
var ErrRecord = errors.New("bad RPC record")

// growStep bounds in octets how far the buffer runs ahead of what has arrived.
const growStep = 64 << 10

// PutMark writes the mark of a record of one fragment of n octets to b[:MarkSize].
func PutMark(b []byte, n int) { binary.BigEndian.PutUint32(b, lastFragment|uint32(n)) }

// FragmentSize is the length in octets of the fragment whose mark b begins with.
func FragmentSize(b []byte) int { return int(binary.BigEndian.Uint32(b) & maxFragment) }

// LastFragment tells whether the fragment whose mark b begins with is the record's last.
func LastFragment(b []byte) bool { return binary.BigEndian.Uint32(b)&lastFragment != 0 }

// A SizeError is a record of more octets than the reader takes. It wraps [ErrRecord].
type SizeError struct {
	Bytes int // of the record up to here, at least
	Limit int

	rest int  // octets of the present fragment that were not read
	last bool // it is the record's last
}

func (e *SizeError) Error() string {
	return fmt.Sprintf("%v: %d octets or more, where at most %d are taken", ErrRecord, e.Bytes, e.Limit)
}

// Unwrap returns [ErrRecord].
func (e *SizeError) Unwrap() error { return ErrRecord }

// Skip reads the rest of the record from r and forgets it, so that the next record can be read. It
// gives up with an error that wraps [ErrRecord] where more than most octets, or fragments, are
// left.
func (e *SizeError) Skip(r io.Reader, most int) error {
	rest, last := e.rest, e.last
	for fragments := 0; ; fragments++ {
		if rest > most || fragments > most {
			return fmt.Errorf("%w: too long to be skipped", ErrRecord)
		}
		if _, err := io.CopyN(io.Discard, r, int64(rest)); err != nil {
			return noEOF(err)
		}
		most -= rest
		if last {
			return nil
		}
		var mark [MarkSize]byte
		if _, err := io.ReadFull(r, mark[:]); err != nil {
			return noEOF(err)
		}
		word := binary.BigEndian.Uint32(mark[:])
		rest, last = int(word&maxFragment), word&lastFragment != 0
	}
}

// ReadRecord reads one record into buf's room and returns it, without its marks; the slice is buf's
// or, where that was too small, a new one. A record of more than limit octets is a [*SizeError],
// before any octet of the excess is read. The end of the stream before the first octet is io.EOF,
// later io.ErrUnexpectedEOF.
//
// ReadRecord reads no octet behind the record. Without a buffered reader it takes two reads per
// fragment.
func ReadRecord(r io.Reader, buf []byte, limit int) ([]byte, error) {
	buf = buf[:0]
	// The mark is read into the record's own buffer: a local array would escape through the
	// interface, once for each record.
	buf = slices.Grow(buf, MarkSize)
	for first := true; ; first = false {
		buf = slices.Grow(buf, MarkSize)
		mark := buf[len(buf) : len(buf)+MarkSize]
		if _, err := io.ReadFull(r, mark); err != nil {
			if !first {
				err = noEOF(err)
			}
			return buf, err
		}
		word := binary.BigEndian.Uint32(mark)
		n, last := int(word&maxFragment), word&lastFragment != 0
		switch {
		case n > limit-len(buf):
			return buf, &SizeError{Bytes: len(buf) + n, Limit: limit, rest: n, last: last}
		case n == 0 && !last:
			// Legal but pointless, and a peer could send them for ever without a record getting
			// longer.
			return buf, fmt.Errorf("%w: an empty fragment that is not the last", ErrRecord)
		}
		var err error
		if buf, err = readN(r, buf, n); err != nil {
			return buf, err
		}
		if last {
			return buf, nil
		}
	}
}

// readN appends n octets of r to buf, which grows as they come.
func readN(r io.Reader, buf []byte, n int) ([]byte, error) {
	for n > 0 {
		step := min(n, max(cap(buf)-len(buf), growStep))
		buf = slices.Grow(buf, step)
		got, err := io.ReadFull(r, buf[len(buf):len(buf)+step])
		buf = buf[:len(buf)+got]
		if err != nil {
			return buf, noEOF(err)
		}
		n -= step
	}
	return buf, nil
}

func noEOF(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// vector is what WriteRecord hands to writev. It is pooled because its parts would otherwise be
// allocated for each record.
type vector struct {
	mark  [MarkSize]byte
	parts [6][]byte
	bufs  net.Buffers
}

var vectors = sync.Pool{New: func() any { return new(vector) }}

// WriteRecord writes the concatenation of at most five parts as a record of one fragment, by one
// writev where w is a TCP connection. After an error the stream is of no more use: part of the
// record may have gone out.
func WriteRecord(w io.Writer, parts ...[]byte) error {
	v := vectors.Get().(*vector)
	defer v.release()
	if len(parts) >= len(v.parts) {
		return fmt.Errorf("%w: %d parts, where at most %d are taken", ErrRecord, len(parts), len(v.parts)-1)
	}
	n := 0
	bufs := append(v.parts[:0], v.mark[:])
	for _, p := range parts {
		n += len(p)
		if len(p) > 0 {
			bufs = append(bufs, p)
		}
	}
	if n > maxFragment {
		return fmt.Errorf("%w: %d octets are more than a fragment holds", ErrRecord, n)
	}
	PutMark(v.mark[:], n)
	v.bufs = bufs
	_, err := v.bufs.WriteTo(w)
	return err
}

// release forgets the parts, which are the caller's memory.
func (v *vector) release() {
	v.parts = [6][]byte{}
	v.bufs = nil
	vectors.Put(v)
}
