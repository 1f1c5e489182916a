package vfs

import (
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/attr"
)

// With Options.Writeback, the kernel gathers small writes in its pages and sends them later in
// large WRITEs (FUSE_WRITEBACK_CACHE). This package then sends them as other writes. The kernel
// sends all pages of a file before FLUSH and FSYNC, so close(2) and fsync(2) keep their promises.
//
// The kernel determines the size, mtime and ctime of a file that it knows, and ignores those of the
// server. The changes of other clients to these files are therefore not seen: the option is for a
// tree that one client uses alone. This has consequences here:
//
//   - The kernel reads a page before it changes a part of it, also through a file that is open for
//     writing only. A user without the right to read gets an open file without pages (readsPages).
//   - The kernel knows the end of the file, so data of O_APPEND goes through the pages.
//   - The kernel sends the mtime of a file in a SETATTR with an open file, after the data. This
//     call needs the credential of the open file, as the data does. After a change of a name or an
//     ACL, the kernel sends the mtime also without an open file (isTimeFlush).
//   - touch(1) sends the kernel's mtime, which only the owner may set (isTouch).
//   - The kernel adds its mtime to a truncation. A user who is not the owner may truncate a file,
//     but may not set a time. The server sets the mtime instead.
//   - The kernel reports the error of a background WRITE by itself to some of the open files. The
//     WRITE therefore does not take the error from its open file (reportsErrors).
//   - The pages can have data when a lock is requested or released. The kernel then sends them
//     (flushPages).
//   - Set-user-ID programs: HANDLE_KILLPRIV_V2 makes the kernel send writes to these files at once,
//     so that the server clears the bits before a program can run the new content. With
//     HANDLE_KILLPRIV alone, the bits would stay as long as the data is in the pages.
//
// When the daemon is killed, the pages stay in the kernel, and the next daemon gets them.

// writebackCapabilities returns the capabilities that Options.Writeback needs.
func (fs *FS) writebackCapabilities() uint64 {
	if !fs.opts.Writeback {
		return 0
	}
	return fuse.CAP_WRITEBACK_CACHE | fuse.CAP_HANDLE_KILLPRIV_V2
}

// limitWriteback clears Options.Writeback if the kernel that sent an INIT request cannot have it.
func (fs *FS) limitWriteback(init []byte) {
	fs.opts.Writeback = fs.opts.Writeback && kernel.CanWriteback(init)
}

// Writeback reports whether a mounted FS uses Options.Writeback, which needs Linux 6.6.
func (fs *FS) Writeback() bool { return fs.opts.Writeback }

// direct reports whether the kernel must not cache the data of an open. Only the server knows the
// end of the file for data to append, except with Options.Writeback.
func (fs *FS) direct(flags uint32) bool {
	appends := flags&syscall.O_APPEND != 0 && flags&syscall.O_ACCMODE != syscall.O_RDONLY
	return flags&syscall.O_DIRECT != 0 || appends && !fs.opts.Writeback
}

// readsPages reports whether the kernel may read pages of a file that is opened with flags although
// the program does not.
func (fs *FS) readsPages(flags uint32) bool {
	return fs.opts.Writeback && flags&syscall.O_ACCMODE == syscall.O_WRONLY && !fs.direct(flags)
}

// reportsErrors reports whether a WRITE returns the error of earlier ones.
func (fs *FS) reportsErrors(in *fuse.WriteIn) bool {
	return !fs.opts.Writeback || in.WriteFlags&fuse.WRITE_CACHE == 0
}

// isTimeFlush reports whether a SETATTR comes from the kernel, which has changed a time itself, and
// not from a program. If no file is open for writing, the SETATTR has no file. It then has the
// credential of the program that changed a name or the ACL (isLoneFlush).
func (fs *FS) isTimeFlush(ino *inode, in *fuse.SetAttrIn) bool {
	const times = fuse.FATTR_MTIME | fuse.FATTR_CTIME
	switch {
	case !fs.opts.Writeback:
		return false
	case in.Valid&fuse.FATTR_FH != 0:
		return in.Valid&times != 0 && in.Valid&^(times|fuse.FATTR_FH) == 0
	}
	return in.Valid == times && fs.isLoneFlush(ino, in.Uid, sattrOf(in).Mtime)
}

// isLoneFlush reports whether a SETATTR of the mtime without a file is a flush. It is one if the
// server has the mtime already, or if a name may have changed since the attributes were received.
// The kernel refuses utimensat(2) of other users than the owner and root.
func (fs *FS) isLoneFlush(ino *inode, uid uint32, mtime nfs.Time) bool {
	v := fs.attrs.View(&ino.attr)
	return hasMtime(&v, mtime) || v.Known && (v.Unseen || uid != 0 && uid != v.UID)
}

// hasMtime reports whether the server has the mtime of a file, as far as this mount knows.
func hasMtime(v *attr.View, mtime nfs.Time) bool { return v.Known && !v.Pending && v.Mtime == mtime }

// flushTimes sets the mtime that the kernel has determined. A user who may write to a file but does
// not own it may not set times: the file then has the time of the last WRITE. The file may also be
// removed. The kernel would report an error to the next fsync(2) or close(2) of any program.
func (fs *FS) flushTimes(r *request, ino *inode, in *fuse.SetAttrIn, out *fuse.AttrOut) error {
	cred, set := r.cred, sattrOf(in)
	h := fs.fileOf(in)
	if h != nil {
		cred = h.cred
	}
	v := fs.attrs.View(&ino.attr)
	if set != (nfs.SetAttr{}) && (h != nil || !hasMtime(&v, set.Mtime)) {
		if err := fs.push(r, ino); err != nil {
			return err
		}
		var wcc nfs.Change
		err := fs.setAttrs(r, cred, ino, &set, &wcc)
		if e := nfs.CallErrno(err); e != 0 && e != syscall.EPERM && e != syscall.EACCES && e != syscall.ESTALE {
			return fs.checkStale(ino, err)
		}
	}
	a, _ := ino.attr.Attr()
	fs.fillAttr(ino, &out.Attr, &a) // the kernel ignores the reply to a flush
	out.SetTimeout(0)
	return nil
}

// isTouch reports whether a SETATTR sets both times to the current time. The kernel then sends its
// own time as mtime and ctime. Other users than the owner may set both times only to the time of
// the server.
func (fs *FS) isTouch(in *fuse.SetAttrIn) bool {
	const times = fuse.FATTR_ATIME_NOW | fuse.FATTR_MTIME | fuse.FATTR_CTIME
	return fs.opts.Writeback && in.Valid&times == times && in.Mtime == in.Ctime && in.Mtimensec == in.Ctimensec
}

// flushPages makes the kernel send the data in its pages of a file, and drop them.
func (fs *FS) flushPages(ino *inode) {
	if fs.opts.Writeback {
		fs.dropCache(ino)
	}
}
