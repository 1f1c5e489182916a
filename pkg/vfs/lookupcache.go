package vfs

import (
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/attr"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/name"
)

// setCaches prepares the caches of attributes and names.
func (fs *FS) setCaches() {
	fs.attrs.Config = attr.Config{RegMin: fs.opts.AcRegMin, RegMax: fs.opts.AcRegMax, DirMin: fs.opts.AcDirMin,
		DirMax: fs.opts.AcDirMax, Off: fs.opts.NoAC}
	fs.names.Attrs = &fs.attrs
	fs.names.Answers = !fs.opts.SharedNames && fs.opts.LookupCache != LookupCacheNone && !fs.opts.NoAC
	fs.names.Missing = fs.opts.LookupCache == LookupCacheAll
	fs.users.Keep = fs.state.setSoleUser
	fs.expiry.Table, fs.expiry.Spawn, fs.expiry.Expire = &fs.names, fs.spawn, fs.expireName
}

// expireName makes the kernel look a name up again. A kernel that cannot expire a name removes the name
// instead. A process in the directory could then not determine its path.
func (fs *FS) expireName(dir uint64, name string, node uint64) {
	d := fs.device.Load()
	if d == nil || fs.isAborted() {
		return
	}
	if !fs.expireOnly.Load() {
		if ino := fs.inodes.get(node); ino != nil && ino.attr.IsDir() {
			return
		}
	}
	_ = d.ExpireEntry(dir, name)
}

// expireAll makes the kernel look all names of a directory up again.
func (fs *FS) expireAll(dir *inode) {
	fs.Counters.NameDrops.Add(uint64(fs.expiry.Begin(&dir.dir, dir.id)))
}

// cacheName remembers a name that the kernel will cache for the time in out, from the reply to a call
// sent at start.
func (fs *FS) cacheName(dir *inode, name string, start uint64, out *fuse.EntryOut) {
	if timeout := out.EntryTimeout(); timeout > 0 {
		out.SetEntryTimeout(fs.names.CacheInKernel(&dir.dir, &dir.attr, name, out.NodeId, start, timeout))
	}
}

// kernelNameTime returns how long the kernel may keep names of a directory.
func (fs *FS) kernelNameTime(dir *inode) time.Duration {
	switch {
	case fs.opts.SharedNames:
		return fs.entryTimeout(dir)
	case dir.id == fuse.FUSE_ROOT_ID || !fs.users.Alone():
		return 0
	}
	return min(fs.entryTimeout(dir), name.SoleTime)
}

// missing returns the result of a lookup of a name that does not exist.
func (fs *FS) missing(dir *inode, out *fuse.EntryOut) (*inode, error) {
	t := min(fs.kernelNameTime(dir), fs.attrs.TTL(&dir.attr))
	// A lock makes missing names old, and the kernel cannot be told for each of them.
	if t == 0 || fs.opts.LookupCache != LookupCacheAll || fs.attrs.Lock.At() != 0 {
		return nil, syscall.ENOENT
	}
	// Node 0 with a timeout makes the kernel cache the name as missing for that time.
	*out = fuse.EntryOut{}
	out.SetEntryTimeout(t)
	return nil, nil
}

// allowSearch records that the server let cred search the directory, in the reply to a call sent at
// start.
func (fs *FS) allowSearch(dir *inode, cred []byte, start uint64) {
	if fs.names.Answers {
		dir.grants().Grant(cred, nfs.AccessLookup, nfs.Time{}, start, attr.Now().Add(fs.attrs.TTL(&dir.attr)))
	}
}

// denySearch forgets that cred may search the directory.
func (fs *FS) denySearch(dir *inode, cred []byte) {
	if r := dir.rights.Load(); r != nil {
		r.Deny(cred)
	}
}

// keepLookup stores what a name stands for, from the reply to a call sent at start. Node 0 stores
// that the name does not exist.
func (fs *FS) keepLookup(dir *inode, name string, node, start uint64) {
	fs.names.Keep(&dir.dir, &dir.attr, name, node, start, fs.entryTimeout(dir))
}

// nameRemoved records that this mount may have removed a name. The reply has no attributes of the
// object, which may have other names.
func (fs *FS) nameRemoved(dir *inode, name string) {
	node, known := fs.names.Changed(&dir.dir, name)
	if !known {
		fs.attrs.Mark(&fs.attrs.BlindRemoval)
	} else if ino := fs.inodes.get(node); ino != nil {
		fs.invalidateAttr(ino)
	}
}

// nameMoved is nameRemoved for both names of a rename.
func (fs *FS) nameMoved(from *inode, oldName string, to *inode, newName string) {
	fs.nameRemoved(to, newName)
	node, known := fs.names.Changed(&from.dir, oldName)
	if !known {
		fs.attrs.Mark(&fs.attrs.BlindRename)
	} else if ino := fs.inodes.get(node); ino != nil {
		fs.invalidateAttr(ino)
	}
}

// lookupCached answers a lookup without asking the server. ok is false when this caller needs an
// answer of the server. The returned node has one more lookup reference; it is nil for a missing name.
func (fs *FS) lookupCached(r *request, dir *inode, name string, out *fuse.EntryOut) (ino *inode, ok bool, err error) {
	if !fs.names.Answers || fs.reopens.expected(r.pid) {
		return nil, false, nil
	}
	v := fs.attrs.View(&dir.attr)
	node, ok := fs.names.Find(&dir.dir, name, &v, dir.rights.Load().Has(r.cred, nfs.AccessLookup, &v))
	if !ok {
		return nil, false, nil
	}
	if node == 0 {
		ino, err = fs.missing(dir, out)
		return ino, true, err
	}
	if ino = fs.inodes.refCurrent(node); ino == nil {
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
	case nfs.CallErrno(err) == syscall.ESTALE:
		fs.inodes.forget(ino.id, 1)
		return nil, false, nil // the name stands for another object now
	case err != nil:
		fs.inodes.forget(ino.id, 1)
		return nil, true, err
	}
	fs.fillEntry(dir, ino, &a, cacheable, out)
	return ino, true, nil
}

// cachedAttr returns attributes that the kernel may cache for the time left.
func (fs *FS) cachedAttr(ino *inode) (a nfs.Attr, left time.Duration, ok bool) {
	a, left, unsent, ok := fs.attrs.Take(&ino.attr)
	if unsent {
		fs.renewed(ino)
	}
	return a, left, ok
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
