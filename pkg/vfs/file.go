package vfs

import (
	"sync/atomic"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/data"
)

// A fileHandle is one open file. READs and WRITEs of a fileHandle use the credential of the user
// who opened the file, also when another process uses the handle.
type fileHandle struct {
	id       uint64
	ino      *inode
	cred     []byte
	flags    uint32 // of open(2)
	open     nfs.OpenState
	state    *State   // nil if the mount is not kept
	kept     keptSlot // owned by the goroutine that opens or releases the file
	writable bool
	direct   bool // I/O past the kernel's pages
	watched  bool // guarded by FS.handles: open for buffered reads
	closed   bool // guarded by FS.handles
	errors   data.Errors
	// setID is true after a write to a file with a set-user-ID or set-group-ID bit. The server may
	// have cleared the bit.
	setID atomic.Bool
	// flushed is true after a close(2). RELEASE follows unless a process has a copy of the
	// descriptor.
	flushed atomic.Bool
	locks   handleLocks
}

// newFile returns the number of a new open file. It returns ENFILE if a kept mount has too many, and
// EMFILE if the user has too many of them.
func (fs *FS) newFile(r *request, ino *inode, flags uint32, open nfs.OpenState) (uint64, error) {
	h := fs.makeFile(ino, r.cred, flags)
	h.open = open
	h.id = fs.nextHandle()
	r.keepHandle(h.id)
	if err := fs.inodes.keep(ino); err != nil {
		return 0, err
	}
	if err := fs.state.addFile(h); err != nil {
		return 0, err
	}
	fs.addFile(h)
	return h.id, nil
}

func (fs *FS) makeFile(ino *inode, cred []byte, flags uint32) *fileHandle {
	h := &fileHandle{ino: ino, cred: cred, flags: flags, state: fs.state,
		writable: flags&syscall.O_ACCMODE != syscall.O_RDONLY, direct: fs.direct(flags)}
	h.watched = fs.explicitPages() && flags&syscall.O_ACCMODE != syscall.O_WRONLY && !h.direct
	if !h.direct {
		ino.attr.Buffer()
	}
	ino.data.Load().Open(&h.errors)
	return h
}

// pin counts the inode as open, so that a later removal hides the file instead of removing it.
// removed is true when a removal in flight may have removed the file. On error the inode is not
// pinned.
//
// unpin reverses pin. unpin removes the file when the file is hidden and was open only here.
func (fs *FS) pin(r *request, ino *inode) (removed bool, err error) {
	fs.inodes.openFile(ino)
	removed, err = fs.awaitRemovals(r, ino)
	if err != nil {
		fs.unpin(ino)
	}
	return removed, err
}

func (fs *FS) unpin(ino *inode) {
	if fs.inodes.closeFile(ino) == 0 && ino.silly.Load() != nil {
		// The request must not wait for a server that does not answer: an unmount waits for the
		// request.
		fs.spawn(func() { fs.removeSilly(background{fs}, ino) })
	}
}

// openFlags chooses how the kernel caches the pages of an open file.
func (fs *FS) openFlags(flags uint32, unchanged bool) uint32 {
	var out uint32
	if unchanged {
		out |= fuse.FOPEN_KEEP_CACHE
	}
	if fs.direct(flags) {
		out |= fuse.FOPEN_DIRECT_IO
	}
	return out
}

// Open handles open(2) of an existing file.
func (fs *FS) Open(k *kernel.Request, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	r, ino, err := fs.onNode(k)
	if err == nil {
		err = fs.open(r, ino, in.Flags, out)
	}
	return fs.end(r, err)
}

func (fs *FS) open(r *request, ino *inode, flags uint32, out *fuse.OpenOut) error {
	removed, err := fs.pin(r, ino) // before any call to the server
	last := fs.reopens.finish(r.pid)
	if err != nil {
		return err
	}
	if removed && last {
		err = fs.checkExists(r, ino)
	} else if removed {
		err = syscall.ESTALE // the kernel repeats the lookup
	}
	if err == nil {
		err = fs.openPinned(r, ino, flags, out)
	}
	if err != nil {
		fs.unpin(ino)
	}
	if removed || nfs.HasStatus(err, nfs.ErrStale) {
		fs.reopens.expect(r.pid)
	}
	return err
}

