package vfs

import (
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/acl"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/attr"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/data"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/name"
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

	attr attr.State
	dir  name.Dir

	// A mount can have millions of nodes, and most are only looked up. What few of them need is
	// behind a pointer.
	rights atomic.Pointer[attr.Rights] // see grants
	acls   atomic.Pointer[acl.State]   // see aclsOf
	silly  atomic.Pointer[sillyName]   // current name of a removed file that is still open
	data   atomic.Pointer[data.File]   // nil until it is needed; see FS.written

	sameHash *inode // guarded by inodeTable.mu; see handleMap
}

// grants returns the rights that the server gave to users of a node.
func (ino *inode) grants() *attr.Rights {
	if r := ino.rights.Load(); r != nil {
		return r
	}
	ino.rights.CompareAndSwap(nil, new(attr.Rights))
	return ino.rights.Load()
}

// An inodeTable finds inodes by node number and by file handle. A number is never reused, so that
// every node has generation 0.
type inodeTable struct {
	mu     sync.Mutex
	byID   map[uint64]*inode
	byFH   handleMap // inodes that a lookup can find
	lastID uint64
	state  *State // nil if the mount is not kept
	// forgotten is called with mu held for each node that leaves the table
	forgotten func(*inode)
	// noRecord is called with mu held for each new node for which state has no room
	noRecord func()
	// shrink is called with mu held when the table has become far emptier than peak
	shrink    func()
	peak      int  // largest number of nodes at a removal since the maps were made
	shrinking bool // shrink was called, and its work has not ended

	files      int // open files, and opens in flight
	unresolved []*unresolvedRemoval
	// closed and set to nil when a removal ends; nil while no goroutine waits
	removalDone chan struct{}
}

func (t *inodeTable) init(root *inode, state *State) {
	t.state = state
	t.shrink, t.forgotten = func() {}, func(*inode) {}
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
	if ino == nil || attr != nil && ino.id != fuse.FUSE_ROOT_ID && ino.attr.IsOther(attr) {
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
	a, _ := ino.attr.Attr()
	if t.state.addNode(ino, &a) != nil {
		return syscall.ENFILE
	}
	return nil
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
	t.forgotten(ino)
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
