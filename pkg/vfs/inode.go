package vfs

import (
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/attr"
)

// An inode is an object of the server that the kernel knows or that is open.
type inode struct {
	id uint64
	fh nfs.Handle

	// The fields up to hiddenRemovals are guarded by inodeTable.mu.
	hadHidden bool // the directory had a hidden name at some time
	kept      keptSlot
	nlookup   uint64 // lookup references of the kernel
	opens     int32  // open files and directories
	// calls in flight that may remove the object and began while it was not open
	removals       int32
	hidden         int32 // hidden names in this directory, each of an open file that was removed
	hiddenRemovals int32 // hidden names whose files were closed and that are being removed

	// A mount can have millions of nodes, and most are only looked up. What few of them need is
	// behind a pointer, and small fields are side by side.
	mu    sync.Mutex
	known bool // attr was set at least once
	valid bool // attr is not known to be outdated
	// sizeUnknown is true after the server rejected data, until the next attributes. size may then
	// be too large.
	sizeUnknown bool
	// unsent is true when attr came with the reply to a change by this mount, or with a renewal
	// (walk.go), and the kernel does not have it yet.
	unsent bool
	// pageStamp is known, and no other client is known to have changed the file
	pageStampValid bool
	buffered       bool     // was opened for I/O through the kernel's pages
	pageDrops      int32    // notifications in progress that make the kernel drop the pages
	pending        int32    // extents that the server does not have yet
	attr           nfs.Attr // latest attributes
	size           uint64   // attr.Size, or the end of data written since, whichever is larger
	// how long attr may be cached; doubles while the attributes stay the same
	ttl      time.Duration
	ttlSetAt attr.Instant // time of the last change of ttl
	// FS.clock of the last change or update; replies to earlier calls are outdated
	changeClock  uint64
	receivedAt   attr.Instant     // time when attr was received
	requestClock uint64           // FS.clock when the call that returned attr was sent
	sent         nfs.Stamp        // of the attributes in the last reply to the kernel
	pageStamp    nfs.Stamp        // state of the file in the kernel's cached pages
	silly        *sillyName       // current name of a removed file that is still open
	lookups      lookupState      // of a directory
	openers      map[*byte]opener // of a file, with Options.NoCTO; as lookupState.searchers
	acls         *cachedACLs      // nil: unknown
	// FS.clock of the last change by this mount that may change the ACLs; replies to earlier
	// GETACLs are outdated
	aclClock uint64
	names    *nameCache // of a directory; nil: none
	found    foundAs    // of a directory
	place    place      // in the last listing
	walk     *dirWalk   // of a directory; nil before a listing

	data atomic.Pointer[writeback] // nil until it is needed; see wb

	sameHash *inode // guarded by inodeTable.mu; see handleMap
}

// wb returns the written data of a file. It makes an empty one when there is none.
func (ino *inode) wb() *writeback {
	if w := ino.data.Load(); w != nil {
		return w
	}
	ino.data.CompareAndSwap(nil, new(writeback))
	return ino.data.Load()
}

func (ino *inode) isDir() bool           { return ino.attr.Type == nfs.Directory }
func (ino *inode) sillyName() *sillyName { ino.mu.Lock(); defer ino.mu.Unlock(); return ino.silly }

// An inodeTable finds inodes by node number and by file handle. A number is never reused, so that
// every node has generation 0.
type inodeTable struct {
	mu     sync.Mutex
	byID   map[uint64]*inode
	byFH   handleMap // inodes that a lookup can find
	lastID uint64
	state  *State // nil if the mount is not kept
	// noRecord is called with mu held for each new node for which state has no room
	noRecord func()
	// shrink is called with mu held when the table has become far emptier than peak
	shrink    func()
	peak      int  // largest number of nodes at a removal since the maps were made
	shrinking bool // shrink was called, and its work has not ended

	names atomic.Int64 // names in all nameCaches, and those that wait for a notification

	files      int // open files, and opens in flight
	unresolved []*unresolvedRemoval
	// closed and set to nil when a removal ends; nil while no goroutine waits
	removalDone chan struct{}
}

func (t *inodeTable) init(root *inode, state *State) {
	t.state = state
	t.shrink = func() {}
	t.byID = map[uint64]*inode{root.id: root}
	t.byFH = handleMap{}
	t.byFH.put(root)
	t.lastID = max(root.id, state.firstID())
}

