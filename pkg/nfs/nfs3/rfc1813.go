package nfs3

import "strconv"

// Program and version of NFS (RFC 1813 §1.3), and the usual TCP port.
const (
	Program = 100003
	Version = 3
	Port    = 2049
)

// Proc is a procedure number of NFS version 3 (RFC 1813 §3.3).
type Proc uint32

// The procedures.
const (
	ProcNull        Proc = 0
	ProcGetAttr     Proc = 1
	ProcSetAttr     Proc = 2
	ProcLookup      Proc = 3
	ProcAccess      Proc = 4
	ProcReadLink    Proc = 5
	ProcRead        Proc = 6
	ProcWrite       Proc = 7
	ProcCreate      Proc = 8
	ProcMkdir       Proc = 9
	ProcSymlink     Proc = 10
	ProcMknod       Proc = 11
	ProcRemove      Proc = 12
	ProcRmdir       Proc = 13
	ProcRename      Proc = 14
	ProcLink        Proc = 15
	ProcReadDir     Proc = 16
	ProcReadDirPlus Proc = 17
	ProcFSStat      Proc = 18
	ProcFSInfo      Proc = 19
	ProcPathConf    Proc = 20
	ProcCommit      Proc = 21

	// NumProcs is the number of procedures.
	NumProcs = 22
)

var procNames = [NumProcs]string{
	"NULL", "GETATTR", "SETATTR", "LOOKUP", "ACCESS", "READLINK", "READ", "WRITE", "CREATE", "MKDIR", "SYMLINK",
	"MKNOD", "REMOVE", "RMDIR", "RENAME", "LINK", "READDIR", "READDIRPLUS", "FSSTAT", "FSINFO", "PATHCONF", "COMMIT",
}

func (p Proc) String() string {
	if p < NumProcs {
		return procNames[p]
	}
	return "procedure " + strconv.FormatUint(uint64(p), 10)
}

// Sizes of the protocol in bytes (RFC 1813 §2.4).
const (
	FHSize         = 64 // NFS3_FHSIZE, maximum size of a file handle
	CookieVerfSize = 8  // NFS3_COOKIEVERFSIZE
	CreateVerfSize = 8  // NFS3_CREATEVERFSIZE
	WriteVerfSize  = 8  // NFS3_WRITEVERFSIZE
)

// Maximum lengths in bytes. RFC 1813 §2.5 does not limit filename3 and nfspath3, so the values are
// NAME_MAX and PATH_MAX of Linux.
const (
	MaxName = 255
	MaxPath = 4096
)

// FileType is ftype3 (RFC 1813 §2.5).
type FileType uint32

// File types.
const (
	NF3REG  FileType = 1 // regular file
	NF3DIR  FileType = 2 // directory
	NF3BLK  FileType = 3 // block special
	NF3CHR  FileType = 4 // character special
	NF3LNK  FileType = 5 // symbolic link
	NF3SOCK FileType = 6 // socket
	NF3FIFO FileType = 7 // named pipe
)

var typeNames = [...]string{"", "regular file", "directory", "block device", "character device", "symbolic link",
	"socket", "named pipe"}

func (t FileType) String() string {
	if t >= NF3REG && t <= NF3FIFO {
		return typeNames[t]
	}
	return "file type " + strconv.FormatUint(uint64(t), 10)
}

// ModeMask selects the bits of mode3 (RFC 1813 §2.5): set-ID bits, sticky bit and permissions.
const ModeMask = 0o7777

// StableHow is stable_how (RFC 1813 §3.3.7).
type StableHow uint32

// Stability of a WRITE, as requested or as done.
const (
	Unstable StableHow = 0
	DataSync StableHow = 1
	FileSync StableHow = 2
)

func (s StableHow) String() string {
	switch s {
	case Unstable:
		return "UNSTABLE"
	case DataSync:
		return "DATA_SYNC"
	case FileSync:
		return "FILE_SYNC"
	}
	return "stable_how " + strconv.FormatUint(uint64(s), 10)
}

// CreateMode is createmode3 (RFC 1813 §3.3.8).
type CreateMode uint32

// What CREATE does if the file exists.
const (
	Unchecked CreateMode = 0 // keep the file and set its attributes
	Guarded   CreateMode = 1 // fail
	Exclusive CreateMode = 2 // fail unless the file was created with the same verifier
)

// TimeHow is time_how (RFC 1813 §2.5): how SETATTR changes a time.
type TimeHow uint32

// Values of time_how.
const (
	DontChange      TimeHow = 0
	SetToServerTime TimeHow = 1
	SetToClientTime TimeHow = 2
)

// Bits of ACCESS (RFC 1813 §3.3.4).
const (
	AccessRead    = 0x01
	AccessLookup  = 0x02
	AccessModify  = 0x04
	AccessExtend  = 0x08
	AccessDelete  = 0x10
	AccessExecute = 0x20
)

// Bits of FSInfoResult.Properties (RFC 1813 §3.3.19).
const (
	FSFLink        = 0x01 // hard links
	FSFSymlink     = 0x02 // symbolic links
	FSFHomogeneous = 0x08 // PATHCONF is the same for every file
	FSFCanSetTime  = 0x10 // SETATTR can set times
)