// checkExists asks the server whether a file still has a name. checkExists returns ESTALE when the
// file has none.
func (fs *FS) checkExists(r *request, ino *inode) error {
	var a nfs.Attr
	if _, err := fs.fetch(r, r.cred, ino, &a); err != nil {
		return err
	}
	if a.Nlink == 0 {
		return syscall.ESTALE
	}
	return nil
}

func (fs *FS) openPinned(r *request, ino *inode, flags uint32, out *fuse.OpenOut) error {
	if err := fs.push(r, ino); err != nil {
		return err
	}
	want := wantedAccess(flags)
	if fs.readsPages(flags) {
		want |= nfs.AccessRead
	}
	o, err := fs.checkOpen(r, ino, want)
	if err == syscall.EACCES && fs.readsPages(flags) {
		flags |= syscall.O_DIRECT
		o, err = fs.checkOpen(r, ino, wantedAccess(flags))
	}
	switch {
	case err != nil:
	case flags&syscall.O_TRUNC != 0:
		o.cacheable, err = fs.truncate(r, ino, &o.attr)
	case !o.cacheable:
		o.cacheable, err = fs.fetch(r, r.cred, ino, &o.attr)
	}
	if err != nil {
		return err
	}
	unchanged := fs.revalidate(ino, &o.attr, o.cacheable)
	if ino.attr.OfferNewer(&o.attr) {
		fs.dropAttr(ino)
	}
	out.OpenFlags = fs.openFlags(flags, unchanged)
	out.Fh, err = fs.newFile(r, ino, flags, o.state)
	return err
}

// An opening is the reply of the server to an open. attr is valid if cacheable is set.
type opening struct {
	attr      nfs.Attr
	cacheable bool
	state     nfs.OpenState
}

// checkOpen opens a file at the server, which checks that the user has the rights want. The kernel
// alone would check only mode bits, and all users share the pages of the file.
func (fs *FS) checkOpen(r *request, ino *inode, want uint32) (o opening, err error) {
	ask := want
	if fs.opts.NoCTO {
		if a, ok := fs.openCached(ino, r.cred, want); ok {
			return opening{attr: a, cacheable: true}, nil
		}
		ask = openRights
	}
	start := fs.attrs.Now()
	res, err := fs.askRights(r, ino, func() (nfs.OpenResult, error) {
		return fs.server.Open(r, r.cred, ino.fh, ask)
	})
	if err != nil {
		return o, err
	}
	if fs.opts.NoCTO && res.Attr.Present {
		fs.keepOpener(ino, r.cred, res.Access, &res.Attr.Attr, start)
	}
	if res.Access&want != want {
		return o, syscall.EACCES
	}
	return opening{res.Attr.Attr, res.Attr.Present, res.State}, nil
}

// wantedAccess returns the ACCESS rights that an open needs. An execution needs no right to read,
// although the kernel executes a file by reading it: the server then allows READ too (RFC 1813
// §4.4). An append needs only the right to extend the file.
func wantedAccess(flags uint32) (want uint32) {
	mode := flags & syscall.O_ACCMODE
	switch {
	case mode == syscall.O_WRONLY:
	case flags&fuse.FMODE_EXEC != 0:
		want |= nfs.AccessExecute
	default:
		want |= nfs.AccessRead
	}
	switch {
	case flags&syscall.O_TRUNC != 0, mode != syscall.O_RDONLY && flags&syscall.O_APPEND == 0:
		want |= nfs.AccessModify
	case mode != syscall.O_RDONLY:
		want |= nfs.AccessExtend
	}
	return want
}

