package fusefs

import "sync/atomic"

// Op is a kind of request from the kernel.
type Op uint8

// Kinds of requests.
const (
	OpLookup Op = iota
	OpForget
	OpGetAttr
	OpSetAttr
	OpReadlink
	OpMknod
	OpMkdir
	OpUnlink
	OpRmdir
	OpSymlink
	OpRename
	OpLink
	OpOpen
	OpCreate
	OpRead
	OpWrite
	OpFlush
	OpRelease
	OpFsync
	OpOpenDir
	OpReadDir
	OpReadDirPlus
	OpFsyncDir
	OpStatFs
	OpAccess

	// NumOps is the number of kinds.
	NumOps
)

var opNames = [NumOps]string{"lookup", "forget", "getattr", "setattr", "readlink", "mknod", "mkdir", "unlink",
	"rmdir", "symlink",
	"rename", "link", "open", "create", "read", "write", "flush", "release", "fsync", "opendir", "readdir", "readdirplus",
	"fsyncdir", "statfs", "access"}

func (o Op) String() string {
	if o < NumOps {
		return opNames[o]
	}
	return "unknown"
}

// Counters are what an FS counts since it was made. They only grow and may be read at any time.
type Counters struct {
	Ops    [NumOps]atomic.Uint64 // requests by kind
	Errors [NumOps]atomic.Uint64 // those of them answered with an error

	ReadBytes    atomic.Uint64 // octets given to the kernel
	WrittenBytes atomic.Uint64 // octets taken from the kernel

	SentBytes      atomic.Uint64 // octets that the server took by WRITE, replays included
	Commits        atomic.Uint64 // COMMIT calls
	Replays        atomic.Uint64 // times a write verifier changed and data was sent again
	ReplayedBytes  atomic.Uint64 // octets sent again
	WriteErrors    atomic.Uint64 // extents whose data was given up after an error
	BufferWaits    atomic.Uint64 // times the buffer pool was found empty
	SillyRenames   atomic.Uint64 // open files that were renamed instead of removed
	JukeboxRetries atomic.Uint64 // calls made again after NFS3ERR_JUKEBOX
	// requests given up for a deadly signal, or because the kernel ended the connection
	Interrupts      atomic.Uint64
	Stale           atomic.Uint64 // nodes dropped because the server no longer knew the handle
	CacheDrops      atomic.Uint64 // opens that found the file changed by someone else
	ReadDirRestarts atomic.Uint64 // directories read again from the start after NFS3ERR_BAD_COOKIE
}
