package sunrpc

import "encoding/binary"

// Sizes of XDR items in bytes (RFC 4506 §4).
const (
	SizeUint32 = 4
	SizeUint64 = 8
	SizeBool   = 4
)

// Pad4 rounds n up to a multiple of 4, the XDR unit (RFC 4506 §3).
func Pad4(n int) int { return (n + 3) &^ 3 }

var zeroPad [3]byte

// AppendUint32 appends an unsigned int, an enum, or a length (RFC 4506 §4.2).
func AppendUint32(b []byte, v uint32) []byte { return binary.BigEndian.AppendUint32(b, v) }

// AppendUint64 appends an unsigned hyper (RFC 4506 §4.5).
func AppendUint64(b []byte, v uint64) []byte { return binary.BigEndian.AppendUint64(b, v) }

// AppendBool appends a boolean (RFC 4506 §4.4).
func AppendBool(b []byte, v bool) []byte {
	if v {
		return AppendUint32(b, 1)
	}
	return AppendUint32(b, 0)
}

// AppendFixed appends fixed-length opaque data and its pad (RFC 4506 §4.9).
func AppendFixed(b, data []byte) []byte {
	b = append(b, data...)
	return append(b, zeroPad[:Pad4(len(data))-len(data)]...)
}

// AppendOpaque appends variable-length opaque data: length, bytes, pad (RFC 4506 §4.10).
func AppendOpaque(b, data []byte) []byte {
	return AppendFixed(AppendUint32(b, uint32(len(data))), data)
}

// AppendString appends a string: length, bytes, pad (RFC 4506 §4.11).
func AppendString(b []byte, s string) []byte {
	b = append(AppendUint32(b, uint32(len(s))), s...)
	return append(b, zeroPad[:Pad4(len(s))-len(s)]...)
}

// A Decoder decodes XDR items from a message. It keeps the first error, and every later read
// returns a zero value. A caller can therefore decode a complete structure and check [Decoder.Err]
// once. A Decoder does not read past the message, does not allocate, and is not safe for concurrent
// use. Its zero value is an empty message.
type Decoder struct {
	b   []byte
	off int
	err error
}

// NewDecoder returns a Decoder for b. The slices that it returns are slices of b.
func NewDecoder(b []byte) Decoder { return Decoder{b: b} }

// Err returns the first error or nil. The error wraps [ErrMalformed] or is an argument of
// [Decoder.Fail].
func (d *Decoder) Err() error { return d.err }

// Fail sets the error of the Decoder to err unless it has an error.
func (d *Decoder) Fail(err error) {
	if d.err == nil {
		d.err = err
	}
}

// Offset returns the number of bytes that were read.
func (d *Decoder) Offset() int { return d.off }

// Rest returns the unread bytes.
func (d *Decoder) Rest() []byte { return d.b[d.off:] }

// Remaining returns the number of unread bytes.
func (d *Decoder) Remaining() int { return len(d.b) - d.off }

// take returns the next n bytes, or nil after an error.
func (d *Decoder) take(n int) []byte {
	if d.err != nil {
		return nil
	}
	if n < 0 || n > len(d.b)-d.off {
		d.err = errShort
		return nil
	}
	p := d.b[d.off : d.off+n : d.off+n]
	d.off += n
	return p
}

// Uint32 reads an unsigned int, an enum, or a length.
func (d *Decoder) Uint32() uint32 {
	p := d.take(SizeUint32)
	if p == nil {
		return 0
	}
	return binary.BigEndian.Uint32(p)
}

// Uint64 reads an unsigned hyper.
func (d *Decoder) Uint64() uint64 {
	p := d.take(SizeUint64)
	if p == nil {
		return 0
	}
	return binary.BigEndian.Uint64(p)
}

// Bool reads a boolean; a value other than 0 and 1 is an error (RFC 4506 §4.4).
func (d *Decoder) Bool() bool {
	switch d.Uint32() {
	case 0:
		return false
	case 1:
		return true
	}
	d.Fail(errBool)
	return false
}

// Fixed reads n bytes of fixed-length opaque data and skips the pad. It does not check the content
// of the pad. RFC 4506 §4.9 requires zero from senders, but some do not comply.
func (d *Decoder) Fixed(n int) []byte {
	p := d.take(n)
	d.take(Pad4(n) - n)
	if d.err != nil {
		return nil
	}
	return p
}

// Opaque reads variable-length opaque data or a string of at most limit bytes and skips the pad. It
// returns a slice of the message.
func (d *Decoder) Opaque(limit int) []byte {
	n := d.Uint32()
	if d.err != nil {
		return nil
	}
	if int64(n) > int64(limit) {
		d.err = errOpaqueLen
		return nil
	}
	return d.Fixed(int(n))
}
