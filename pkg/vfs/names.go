package vfs

import (
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
)

// Lookup finds a name in a directory.
func (fs *FS) Lookup(k *kernel.Request, name string, out *fuse.EntryOut) fuse.Status {
	r, dir, err := fs.onNode(k)
	if err == nil && !fs.users.Admit(k.Header.Uid, r.Done()) {
		err = syscall.EINTR
	}
	if err == nil {
		err = fs.lookup(r, dir, name, out)
		if nfs.CallErrno(err) == syscall.EACCES && fs.hasMountsBelow() {
			err = syscall.ENOMEM
		}
	}
	return fs.end(r, err)
}

func (fs *FS) lookup(r *request, dir *inode, name string, out *fuse.EntryOut) error {
	ino, err := fs.lookupOnce(r, dir, name, out)
	if err != nil || ino == nil {
		fs.reopens.finish(r.pid)
		return err
	}
	if out.Attr.Mode&syscall.S_IFMT == syscall.S_IFDIR {
		return nil
	}
	reopen := fs.reopens.lookup(r.pid)
	if reopen == nil {
		return nil
	}
	for range pinTries {
		if err := fs.pinUntilReopen(r, ino, reopen); err != nil {
			fs.inodes.forget(ino.id, 1)
			return err
		}
		pinned := ino // the name may stand for another object now
		if ino, err = fs.lookupOnce(r, dir, name, out); err != nil || ino == nil {
			fs.inodes.forget(pinned.id, 1)
			fs.reopens.finish(r.pid)
			return err
		}
		fs.inodes.forget(pinned.id, 1)
		if ino == pinned {
			return nil
		}
	}
	return nil
}

// lookupOnce finds a name. The returned node is nil when the kernel may cache the name as missing.
// When the object disappears before its attributes arrive, lookupOnce looks the name up again.
func (fs *FS) lookupOnce(r *request, dir *inode, name string, out *fuse.EntryOut) (*inode, error) {
	start := fs.attrs.Now()
	if ino, ok, err := fs.lookupCached(r, dir, name, out); ok {
		if err == nil {
			fs.cacheName(dir, name, start, out)
		}
		return ino, err
	}
	for try := 0; ; try++ {
		var res nfs.LookupResult
		start, err := fs.lookupRPC(r, dir, name, &res)
		if nfs.HasStatus(err, nfs.ErrNoEnt) {
			fs.keepLookup(dir, name, 0, start)
			ino, err := fs.missing(dir, out)
			fs.cacheName(dir, name, start, out)
			return ino, err
		}
		if nfs.IsStale(err) && fs.missingAtPath(r, dir, name) {
			return nil, syscall.ENOENT
		}
		if err != nil {
			return nil, err
		}
		ino, err := fs.entry(r, dir, name, res.FH, &res.Attr, start, out)
		if err == nil {
			fs.keepLookup(dir, name, ino.id, start)
			fs.renew(r, dir, ino) // for the names that follow
		}
		if nfs.CallErrno(err) != syscall.ESTALE || try >= staleTries {
			return ino, err
		}
	}
}

// staleTries bounds the consecutive lookups that return an object whose handle is stale.
const staleTries = 16

// lookupRPC sends a LOOKUP at start and stores the directory attributes of the reply.
func (fs *FS) lookupRPC(r *request, dir *inode, name string, res *nfs.LookupResult) (start uint64, err error) {
	for try := 0; ; try++ {
		start = fs.attrs.Now()
		*res, err = fs.server.Lookup(r, r.cred, dir.fh, name)
		if fs.busy.Retry(r, err, try) {
			continue
		}
		if res.DirAttr.Present {
			fs.updateAttr(dir, &res.DirAttr.Attr, start)
		}
		switch {
		case err == nil, nfs.HasStatus(err, nfs.ErrNoEnt):
			fs.allowSearch(dir, r.cred, start)
		case nfs.HasStatus(err, nfs.ErrAcces):
			fs.denySearch(dir, r.cred)
		}
		return start, fs.checkStale(dir, err)
	}
}

