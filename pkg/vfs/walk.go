package vfs

import (
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
)

// A program that walks a large directory, for example find(1), du(1) or rsync(1), uses the
// attributes of each file some time after it has listed the directory. They have then expired. A
// GETATTR or LOOKUP for each file costs one round trip to the server, while one READDIRPLUS returns
// the attributes of some hundred files.
//
// The listing of a directory therefore records where the server continues: the cookie before each
// walkChunk-th entry, and the index of the entry in each node. When requests need attributes of
// several files of one directory soon after each other, a READDIRPLUS from the recorded cookie
// renews the attributes of the needed file and of those that follow.
//
// A renewal does not weaken the consistency: it makes the same changes to a node as a GETATTR that
// is sent at the same time. Attributes expire as before, a change by this mount after the call was
// sent wins (updateAttr), and an open still asks the server. A wrong cookie or index only makes the
// renewal useless, because replies are matched by file handle.
//
// Programs use the files in the order of the listing, or sort them first. So the walk is detected
// by credit: a request that needs the server earns walkMiss, or walkNext when its file follows that
// of the request before. A request that is answered by a renewal earns walkHit. A renewal needs
// walkStart and costs walkCost. Random accesses that a renewal does not help therefore cause at
// most one READDIRPLUS for walkCost of them.
const (
	walkMiss  = 1
	walkHit   = 1
	walkNext  = 8
	walkStart = 24
	walkCost  = 8
	walkMax   = 64 // credit that a directory can have

	// walkGap is how far the next file may be in the listing. Files between are still valid, or the
	// program does not need them.
	walkGap = 64
	// walkPause is the time without request after which the credit is lost.
	walkPause = time.Second
	// walkChunk is the number of entries for each recorded cookie. A reply of DefaultDirCount has
	// more entries than two chunks.
	walkChunk = 128
	// maxUseless is the number of consecutive useless renewals after which the cookies are dropped.
	maxUseless = 2
	// maxWalkCookies bounds the recorded cookies of a directory, 8 bytes each.
	maxWalkCookies = 1 << 16
)

// A place is where a listing found a node.
type place struct {
	dir   uint64 // node number of the directory; 0 if unknown
	index uint32 // of the entry
}

// A dirWalk is what a directory records for renewals. inode.mu guards it.
type dirWalk struct {
	cookies []uint64 // before the entries with the indexes 0, walkChunk, 2*walkChunk, ...
	verf    nfs.Verifier
	credit  int
	last    uint32    // index in the last request
	at      time.Time // time of the last request
	busy    bool      // a renewal is in progress
	useless int       // consecutive renewals that did not return the needed file
	acls    int       // requests for ACLs of entries, without a pause of walkPause; see aclahead.go
	aclAt   time.Time // time of the last of them
	aclCred []byte    // its credential
}

// renews reports whether attributes are cached, so that a renewal is useful.
func (fs *FS) renews() bool { return !fs.opts.NoAC && fs.opts.AcRegMin > 0 && !fs.noPlus.Load() }

// setPlace records where the listing d found a node.
func (ino *inode) setPlace(d *dirHandle) {
	if d.index < 0 || d.index/walkChunk >= maxWalkCookies {
		return
	}
	ino.mu.Lock()
	defer ino.mu.Unlock()
	ino.place = place{d.ino.id, uint32(d.index)}
}

// keepCookie records the reader's position if it is at the start of a chunk.
func (d *dirHandle) keepCookie() {
	dir, chunk := d.ino, d.index/walkChunk
	if d.index < 0 || d.index%walkChunk != 0 || chunk >= maxWalkCookies {
		return
	}
	dir.mu.Lock()
	defer dir.mu.Unlock()
	if dir.walk == nil {
		dir.walk = new(dirWalk)
	}
	w := dir.walk
	w.verf = d.verf
	switch {
	case chunk < len(w.cookies):
		w.cookies[chunk] = d.offset
	case chunk == len(w.cookies):
		w.cookies = append(w.cookies, d.offset)
	}
}

