package vfs

import (
	"sync/atomic"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
)

// Counters holds the counters of one FS. The counters only grow. Reading them is safe at any time.
type Counters struct {
	Ops    [kernel.NumOps]atomic.Uint64 // requests by kind
	Errors [kernel.NumOps]atomic.Uint64 // requests that failed, by kind

	ReadBytes    atomic.Uint64 // bytes returned to the kernel
	WrittenBytes atomic.Uint64 // bytes received from the kernel

	SentBytes      atomic.Uint64 // bytes accepted by the server's WRITE, including replays
	Commits        atomic.Uint64 // COMMIT calls
	Replays        atomic.Uint64 // replays after a write verifier changed
	ReplayedBytes  atomic.Uint64 // bytes sent again by replays
	WriteErrors    atomic.Uint64 // extents whose data was discarded after an error
	BufferWaits    atomic.Uint64 // requests that waited for a buffer or for room for written data
	InvalidReplies atomic.Uint64 // replies that break the protocol
	WriteThroughs  atomic.Uint64 // writes without write-behind because the server was busy with other files
	SillyRenames   atomic.Uint64 // open files that were renamed instead of removed
	JukeboxRetries atomic.Uint64 // retries after NFS3ERR_JUKEBOX
	// Interrupts counts requests that ended early: a fatal signal arrived, or the kernel ended the
	// connection.
	Interrupts      atomic.Uint64
	Stale           atomic.Uint64 // nodes dropped because the server no longer knew the handle
	CacheDrops      atomic.Uint64 // drops of the cached pages of a file: another client changed it, or a lock
	NameDrops       atomic.Uint64 // cached names that expired: another client changed the directory
	Panics          atomic.Uint64 // requests and goroutines that panicked
	Renewals        atomic.Uint64 // READDIRPLUS calls that renewed attributes during a walk
	ReadDirRestarts atomic.Uint64 // directory listings restarted after NFS3ERR_BAD_COOKIE
	// NodesWithoutRecord counts nodes that a restart does not keep, because the table was full.
	NodesWithoutRecord atomic.Uint64
	// GroupsUnknown and GroupsCut count credentials without supplementary groups because those
	// could not be read, and credentials with only the first 16 groups.
	GroupsUnknown, GroupsCut atomic.Uint64
}
