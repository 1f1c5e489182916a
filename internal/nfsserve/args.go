package nfsserve

import (
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// maxPathOctets bounds the text of a symbolic link.
const maxPathOctets = nfs3.MaxPath

// args are the arguments of one call, as far as anything here needs them. Slices are views of the
// call.
type args struct {
	fh, fh2    []byte // first and second handle
	name       string
	name2      string
	set        nfs3.SetAttr
	guarded    bool
	guard      nfs3.Time3
	access     uint32
	stable     nfs3.StableHow
	create     nfs3.CreateMode
	createVerf nfs3.Verifier
	ftype      nfs3.FileType
	dev        nfs3.Device
	offset     uint64 // of READ and WRITE
	count      uint32 // of WRITE, and READDIRPLUS's maxcount
	cookie     uint64 // of READDIRPLUS
	// Where these stand in the arguments: READ's offset, READDIRPLUS's dircount, and what bounds
	// the reply, the count of READ and READDIR and READDIRPLUS's maxcount.
	offsetAt, dirCountAt, countAt int
}

// maxNameTaken lets longer names through than are allowed, so that they get NFS3ERR_NAMETOOLONG and
// not GARBAGE_ARGS.
const maxNameTaken = 4096

// parseArgs checks that b is the arguments of proc, whole and nothing behind (RFC 1813 §3.3).
func parseArgs(proc nfs3.Proc, b []byte) (a args, ok bool) {
	d := sunrpc.NewDecoder(b)
	dirop := func() ([]byte, string) {
		fh := d.Opaque(nfs3.FHSize)
		return fh, string(d.Opaque(maxNameTaken))
	}
	switch proc {
	case nfs3.ProcNull:
		return a, true // tolerated: some clients send words
	case nfs3.ProcGetAttr, nfs3.ProcReadLink, nfs3.ProcFSStat, nfs3.ProcFSInfo, nfs3.ProcPathConf:
		a.fh = d.Opaque(nfs3.FHSize)
	case nfs3.ProcSetAttr:
		a.fh = d.Opaque(nfs3.FHSize)
		a.set = decodeSetAttr(&d)
		if a.guarded = d.Bool(); a.guarded {
			a.guard = nfs3.Time3{Sec: d.Uint32(), Nsec: d.Uint32()}
		}
	case nfs3.ProcLookup, nfs3.ProcRemove, nfs3.ProcRmdir:
		a.fh, a.name = dirop()
	case nfs3.ProcAccess:
		a.fh, a.access = d.Opaque(nfs3.FHSize), d.Uint32()
	case nfs3.ProcRead:
		a.fh = d.Opaque(nfs3.FHSize)
		a.offsetAt = d.Offset()
		a.offset = d.Uint64()
		a.countAt = d.Offset()
		d.Uint32()
	case nfs3.ProcWrite:
		a.fh = d.Opaque(nfs3.FHSize)
		a.offset = d.Uint64()
		a.count = d.Uint32()
		a.stable = nfs3.StableHow(d.Uint32())
		if data := d.Opaque(len(b)); uint64(len(data)) != uint64(a.count) {
			return a, false
		}
	case nfs3.ProcCreate:
		a.fh, a.name = dirop()
		a.create = nfs3.CreateMode(d.Uint32())
		switch a.create {
		case nfs3.Unchecked, nfs3.Guarded:
			a.set = decodeSetAttr(&d)
		case nfs3.Exclusive:
			copy(a.createVerf[:], d.Fixed(len(a.createVerf)))
		default:
			return a, false
		}
	case nfs3.ProcMkdir:
		a.fh, a.name = dirop()
		a.set = decodeSetAttr(&d)
	case nfs3.ProcSymlink:
		a.fh, a.name = dirop()
		a.set = decodeSetAttr(&d)
		d.Opaque(maxPathOctets)
	case nfs3.ProcMknod:
		a.fh, a.name = dirop()
		a.ftype = nfs3.FileType(d.Uint32())
		switch a.ftype {
		case nfs3.NF3CHR, nfs3.NF3BLK:
			a.set = decodeSetAttr(&d)
			a.dev = nfs3.Device{Major: d.Uint32(), Minor: d.Uint32()}
		case nfs3.NF3SOCK, nfs3.NF3FIFO:
			a.set = decodeSetAttr(&d)
		}
	case nfs3.ProcRename:
		a.fh, a.name = dirop()
		a.fh2, a.name2 = dirop()
	case nfs3.ProcLink:
		a.fh = d.Opaque(nfs3.FHSize)
		a.fh2, a.name = dirop()
	case nfs3.ProcReadDir:
		a.fh = d.Opaque(nfs3.FHSize)
		d.Fixed(8 + nfs3.CookieVerfSize)
		a.countAt = d.Offset()
		d.Uint32()
	case nfs3.ProcReadDirPlus:
		a.fh = d.Opaque(nfs3.FHSize)
		a.cookie = d.Uint64()
		d.Fixed(nfs3.CookieVerfSize)
		a.dirCountAt = d.Offset()
		d.Uint32()
		a.countAt = d.Offset()
		a.count = d.Uint32()
	case nfs3.ProcCommit:
		a.fh = d.Opaque(nfs3.FHSize)
		d.Uint64()
		d.Uint32()
	default:
		return a, false
	}
	return a, d.Err() == nil && d.Remaining() == 0
}

func decodeSetAttr(d *sunrpc.Decoder) (s nfs3.SetAttr) {
	if s.HasMode = d.Bool(); s.HasMode {
		s.Mode = d.Uint32() & nfs3.ModeMask
	}
	if s.HasUID = d.Bool(); s.HasUID {
		s.UID = d.Uint32()
	}
	if s.HasGID = d.Bool(); s.HasGID {
		s.GID = d.Uint32()
	}
	if s.HasSize = d.Bool(); s.HasSize {
		s.Size = d.Uint64()
	}
	s.AtimeHow, s.Atime = decodeSetTime(d)
	s.MtimeHow, s.Mtime = decodeSetTime(d)
	return s
}

func decodeSetTime(d *sunrpc.Decoder) (how nfs3.TimeHow, t nfs3.Time3) {
	how = nfs3.TimeHow(d.Uint32())
	switch how {
	case nfs3.DontChange, nfs3.SetToServerTime:
	case nfs3.SetToClientTime:
		t = nfs3.Time3{Sec: d.Uint32(), Nsec: d.Uint32()}
	default:
		d.Fail(sunrpc.ErrMalformed)
	}
	return how, t
}
