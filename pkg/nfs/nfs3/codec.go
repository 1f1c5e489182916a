package nfs3

import (
	"errors"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// Errors of a reply with valid XDR. They are variables so that invalid replies cause no allocation.
var (
	errFileType   = errors.New("file type is out of range")
	errEmptyFH    = errors.New("file handle is empty")
	errStableHow  = errors.New("stable_how is out of range")
	errName       = errors.New("name of a directory entry is empty, longer than 255 bytes, or contains '/' or NUL")
	errReadMore   = errors.New("READ returned more data than requested")
	errReadCount  = errors.New("count of READ differs from the length of the data")
	errPlacedLen  = errors.New("length in the reply differs from the length of the placed data")
	errPathLen    = errors.New("path is longer than the buffer")
	errPathNUL    = errors.New("path contains NUL")
	errWroteMore  = errors.New("WRITE reports more data than the client sent")
	errWroteNone  = errors.New("WRITE succeeded without writing any data")
	errDataShort  = errors.New("reply is shorter than its data")
	errResultData = errors.New("transport placed more data than the buffer holds")
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

// A reader decodes the types of results. As in sunrpc.Decoder, the first error stays and nothing is
// allocated. A value out of range is an error.
type reader struct {
	sunrpc.Decoder
}

func (d *reader) fh(h *FH) {
	p := d.Opaque(FHSize)
	if d.Err() == nil && len(p) == 0 {
		d.Fail(errEmptyFH)
	}
	h.Set(p)
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
