package fusefs

import (
	"sync"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
)

// An inode is an object of the server's that the kernel knows, or that is open.
type inode struct {
	id uint64
	fh nfs3.FH

	// Guarded by inodeTable.mu.
	nlookup  uint64 // references that the kernel holds
	opens    int    // open files and directories
	removals int    // calls under way that may remove the object, begun while it was not open
	hidden   int    // names in this directory of open files that were removed
	hid      bool   // there was ever one
	leaving  int    // those of them whose file was closed, so that they are being removed

	mu        sync.Mutex
	attr      nfs3.Attr     // last seen
	known     bool          // attr was ever filled
	valid     bool          // attr is not known to be outdated
	size      uint64        // attr.Size, or beyond it for data written since
	ttl       time.Duration // for how long attributes are trusted: doubles while they stay the same
	checked   time.Time     // when ttl was last chosen
	attrClock uint64        // FS.clock when the node last changed hands; older answers are outdated
	seen      time.Time     // when attr was received
	seenClock uint64        // FS.clock when attr was asked for
	// attr came with the reply to a change of ours, and the kernel does not have it
	untold  bool
	base    stamp      // the file as the kernel's pages show it
	baseOK  bool       // base can be compared: nobody else is known to have changed the file
	pending int        // extents that the server does not have yet
	silly   *sillyName // the name that an open, removed file has now

	wb writeback
}

// A stamp tells one state of a file's content from another.
type stamp struct {
	size         uint64
	mtime, ctime nfs3.Time3
}

func stampOf(a *nfs3.Attr) stamp         { return stamp{a.Size, a.Mtime, a.Ctime} }
func stampOfWcc(a *nfs3.WccAttr) stamp   { return stamp{a.Size, a.Mtime, a.Ctime} }
func (ino *inode) isDir() bool           { return ino.attr.Type == nfs3.NF3DIR }
func (ino *inode) sillyName() *sillyName { ino.mu.Lock(); defer ino.mu.Unlock(); return ino.silly }

// An inodeTable finds inodes by node number and by file handle. A number is never used for a second
// handle, so that every node is of generation 0.
type inodeTable struct {
	mu     sync.Mutex
	byID   map[uint64]*inode
	byFH   map[nfs3.FH]*inode // those that a lookup may still find
	lastID uint64

	files   int // open files, and opens under way
	blind   []*blindRemoval
	removed chan struct{} // closed and forgotten when a removal ended; nil while nobody waits
}

func (t *inodeTable) init(root *inode) {
	t.byID = map[uint64]*inode{root.id: root}
	t.byFH = map[nfs3.FH]*inode{root.fh: root}
	t.lastID = root.id
}

// get is the inode of a number, or nil.
func (t *inodeTable) get(id uint64) *inode {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.byID[id]
}

// find is the inode of a handle, or nil.
func (t *inodeTable) find(fh nfs3.FH) *inode {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.byFH[fh]
}

// ref is the inode of a handle, made if need be, with one more reference of the kernel's. attr, if
// the server sent it, tells when a server uses a handle again for another object: such an object is
// another node.
func (t *inodeTable) ref(fh nfs3.FH, attr *nfs3.Attr) *inode {
	t.mu.Lock()
	defer t.mu.Unlock()
	ino := t.byFH[fh]
	if ino == nil || attr != nil && ino.id != fuse.FUSE_ROOT_ID && ino.otherObject(attr) {
		t.lastID++
		ino = &inode{id: t.lastID, fh: fh}
		t.byID[ino.id] = ino
		t.byFH[fh] = ino
	}
	ino.nlookup++
	return ino
}

func (ino *inode) otherObject(attr *nfs3.Attr) bool {
	ino.mu.Lock()
	defer ino.mu.Unlock()
	return ino.isOther(attr)
}

// isOther tells whether attributes that came for the node's handle are those of another object. An
// export's root may be numbered anew, by a file system that is mounted over it on the server, but
// stays a directory. Called with mu held.
func (ino *inode) isOther(attr *nfs3.Attr) bool {
	return ino.known && (ino.attr.Type != attr.Type || ino.attr.FileID != attr.FileID && ino.id != fuse.FUSE_ROOT_ID)
}

// forget takes n of the kernel's references back.
func (t *inodeTable) forget(id, n uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	ino := t.byID[id]
	if ino == nil {
		return
	}
	ino.nlookup -= min(n, ino.nlookup)
	t.dropIfUnused(ino)
}

// open and close count open directories and files.
func (t *inodeTable) open(ino *inode) {
	t.mu.Lock()
	defer t.mu.Unlock()
	ino.opens++
}

// close returns the number of times that the object is still open.
func (t *inodeTable) close(ino *inode) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	ino.opens--
	t.dropIfUnused(ino)
	return ino.opens
}

func (t *inodeTable) opensOf(ino *inode) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return ino.opens
}

// stale makes lookups miss the inode, because the server does not know its handle any more.
func (t *inodeTable) stale(ino *inode) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if ino.id != fuse.FUSE_ROOT_ID && t.byFH[ino.fh] == ino {
		delete(t.byFH, ino.fh)
	}
}

func (t *inodeTable) dropIfUnused(ino *inode) {
	if ino.nlookup > 0 || ino.opens > 0 || ino.id == fuse.FUSE_ROOT_ID {
		return
	}
	delete(t.byID, ino.id)
	if t.byFH[ino.fh] == ino {
		delete(t.byFH, ino.fh)
	}
}

// Len is the number of inodes in the table.
func (t *inodeTable) len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.byID)
}