// get returns the inode with the number id, or nil.
func (t *inodeTable) get(id uint64) *inode {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.byID[id]
}

// find returns the inode with the handle fh, or nil.
func (t *inodeTable) find(fh nfs.Handle) *inode {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.byFH.get(fh)
}

// ref returns the inode with the handle fh and adds one lookup reference. ref creates the inode if
// necessary. attr holds the server's attributes, or is nil. When attr shows that the server reused
// the handle for another object, ref creates a new inode.
func (t *inodeTable) ref(fh nfs.Handle, attr *nfs.Attr) *inode {
	t.mu.Lock()
	defer t.mu.Unlock()
	ino := t.byFH.get(fh)
	if ino == nil || attr != nil && ino.id != fuse.FUSE_ROOT_ID && ino.isOtherObject(attr) {
		t.lastID++
		ino = &inode{id: t.lastID, fh: fh, nlookup: 1}
		t.byID[ino.id] = ino
		t.byFH.put(ino)
		if t.state.addNode(ino, attr) != nil {
			t.noRecord()
		}
		return ino
	}
	ino.nlookup++
	t.state.setLookups(ino)
	return ino
}

// keep makes a record of a node that has none because there was no room. The records of open files
// refer to it. The error is ENFILE.
func (t *inodeTable) keep(ino *inode) error {
	if t.state == nil || ino.id == fuse.FUSE_ROOT_ID {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if ino.kept != 0 {
		return nil
	}
	ino.mu.Lock()
	attr := ino.attr
	ino.mu.Unlock()
	if t.state.addNode(ino, &attr) != nil {
		return syscall.ENFILE
	}
	return nil
}

func (ino *inode) isOtherObject(attr *nfs.Attr) bool {
	ino.mu.Lock()
	defer ino.mu.Unlock()
	return ino.isOtherObjectLocked(attr)
}

// isOtherObjectLocked reports whether attributes for the node's handle describe another object. A
// mount on the server can change the file ID of an export's root, but the root stays a directory.
// The caller holds mu.
func (ino *inode) isOtherObjectLocked(attr *nfs.Attr) bool {
	return ino.known && (ino.attr.Type != attr.Type || ino.attr.FileID != attr.FileID && ino.id != fuse.FUSE_ROOT_ID)
}

// forget releases n lookup references of the kernel. It returns the inode if these were the last
// ones, and the inode is still open.
func (t *inodeTable) forget(id, n uint64) (open *inode) {
	t.mu.Lock()
	defer t.mu.Unlock()
	ino := t.byID[id]
	if ino == nil {
		return nil
	}
	ino.nlookup -= min(n, ino.nlookup)
	t.state.setLookups(ino)
	t.dropIfUnused(ino)
	if ino.nlookup == 0 && ino.opens > 0 {
		open = ino
	}
	return open
}

// open counts an open directory or file.
func (t *inodeTable) open(ino *inode) {
	t.mu.Lock()
	defer t.mu.Unlock()
	ino.opens++
}

// close ends one open and returns the number of remaining opens.
func (t *inodeTable) close(ino *inode) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	ino.opens--
	t.dropIfUnused(ino)
	return int(ino.opens)
}

func (t *inodeTable) opensOf(ino *inode) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return int(ino.opens)
}

// stale removes the inode from lookups because the server no longer knows its handle.
func (t *inodeTable) stale(ino *inode) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if ino.id != fuse.FUSE_ROOT_ID {
		t.byFH.remove(ino)
	}
}

func (t *inodeTable) dropIfUnused(ino *inode) {
	if ino.nlookup > 0 || ino.opens > 0 || ino.id == fuse.FUSE_ROOT_ID {
		return
	}
	t.peak = max(t.peak, len(t.byID))
	delete(t.byID, ino.id)
	t.state.freeNode(ino)
	ino.mu.Lock()
	t.names.Add(-int64(ino.names.len()))
	ino.names = nil
	ino.mu.Unlock()
	t.byFH.remove(ino)
	t.shrinkIfEmpty()
}

// len returns the number of inodes in the table.
func (t *inodeTable) len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.byID)
}

// nodeWithoutRecord counts a node that the next process cannot restore. It warns once.
func (fs *FS) nodeWithoutRecord() {
	if fs.Counters.NodesWithoutRecord.Add(1) == 1 {
		fs.Warn("the kernel uses more files of the mount than a restart can keep; the others become stale at a "+
			"restart", "limit", fs.state.nodes.MaxSlots())
	}
}
