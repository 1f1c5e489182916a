package nfs3

import (
	"strconv"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
)

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
	FHSize         = nfs.HandleSize // NFS3_FHSIZE, maximum size of a file handle
	CookieVerfSize = 8              // NFS3_COOKIEVERFSIZE
	CreateVerfSize = 8              // NFS3_CREATEVERFSIZE
	WriteVerfSize  = 8              // NFS3_WRITEVERFSIZE
)

// Bits of FSInfoResult.Properties (RFC 1813 §3.3.19).
const (
	FSFLink        = 0x01 // hard links
	FSFSymlink     = 0x02 // symbolic links
	FSFHomogeneous = 0x08 // PATHCONF is the same for every file
	FSFCanSetTime  = 0x10 // SETATTR can set times
)
