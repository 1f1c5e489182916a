package nfs3

import (
	"errors"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// What a server can get wrong beyond XDR itself; made once, so that a hostile server makes no work
// for the allocator.
var (
	errFileType   = errors.New("a file type is out of range")
	errEmptyFH    = errors.New("a file handle is empty")
	errStableHow  = errors.New("stable_how is out of range")
	errName       = errors.New("a directory entry's name is empty, longer than 255 octets, or holds '/' or NUL")
	errReadMore   = errors.New("READ returned more data than was asked for")
	errReadCount  = errors.New("the count of READ differs from the length of its data")
	errPlacedLen  = errors.New("the length in the reply differs from the length of the data that was placed")
	errPathLen    = errors.New("the path is longer than the buffer for it")
	errPathNUL    = errors.New("the path holds a NUL")
	errWroteMore  = errors.New("WRITE reports more data written than was sent")
	errWroteNone  = errors.New("WRITE reports success with nothing written")
	errDataShort  = errors.New("the reply ends before its data does")
	errResultData = errors.New("the transport placed more data than there was room for")
)

func appendFH(b []byte, h *FH) []byte { return sunrpc.AppendOpaque(b, h.Bytes()) }

func appendTime(b []byte, t Time3) []byte {
	return sunrpc.AppendUint32(sunrpc.AppendUint32(b, t.Sec), t.Nsec)
}

// appendOptUint32 appends a set_mode3, set_uid3 or set_gid3.
func appendOptUint32(b []byte, set bool, v uint32) []byte {
	b = sunrpc.AppendBool(b, set)
	if set {
		b = sunrpc.AppendUint32(b, v)
	}
	return b
}

// appendSetTime appends a set_atime or set_mtime.
func appendSetTime(b []byte, how TimeHow, t Time3) []byte {
	b = sunrpc.AppendUint32(b, uint32(how))
	if how == SetToClientTime {
		b = appendTime(b, t)
	}
	return b
}

func appendSetAttr(b []byte, a *SetAttr) []byte {
	b = appendOptUint32(b, a.HasMode, a.Mode&ModeMask)
	b = appendOptUint32(b, a.HasUID, a.UID)
	b = appendOptUint32(b, a.HasGID, a.GID)
	b = sunrpc.AppendBool(b, a.HasSize)
	if a.HasSize {
		b = sunrpc.AppendUint64(b, a.Size)
	}
	b = appendSetTime(b, a.AtimeHow, a.Atime)
	return appendSetTime(b, a.MtimeHow, a.Mtime)
}

// A reader decodes the results' types over sunrpc's Decoder: sticky error, no allocation, values
// out of range refused.
type reader struct {
	sunrpc.Decoder
}

func (d *reader) fh(h *FH) {
	p := d.Opaque(FHSize)
	if d.Err() == nil && len(p) == 0 {
		d.Fail(errEmptyFH)
	}
	*h = FH{}
	h.n = uint8(copy(h.b[:], p))
}

func (d *reader) postOpFH(h *FH) (present bool) {
	*h = FH{}
	if present = d.Bool(); present {
		d.fh(h)
	}
	return present
}

func (d *reader) time() (t Time3) {
	t.Sec, t.Nsec = d.Uint32(), d.Uint32()
	return t
}

func (d *reader) attr(a *Attr) {
	a.Type = FileType(d.Uint32())
	if a.Type < NF3REG || a.Type > NF3FIFO {
		d.Fail(errFileType)
	}
	a.Mode = d.Uint32() & ModeMask
	a.Nlink = d.Uint32()
	a.UID = d.Uint32()
	a.GID = d.Uint32()
	a.Size = d.Uint64()
	a.Used = d.Uint64()
	a.Rdev.Major = d.Uint32()
	a.Rdev.Minor = d.Uint32()
	a.FSID = d.Uint64()
	a.FileID = d.Uint64()
	a.Atime = d.time()
	a.Mtime = d.time()
	a.Ctime = d.time()
}

func (d *reader) postOpAttr(a *PostOpAttr) {
	if a.Present = d.Bool(); a.Present {
		d.attr(&a.Attr)
	} else {
		a.Attr = Attr{}
	}
}

func (d *reader) wcc(w *WccData) {
	*w = WccData{}
	if w.HasBefore = d.Bool(); w.HasBefore {
		w.Before.Size = d.Uint64()
		w.Before.Mtime = d.time()
		w.Before.Ctime = d.time()
	}
	if w.HasAfter = d.Bool(); w.HasAfter {
		d.attr(&w.After)
	}
}

func (d *reader) verifier() (v Verifier) {
	copy(v[:], d.Fixed(len(v)))
	return v
}

func (d *reader) stableHow() StableHow {
	s := StableHow(d.Uint32())
	if s > FileSync {
		d.Fail(errStableHow)
	}
	return s
}
