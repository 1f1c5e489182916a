package fusefs

import (
	"crypto/rand"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
)

// A fileHandle is one open file. READs and WRITEs of a fileHandle use the credential of the user
// who opened the file, also when another process uses the handle.
type fileHandle struct {
	ino      *inode
	cred     []byte
	writable bool
	errSeen  uint64 // guarded by ino.wb.mu: number of errors reported so far
}

func (fs *FS) newFile(ino *inode, cred []byte, flags uint32) uint64 {
	h := &fileHandle{ino: ino, cred: cred, writable: flags&syscall.O_ACCMODE != syscall.O_RDONLY}
	ino.wb.mu.Lock()
	h.errSeen = ino.wb.errSeq
	ino.wb.mu.Unlock()
	return fs.addFile(h)
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
	if fs.inodes.closeFile(ino) == 0 && ino.sillyName() != nil {
		// The request must not wait for a server that does not answer: an unmount waits for the
		// request.
		fs.work.Go(func() { fs.removeSilly(background{fs}, ino) })
	}
}

// openFlags chooses how the kernel caches the pages of an open file.
func openFlags(flags uint32, unchanged bool) uint32 {
	var out uint32
	if unchanged {
		out |= fuse.FOPEN_KEEP_CACHE
	}
	appends := flags&syscall.O_APPEND != 0 && flags&syscall.O_ACCMODE != syscall.O_RDONLY
	if flags&syscall.O_DIRECT != 0 || appends {
		// Only the server knows the end of the file. The kernel must not cache appended data.
		out |= fuse.FOPEN_DIRECT_IO
	}
	return out
}

// Open handles open(2) of an existing file.
func (fs *FS) Open(cancel <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	return fs.onNode(OpOpen, cancel, &in.InHeader, func(r *request, ino *inode) error {
		return fs.open(r, ino, in.Flags, out)
	})
}

func (fs *FS) open(r *request, ino *inode, flags uint32, out *fuse.OpenOut) error {
	removed, err := fs.pin(r, ino) // before any call to the server
	fs.reopens.finish(r.pid)
	if err != nil {
		return err
	}
	if removed {
		err = syscall.ESTALE // the kernel repeats the lookup
	} else {
		err = fs.openPinned(r, ino, flags, out)
	}
	if err != nil {
		fs.unpin(ino)
	}
	if removed || hasStatus(err, nfs3.ErrStale) {
		fs.reopens.expect(r.pid)
	}
	return err
}

func (fs *FS) openPinned(r *request, ino *inode, flags uint32, out *fuse.OpenOut) error {
	if err := fs.push(r, ino); err != nil {
		return err
	}
	// ACCESS returns both the user's permission and the current attributes.
	var res nfs3.AccessResult
	want := wantedAccess(flags)
	if err := fs.askAccess(r, r.cred, ino, want, &res); err != nil {
		return err
	}
	if !granted(flags, res.Access) {
		return syscall.EACCES
	}
	a, cacheable := res.Attr.Attr, res.Attr.Present
	if !cacheable {
		var err error
		if cacheable, err = fs.fetch(r, r.cred, ino, &a); err != nil {
			return err
		}
	}
	unchanged := ino.revalidate(&a, cacheable)
	if !unchanged {
		fs.Counters.CacheDrops.Add(1)
		ino.mu.Lock()
		ino.unsent = ino.valid
		ino.mu.Unlock()
		fs.dropAttr(ino)
	}
	out.Fh = fs.newFile(ino, r.cred, flags)
	out.OpenFlags = openFlags(flags, unchanged)
	return nil
}

// revalidate reports whether the kernel's cached pages match the attributes a, which are new from
// the server. revalidate records a as the state of the pages from now on.
func (ino *inode) revalidate(a *nfs3.Attr, cacheable bool) (unchanged bool) {
	ino.mu.Lock()
	defer ino.mu.Unlock()
	now := stampOf(a)
	unchanged = cacheable && ino.pageStampValid && ino.pageStamp == now
	ino.pageStamp, ino.pageStampValid = now, cacheable
	return unchanged
}

// wantedAccess and granted check an open by the ACCESS bits. Permission to execute includes
// permission to read, because the kernel executes a file by reading it.
func wantedAccess(flags uint32) (want uint32) {
	if flags&syscall.O_ACCMODE != syscall.O_WRONLY {
		want |= nfs3.AccessRead | nfs3.AccessExecute
	}
	if flags&syscall.O_ACCMODE != syscall.O_RDONLY {
		want |= nfs3.AccessModify | nfs3.AccessExtend
	}
	return want
}

func granted(flags, access uint32) bool {
	if flags&syscall.O_ACCMODE != syscall.O_WRONLY && access&(nfs3.AccessRead|nfs3.AccessExecute) == 0 {
		return false
	}
	return flags&syscall.O_ACCMODE == syscall.O_RDONLY || access&(nfs3.AccessModify|nfs3.AccessExtend) != 0
}

// Create handles open(2) with O_CREAT of a name that the kernel does not know.
func (fs *FS) Create(cancel <-chan struct{}, in *fuse.CreateIn, name string, out *fuse.CreateOut) fuse.Status {
	return fs.onNode(OpCreate, cancel, &in.InHeader, func(r *request, dir *inode) error {
		return fs.create(r, dir, in, name, out)
	})
}

