package fusefs

import (
	"crypto/rand"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
)

// A fileHandle is one open file. Its READs and WRITEs go out as the user who opened it, whoever
// holds it now, as on any file system.
type fileHandle struct {
	ino      *inode
	cred     []byte
	writable bool
	errSeen  uint64 // guarded by ino.wb.mu: errors up to here were reported
}

func (fs *FS) newFile(ino *inode, cred []byte, flags uint32) uint64 {
	h := &fileHandle{ino: ino, cred: cred, writable: flags&syscall.O_ACCMODE != syscall.O_RDONLY}
	ino.wb.mu.Lock()
	h.errSeen = ino.wb.errSeq
	ino.wb.mu.Unlock()
	return fs.addFile(h)
}

// claim counts the inode as open, so that a removal from now on hides the file. removed tells that
// it may have been removed just now. disclaim takes that back, and removes the file if it was
// hidden and nobody has it open any more.
func (fs *FS) claim(r *request, ino *inode) (removed bool, err error) {
	fs.inodes.openFile(ino)
	removed, err = fs.awaitRemovals(r, ino)
	if err != nil {
		fs.disclaim(ino)
	}
	return removed, err
}

func (fs *FS) disclaim(ino *inode) {
	if fs.inodes.closeFile(ino) == 0 && ino.sillyName() != nil {
		// A server that does not answer must not keep the end of the mount waiting for this
		// request.
		fs.work.Go(func() { fs.removeSilly(background{fs}, ino) })
	}
}

// openFlags chooses how the kernel treats the pages of an open file.
func openFlags(flags uint32, unchanged bool) uint32 {
	var out uint32
	if unchanged {
		out |= fuse.FOPEN_KEEP_CACHE
	}
	appends := flags&syscall.O_APPEND != 0 && flags&syscall.O_ACCMODE != syscall.O_RDONLY
	if flags&syscall.O_DIRECT != 0 || appends {
		// Only the server knows where the end of the file is, so that the kernel must not put
		// appended data into its pages.
		out |= fuse.FOPEN_DIRECT_IO
	}
	return out
}

// Open answers open(2) of a file that exists.
func (fs *FS) Open(cancel <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	r := fs.begin(OpOpen, cancel, &in.InHeader)
	return fs.end(OpOpen, r, fs.open(r, in, out))
}

func (fs *FS) open(r *request, in *fuse.OpenIn, out *fuse.OpenOut) error {
	ino := fs.inodes.get(in.NodeId)
	if ino == nil {
		return syscall.ESTALE
	}
	removed, err := fs.claim(r, ino) // before the server is asked
	fs.reopens.over(r.pid)
	if err != nil {
		return err
	}
	if removed {
		err = syscall.ESTALE // the kernel looks the name up anew
	} else {
		err = fs.openClaimed(r, ino, in.Flags, out)
	}
	if err != nil {
		fs.disclaim(ino)
	}
	if removed || hasStatus(err, nfs3.ErrStale) {
		fs.reopens.expect(r.pid)
	}
	return err
}

func (fs *FS) openClaimed(r *request, ino *inode, flags uint32, out *fuse.OpenOut) error {
	if err := fs.push(r, ino); err != nil {
		return err
	}
	// ACCESS tells both whether the server lets this user in and what the file looks like now.
	var res nfs3.AccessResult
	want := wantedAccess(flags)
	if err := fs.askAccess(r, r.cred, ino, want, &res); err != nil {
		return err
	}
	if !granted(flags, res.Access) {
		return syscall.EACCES
	}
	a, settled := res.Attr.Attr, res.Attr.Present
	if !settled {
		var err error
		if settled, err = fs.fetch(r, r.cred, ino, &a); err != nil {
			return err
		}
	}
	unchanged := ino.revalidate(&a, settled)
	if !unchanged {
		fs.Counters.CacheDrops.Add(1)
		ino.mu.Lock()
		ino.untold = ino.valid
		ino.mu.Unlock()
		fs.dropAttr(ino)
	}
	out.Fh = fs.newFile(ino, r.cred, flags)
	out.OpenFlags = openFlags(flags, unchanged)
	return nil
}

// revalidate tells whether the file is as the kernel's pages show it, and takes a, fresh from the
// server, as the state that they show from now on.
func (ino *inode) revalidate(a *nfs3.Attr, settled bool) (unchanged bool) {
	ino.mu.Lock()
	defer ino.mu.Unlock()
	now := stampOf(a)
	unchanged = settled && ino.baseOK && ino.base == now
	ino.base, ino.baseOK = now, settled
	return unchanged
}

// wantedAccess and granted judge an open by the ACCESS bits: who may execute a file may read it,
// since that is how the kernel executes it.
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

