package vfs

import (
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
)

// createTries bounds the attempts of a create whose name other clients keep creating and removing.
const createTries = 16

// Create handles open(2) with O_CREAT of a name that the kernel does not know.
func (fs *FS) Create(k *kernel.Request, in *fuse.CreateIn, name string, out *fuse.CreateOut) fuse.Status {
	r, dir, err := fs.onNode(k)
	if err == nil {
		err = fs.create(r, dir, in, name, out)
	}
	return fs.end(r, err)
}

// create creates and opens a file. Another client may have created the name after the kernel's
// lookup. The kernel checks no permission for the reply to CREATE, so create makes the CREATE fail
// for a name that exists (GUARDED), and opens the existing file with all checks of an open.
func (fs *FS) create(r *request, dir *inode, in *fuse.CreateIn, name string, out *fuse.CreateOut) error {
	for try := 0; ; try++ {
		made, err := fs.createNew(r, dir, in, name, &out.EntryOut)
		if err == nil && made.own {
			return fs.openNew(r, made, in.Flags, &out.OpenOut)
		}
		if err == nil {
			return fs.openExisting(r, made.ino, in.Flags, out)
		}
		if in.Flags&syscall.O_EXCL != 0 || !nfs.HasStatus(err, nfs.ErrExist) {
			return err
		}
		ino, err := fs.lookupOnce(r, dir, name, &out.EntryOut)
		removed := err == nil && ino == nil || nfs.CallErrno(err) == syscall.ENOENT
		if removed && try < createTries {
			continue
		}
		if removed {
			return syscall.ESTALE
		}
		if err != nil {
			return err
		}
		return fs.openExisting(r, ino, in.Flags, out)
	}
}

// createNew creates a file that must not exist.
func (fs *FS) createNew(r *request, dir *inode, in *fuse.CreateIn, name string, out *fuse.EntryOut) (created, error) {
	set := fs.newMode(r, dir, in.Mode, in.Umask)
	if in.Flags&syscall.O_EXCL != 0 {
		return fs.createExclusive(r, dir, name, set, out)
	}
	return fs.createFile(r, dir, name, nfs.CreateHow{Mode: nfs.Guarded, Attr: set}, out)
}

// openNew opens a file that this call created. Its mode does not restrict this open (open(2)).
func (fs *FS) openNew(r *request, made created, flags uint32, out *fuse.OpenOut) error {
	ino := made.ino
	v := fs.attrs.View(&ino.attr)
	unchanged := fs.revalidate(ino, &v.Attr, v.Valid)
	fs.inodes.openFile(ino) // the kernel holds the directory's lock, so no removal can run
	id, err := fs.newFile(r, ino, flags, made.open)
	if err != nil {
		fs.unpin(ino)
		fs.inodes.forget(ino.id, 1)
		return err
	}
	*out = fuse.OpenOut{Fh: id, OpenFlags: fs.openFlags(flags, unchanged)}
	return nil
}

// openExisting opens a file that another client created. The lookup reference of ino in out passes
// to the kernel, or ends with an error. The kernel expects a regular file here. For any other
// object it gets ESTALE, and repeats the lookup and all its own checks.
func (fs *FS) openExisting(r *request, ino *inode, flags uint32, out *fuse.CreateOut) error {
	err := error(syscall.ESTALE)
	if out.Attr.Mode&syscall.S_IFMT == syscall.S_IFREG {
		err = fs.open(r, ino, flags, &out.OpenOut)
	}
	if err != nil {
		fs.inodes.forget(ino.id, 1)
		return err
	}
	v := fs.attrs.View(&ino.attr)
	v.Attr.Size = v.Written
	fs.fillEntryAttr(ino, &v.Attr, v.Valid, &out.EntryOut)
	return nil
}

func (fs *FS) createFile(r *request, dir *inode, name string, how nfs.CreateHow,
	out *fuse.EntryOut) (created, error) {
	return fs.createEntry(r, dir, name, nfs.Regular, out, func() (nfs.CreateResult, error) {
		return fs.server.Create(r, r.cred, dir.fh, name, how)
	})
}

// createExclusive creates a file that must not exist. The verifier lets the server recognize a
// retransmitted call. The server may store the verifier in the attributes, so a SETATTR follows
// (RFC 1813 §3.3.8).
func (fs *FS) createExclusive(r *request, dir *inode, name string, set nfs.SetAttr,
	out *fuse.EntryOut) (created, error) {
	if fs.hasDefaultACL(r, dir) {
		// The SETATTR would replace permissions that the file inherited.
		return fs.createFile(r, dir, name, nfs.CreateHow{Mode: nfs.Guarded, Attr: set}, out)
	}
	how := nfs.CreateHow{Mode: nfs.Exclusive}
	how.Verf = r.derive("verifier")
	made, err := fs.createFile(r, dir, name, how, out)
	if nfs.HasStatus(err, nfs.ErrNotSupp) {
		how = nfs.CreateHow{Mode: nfs.Guarded, Attr: set}
		return fs.createFile(r, dir, name, how, out)
	}
	if err != nil {
		return made, err
	}
	ino := made.ino
	set.AtimeHow, set.MtimeHow = nfs.SetToServerTime, nfs.SetToServerTime
	var wcc nfs.Change
	var a nfs.Attr
	var cacheable bool
	if err = fs.checkStale(ino, fs.setAttrs(r, r.cred, ino, &set, &wcc)); err == nil {
		cacheable, err = fs.attrAfterChange(r, r.cred, ino, &wcc, &a)
	}
	if err != nil {
		fs.inodes.forget(ino.id, 1)
		return made, err
	}
	fs.fillEntryAttr(ino, &a, cacheable, out)
	return made, nil
}

func modeOnly(mode uint32) nfs.SetAttr {
	return nfs.SetAttr{HasMode: true, Mode: mode & nfs.ModeMask}
}
