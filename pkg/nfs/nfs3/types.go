package nfs3

import (
	"encoding/hex"
	"fmt"
	"time"
)

// FH is a file handle (RFC 1813 §2.5, nfs_fh3): 0 to 64 bytes with a meaning only for the server.
// It is comparable and usable as a map key. The zero FH is not a valid handle.
type FH struct {
	n uint8
	b [FHSize]byte // zero after n bytes, so that == compares handles
}

// NewFH returns a handle with a copy of b. It fails if b is longer than 64 bytes.
func NewFH(b []byte) (FH, error) {
	if len(b) > FHSize {
		return FH{}, fmt.Errorf("%w: file handle has %d bytes, maximum is %d",
			ErrMalformed, len(b), FHSize)
	}
	var h FH
	h.n = uint8(copy(h.b[:], b))
	return h, nil
}

// Len returns the length of the handle in bytes.
func (h *FH) Len() int { return int(h.n) }

// Bytes returns the handle as a slice of the memory of h.
func (h *FH) Bytes() []byte { return h.b[:h.n] }

// IsZero reports whether h is the zero FH.
func (h *FH) IsZero() bool { return h.n == 0 }

// String returns the handle in hexadecimal.
func (h FH) String() string { return hex.EncodeToString(h.b[:h.n]) }

// Time3 is nfstime3 (RFC 1813 §2.5): seconds and nanoseconds since 1970. Values from a server are
// not checked, so Nsec may exceed a second.
type Time3 struct {
	Sec, Nsec uint32
}

// Time returns t as a time.Time.
func (t Time3) Time() time.Time { return time.Unix(int64(t.Sec), int64(t.Nsec)) }

// TimeOf returns t as a Time3. It returns 0 for times before 1970, and the maximum, in 2106, for
// later times.
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

// Attr is fattr3 (RFC 1813 §2.5). Type is one of NF3REG to NF3FIFO, and Mode contains only ModeMask
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
	Atime  Time3
	Mtime  Time3
	Ctime  Time3
}

// PostOpAttr is post_op_attr (RFC 1813 §2.6): attributes that a server may omit. Attr is valid only
// if Present is set.
type PostOpAttr struct {
	Present bool
	Attr
}

// WccAttr is wcc_attr (RFC 1813 §2.6). A client compares it to detect changes by other clients.
type WccAttr struct {
	Size  uint64
	Mtime Time3
	Ctime Time3
}

// WccData is wcc_data (RFC 1813 §2.6): attributes of an object before and after an operation. A
// server may omit each of them.
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

// Verifier is a cookieverf3, createverf3 or writeverf3 (RFC 1813 §2.5): 8 opaque bytes. Only
// equality is meaningful.
type Verifier [8]byte