// earn adds credit for a request that needs the file at index, and reports whether a renewal may
// begin.
func (w *dirWalk) earn(index uint32, now time.Time) bool {
	if now.Sub(w.at) > walkPause {
		w.credit = 0
	}
	credit := walkMiss
	if w.credit > 0 && index > w.last && index-w.last <= walkGap {
		credit = walkNext
	}
	w.credit = min(w.credit+credit, walkMax)
	w.last, w.at = index, now
	return w.credit >= walkStart
}

// renewed records that attributes of a renewal have answered a request.
func (fs *FS) renewed(ino *inode) {
	ino.mu.Lock()
	at := ino.place
	ino.mu.Unlock()
	dir := fs.inodes.get(at.dir)
	if dir == nil {
		return
	}
	dir.mu.Lock()
	defer dir.mu.Unlock()
	if w := dir.walk; w != nil {
		w.credit = min(w.credit+walkHit, walkMax)
		w.last, w.at = at.index, time.Now()
	}
}

// renew is called for a request that needs the attributes of ino from the server. During a walk it
// renews these attributes and those of the entries that follow. ok is false if it did not renew
// those of ino. dir is the directory of the request; nil stands for the last that listed ino.
func (fs *FS) renew(r *request, dir, ino *inode) (ok bool) {
	if !fs.renews() {
		return false
	}
	ino.mu.Lock()
	at := ino.place
	ino.mu.Unlock()
	if dir == nil && at.dir != 0 {
		dir = fs.inodes.get(at.dir)
	}
	if dir == nil || dir.id != at.dir {
		return false
	}
	cookie, verf, began := dir.beginRenewal(at.index)
	if !began {
		return false
	}
	defer func() { dir.endRenewal(ok) }()
	d := &dirHandle{ino: dir, cred: r.cred, verf: verf, index: int(at.index / walkChunk * walkChunk)}
	if err := fs.dirRPC(r, d, cookie, true); err != nil {
		dir.mu.Lock()
		dir.walk.cookies = nil // until the next listing
		dir.mu.Unlock()
		return false
	}
	fs.Counters.Renewals.Add(1)
	for i := range d.entries {
		if e := &d.entries[i]; e.hasFH && e.attr.Present && fs.renewEntry(d, e) == ino {
			ok = true
		}
		d.index++
	}
	return ok
}

// beginRenewal returns the position from which a READDIRPLUS returns the entry with the index. ok
// is false if there is no walk, or if another request renews the directory.
func (ino *inode) beginRenewal(index uint32) (cookie uint64, verf nfs.Verifier, ok bool) {
	ino.mu.Lock()
	defer ino.mu.Unlock()
	w, chunk := ino.walk, int(index/walkChunk)
	if w == nil || !w.earn(index, time.Now()) || w.busy || chunk >= len(w.cookies) {
		return 0, verf, false
	}
	w.credit -= walkCost
	w.busy = true
	if cookie = w.cookies[chunk]; cookie != 0 {
		verf = w.verf // RFC 1813 §3.3.17: the verifier is 0 at the start
	}
	return cookie, verf, true
}

// endRenewal ends a renewal. ok is false if it did not return the needed file: the server returns
// fewer entries than a chunk, or has numbered them again.
func (ino *inode) endRenewal(ok bool) {
	ino.mu.Lock()
	defer ino.mu.Unlock()
	w := ino.walk
	w.busy = false
	if ok {
		w.useless = 0
		return
	}
	w.credit = 0
	if w.useless++; w.useless >= maxUseless {
		w.useless, w.cookies = 0, nil // until the next listing
	}
}

// renewEntry stores the attributes of an entry, and what its name stands for. It returns the node
// of the entry if the kernel gets the attributes with its next request.
func (fs *FS) renewEntry(d *dirHandle, e *dirEntry) *inode {
	if e.name == "." || e.name == ".." {
		return nil
	}
	ino := fs.inodes.find(e.fh)
	if ino == nil || !fs.updateAttr(ino, &e.attr.Attr, d.start) {
		return nil
	}
	ino.mu.Lock()
	ino.unsent = ino.valid
	ino.mu.Unlock()
	ino.setPlace(d)
	fs.dropStalePages(ino)
	fs.keepLookup(d.ino, e.name, ino.id, d.start)
	return ino
}
