package nfs3

import (
	"errors"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// Errors of [ParseArgs], made once: a hostile client must not cause allocations.
var (
	errArgsLong   = errors.New("bytes follow the arguments")
	errWriteCount = errors.New("the count of WRITE differs from the length of its data")
	errCreateMode = errors.New("createmode3 is out of range")
	errTimeHow    = errors.New("time_how is out of range")
	errProc       = errors.New("the procedure number is out of range")
)

// MaxNameTaken and MaxPathTaken are the longest name and symbolic link target in bytes that
// [ParseArgs] accepts. They exceed [MaxName] and [MaxPath], so that a server can answer
// NFS3ERR_NAMETOOLONG instead of GARBAGE_ARGS.
const (
	MaxNameTaken = 4096
	MaxPathTaken = 2 * MaxPath
)

// Args holds the arguments of one call as a server sees them (RFC 1813 §3.3). Each procedure sets
// the fields that it has; the others are zero. The slices are views of the call message.
type Args struct {
	FH, FH2     FH     // first and second file handle
	Name, Name2 []byte // first and second file name, not checked
	Offset      uint64 // READ, WRITE, COMMIT
	Count       uint32 // READ, WRITE, COMMIT, READDIR; maxcount of READDIRPLUS
	DirCount    uint32 // READDIRPLUS
	Cookie      uint64 // READDIR, READDIRPLUS
	CookieVerf  Verifier
	Access      uint32 // ACCESS
	Stable      StableHow
	Data        []byte // WRITE; target of SYMLINK
	Create      CreateMode
	CreateVerf  Verifier // CREATE with Exclusive
	Set         SetAttr
	HasGuard    bool // SETATTR
	Guard       Time3
	Type        FileType // MKNOD, not checked
	Dev         Device
}

// ParseArgs decodes the arguments of proc from b into a, which it overwrites. It accepts b only
// when b holds exactly the arguments (RFC 1813 §3.3); otherwise it returns an error, and the server
// answers GARBAGE_ARGS. It allocates nothing.
func ParseArgs(proc Proc, b []byte, a *Args) error {
	*a = Args{}
	if proc == ProcNull {
		return nil // arguments of NULL are ignored: some clients send padding
	}
	d := reader{sunrpc.NewDecoder(b)}
	switch proc {
	case ProcGetAttr, ProcReadLink, ProcFSStat, ProcFSInfo, ProcPathConf:
		d.serverFH(&a.FH)
	case ProcSetAttr:
		d.serverFH(&a.FH)
		d.setAttr(&a.Set)
		if a.HasGuard = d.Bool(); a.HasGuard {
			a.Guard = d.time()
		}
	case ProcLookup, ProcRemove, ProcRmdir:
		d.dirOp(&a.FH, &a.Name)
	case ProcAccess:
		d.serverFH(&a.FH)
		a.Access = d.Uint32()
	case ProcRead, ProcCommit:
		d.serverFH(&a.FH)
		a.Offset, a.Count = d.Uint64(), d.Uint32()
	case ProcWrite:
		d.writeArgs(a, len(b))
	case ProcCreate, ProcMkdir, ProcSymlink, ProcMknod:
		d.dirOp(&a.FH, &a.Name)
		d.createArgs(proc, a)
	case ProcRename:
		d.dirOp(&a.FH, &a.Name)
		d.dirOp(&a.FH2, &a.Name2)
	case ProcLink:
		d.serverFH(&a.FH)
		d.dirOp(&a.FH2, &a.Name)
	case ProcReadDir, ProcReadDirPlus:
		d.serverFH(&a.FH)
		a.Cookie, a.CookieVerf = d.Uint64(), d.verifier()
		if proc == ProcReadDirPlus {
			a.DirCount = d.Uint32()
		}
		a.Count = d.Uint32()
	default:
		return errProc
	}
	if d.Err() == nil && d.Remaining() != 0 {
		d.Fail(errArgsLong)
	}
	return d.Err()
}

// serverFH reads a handle; unlike the client, a server accepts an empty one and answers
// NFS3ERR_BADHANDLE.
func (d *reader) serverFH(h *FH) {
	h.Set(d.Opaque(FHSize))
}

// dirOp reads a diropargs3 (RFC 1813 §2.6).
func (d *reader) dirOp(h *FH, name *[]byte) {
	d.serverFH(h)
	*name = d.Opaque(MaxNameTaken)
}

func (d *reader) writeArgs(a *Args, limit int) {
	d.serverFH(&a.FH)
	a.Offset, a.Count, a.Stable = d.Uint64(), d.Uint32(), d.stableHow()
	a.Data = d.Opaque(limit)
	if uint64(len(a.Data)) != uint64(a.Count) {
		d.Fail(errWriteCount)
	}
}

// createArgs reads the arguments after the name in the four procedures that create an object.
func (d *reader) createArgs(proc Proc, a *Args) {
	switch proc {
	case ProcCreate:
		a.Create = CreateMode(d.Uint32())
		switch a.Create {
		case Unchecked, Guarded:
			d.setAttr(&a.Set)
		case Exclusive:
			a.CreateVerf = d.verifier()
		default:
			d.Fail(errCreateMode)
		}
	case ProcMkdir:
		d.setAttr(&a.Set)
	case ProcSymlink:
		d.setAttr(&a.Set)
		a.Data = d.Opaque(MaxPathTaken)
	case ProcMknod:
		a.Type = FileType(d.Uint32())
		switch a.Type {
		case NF3CHR, NF3BLK:
			d.setAttr(&a.Set)
			a.Dev = Device{Major: d.Uint32(), Minor: d.Uint32()}
		case NF3SOCK, NF3FIFO:
			d.setAttr(&a.Set)
		}
	}
}

// setAttr reads a sattr3 (RFC 1813 §2.5).
func (d *reader) setAttr(s *SetAttr) {
	*s = SetAttr{}
	if s.HasMode = d.Bool(); s.HasMode {
		s.Mode = d.Uint32() & ModeMask
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
	s.AtimeHow, s.Atime = d.setTime()
	s.MtimeHow, s.Mtime = d.setTime()
}

// setTime reads a set_atime or set_mtime (RFC 1813 §2.5).
func (d *reader) setTime() (how TimeHow, t Time3) {
	how = TimeHow(d.Uint32())
	switch how {
	case DontChange, SetToServerTime:
	case SetToClientTime:
		t = d.time()
	default:
		d.Fail(errTimeHow)
	}
	return how, t
}

// DecodeFH decodes an nfs_fh3 for a protocol beside NFS whose calls contain one. An empty handle is
// accepted, as by [ParseArgs].
func DecodeFH(d *sunrpc.Decoder, h *FH) {
	r := reader{*d}
	r.serverFH(h)
	*d = r.Decoder
}

// DecodePostOpAttr decodes a post_op_attr for a protocol beside NFS whose results contain one.
func DecodePostOpAttr(d *sunrpc.Decoder, a *PostOpAttr) {
	r := reader{*d}
	r.postOpAttr(a)
	*d = r.Decoder
}
