package fusefs

import (
	"context"
	"slices"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
)

// GetAttr answers stat(2). The kernel keeps attributes for as long as it was told, so that a
// request means that it wants new ones, or that a change made it forget the old ones.
func (fs *FS) GetAttr(cancel <-chan struct{}, in *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status {
	r := fs.begin(OpGetAttr, cancel, &in.InHeader)
	return fs.end(OpGetAttr, r, fs.getattr(r, in.NodeId, out))
}

func (fs *FS) getattr(r *request, id uint64, out *fuse.AttrOut) error {
	ino := fs.inodes.get(id)
	if ino == nil {
		return syscall.ESTALE
	}
	if err := fs.push(r, ino); err != nil {
		return err
	}
	var a nfs3.Attr
	if left, ok := fs.news(ino, &a); ok {
		fs.fillAttr(&out.Attr, &a)
		out.SetTimeout(left)
		return nil
	}
	settled, err := fs.fetch(r, r.cred, ino, &a)
	if err != nil {
		return err
	}
	fs.attrOut(ino, &a, settled, out)
	return nil
}

func (fs *FS) attrOut(ino *inode, a *nfs3.Attr, settled bool, out *fuse.AttrOut) {
	fs.fillAttr(&out.Attr, a)
	out.SetTimeout(0)
	if settled {
		out.SetTimeout(fs.timeout(ino))
	}
}

// SetAttr answers chmod(2), chown(2), utimensat(2) and truncate(2).
func (fs *FS) SetAttr(cancel <-chan struct{}, in *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	r := fs.begin(OpSetAttr, cancel, &in.InHeader)
	return fs.end(OpSetAttr, r, fs.setattr(r, in, out))
}

func (fs *FS) setattr(r *request, in *fuse.SetAttrIn, out *fuse.AttrOut) error {
	ino := fs.inodes.get(in.NodeId)
	if ino == nil {
		return syscall.ESTALE
	}
	set := sattrOf(in)
	cred := r.cred
	if set.HasSize {
		if set.Size > fs.maxFileSize {
			return syscall.EFBIG
		}
		if h := fs.fileOf(in); h != nil {
			cred = h.cred // ftruncate(2): what counts is what the file was opened with
		}
	}
	if set == (nfs3.SetAttr{}) {
		return fs.getattr(r, in.NodeId, out)
	}
	// A WRITE that arrived later would undo the new times, and a replay would undo a truncation. A
	// COMMIT that came later might be refused to the old owner.
	settle := fs.push
	if set.HasSize || set.HasUID || set.HasGID || set.HasMode {
		settle = fs.sync
	}
	if err := settle(r, ino); err != nil {
		return err
	}
	var wcc nfs3.WccData
	if err := fs.setAttrs(r, cred, ino, &set, &wcc); err != nil {
		return err
	}
	if ino.validAfter(&wcc) {
		var a nfs3.Attr
		ino.mu.Lock()
		a, ino.untold = ino.attr, false
		ino.mu.Unlock()
		fs.attrOut(ino, &a, true, out)
		return nil
	}
	var a nfs3.Attr
	settled, err := fs.fetch(r, cred, ino, &a)
	if err != nil {
		return err
	}
	fs.attrOut(ino, &a, settled, out)
	return nil
}

func (ino *inode) validAfter(wcc *nfs3.WccData) bool {
	ino.mu.Lock()
	defer ino.mu.Unlock()
	return wcc.HasAfter && ino.valid
}

// setAttrs makes the SETATTR call and absorbs its result.
func (fs *FS) setAttrs(ctx context.Context, cred []byte, ino *inode, set *nfs3.SetAttr, wcc *nfs3.WccData) error {
	fs.outdate(ino)
	for try := 0; ; try++ {
		start := fs.tick()
		err := fs.client.SetAttr(ctx, cred, ino.fh, set, nil, wcc)
		if fs.again(ctx, err, try) {
			continue
		}
		if err != nil {
			fs.outdate(ino)
			return fs.nodeErr(ino, err)
		}
		if set.HasSize {
			ino.mu.Lock()
			ino.size = set.Size
			ino.mu.Unlock()
		}
		fs.absorbWcc(ino, wcc, start, true)
		return nil
	}
}

// sattrOf is what a SETATTR request of the kernel's asks for, as sattr3 (RFC 1813 §2.5).
func sattrOf(in *fuse.SetAttrIn) (set nfs3.SetAttr) {
	if mode, ok := in.GetMode(); ok {
		set.HasMode, set.Mode = true, mode&nfs3.ModeMask
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

func timeHow(valid, bit, now uint32, sec uint64, nsec uint32) (nfs3.TimeHow, nfs3.Time3) {
	switch {
	case valid&now != 0:
		return nfs3.SetToServerTime, nfs3.Time3{}
	case valid&bit == 0:
		return nfs3.DontChange, nfs3.Time3{}
	case int64(sec) < 0: // before 1970: nfstime3 has no such time
		return nfs3.SetToClientTime, nfs3.Time3{}
	case sec > 1<<32-1:
		return nfs3.SetToClientTime, nfs3.Time3{Sec: 1<<32 - 1}
	}
	return nfs3.SetToClientTime, nfs3.Time3{Sec: uint32(sec), Nsec: nsec}
}

// Access answers access(2) where the kernel does not judge by itself.
func (fs *FS) Access(cancel <-chan struct{}, in *fuse.AccessIn) fuse.Status {
	r := fs.begin(OpAccess, cancel, &in.InHeader)
	return fs.end(OpAccess, r, fs.access(r, in))
}

func (fs *FS) access(r *request, in *fuse.AccessIn) error {
	ino := fs.inodes.get(in.NodeId)
	if ino == nil {
		return syscall.ESTALE
	}
	var want uint32
	if in.Mask&unix.R_OK != 0 {
		want |= nfs3.AccessRead
	}
	if in.Mask&unix.W_OK != 0 {
		want |= nfs3.AccessModify
	}
	if in.Mask&unix.X_OK != 0 {
		ino.mu.Lock()
		if ino.isDir() {
			want |= nfs3.AccessLookup
		} else {
			want |= nfs3.AccessExecute
		}
		ino.mu.Unlock()
	}
	var res nfs3.AccessResult
	if err := fs.askAccess(r, r.cred, ino, want, &res); err != nil {
		return err
	}
	if res.Access&want != want {
		return syscall.EACCES
	}
	return nil
}

// askAccess makes the ACCESS call and absorbs its attributes.
func (fs *FS) askAccess(ctx context.Context, cred []byte, ino *inode, want uint32, res *nfs3.AccessResult) error {
	for try := 0; ; try++ {
		start := fs.tick()
		err := fs.client.Access(ctx, cred, ino.fh, want, res)
		if fs.again(ctx, err, try) {
			continue
		}
		if err != nil {
			return fs.nodeErr(ino, err)
		}
		if res.Attr.Present {
			fs.absorb(ino, &res.Attr.Attr, start)
		}
		return nil
	}
}

// Readlink answers readlink(2).
func (fs *FS) Readlink(cancel <-chan struct{}, h *fuse.InHeader) ([]byte, fuse.Status) {
	r := fs.begin(OpReadlink, cancel, h)
	path, err := fs.readlink(r, h.NodeId)
	return path, fs.end(OpReadlink, r, err)
}

func (fs *FS) readlink(r *request, id uint64) ([]byte, error) {
	ino := fs.inodes.get(id)
	if ino == nil {
		return nil, syscall.ESTALE
	}
	// the server may write to it, as to that of a READ: not every device reaches other memory
	buf := fs.getBuffer(r)
	if buf == nil {
		return nil, syscall.EINTR
	}
	defer fs.buffers.Put(buf)
	for try := 0; ; try++ {
		var res nfs3.ReadLinkResult
		start := fs.tick()
		err := fs.client.ReadLink(r, r.cred, ino.fh, buf[:nfs3.MaxPath], &res)
		if fs.again(r, err, try) {
			continue
		}
		if hasStatus(err, nfs3.ErrStale) {
			fs.reopens.expect(r.pid)
		}
		if err != nil {
			return nil, fs.nodeErr(ino, err)
		}
		if res.Attr.Present {
			fs.absorb(ino, &res.Attr.Attr, start)
		}
		return slices.Clone(buf[:res.N]), nil
	}
}

// statfsBlock is the unit in octets in which statfs(2) counts.
const statfsBlock = 4096

// StatFs answers statfs(2).
func (fs *FS) StatFs(cancel <-chan struct{}, h *fuse.InHeader, out *fuse.StatfsOut) fuse.Status {
	r := fs.begin(OpStatFs, cancel, h)
	return fs.end(OpStatFs, r, fs.statfs(r, h.NodeId, out))
}

func (fs *FS) statfs(r *request, id uint64, out *fuse.StatfsOut) error {
	ino := fs.inodes.get(id)
	if ino == nil {
		return syscall.ESTALE
	}
	var res nfs3.FSStatResult
	for try := 0; ; try++ {
		err := fs.client.FSStat(r, r.cred, ino.fh, &res)
		if fs.again(r, err, try) {
			continue
		}
		if err != nil {
			return fs.nodeErr(ino, err)
		}
		break
	}
	*out = fuse.StatfsOut{
		Blocks: res.TotalBytes / statfsBlock, Bfree: res.FreeBytes / statfsBlock, Bavail: res.AvailBytes / statfsBlock,
		Files: res.TotalFiles, Ffree: res.FreeFiles,
		Bsize: statfsBlock, Frsize: statfsBlock, NameLen: nfs3.MaxName,
	}
	return nil
}
