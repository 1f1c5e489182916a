package vfs

import (
	"sync"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/attr"
)

// The kernel's FUSE client has one cache of names for all users. It checks by mode bits alone who
// may search a directory. The server may refuse a user that the mode bits let in: an access control
// list denies the user, or the server maps root to another user. Therefore the kernel keeps no name
// (Options.SharedNames makes it). It asks for each name of a path on behalf of the caller, and this
// package answers from the name cache under these conditions (soleuser.go describes an exception):
//
//   - The server let the caller search the directory: it answered an ACCESS or a LOOKUP with the
//     same credential not longer ago than the attributes of the directory may be cached.
//   - Since then the directory has not changed, as far as this client knows, except by this client.
//   - The name was found not longer ago than the attributes of the directory may be cached, and the
//     attributes of the directory are not older than maxNameAge.
//   - A name that does not exist was looked up after the last lock that the server granted to this
//     mount.
//
// Otherwise the server gets a LOOKUP with the credential of the caller. So an answer of the server
// for one user is never an answer for another user. Linux's NFS client gives the same promise.

const (
	// maxNameAge bounds the age of the attributes that show that a directory did not change. It is
	// short, because the kernel cannot ask for a fresh answer: a program that waits for another
	// client to remove a lock file would otherwise wait until its name expires.
	maxNameAge = 3 * time.Second
	// maxNames bounds the cached names of a mount, about 150 bytes each. maxSearchers bounds the
	// credentials that one directory remembers.
	maxNames     = 1 << 16
	maxSearchers = 64
)

// A nameKey is a name in the directory with the node number dir.
type nameKey struct {
	dir  uint64
	name string
}

// A nameEntry is what a name stands for.
type nameEntry struct {
	node    uint64 // 0: the name does not exist
	epoch   uint64 // of the directory
	start   uint64 // FS.clock at the LOOKUP
	expires attr.Instant
}

// A lookupCache holds what names stand for. It does not keep nodes from being forgotten.
type lookupCache struct {
	mu    sync.Mutex
	names map[nameKey]nameEntry
}

func (c *lookupCache) get(key nameKey) (nameEntry, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, ok := c.names[key]
	return e, ok
}

// put stores a name. A full cache loses any other name.
func (c *lookupCache) put(key nameKey, e nameEntry) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.names == nil {
		c.names = make(map[nameKey]nameEntry)
	}
	if len(c.names) >= maxNames {
		for k := range c.names {
			delete(c.names, k)
			break
		}
	}
	c.names[key] = e
}

// drop removes a name. ok is true when the cache had the name, for the node with the number node.
func (c *lookupCache) drop(key nameKey) (node uint64, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, ok := c.names[key]
	delete(c.names, key)
	return e.node, ok
}

// clear removes all names.
func (c *lookupCache) clear() {
	c.mu.Lock()
	defer c.mu.Unlock()
	clear(c.names)
}

// A lookupState is what makes cached names of a directory valid. inode.mu guards it.
type lookupState struct {
	// epoch changes when another client may have changed the directory, or when its rights changed.
	// epochClock is FS.clock at that moment.
	epoch, epochClock uint64
	namesClock        uint64 // FS.clock after the last change of a name by this mount
	// searchers holds until when a credential may search the directory, by the first byte of its
	// encoding, which credentials shares between the calls of one identity.
	searchers map[*byte]attr.Instant
}

// newEpoch makes all cached names and rights of an inode invalid. Replies to calls that were sent
// before do not enter the caches, because the server may have executed these calls before the
// change. The caller holds ino.mu.
func (ino *inode) newEpoch(fs *FS) {
	ino.lookups.epoch++
	ino.lookups.epochClock = fs.clock.Tick()
	clear(ino.lookups.searchers)
	clear(ino.openers)
}

// overtaken reports whether a new epoch has begun since a call was sent at start.
func (ino *inode) overtaken(start uint64) bool {
	ino.mu.Lock()
	defer ino.mu.Unlock()
	return start < ino.lookups.epochClock
}

// cachesLookups reports whether this package caches names.
func (fs *FS) cachesLookups() bool {
	return !fs.opts.SharedNames && fs.opts.LookupCache != LookupCacheNone && !fs.opts.NoAC
}

// allowSearch records that the server let cred search the directory, in the reply to a call sent at
// start.
func (fs *FS) allowSearch(dir *inode, cred []byte, start uint64) {
	if !fs.cachesLookups() {
		return
	}
	until := attr.Now().Add(fs.attrTimeout(dir))
	dir.mu.Lock()
	defer dir.mu.Unlock()
	d := &dir.lookups
	if start < d.epochClock {
		return
	}
	if d.searchers == nil {
		d.searchers = make(map[*byte]attr.Instant)
	}
	if _, known := d.searchers[&cred[0]]; !known && len(d.searchers) >= maxSearchers {
		clear(d.searchers)
	}
	d.searchers[&cred[0]] = until
}

// denySearch forgets that cred may search the directory.
func (fs *FS) denySearch(dir *inode, cred []byte) {
	dir.mu.Lock()
	defer dir.mu.Unlock()
	delete(dir.lookups.searchers, &cred[0])
}