// truncate sets the size of a file to 0 for open(2) and sets a to the new attributes. cacheable is
// as in fetch.
func (fs *FS) truncate(r *request, ino *inode, a *nfs.Attr) (cacheable bool, err error) {
	if err := fs.sync(r, ino); err != nil { // a replay would undo the truncation
		return false, err
	}
	set := nfs.SetAttr{HasSize: true}
	var wcc nfs.Change
	if err := fs.setAttrs(r, r.cred, ino, &set, &wcc); err != nil {
		return false, fs.checkStale(ino, err)
	}
	return fs.attrAfterChange(r, r.cred, ino, &wcc, a)
}

// Flush handles close(2). Flush returns after the file's data is stable, or returns the write
// error.
func (fs *FS) Flush(k *kernel.Request, in *fuse.FlushIn) fuse.Status {
	r := fs.begin(k)
	h := fs.file(in.Fh)
	if h != nil {
		h.flushed.Store(true)
	}
	switch {
	case h == nil:
		return fs.end(r, syscall.EBADF)
	case h.writable:
		err := fs.syncFile(r, h)
		if h.setID.Load() {
			fs.dropAttr(h.ino) // otherwise execve(2) uses the kernel's old mode
		}
		fs.flushLocks(r, h, in.LockOwner)
		return fs.end(r, err)
	}
	fs.flushLocks(r, h, in.LockOwner)
	return fs.end(r, nil)
}

// Fsync handles fsync(2) and fdatasync(2).
func (fs *FS) Fsync(k *kernel.Request, in *fuse.FsyncIn) fuse.Status {
	r := fs.begin(k)
	h := fs.file(in.Fh)
	if h == nil {
		return fs.end(r, syscall.EBADF)
	}
	return fs.end(r, fs.syncFile(r, h))
}

func (fs *FS) syncFile(r *request, h *fileHandle) error {
	if err := h.reportedBefore(r); err != nil {
		return err
	}
	if err := fs.sync(r, h.ino); err != nil {
		return err
	}
	if err := h.ino.data.Load().AwaitDropped(r); err != nil {
		return err
	}
	if fs.isAborted() {
		// an earlier call may have reported the error, but the data is still not stable
		return syscall.EIO
	}
	return h.report(r)
}

// Release ends an open file. The kernel does not wait for it. When a fatal signal interrupted
// close(2), Release writes the remaining data in the background.
func (fs *FS) Release(_ *kernel.Request, in *fuse.ReleaseIn) fuse.Status {
	fs.Counters.Ops[kernel.OpRelease].Add(1)
	fs.releaseFile(in.Fh)
	return fuse.OK
}

func (fs *FS) releaseFile(id uint64) {
	h := fs.file(id)
	if h == nil {
		return
	}
	locks := h.hasLocks()
	fs.handles.Lock()
	if h.closed { // a guest may release a file twice
		fs.handles.Unlock()
		return
	}
	delete(fs.handles.files, id)
	h.closed = true
	if h.watched {
		fs.unwatchFile()
	}
	if locks {
		fs.handles.releasing[h] = struct{}{}
	}
	fs.handles.Unlock()
	dirty := h.writable && !h.ino.data.Load().Clean()
	if !dirty && !locks {
		fs.closeFile(h)
		return
	}
	fs.state.setReleasing(h)
	fs.spawn(func() { fs.finishRelease(h) })
}

// finishRelease writes the data and releases the locks of a file that the kernel has released.
func (fs *FS) finishRelease(h *fileHandle) {
	_ = fs.sync(background{fs}, h.ino) // no caller to report an error to
	if h.hasLocks() {
		fs.releaseLocks(background{fs}, h)
	}
	fs.closeFile(h)
}

// closeFile ends an open file. The record of the node must be freed last: OpenState refuses a State
// with an open file of an unknown node.
func (fs *FS) closeFile(h *fileHandle) {
	if h.open != (nfs.OpenState{}) {
		fs.spawn(func() { _ = fs.server.Close(background{fs}, h.cred, h.ino.fh, h.open) })
	}
	fs.state.freeFile(h)
	fs.unpin(h.ino)
}
