package vfs

import (
	"context"
	"errors"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
)

// statBlock is the unit of st_blocks in bytes (stat(2)).
const statBlock = 512

var modeOfType = [...]uint32{
	nfs.Regular:     syscall.S_IFREG,
	nfs.Directory:   syscall.S_IFDIR,
	nfs.BlockDevice: syscall.S_IFBLK,
	nfs.CharDevice:  syscall.S_IFCHR,
	nfs.Symlink:     syscall.S_IFLNK,
	nfs.Socket:      syscall.S_IFSOCK,
	nfs.FIFO:        syscall.S_IFIFO,
}

// fileMode returns the st_mode for attributes.
func fileMode(a *nfs.Attr) uint32 {
	if int(a.Type) >= len(modeOfType) {
		return a.Mode & nfs.ModeMask
	}
	return modeOfType[a.Type] | a.Mode&nfs.ModeMask
}

// nsec returns the server's nanoseconds, below one second as the kernel requires.
func nsec(t nfs.Time) uint32 { return min(t.Nsec, uint32(time.Second-1)) }

// fillAttr sets out to the attributes a of the server. The size includes data that the server may
// have lost.
func (fs *FS) fillAttr(ino *inode, out *fuse.Attr, a *nfs.Attr) {
	*out = fuse.Attr{
		Ino: a.FileID, Size: max(a.Size, ino.data.Load().End()), Blocks: (a.Used + statBlock - 1) / statBlock,
		Atime: uint64(a.Atime.Sec), Atimensec: nsec(a.Atime),
		Mtime: uint64(a.Mtime.Sec), Mtimensec: nsec(a.Mtime),
		Ctime: uint64(a.Ctime.Sec), Ctimensec: nsec(a.Ctime),
		Mode: fileMode(a), Nlink: a.Nlink, Owner: fuse.Owner{Uid: a.UID, Gid: a.GID},
		Blksize: uint32(fs.opts.WSize),
	}
	if a.Type == nfs.BlockDevice || a.Type == nfs.CharDevice {
		// The kernel's FUSE protocol carries a device in 32 bits, encoded by new_encode_dev.
		out.Rdev = uint32(unix.Mkdev(a.Rdev.Major, a.Rdev.Minor))
	}
}

// updateAttr is attr.Cache.Update. When another client changed a directory, its names expire.
func (fs *FS) updateAttr(ino *inode, a *nfs.Attr, start uint64) bool {
	stored, foreign := fs.attrs.Update(&ino.attr, a, start)
	if foreign {
		fs.expireAll(ino)
	}
	return stored
}

// updateChange is attr.Cache.Changed. When another client changed a directory, its names expire.
func (fs *FS) updateChange(ino *inode, ch *nfs.Change, start uint64, alone bool) {
	foreign := fs.attrs.Changed(&ino.attr, ch, start, alone)
	ino.acls.Load().Keep(ch)
	if foreign {
		fs.expireAll(ino)
	}
}

// invalidateAttr marks the attributes as outdated because the node is being changed.
func (fs *FS) invalidateAttr(ino *inode) { fs.attrs.Invalidate(&ino.attr) }

// fetchTries is the number of GETATTR calls while other calls keep changing the node.
const fetchTries = 3

// fetch gets the node's attributes from the server (GETATTR) and stores them. cacheable is false
// when other calls of this mount kept changing the node: the attributes must then not be cached.
func (fs *FS) fetch(ctx context.Context, cred []byte, ino *inode, a *nfs.Attr) (cacheable bool, err error) {
	for range fetchTries {
		start := fs.attrs.Now()
		if err := fs.getAttr(ctx, cred, ino, a); err != nil {
			return false, err
		}
		if fs.updateAttr(ino, a, start) {
			*a, _ = ino.attr.Attr()
			return true, nil
		}
	}
	a.Size = max(a.Size, fs.attrs.View(&ino.attr).Written)
	return false, nil
}

func (fs *FS) getAttr(ctx context.Context, cred []byte, ino *inode, a *nfs.Attr) error {
	for try := 0; ; try++ {
		var err error
		*a, err = fs.server.GetAttr(ctx, cred, ino.fh)
		if fs.busy.Retry(ctx, err, try) {
			continue
		}
		if err == nil && ino.attr.IsOther(a) {
			fs.dropStale(ino)
			return syscall.ESTALE // the server reused the handle for another object
		}
		return fs.checkStale(ino, err)
	}
}

// checkStale returns err. checkStale drops the node when the server no longer knows the node's
// handle. checkStale counts and reports an invalid reply.
func (fs *FS) checkStale(ino *inode, err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, nfs.ErrMalformed) {
		_ = fs.invalidReply(ino, err.Error())
		return err // for the error of a mount; the kernel gets EIO
	}
	if nfs.IsStale(err) {
		fs.dropStale(ino)
	}
	return err
}

// dropStale removes a node from lookups because the server no longer knows its handle. The kernel
// looks up each name of the path once more and repeats the call. More directories of the path may
// be stale, so the server must answer all these lookups.
func (fs *FS) dropStale(ino *inode) {
	fs.Counters.Stale.Add(1)
	fs.inodes.stale(ino)
	fs.names.ForgetAnswers()
	fs.invalidateAttr(ino)
}

func toStatus(err error) fuse.Status { return fuse.Status(nfs.CallErrno(err)) }
