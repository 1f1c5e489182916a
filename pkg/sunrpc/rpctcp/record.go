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

// Record marking (RFC 5531 §11): a mark precedes each fragment. The top bit of the mark is set for
// the last fragment of the record, and the other bits are the length of the fragment.
const (
	MarkSize     = 4 // bytes
	lastFragment = 1 << 31
	maxFragment  = lastFragment - 1
)

// ErrRecord is wrapped by every error about the framing: the peer does not speak RPC over TCP, or
// the record exceeds the limit.
var ErrRecord = errors.New("invalid RPC record")

// growStep limits, in bytes, how much larger the buffer is than the received data.
const growStep = 64 << 10

// PutMark writes the mark of a record with one fragment of n bytes to b[:MarkSize].
func PutMark(b []byte, n int) { binary.BigEndian.PutUint32(b, lastFragment|uint32(n)) }

// FragmentSize returns the length in bytes of the fragment whose mark is b[:MarkSize].
func FragmentSize(b []byte) int { return int(binary.BigEndian.Uint32(b) & maxFragment) }

// LastFragment reports whether the fragment whose mark is b[:MarkSize] is the last one of its
// record.
func LastFragment(b []byte) bool { return binary.BigEndian.Uint32(b)&lastFragment != 0 }

// A SizeError reports a record that exceeds the limit of the reader. It wraps [ErrRecord].
type SizeError struct {
	Bytes int // lower bound of the size of the record
	Limit int // maximum size in bytes

	rest int  // unread bytes of the current fragment
	last bool // the current fragment is the last one
}

func (e *SizeError) Error() string {
	return fmt.Sprintf("%v: record has at least %d bytes, maximum is %d", ErrRecord, e.Bytes, e.Limit)
}

// Unwrap returns [ErrRecord].
func (e *SizeError) Unwrap() error { return ErrRecord }

// Skip reads and discards the rest of the record, so that the caller can read the next record from
// r. It returns an error that wraps [ErrRecord] when the rest has more than most bytes or more than
// most fragments.
func (e *SizeError) Skip(r io.Reader, most int) error {
	rest, last := e.rest, e.last
	for fragments := 0; ; fragments++ {
		if rest > most || fragments > most {
			return fmt.Errorf("%w: record is too long to skip", ErrRecord)
		}
		if _, err := io.CopyN(io.Discard, r, int64(rest)); err != nil {
			return unexpectedEOF(err)
		}
		most -= rest
		if last {
			return nil
		}
		var mark [MarkSize]byte
		if _, err := io.ReadFull(r, mark[:]); err != nil {
			return unexpectedEOF(err)
		}
		word := binary.BigEndian.Uint32(mark[:])
		rest, last = int(word&maxFragment), word&lastFragment != 0
	}
}

// ReadRecord reads one record and returns it without its marks. It stores the record in buf's
// memory, or in a larger new slice when the capacity of buf is too small.
//
// A record of more than limit bytes is a [*SizeError], which ReadRecord returns before it reads the
// excess. The end of the stream is io.EOF before the first byte, and io.ErrUnexpectedEOF later.
//
// ReadRecord reads nothing after the record. Each fragment takes two reads from r, so r should be
// buffered.
func ReadRecord(r io.Reader, buf []byte, limit int) ([]byte, error) {
	buf = buf[:0]
	// The mark goes to the buffer of the record. A local array would escape to the heap through the
	// interface, once for each record.
	buf = slices.Grow(buf, MarkSize)
	for first := true; ; first = false {
		buf = slices.Grow(buf, MarkSize)
		mark := buf[len(buf) : len(buf)+MarkSize]
		if _, err := io.ReadFull(r, mark); err != nil {
			if !first {
				err = unexpectedEOF(err)
			}
			return buf, err
		}
		word := binary.BigEndian.Uint32(mark)
		n, last := int(word&maxFragment), word&lastFragment != 0
		switch {
		case n > limit-len(buf):
			return buf, &SizeError{Bytes: len(buf) + n, Limit: limit, rest: n, last: last}
		case n == 0 && !last:
			// RFC 5531 allows empty fragments. But a peer could send them without end and never
			// exceed a size limit.
			return buf, fmt.Errorf("%w: empty fragment before the last fragment", ErrRecord)
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

// readN appends n bytes of r to buf, which grows with the received data.
func readN(r io.Reader, buf []byte, n int) ([]byte, error) {
	for n > 0 {
		step := min(n, max(cap(buf)-len(buf), growStep))
		buf = slices.Grow(buf, step)
		got, err := io.ReadFull(r, buf[len(buf):len(buf)+step])
		buf = buf[:len(buf)+got]
		if err != nil {
			return buf, unexpectedEOF(err)
		}
		n -= step
	}
	return buf, nil
}

// unexpectedEOF returns io.ErrUnexpectedEOF in place of io.EOF.
func unexpectedEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// vector is the argument of writev. A pool reuses it, so that WriteRecord does not allocate.
type vector struct {
	mark  [MarkSize]byte
	parts [6][]byte
	bufs  net.Buffers
}

var vectors = sync.Pool{New: func() any { return new(vector) }}

// WriteRecord writes the concatenation of at most five parts as one record with one fragment. It
// calls writev once when w is a TCP connection. The stream is unusable after an error, because part
// of the record may have been written.
func WriteRecord(w io.Writer, parts ...[]byte) error {
	v := vectors.Get().(*vector)
	defer v.release()
	if len(parts) >= len(v.parts) {
		return fmt.Errorf("%w: record has %d parts, maximum is %d", ErrRecord, len(parts), len(v.parts)-1)
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
		return fmt.Errorf("%w: record has %d bytes, maximum of a fragment is %d", ErrRecord, n, maxFragment)
	}
	PutMark(v.mark[:], n)
	v.bufs = bufs
	_, err := v.bufs.WriteTo(w)
	return err
}

// release drops the references to the memory of the caller.
func (v *vector) release() {
	v.parts = [6][]byte{}
	v.bufs = nil
	vectors.Put(v)
}