// Create answers open(2) with O_CREAT of a name that does not exist as far as the kernel knows.
func (fs *FS) Create(cancel <-chan struct{}, in *fuse.CreateIn, name string, out *fuse.CreateOut) fuse.Status {
	r := fs.begin(OpCreate, cancel, &in.InHeader)
	return fs.end(OpCreate, r, fs.create(r, in, name, out))
}

func (fs *FS) create(r *request, in *fuse.CreateIn, name string, out *fuse.CreateOut) error {
	dir := fs.inodes.get(in.NodeId)
	if dir == nil {
		return syscall.ESTALE
	}
	how := nfs3.CreateHow{Mode: nfs3.Unchecked, Attr: modeOnly(in.Mode)}
	if in.Flags&syscall.O_TRUNC != 0 {
		how.Attr.HasSize = true // another client may have made the file since the kernel looked
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
	ino.base, ino.baseOK = stampOf(&ino.attr), ino.valid
	ino.mu.Unlock()
	fs.inodes.openFile(ino) // the kernel lets nobody change the directory meanwhile
	out.OpenOut = fuse.OpenOut{Fh: fs.newFile(ino, r.cred, in.Flags), OpenFlags: openFlags(in.Flags, true)}
	return nil
}

func (fs *FS) createFile(r *request, dir *inode, name string, how *nfs3.CreateHow, out *fuse.EntryOut) (*inode, error) {
	return fs.make(r, dir, name, out, func(res *nfs3.CreateResult) error {
		return fs.client.Create(r, r.cred, dir.fh, name, how, res)
	})
}

// createExclusive makes a file that must not exist. The verifier lets the server tell a call that
// reaches it twice from a second file of the same name; it may keep it where the attributes are, so
// they are set afterwards (RFC 1813 §3.3.8).
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
	err = fs.setAttrs(r, r.cred, ino, &set, &wcc)
	settled := err == nil && ino.validAfter(&wcc)
	if settled {
		ino.mu.Lock()
		a, ino.untold = ino.attr, false
		ino.mu.Unlock()
	} else if err == nil {
		settled, err = fs.fetch(r, r.cred, ino, &a)
	}
	if err != nil {
		fs.inodes.forget(ino.id, 1)
		return nil, err
	}
	fs.fillAttr(&out.Attr, &a)
	out.SetAttrTimeout(0)
	if settled {
		out.SetAttrTimeout(fs.timeout(ino))
	}
	return ino, nil
}

func modeOnly(mode uint32) nfs3.SetAttr {
	return nfs3.SetAttr{HasMode: true, Mode: mode & nfs3.ModeMask}
}

// Flush answers close(2): what was written is stable when it returns, or the caller learns that it
// is not.
func (fs *FS) Flush(cancel <-chan struct{}, in *fuse.FlushIn) fuse.Status {
	r := fs.begin(OpFlush, cancel, &in.InHeader)
	h := fs.file(in.Fh)
	switch {
	case h == nil:
		return fs.end(OpFlush, r, syscall.EBADF)
	case !h.writable:
		return fs.end(OpFlush, r, nil)
	}
	return fs.end(OpFlush, r, fs.settle(r, h))
}

// Fsync answers fsync(2) and fdatasync(2).
func (fs *FS) Fsync(cancel <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	r := fs.begin(OpFsync, cancel, &in.InHeader)
	h := fs.file(in.Fh)
	if h == nil {
		return fs.end(OpFsync, r, syscall.EBADF)
	}
	return fs.end(OpFsync, r, fs.settle(r, h))
}

func (fs *FS) settle(r *request, h *fileHandle) error {
	if err := fs.sync(r, h.ino); err != nil {
		return err
	}
	if fs.isAborted() {
		return syscall.EIO // what was given up may have been reported, but nothing is stable since
	}
	return h.report()
}

// Release ends an open file. Nobody waits for it, so that data which a deadly signal kept from
// being written at close(2) is written behind it.
func (fs *FS) Release(cancel <-chan struct{}, in *fuse.ReleaseIn) {
	fs.Counters.Ops[OpRelease].Add(1)
	fs.handlesMu.Lock()
	h := fs.files[in.Fh]
	delete(fs.files, in.Fh)
	fs.handlesMu.Unlock()
	if h == nil {
		return
	}
	w := &h.ino.wb
	w.mu.Lock()
	dirty := h.writable && !w.clean()
	w.mu.Unlock()
	if !dirty {
		fs.disclaim(h.ino)
		return
	}
	fs.work.Go(func() {
		_ = fs.sync(background{fs}, h.ino) // there is nobody to tell
		fs.disclaim(h.ino)
	})
}
