package nfs

import "strconv"

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
	Regular     FileType = 1 // regular file
	Directory   FileType = 2 // directory
	BlockDevice FileType = 3 // block special
	CharDevice  FileType = 4 // character special
	Symlink     FileType = 5 // symbolic link
	Socket      FileType = 6 // socket
	FIFO        FileType = 7 // named pipe
)

var typeNames = [...]string{"", "regular file", "directory", "block device", "character device", "symbolic link",
	"socket", "named pipe"}

func (t FileType) String() string {
	if t >= Regular && t <= FIFO {
		return typeNames[t]
	}
	return "file type " + strconv.FormatUint(uint64(t), 10)
}

// ModeMask selects the bits of mode3 (RFC 1813 §2.5): set-ID bits, sticky bit and permissions.
const ModeMask = 0o7777

// Stability is stable_how (RFC 1813 §3.3.7).
type Stability uint32

// Stability of a WRITE, as requested or as done.
const (
	Unstable Stability = 0
	DataSync Stability = 1
	FileSync Stability = 2
)

func (s Stability) String() string {
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
