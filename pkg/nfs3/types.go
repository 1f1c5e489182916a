package nfs3

import (
	"encoding/hex"
	"fmt"
	"time"
)

// FH is a file handle (RFC 1813 §2.5, nfs_fh3): 0 to 64 octets that only the server understands. It
// is a value: comparable, and usable as a map key. The zero FH is no handle.
type FH struct {
	n uint8
	b [FHSize]byte // zero beyond n, so that == compares handles
}

// NewFH makes a handle of b, which it copies. It fails when b is longer than 64 octets.
func NewFH(b []byte) (FH, error) {
	if len(b) > FHSize {
		return FH{}, fmt.Errorf("%w: a file handle of %d octets is longer than the %d that NFSv3 allows",
			ErrMalformed, len(b), FHSize)
	}
	var h FH
	h.n = uint8(copy(h.b[:], b))
	return h, nil
}

// Len is the handle's length in octets.
func (h *FH) Len() int { return int(h.n) }

// Bytes is a view of the handle's octets.
func (h *FH) Bytes() []byte { return h.b[:h.n] }

// IsZero tells whether h is no handle.
func (h *FH) IsZero() bool { return h.n == 0 }

// String is the handle in hexadecimal.
func (h FH) String() string { return hex.EncodeToString(h.b[:h.n]) }

// Time3 is nfstime3 (RFC 1813 §2.5): seconds and nanoseconds since 1970. Values that a server sent
// are kept as they came: Nsec may exceed a second.
type Time3 struct {
	Sec, Nsec uint32
}

// Time is t as a time.Time.
func (t Time3) Time() time.Time { return time.Unix(int64(t.Sec), int64(t.Nsec)) }

// TimeOf is t as NFSv3 can carry it: times before 1970 become 0, times after 2106 the last one.
func TimeOf(t time.Time) Time3 {
	const last = 1<<32 - 1
	switch sec := t.Unix(); {
	case sec < 0:
		return Time3{}
	case sec > last:
		return Time3{Sec: last}
	default:
		return Time3{Sec: uint32(sec), Nsec: uint32(t.Nanosecond())}
	}
}

// Device is specdata3 (RFC 1813 §2.5): the numbers of a device file.
type Device struct {
	Major, Minor uint32
}

// Attr is fattr3 (RFC 1813 §2.5). Type is one of NF3REG to NF3FIFO, Mode holds ModeMask bits only;
// the rest is what the server says.
type Attr struct {
	Type   FileType
	Mode   uint32
	Nlink  uint32
	UID    uint32
	GID    uint32
	Size   uint64 // octets
	Used   uint64 // octets of disk space
	Rdev   Device
	FSID   uint64
	FileID uint64
	Atime  Time3
	Mtime  Time3
	Ctime  Time3
}

// PostOpAttr is post_op_attr (RFC 1813 §2.6): attributes that a server may leave out. Attr is
// meaningful when Present.
type PostOpAttr struct {
	Present bool
	Attr
}

// WccAttr is wcc_attr (RFC 1813 §2.6): what a client needs to see that nobody else changed an
// object.
type WccAttr struct {
	Size  uint64
	Mtime Time3
	Ctime Time3
}

// WccData is wcc_data (RFC 1813 §2.6): an object before and after an operation, each of which a
// server may leave out.
type WccData struct {
	HasBefore bool
	Before    WccAttr
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
	Atime    Time3 // with SetToClientTime
	MtimeHow TimeHow
	Mtime    Time3 // with SetToClientTime
}

// Verifier is a cookieverf3, createverf3 or writeverf3 (RFC 1813 §2.5): 8 opaque octets, to be
// compared only.
type Verifier [8]byte