// keepLookup stores what a name stands for, from the reply to a call sent at start. Node 0 stores
// that the name does not exist.
func (fs *FS) keepLookup(dir *inode, name string, node, start uint64) {
	if !fs.cachesLookups() || node == 0 && fs.opts.LookupCache != LookupCacheAll {
		return
	}
	expires := attr.Now().Add(fs.entryTimeout(dir))
	dir.mu.Lock()
	defer dir.mu.Unlock() // a removal that drops the name comes after the put, or is seen here
	if start >= max(dir.lookups.epochClock, dir.lookups.namesClock) {
		fs.lookups.put(nameKey{dir.id, name}, nameEntry{node, dir.lookups.epoch, start, expires})
	}
}

// nameChanged records that this mount may have changed a name, and returns the node that the name
// stood for before. known is false when that node is unknown; node is 0 when there was none.
// Replies to calls sent before do not enter the cache.
func (fs *FS) nameChanged(dir *inode, name string) (node uint64, known bool) {
	dir.mu.Lock()
	dir.lookups.namesClock = fs.clock.Tick()
	dir.mu.Unlock()
	return fs.lookups.drop(nameKey{dir.id, name})
}

// nameRemoved is nameChanged for a name that was removed. The reply has no attributes of the
// object, which may have other names.
func (fs *FS) nameRemoved(dir *inode, name string) {
	node, known := fs.nameChanged(dir, name)
	if !known {
		fs.clock.Mark(&fs.clock.BlindRemoval)
	} else if ino := fs.inodes.get(node); ino != nil {
		fs.invalidateAttr(ino)
	}
}

// nameMoved is nameChanged for both names of a rename.
func (fs *FS) nameMoved(from *inode, oldName string, to *inode, newName string) {
	fs.nameRemoved(to, newName)
	node, known := fs.nameChanged(from, oldName)
	if !known {
		fs.clock.Mark(&fs.clock.BlindRename)
	} else if ino := fs.inodes.get(node); ino != nil {
		fs.invalidateAttr(ino)
	}
}

// lookupCached answers a lookup from the name cache. ok is false when the cache has no answer for
// this caller. The returned node has one more lookup reference; it is nil for a missing name.
func (fs *FS) lookupCached(r *request, dir *inode, name string, out *fuse.EntryOut) (ino *inode, ok bool, err error) {
	if !fs.cachesLookups() || fs.reopens.expected(r.pid) {
		return nil, false, nil
	}
	e, ok := fs.lookups.get(nameKey{dir.id, name})
	if !ok || e.node == 0 && e.start < fs.clock.Lock.At() || !fs.nameValid(dir, &e, r.cred, attr.Now()) {
		return nil, false, nil
	}
	if e.node == 0 {
		ino, err = fs.missing(dir, out)
		return ino, true, err
	}
	if ino = fs.inodes.refCurrent(e.node); ino == nil {
		return nil, false, nil
	}
	a, left, ok := fs.cachedAttr(ino)
	if !ok && fs.renew(r, dir, ino) {
		a, left, ok = fs.cachedAttr(ino)
	}
	if ok {
		fs.fillEntry(dir, ino, &a, true, out)
		out.SetAttrTimeout(left)
		return ino, true, nil
	}
	var cacheable bool
	if err = fs.push(r, ino); err == nil {
		cacheable, err = fs.fetch(r, r.cred, ino, &a)
	}
	switch {
	case errno(err) == syscall.ESTALE:
		fs.inodes.forget(ino.id, 1)
		return nil, false, nil // the name stands for another object now
	case err != nil:
		fs.inodes.forget(ino.id, 1)
		return nil, true, err
	}
	fs.fillEntry(dir, ino, &a, cacheable, out)
	return ino, true, nil
}

// nameValid reports whether the entry of a name in dir is valid for a caller.
func (fs *FS) nameValid(dir *inode, e *nameEntry, cred []byte, at attr.Instant) bool {
	dir.mu.Lock()
	defer dir.mu.Unlock()
	until, ok := dir.lookups.searchers[&cred[0]]
	return ok && at < until && at < e.expires && e.epoch == dir.lookups.epoch && dir.valid &&
		at.Sub(dir.receivedAt) < maxNameAge
}

// cachedAttr returns attributes that the kernel may cache for the time left.
func (fs *FS) cachedAttr(ino *inode) (a nfs.Attr, left time.Duration, ok bool) {
	a, left, unsent, ok := fs.takeCached(ino)
	if unsent {
		fs.renewed(ino)
	}
	return a, left, ok
}

// takeCached is cachedAttr. unsent is true when the kernel did not have the attributes yet.
func (fs *FS) takeCached(ino *inode) (a nfs.Attr, left time.Duration, unsent, ok bool) {
	ino.mu.Lock()
	defer ino.mu.Unlock()
	changed := fs.clock.BlindRename.At()
	if !ino.isDir() && ino.attr.Nlink > 1 {
		changed = max(changed, fs.clock.BlindRemoval.At())
	}
	left = ino.ttl - attr.Now().Sub(ino.receivedAt)
	if !ino.valid || ino.pending > 0 || left <= 0 || ino.requestClock < changed {
		return a, 0, false, false
	}
	unsent, ino.unsent = ino.unsent, false
	return ino.attr, left, unsent, true
}

// refCurrent returns the node with the number id, with one more lookup reference. It returns nil
// when the kernel does not know the node, or when the node is stale.
func (t *inodeTable) refCurrent(id uint64) *inode {
	t.mu.Lock()
	defer t.mu.Unlock()
	ino := t.byID[id]
	if ino == nil || !t.byFH.has(ino) {
		return nil
	}
	ino.nlookup++
	t.state.setLookups(ino)
	return ino
}

// expected reports whether the thread is expected to repeat a lookup and an open.
func (o *reopens) expected(pid uint32) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.byThread[pid].expected()
}
