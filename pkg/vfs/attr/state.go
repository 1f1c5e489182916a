package attr

import (
	"sync"
	"syscall"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
)

// A Config says how long attributes are cached (nfs(5), acregmin to acdirmax).
type Config struct {
	RegMin, RegMax, DirMin, DirMax time.Duration
	// Off disables caching (nfs(5), noac).
	Off bool
}

// A Cache is what the States of one mount share. It is safe for concurrent use. Its Config must be
// set before.
type Cache struct {
	Clock
	Config
}

// A State is what this client knows of the attributes of one object, and of the copies that the
// kernel has of them and of the pages of a file. It is safe for concurrent use. The zero value knows
// nothing.
//
// Most fields are small and side by side, because a mount can have millions of nodes.
type State struct {
	// Root is set for the root of an export, before the State is used.
	Root bool

	mu    sync.Mutex
	known bool // attr was set at least once
	valid bool // attr is not known to be outdated
	// sizeUnknown is true after the server rejected data, until the next attributes. size may then
	// be too large.
	sizeUnknown bool
	// unsent is true when attr came with the reply to a change by this mount, or with a renewal, and
	// the kernel does not have it yet.
	unsent bool
	hidden bool // the object has one more name, which Nlink does not count
	// pagesKnown is true when pages is known, and no other client is known to have changed the file.
	pagesKnown bool
	buffered   bool     // was opened for I/O through the kernel's pages
	drops      int32    // notifications in progress that make the kernel drop the pages
	pending    int32    // written extents that the server does not have yet
	attr       nfs.Attr // latest attributes
	size       uint64   // attr.Size, or the end of data written since, whichever is larger
	// ttl is how long attr may be cached. It doubles while the attributes stay the same.
	ttl      time.Duration
	ttlSetAt Instant // time of the last change of ttl
	// change is the clock at the last change or update. Replies to earlier calls are outdated.
	change   uint64
	received Instant // time when attr was received
	asked    uint64  // clock when the call that returned attr was sent
	sent     uint64  // sum of the attributes in the last reply to the kernel
	// pages is the state of the file in the kernel's pages; nil before the first open.
	pages *nfs.Stamp
	// epochStart is the clock when another client may have changed a directory, or when the rights of
	// an object changed. What was known of its names and rights before is outdated.
	epochStart uint64
}

// A View is what a State knew at one moment.
type View struct {
	nfs.Attr
	Known bool // Attr was set at least once
	Valid bool // Attr is not known to be outdated
	Fresh bool // Attr may be used without asking the server
	// Pending means that the server does not have all written data.
	Pending bool
	// Unseen means that a call of this mount may have changed the ctime since, although its reply had
	// no attributes of this object.
	Unseen bool
	// Written is the size of the file with the data that was written since. It may be too large if
	// SizeKnown is false.
	Written   uint64
	SizeKnown bool
	Buffered  bool          // the file was opened for I/O through the kernel's pages
	Age       time.Duration // since the attributes were received
	TTL       time.Duration // how long attributes may be cached that were just received
	// EpochStart is the clock when another client may have changed a directory, or when the rights of
	// the object changed. What replies to earlier calls say of names and rights is outdated.
	EpochStart uint64
}

// View returns what s knows.
func (c *Cache) View(s *State) View {
	s.mu.Lock()
	defer s.mu.Unlock()
	return View{Attr: s.attr, Known: s.known, Valid: s.valid, Fresh: c.fresh(s), Pending: s.pending > 0,
		Unseen: s.asked < c.lastUnseen(s), Written: s.size, SizeKnown: !s.sizeUnknown, Buffered: s.buffered,
		Age: Now().Sub(s.received), TTL: s.ttl, EpochStart: s.epochStart}
}

// fresh reports whether the attributes may be used without asking the server. The caller holds mu.
func (c *Cache) fresh(s *State) bool { return s.valid && !c.Off && Now().Sub(s.received) < s.ttl }

// TTL returns how long attributes that were just stored may be cached; 0 if they may not.
func (c *Cache) TTL(s *State) time.Duration {
	if c.Off {
		return 0
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.valid {
		return 0
	}
	return s.ttl
}

// Attr returns the latest attributes. known is false if there are none.
func (s *State) Attr() (a nfs.Attr, known bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.attr, s.known
}

// EpochStart is that of View.
func (s *State) EpochStart() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.epochStart
}

// IsDir reports whether the object is known to be a directory.
func (s *State) IsDir() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.isDir()
}

func (s *State) isDir() bool { return s.attr.Type == nfs.Directory }

// MayHaveSetID reports whether the file had a set-user-ID or set-group-ID bit when its attributes
// were last known.
func (s *State) MayHaveSetID() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.attr.Mode&(syscall.S_ISUID|syscall.S_ISGID) != 0
}

// Restore sets what an earlier process knew. The state of the kernel's pages equals no state of a
// file, so the pages are dropped when the file is next used.
func (s *State) Restore(typ nfs.FileType, fileID uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.attr.Type, s.attr.FileID, s.known = typ, fileID, typ != 0
	s.setPages(unknownPages)
}

// IsOther reports whether attributes describe another object than those that s knows. A mount on the
// server can change the file ID of an export's root, but the root stays a directory.
func (s *State) IsOther(a *nfs.Attr) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.isOther(a)
}

func (s *State) isOther(a *nfs.Attr) bool {
	return s.known && (s.attr.Type != a.Type || s.attr.FileID != a.FileID && !s.Root)
}

// SetHidden sets whether the object has one more name, which Nlink does not count.
func (s *State) SetHidden(hidden bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hidden = hidden
}