// entry fills the reply for a name with the node of fh and adds one lookup reference to it. post
// holds the attributes that came with fh in the reply to a call sent at start.
func (fs *FS) entry(r *request, dir *inode, name string, fh nfs.Handle, post *nfs.PostOpAttr, start uint64,
	out *fuse.EntryOut) (*inode, error) {
	var known *nfs.Attr
	if post.Present {
		known = &post.Attr
	}
	ino := fs.inodes.ref(fh, known)
	a, cacheable, err := fs.entryAttr(r, ino, post, start)
	if err != nil {
		fs.inodes.forget(ino.id, 1)
		return nil, err
	}
	fs.dropStalePages(ino)
	fs.fillEntry(dir, ino, &a, cacheable, out)
	fs.cacheName(dir, name, start, out)
	ino.setFound(dir, name)
	return ino, nil
}

// entryAttr returns the node's attributes: those of the reply, or newer ones.
func (fs *FS) entryAttr(r *request, ino *inode, post *nfs.PostOpAttr,
	start uint64) (a nfs.Attr, cacheable bool, err error) {
	if post.Present && fs.updateAttr(ino, &post.Attr, start) {
		a, _ = ino.attr.Attr()
		return a, true, nil
	}
	if err := fs.push(r, ino); err != nil {
		return a, false, err
	}
	cacheable, err = fs.fetch(r, r.cred, ino, &a)
	return a, cacheable, err
}

func (fs *FS) fillEntry(dir, ino *inode, a *nfs.Attr, cacheable bool, out *fuse.EntryOut) {
	*out = fuse.EntryOut{NodeId: ino.id}
	out.SetEntryTimeout(fs.kernelNameTime(dir))
	fs.fillEntryAttr(ino, a, cacheable, out)
}

// fillEntryAttr replaces the attributes in the reply for a name.
func (fs *FS) fillEntryAttr(ino *inode, a *nfs.Attr, cacheable bool, out *fuse.EntryOut) {
	fs.fillAttr(ino, &out.Attr, a)
	ino.attr.Sent(a)
	out.SetAttrTimeout(0)
	if cacheable {
		out.SetAttrTimeout(fs.attrs.TTL(&ino.attr))
	}
}

// entryTimeout returns how long a name may be cached: as long as the directory's attributes.
func (fs *FS) entryTimeout(dir *inode) time.Duration {
	if fs.opts.LookupCache == LookupCacheNone || fs.opts.NoAC {
		return 0
	}
	if t := fs.attrs.TTL(&dir.attr); t > 0 {
		return t
	}
	return fs.opts.AcDirMin
}

// A created is the result of a call that makes a name.
type created struct {
	ino *inode
	// own is true when the handle came with the reply, so that the node certainly is the new object.
	// A handle from a later LOOKUP may belong to an object that replaced the new one.
	own  bool
	open nfs.OpenState
}

// createEntry is the common part of CREATE, MKDIR, SYMLINK and MKNOD. createEntry makes the call
// and gets what the server left out of its reply.
func (fs *FS) createEntry(r *request, dir *inode, name string, typ nfs.FileType, out *fuse.EntryOut,
	call func() (nfs.CreateResult, error)) (made created, err error) {
	var res nfs.CreateResult
	var start, changed uint64
	var before bool // by an earlier process
	for try := 0; ; try++ {
		start = fs.attrs.Now()
		res, err = call()
		if fs.busy.Retry(r, err, try) {
			continue
		}
		changed = fs.nameMade(dir, name, &res.DirChange, start)
		before = nfs.HasStatus(err, nfs.ErrExist) && r.sentBefore()
		if err != nil && !before {
			return made, fs.checkStale(dir, err)
		}
		break
	}
	made.open = res.State
	if made.own = res.HasFH && !before; !made.own {
		var found nfs.LookupResult
		if start, err = fs.lookupRPC(r, dir, name, &found); err != nil {
			return made, err
		}
		res.FH, res.Attr = found.FH, found.Attr
		if before {
			if made.own = found.Attr.Present && r.madeBefore(&found.Attr.Attr, typ); !made.own {
				return made, syscall.EEXIST
			}
		}
	}
	if made.ino, err = fs.entry(r, dir, name, res.FH, &res.Attr, start, out); err == nil {
		fs.keepLookup(dir, name, made.ino.id, changed)
	}
	return made, err
}

// nameMade stores the attributes in the reply to a call that makes a name, sent at start. nameMade
// returns the start for keepLookup. The epoch that begins with this reply is due to changes before
// the call, so it does not outdate the name.
func (fs *FS) nameMade(dir *inode, name string, wcc *nfs.Change, start uint64) (changed uint64) {
	overtaken := start < dir.attr.EpochStart()
	fs.names.Changed(&dir.dir, name)
	fs.updateChange(dir, wcc, start, true)
	if overtaken {
		return start
	}
	return fs.attrs.Now() // the kernel locks the directory, so this mount changes no other name
}