func (fs *FS) create(r *request, dir *inode, in *fuse.CreateIn, name string, out *fuse.CreateOut) error {
	how := nfs3.CreateHow{Mode: nfs3.Unchecked, Attr: modeOnly(in.Mode)}
	if in.Flags&syscall.O_TRUNC != 0 {
		// another client may have created the file after the kernel's lookup
		how.Attr.HasSize = true
	}
	var ino *inode
	var err error
	if in.Flags&syscall.O_EXCL != 0 {
		ino, err = fs.createExclusive(r, dir, name, in.Mode, &out.EntryOut)
	} else {
		ino, err = fs.createFile(r, dir, name, &how, &out.EntryOut)
	}
	if err != nil {
		return err
	}
	ino.mu.Lock()
	ino.pageStamp, ino.pageStampValid = stampOf(&ino.attr), ino.valid
	ino.mu.Unlock()
	fs.inodes.openFile(ino) // the kernel holds the directory's lock, so no removal can run
	out.OpenOut = fuse.OpenOut{Fh: fs.newFile(ino, r.cred, in.Flags), OpenFlags: openFlags(in.Flags, true)}
	return nil
}

func (fs *FS) createFile(r *request, dir *inode, name string, how *nfs3.CreateHow, out *fuse.EntryOut) (*inode, error) {
	return fs.createEntry(r, dir, name, out, func(res *nfs3.CreateResult) error {
		return fs.client.Create(r, r.cred, dir.fh, name, how, res)
	})
}

// createExclusive creates a file that must not exist. The verifier lets the server recognize a
// retransmitted call. The server may store the verifier in the attributes, so a SETATTR follows
// (RFC 1813 §3.3.8).
func (fs *FS) createExclusive(r *request, dir *inode, name string, mode uint32, out *fuse.EntryOut) (*inode, error) {
	how := nfs3.CreateHow{Mode: nfs3.Exclusive}
	_, _ = rand.Read(how.Verf[:]) // never fails
	ino, err := fs.createFile(r, dir, name, &how, out)
	if hasStatus(err, nfs3.ErrNotSupp) {
		how = nfs3.CreateHow{Mode: nfs3.Guarded, Attr: modeOnly(mode)}
		return fs.createFile(r, dir, name, &how, out)
	}
	if err != nil {
		return nil, err
	}
	set := modeOnly(mode)
	set.AtimeHow, set.MtimeHow = nfs3.SetToServerTime, nfs3.SetToServerTime
	var wcc nfs3.WccData
	var a nfs3.Attr
	var cacheable bool
	if err = fs.setAttrs(r, r.cred, ino, &set, &wcc); err == nil {
		cacheable, err = fs.attrAfterChange(r, r.cred, ino, &wcc, &a)
	}
	if err != nil {
		fs.inodes.forget(ino.id, 1)
		return nil, err
	}
	fs.fillAttr(&out.Attr, &a)
	out.SetAttrTimeout(0)
	if cacheable {
		out.SetAttrTimeout(fs.attrTimeout(ino))
	}
	return ino, nil
}

func modeOnly(mode uint32) nfs3.SetAttr {
	return nfs3.SetAttr{HasMode: true, Mode: mode & nfs3.ModeMask}
}

// Flush handles close(2). Flush returns after the file's data is stable, or returns the write
// error.
func (fs *FS) Flush(cancel <-chan struct{}, in *fuse.FlushIn) fuse.Status {
	r := fs.begin(OpFlush, cancel, &in.InHeader)
	h := fs.file(in.Fh)
	switch {
	case h == nil:
		return fs.end(OpFlush, r, syscall.EBADF)
	case !h.writable:
		return fs.end(OpFlush, r, nil)
	}
	return fs.end(OpFlush, r, fs.syncFile(r, h))
}

// Fsync handles fsync(2) and fdatasync(2).
func (fs *FS) Fsync(cancel <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	r := fs.begin(OpFsync, cancel, &in.InHeader)
	h := fs.file(in.Fh)
	if h == nil {
		return fs.end(OpFsync, r, syscall.EBADF)
	}
	return fs.end(OpFsync, r, fs.syncFile(r, h))
}

func (fs *FS) syncFile(r *request, h *fileHandle) error {
	if err := fs.sync(r, h.ino); err != nil {
		return err
	}
	if fs.isAborted() {
		// an earlier call may have reported the error, but the data is still not stable
		return syscall.EIO
	}
	return h.report()
}

// Release ends an open file. The kernel does not wait for it. When a fatal signal interrupted
// close(2), Release writes the remaining data in the background.
func (fs *FS) Release(cancel <-chan struct{}, in *fuse.ReleaseIn) {
	fs.Counters.Ops[OpRelease].Add(1)
	fs.handles.Lock()
	h := fs.handles.files[in.Fh]
	delete(fs.handles.files, in.Fh)
	fs.handles.Unlock()
	if h == nil {
		return
	}
	w := &h.ino.wb
	w.mu.Lock()
	dirty := h.writable && !w.clean()
	w.mu.Unlock()
	if !dirty {
		fs.unpin(h.ino)
		return
	}
	fs.work.Go(func() {
		_ = fs.sync(background{fs}, h.ino) // no caller to report an error to
		fs.unpin(h.ino)
	})
}
