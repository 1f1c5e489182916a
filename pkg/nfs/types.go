package nfs

import (
	"encoding/hex"
	"fmt"
	"time"
)

// HandleSize is the maximum size of a file handle in bytes: NFS3_FHSIZE (RFC 1813 §2.4). Handles of
// NFSv4 can have 128 bytes (RFC 8881 §3.1).
const HandleSize = 64

// A Handle is a file handle (RFC 1813 §2.5): 0 to HandleSize bytes with a meaning only for the
// server. It is comparable and usable as a map key. The zero Handle is not valid.
type Handle struct {
	n uint8
	b [HandleSize]byte // zero after n bytes, so that == compares handles
}

// NewHandle returns a handle with a copy of b. It fails if b is longer than HandleSize bytes.
func NewHandle(b []byte) (Handle, error) {
	if len(b) > HandleSize {
		return Handle{}, fmt.Errorf("%w: file handle has %d bytes, maximum is %d", ErrMalformed, len(b), HandleSize)
	}
	var h Handle
	h.Set(b)
	return h, nil
}

// Set makes h a handle with a copy of the first HandleSize bytes of b.
func (h *Handle) Set(b []byte) {
	*h = Handle{}
	h.n = uint8(copy(h.b[:], b))
}

// Len returns the length of the handle in bytes.
func (h *Handle) Len() int { return int(h.n) }

// Bytes returns the handle as a slice of the memory of h.
func (h *Handle) Bytes() []byte { return h.b[:h.n] }

// IsZero reports whether h is the zero Handle.
func (h *Handle) IsZero() bool { return h.n == 0 }

// String returns the handle in hexadecimal.
func (h Handle) String() string { return hex.EncodeToString(h.b[:h.n]) }

// A Time is nfstime3 (RFC 1813 §2.5): seconds and nanoseconds since 1970. Values from a server are
// not checked, so Nsec may exceed a second.
type Time struct {
	Sec, Nsec uint32
}

// Time returns t as a time.Time.
func (t Time) Time() time.Time { return time.Unix(int64(t.Sec), int64(t.Nsec)) }

// TimeOf returns t as a Time. It returns 0 for times before 1970, and the maximum, in 2106, for
// later times.
func TimeOf(t time.Time) Time {
	const last = 1<<32 - 1
	switch sec := t.Unix(); {
	case sec < 0:
		return Time{}
	case sec > last:
		return Time{Sec: last}
	default:
		return Time{Sec: uint32(sec), Nsec: uint32(t.Nanosecond())}
	}
}

// Device is specdata3 (RFC 1813 §2.5): the numbers of a device file.
type Device struct {
	Major, Minor uint32
}

// Attr is fattr3 (RFC 1813 §2.5). Type is one of Regular to FIFO, and Mode contains only ModeMask
// bits. The other fields are not checked.
type Attr struct {
	Type   FileType
	Mode   uint32
	Nlink  uint32
	UID    uint32
	GID    uint32
	Size   uint64 // bytes
	Used   uint64 // disk space in bytes
	Rdev   Device
	FSID   uint64
	FileID uint64
	Atime  Time
	Mtime  Time
	Ctime  Time
}

// PostOpAttr is post_op_attr (RFC 1813 §2.6): attributes that a server may omit. Attr is valid only
// if Present is set.
type PostOpAttr struct {
	Present bool
	Attr
}

// A Stamp identifies one state of an object (wcc_attr, RFC 1813 §2.6). A client compares stamps to
// detect changes by other clients.
type Stamp struct {
	Size         uint64
	Mtime, Ctime Time
}

// Stamp returns the state that the attributes describe.
func (a *Attr) Stamp() Stamp { return Stamp{a.Size, a.Mtime, a.Ctime} }

// A Change is wcc_data (RFC 1813 §2.6): the object before and after an operation. A server may omit
// each of them.
type Change struct {
	HasBefore bool
	Before    Stamp
	HasAfter  bool
	After     Attr
}

// SetAttr is sattr3 (RFC 1813 §2.5): the attributes to set. The zero value sets nothing.
type SetAttr struct {
	HasMode bool
	HasUID  bool
	HasGID  bool
	HasSize bool
	Mode    uint32 // ModeMask bits
	UID     uint32
	GID     uint32
	Size    uint64

	AtimeHow TimeHow
	Atime    Time // with SetToClientTime
	MtimeHow TimeHow
	Mtime    Time // with SetToClientTime
}

// Verifier is a cookieverf3, createverf3 or writeverf3 (RFC 1813 §2.5): 8 opaque bytes. Only
// equality is meaningful.
type Verifier [8]byte