// Mkdir handles mkdir(2).
func (fs *FS) Mkdir(k *kernel.Request, in *fuse.MkdirIn, name string, out *fuse.EntryOut) fuse.Status {
	r, dir, err := fs.onNode(k)
	if err == nil {
		set := fs.newMode(r, dir, in.Mode, in.Umask)
		_, err = fs.createEntry(r, dir, name, nfs.Directory, out, func() (nfs.CreateResult, error) {
			return fs.server.Mkdir(r, r.cred, dir.fh, name, set)
		})
	}
	return fs.end(r, err)
}

// Mknod handles mknod(2), including regular files.
func (fs *FS) Mknod(k *kernel.Request, in *fuse.MknodIn, name string, out *fuse.EntryOut) fuse.Status {
	r, dir, err := fs.onNode(k)
	if err == nil {
		err = fs.mknod(r, dir, in, name, out)
	}
	return fs.end(r, err)
}

func (fs *FS) mknod(r *request, dir *inode, in *fuse.MknodIn, name string, out *fuse.EntryOut) error {
	set := fs.newMode(r, dir, in.Mode, in.Umask)
	var typ nfs.FileType
	switch in.Mode & syscall.S_IFMT {
	case syscall.S_IFREG, 0:
		_, err := fs.createFile(r, dir, name, nfs.CreateHow{Mode: nfs.Guarded, Attr: set}, out)
		return err
	case syscall.S_IFCHR:
		typ = nfs.CharDevice
	case syscall.S_IFBLK:
		typ = nfs.BlockDevice
	case syscall.S_IFIFO:
		typ = nfs.FIFO
	case syscall.S_IFSOCK:
		typ = nfs.Socket
	default:
		return syscall.EINVAL
	}
	dev := nfs.Device{Major: unix.Major(uint64(in.Rdev)), Minor: unix.Minor(uint64(in.Rdev))}
	_, err := fs.createEntry(r, dir, name, typ, out, func() (nfs.CreateResult, error) {
		return fs.server.Mknod(r, r.cred, dir.fh, name, typ, set, dev)
	})
	return err
}

// Symlink handles symlink(2).
func (fs *FS) Symlink(k *kernel.Request, name, target string, out *fuse.EntryOut) fuse.Status {
	r, dir, err := fs.onNode(k)
	if err == nil {
		set := modeOnly(0o777) // the mode that lstat(2) shows for symbolic links on all file systems
		_, err = fs.createEntry(r, dir, name, nfs.Symlink, out, func() (nfs.CreateResult, error) {
			return fs.server.Symlink(r, r.cred, dir.fh, name, target, set)
		})
	}
	return fs.end(r, err)
}

// Link handles link(2).
func (fs *FS) Link(k *kernel.Request, in *fuse.LinkIn, name string, out *fuse.EntryOut) fuse.Status {
	r, dir, err := fs.onNode(k)
	if err == nil {
		err = fs.link(r, dir, fs.inodes.get(in.Oldnodeid), name, out)
	}
	return fs.end(r, err)
}

func (fs *FS) link(r *request, dir, ino *inode, name string, out *fuse.EntryOut) error {
	if ino == nil {
		return syscall.ESTALE
	}
	if err := fs.push(r, ino); err != nil {
		return err
	}
	fs.invalidateAttr(ino)
	var res nfs.LinkResult
	var start, changed uint64
	for try := 0; ; try++ {
		start = fs.attrs.Now()
		var err error
		res, err = fs.server.Link(r, r.cred, ino.fh, dir.fh, name)
		if fs.busy.Retry(r, err, try) {
			continue
		}
		changed = fs.nameMade(dir, name, &res.DirChange, start)
		if nfs.HasStatus(err, nfs.ErrExist) && r.sentBefore() && fs.isNow(r, dir, name, ino) {
			err = nil
		}
		if err != nil {
			return fs.checkStale(ino, err)
		}
		break
	}
	fs.attrs.RenameEnded() // the link has changed the ctime
	_, err := fs.entry(r, dir, name, ino.fh, &res.Attr, start, out)
	if err == nil {
		fs.keepLookup(dir, name, ino.id, changed)
	}
	return err
}
