package vfs

import (
	"context"
	"slices"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
)

// GetAttr handles stat(2). The kernel caches attributes for the time in the reply. The kernel
// therefore sends a request only when this time is over, or when a change has invalidated the
// cached attributes.
func (fs *FS) GetAttr(k *kernel.Request, in *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status {
	r, ino, err := fs.onNode(k)
	if err != nil {
		return fs.end(r, err)
	}
	err = fs.getattr(r, ino, out)
	// open(2) asks for attributes to check rights. Pid 0 stands for all callers of other PID
	// namespaces.
	if err != nil && nfs.CallErrno(err) == syscall.ESTALE && in.Flags()&fuse.FUSE_GETATTR_FH == 0 &&
		!ino.attr.IsDir() &&
		r.pid != 0 {
		fs.reopens.expect(r.pid)
	}
	return fs.end(r, err)
}

func (fs *FS) getattr(r *request, ino *inode, out *fuse.AttrOut) error {
	if err := fs.push(r, ino); err != nil {
		return err
	}
	a, left, ok := fs.attrs.TakeUnsent(&ino.attr)
	if ok {
		fs.renewed(ino)
	} else if fs.renew(r, nil, ino) {
		a, left, ok = fs.attrs.TakeUnsent(&ino.attr)
	}
	if ok {
		fs.dropStalePages(ino)
		fs.fillAttr(ino, &out.Attr, &a)
		ino.attr.Sent(&a)
		out.SetTimeout(left)
		return nil
	}
	cacheable, err := fs.fetch(r, r.cred, ino, &a)
	if err != nil {
		return err
	}
	fs.dropStalePages(ino)
	fs.fillAttrOut(ino, &a, cacheable, out)
	return nil
}

func (fs *FS) fillAttrOut(ino *inode, a *nfs.Attr, cacheable bool, out *fuse.AttrOut) {
	fs.fillAttr(ino, &out.Attr, a)
	ino.attr.Sent(a)
	out.SetTimeout(0)
	if cacheable {
		out.SetTimeout(fs.attrs.TTL(&ino.attr))
	}
}

// SetAttr handles chmod(2), chown(2), utimensat(2) and truncate(2).
func (fs *FS) SetAttr(k *kernel.Request, in *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	r, ino, err := fs.onNode(k)
	if err == nil {
		err = fs.setattr(r, ino, in, out)
	}
	return fs.end(r, err)
}

func (fs *FS) setattr(r *request, ino *inode, in *fuse.SetAttrIn, out *fuse.AttrOut) error {
	if fs.isTimeFlush(ino, in) {
		return fs.flushTimes(r, ino, in, out)
	}
	set := sattrOf(in)
	cred := r.cred
	if set.HasSize {
		if set.Size > fs.maxFileSize {
			return syscall.EFBIG
		}
		if h := fs.fileOf(in); h != nil {
			cred = h.cred // ftruncate(2) uses the credential of the open
		}
		if fs.opts.Writeback && set.MtimeHow == nfs.SetToClientTime {
			set.MtimeHow = nfs.SetToServerTime
		}
	}
	if set == (nfs.SetAttr{}) {
		return fs.getattr(r, ino, out)
	}
	err := fs.setAndFill(r, cred, ino, &set, out)
	if e := nfs.CallErrno(err); fs.isTouch(in) && (e == syscall.EPERM || e == syscall.EACCES) {
		set.MtimeHow = nfs.SetToServerTime
		err = fs.setAndFill(r, cred, ino, &set, out)
	}
	return err
}

// setAndFill writes the data of a file as the change needs it, changes attributes, and fills the
// reply.
func (fs *FS) setAndFill(r *request, cred []byte, ino *inode, set *nfs.SetAttr, out *fuse.AttrOut) error {
	// A later WRITE would undo the new times, and a replay would undo a truncation. The server may
	// refuse a later COMMIT by the old owner.
	flush := fs.push
	if set.HasSize || set.HasUID || set.HasGID || set.HasMode {
		flush = fs.sync
	}
	if err := flush(r, ino); err != nil {
		return err
	}
	var wcc nfs.Change
	if err := fs.setAttrs(r, cred, ino, set, &wcc); err != nil {
		return fs.checkStale(ino, err)
	}
	var a nfs.Attr
	cacheable, err := fs.attrAfterChange(r, cred, ino, &wcc, &a)
	if err != nil {
		return err
	}
	fs.fillAttrOut(ino, &a, cacheable, out)
	return nil
}

// attrAfterChange sets a to the attributes after a change by this mount. attrAfterChange uses the
// reply wcc if those attributes are valid, else it sends a GETATTR. cacheable is as in fetch.
func (fs *FS) attrAfterChange(ctx context.Context, cred []byte, ino *inode, wcc *nfs.Change,
	a *nfs.Attr) (cacheable bool, err error) {
	if wcc.HasAfter {
		var ok bool
		if *a, ok = ino.attr.TakeChanged(); ok {
			return true, nil
		}
	}
	return fs.fetch(ctx, cred, ino, a)
}

// setAttrs sends a SETATTR and stores the attributes of the reply. The caller passes an error to
// checkStale.
func (fs *FS) setAttrs(ctx context.Context, cred []byte, ino *inode, set *nfs.SetAttr, wcc *nfs.Change) error {
	fs.invalidateAttr(ino)
	for try := 0; ; try++ {
		start := fs.attrs.Now()
		var err error
		*wcc, err = fs.server.SetAttr(ctx, cred, ino.fh, *set)
		fs.dropACLs(ino) // a new mode changes the ACL
		if fs.busy.Retry(ctx, err, try) {
			continue
		}
		if err != nil {
			fs.invalidateAttr(ino)
			return err
		}
		if set.HasSize {
			ino.attr.Truncated(set.Size)
		}
		fs.attrs.NewEpoch(&ino.attr) // the change may grant or revoke rights
		fs.updateChange(ino, wcc, start, true)
		return nil
	}
}

// sattrOf converts a SETATTR request of the kernel to sattr3 (RFC 1813 §2.5).
func sattrOf(in *fuse.SetAttrIn) (set nfs.SetAttr) {
	if mode, ok := in.GetMode(); ok {
		set.HasMode, set.Mode = true, mode&nfs.ModeMask
	}
	if in.Valid&fuse.FATTR_UID != 0 {
		set.HasUID, set.UID = true, in.Uid
	}
	if in.Valid&fuse.FATTR_GID != 0 {
		set.HasGID, set.GID = true, in.Gid
	}
	if in.Valid&fuse.FATTR_SIZE != 0 {
		set.HasSize, set.Size = true, in.Size
	}
	set.AtimeHow, set.Atime = timeHow(in.Valid, fuse.FATTR_ATIME, fuse.FATTR_ATIME_NOW, in.Atime, in.Atimensec)
	set.MtimeHow, set.Mtime = timeHow(in.Valid, fuse.FATTR_MTIME, fuse.FATTR_MTIME_NOW, in.Mtime, in.Mtimensec)
	return set
}

func timeHow(valid, bit, now uint32, sec uint64, nsec uint32) (nfs.TimeHow, nfs.Time) {
	switch {
	case valid&now != 0:
		return nfs.SetToServerTime, nfs.Time{}
	case valid&bit == 0:
		return nfs.DontChange, nfs.Time{}
	case int64(sec) < 0: // nfstime3 cannot represent times before 1970
		return nfs.SetToClientTime, nfs.Time{}
	case sec > 1<<32-1:
		return nfs.SetToClientTime, nfs.Time{Sec: 1<<32 - 1}
	}
	return nfs.SetToClientTime, nfs.Time{Sec: uint32(sec), Nsec: nsec}
}

// Access handles access(2) where the kernel does not check permissions itself.
func (fs *FS) Access(k *kernel.Request, in *fuse.AccessIn) fuse.Status {
	r, ino, err := fs.onNode(k)
	if err == nil {
		err = fs.access(r, ino, in.Mask)
	}
	return fs.end(r, err)
}

func (fs *FS) access(r *request, ino *inode, mask uint32) error {
	var want uint32
	if mask&unix.R_OK != 0 {
		want |= nfs.AccessRead
	}
	if mask&unix.W_OK != 0 {
		want |= nfs.AccessModify
	}
	if mask&unix.X_OK != 0 {
		if ino.attr.IsDir() {
			want |= nfs.AccessLookup
		} else {
			want |= nfs.AccessExecute
		}
	}
	res, err := fs.askAccess(r, r.cred, ino, want)
	if err != nil {
		return err
	}
	if res.Access&want != want {
		return syscall.EACCES
	}
	return nil
}

// askAccess asks the server for rights.
func (fs *FS) askAccess(ctx context.Context, cred []byte, ino *inode, want uint32) (nfs.OpenResult, error) {
	return fs.askRights(ctx, ino, func() (nfs.OpenResult, error) {
		res, err := fs.server.Access(ctx, cred, ino.fh, want)
		return nfs.OpenResult{AccessResult: res}, err
	})
}

// askRights makes a call that asks for rights, and stores the attributes of the reply.
func (fs *FS) askRights(ctx context.Context, ino *inode, call func() (nfs.OpenResult, error)) (nfs.OpenResult, error) {
	for try := 0; ; try++ {
		start := fs.attrs.Now()
		res, err := call()
		if fs.busy.Retry(ctx, err, try) {
			continue
		}
		if err != nil {
			return res, fs.checkStale(ino, err)
		}
		if res.Attr.Present {
			fs.updateAttr(ino, &res.Attr.Attr, start)
		}
		return res, nil
	}
}

// Readlink handles readlink(2).
func (fs *FS) Readlink(k *kernel.Request) (path []byte, status fuse.Status) {
	r, ino, err := fs.onNode(k)
	if err == nil {
		path, err = fs.readlink(r, ino)
	}
	return path, fs.end(r, err)
}

func (fs *FS) readlink(r *request, ino *inode) ([]byte, error) {
	// The server may write the path with RDMA. Not every device reaches memory outside the pool.
	buf := fs.data.Buffer(r, r.cred)
	if buf == nil {
		return nil, syscall.EINTR
	}
	t := &r.target
	t.useBuffer(buf)
	defer t.dropBuffer(fs)
	for try := 0; ; try++ {
		start := fs.attrs.Now()
		res, err := fs.server.ReadLink(r, r.cred, ino.fh, t.buf[:nfs.MaxPath])
		if nfs.IsBusy(err) {
			if _ = fs.pauseRead(r, r.cred, &err, t, 0, try); err == nil {
				continue
			}
		}
		if nfs.HasStatus(err, nfs.ErrStale) {
			fs.reopens.expect(r.pid)
		}
		if err != nil {
			return nil, fs.checkStale(ino, err)
		}
		if res.Attr.Present {
			fs.updateAttr(ino, &res.Attr.Attr, start)
		}
		return slices.Clone(t.buf[:res.N]), nil
	}
}

// statfsBlock is the block size in bytes that statfs(2) reports.
const statfsBlock = 4096

// StatFs handles statfs(2).
func (fs *FS) StatFs(k *kernel.Request, out *fuse.StatfsOut) fuse.Status {
	r, ino, err := fs.onNode(k)
	if err == nil {
		err = fs.statfs(r, ino, out)
	}
	return fs.end(r, err)
}

func (fs *FS) statfs(r *request, ino *inode, out *fuse.StatfsOut) error {
	var res nfs.FSStatResult
	for try := 0; ; try++ {
		var err error
		res, err = fs.server.FSStat(r, r.cred, ino.fh)
		if fs.busy.Retry(r, err, try) {
			continue
		}
		if err != nil {
			return fs.checkStale(ino, err)
		}
		break
	}
	*out = fuse.StatfsOut{
		Blocks: res.TotalBytes / statfsBlock, Bfree: res.FreeBytes / statfsBlock, Bavail: res.AvailBytes / statfsBlock,
		Files: res.TotalFiles, Ffree: res.FreeFiles,
		Bsize: statfsBlock, Frsize: statfsBlock, NameLen: nfs.MaxName,
	}
	return nil
}
