package vfs

import (
	"context"
	"errors"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
)

// NFSv3 servers have no open files: a file without a name is gone, even for processes that have it
// open. An NFSv3 client therefore renames the file of an open handle to a hidden name ("silly
// rename"). The client removes the hidden name after the last close.

// sillyPrefix begins the hidden names. Servers have cleanup jobs that look for it after client
// crashes.
const sillyPrefix = ".nfs"

// A sillyName is the hidden name of a removed file that is still open.
type sillyName struct {
	dir  *inode
	name string
	cred []byte // of the user who removed the file
	kept keptSlot
}

// setSilly sets the hidden name of ino.
func (ino *inode) setSilly(silly *sillyName) {
	ino.silly.Store(silly)
	ino.attr.SetHidden(true)
}

// takeSillyName removes and returns the hidden name of ino, or nil when ino has none.
func (ino *inode) takeSillyName() *sillyName {
	silly := ino.silly.Swap(nil)
	if silly != nil {
		ino.attr.SetHidden(false)
	}
	return silly
}

// Unlink handles unlink(2).
func (fs *FS) Unlink(k *kernel.Request, name string) fuse.Status {
	r, dir, err := fs.onNode(k)
	if err == nil {
		err = fs.unlink(r, dir, name)
	}
	return fs.end(r, err)
}

func (fs *FS) unlink(r *request, dir *inode, name string) error {
	for try := 0; ; try++ {
		err := fs.unlinkOnce(r, dir, name)
		if !fs.busy.Retry(r, err, try) {
			return r.removedBefore(err)
		}
	}
}

// unlinkOnce removes or hides a name. unlinkOnce returns NFS3ERR_JUKEBOX to its caller, so that
// opens need not wait during the delay before the retry.
func (fs *FS) unlinkOnce(r *request, dir *inode, name string) error {
	b := fs.newRemoval(r, dir, name)
	defer fs.inodes.endUnresolved(b)
	if fs.inodes.beginUnresolved(b) {
		return fs.removeRPC(r, r.cred, dir, name)
	}
	target, err := fs.targetFor(r, b)
	if err != nil {
		return err
	}
	if target != nil {
		if fs.inodes.beginRemoval(target) {
			defer fs.inodes.endRemoval(target)
		} else if last, err := fs.lastName(r, target); err != nil {
			return err
		} else if last && target.isHidden(r) {
			return syscall.EBUSY // name is the hidden name of an open file
		} else if last {
			return fs.sillyRename(r, dir, name, target)
		}
		defer fs.invalidateAttr(target)
	}
	return fs.removeRPC(r, r.cred, dir, name)
}

// targetOf returns the inode that name stands for on the server. targetOf returns nil when the name
// does not exist, or when the inode is unknown and therefore not open.
func (fs *FS) targetOf(r *request, dir *inode, name string) (*inode, error) {
	fh, ok, err := fs.lookupHandle(r, dir, name)
	if !ok {
		return nil, err
	}
	return fs.inodes.find(fh), nil
}

// lookupHandle returns the handle of the object that name stands for. ok is false without an error
// when the name does not exist.
func (fs *FS) lookupHandle(r *request, dir *inode, name string) (fh nfs.Handle, ok bool, err error) {
	var res nfs.LookupResult
	_, err = fs.lookupRPC(r, dir, name, &res)
	if nfs.HasStatus(err, nfs.ErrNoEnt) {
		return fh, false, nil // the caller's next call returns this error
	}
	return res.FH, err == nil, err
}

// targetFor is targetOf for a removal that begins now. When the inode is unknown, targetFor begins
// the unresolved removal b, so that concurrent opens wait for the removal.
func (fs *FS) targetFor(r *request, b *unresolvedRemoval) (*inode, error) {
	fh, ok, err := fs.lookupHandle(r, b.dir, b.name)
	if !ok {
		return nil, err
	}
	return fs.inodes.findOrBeginUnresolved(fh, b), nil
}

// lastName reports whether the open file ino has only one name left.
func (fs *FS) lastName(r *request, ino *inode) (bool, error) {
	var a nfs.Attr
	if err := fs.getAttr(r, r.cred, ino, &a); err != nil {
		return false, err
	}
	return a.Type != nfs.Directory && a.Nlink <= 1, nil
}

// sillyRename renames an open file to a hidden name instead of removing it.
func (fs *FS) sillyRename(r *request, dir *inode, name string, target *inode) error {
	silly := target.silly.Load() // of an earlier process, or nil
	isNew := silly == nil
	if isNew {
		silly = &sillyName{dir: dir, name: r.sillyName(), cred: r.cred}
		if err := fs.state.addHidden(target, silly); err != nil {
			return err
		}
	}
	err := fs.renameRPC(r, dir, name, dir, silly.name)
	if nfs.HasStatus(err, nfs.ErrNoEnt) && r.sentBefore() && fs.isNow(r, dir, silly.name, target) {
		err = nil
	}
	if err != nil && isNew {
		fs.state.freeHidden(silly)
	}
	if err != nil {
		return err
	}
	fs.Counters.SillyRenames.Add(1)
	if isNew {
		fs.inodes.addHidden(dir)
		target.setSilly(silly)
	}
	fs.invalidateAttr(target)
	// When the last close came before silly was set, that close found no hidden name to remove.
	if fs.inodes.opensOf(target) == 0 {
		fs.spawn(func() { fs.removeSilly(background{fs}, target) })
	}
	return nil
}

// removeSilly removes the hidden name of a file, if it has one. removeSilly does nothing when the
// file was opened again through /proc/PID/fd.
func (fs *FS) removeSilly(ctx context.Context, ino *inode) {
	if !fs.inodes.beginRemoval(ino) {
		return
	}
	defer fs.inodes.endRemoval(ino)
	silly := ino.takeSillyName()
	if silly == nil {
		return
	}
	fs.inodes.beginHiddenRemoval(silly.dir)
	defer fs.inodes.endHiddenRemoval(silly.dir)
	for try := 0; fs.busy.Retry(ctx, fs.removeRPC(ctx, silly.cred, silly.dir, silly.name), try); try++ {
	}
	fs.state.freeHidden(silly)
	fs.invalidateAttr(ino)
	fs.dropAttr(silly.dir) // the kernel did not request this change
}

func (fs *FS) removeRPC(ctx context.Context, cred []byte, dir *inode, name string) error {
	start := fs.attrs.Now()
	wcc, err := fs.server.Remove(ctx, cred, dir.fh, name)
	fs.attrs.Mark(&fs.attrs.Removal)
	fs.nameRemoved(dir, name)
	fs.updateChange(dir, &wcc, start, true)
	return fs.checkStale(dir, err)
}

// Rmdir handles rmdir(2).
func (fs *FS) Rmdir(k *kernel.Request, name string) fuse.Status {
	r, dir, err := fs.onNode(k)
	if err == nil {
		err = fs.rmdir(r, dir, name)
	}
	return fs.end(r, err)
}

func (fs *FS) rmdir(r *request, dir *inode, name string) error {
	err := r.removedBefore(fs.rmdirRPC(r, dir, name))
	if !errors.Is(err, syscall.ENOTEMPTY) {
		return err
	}
	target, lookupErr := fs.targetOf(r, dir, name)
	if lookupErr != nil || target == nil {
		return err
	}
	// An earlier process may have removed the hidden names.
	if !fs.awaitHiddenRemovals(r, target) && !r.sentBefore() {
		return err
	}
	return r.removedBefore(fs.rmdirRPC(r, dir, name))
}

// rmdirRPC sends an RMDIR. rmdirRPC returns ENOTEMPTY for a directory that is not empty.
func (fs *FS) rmdirRPC(r *request, dir *inode, name string) error {
	for try := 0; ; try++ {
		start := fs.attrs.Now()
		wcc, err := fs.server.Rmdir(r, r.cred, dir.fh, name)
		if fs.busy.Retry(r, err, try) {
			continue
		}
		fs.nameRemoved(dir, name)
		fs.updateChange(dir, &wcc, start, true)
		// Some servers return NFS3ERR_EXIST.
		if nfs.HasStatus(err, nfs.ErrNotEmpty) || nfs.HasStatus(err, nfs.ErrExist) {
			return syscall.ENOTEMPTY
		}
		return fs.checkStale(dir, err)
	}
}

// Rename handles rename(2). NFSv3 supports none of the flags of renameat2(2).
func (fs *FS) Rename(k *kernel.Request, oldName string, newDir uint64, newName string, flags uint32) fuse.Status {
	r, dir, err := fs.onNode(k)
	switch {
	case err != nil:
	case flags != 0:
		err = syscall.EINVAL
	default:
		err = fs.rename(r, dir, oldName, fs.inodes.get(newDir), newName)
	}
	return fs.end(r, err)
}

func (fs *FS) rename(r *request, from *inode, oldName string, to *inode, newName string) error {
	if to == nil {
		return syscall.ESTALE
	}
	for try := 0; ; try++ {
		err := fs.renameOnce(r, from, oldName, to, newName)
		if nfs.HasStatus(err, nfs.ErrNoEnt) && r.sentBefore() {
			if _, ok, _ := fs.lookupHandle(r, to, newName); ok {
				return nil // an earlier process has renamed it
			}
		}
		if fs.busy.Retry(r, err, try) {
			continue
		}
		if err != nil && r.sentBefore() {
			if target := fs.hiddenBefore[r.sillyName()]; target != nil {
				fs.unhide(r, to, newName, target)
			}
		}
		return err
	}
}

// renameOnce renames a file. renameOnce hides the target if the target is open. renameOnce returns
// NFS3ERR_JUKEBOX to its caller, as unlinkOnce does.
func (fs *FS) renameOnce(r *request, from *inode, oldName string, to *inode, newName string) error {
	b := fs.newRemoval(r, to, newName)
	b.fromDir, b.fromName = from, oldName
	defer fs.inodes.endUnresolved(b)
	if fs.inodes.beginUnresolved(b) {
		return fs.renameRPC(r, from, oldName, to, newName)
	}
	target, err := fs.targetFor(r, b)
	if err != nil {
		return err
	}
	if target == nil {
		return fs.renameRPC(r, from, oldName, to, newName)
	}
	defer fs.invalidateAttr(target)
	if fs.inodes.beginRemoval(target) {
		defer fs.inodes.endRemoval(target)
		return fs.renameRPC(r, from, oldName, to, newName)
	}
	last, err := fs.lastName(r, target)
	if err != nil {
		return err
	}
	if !last || target.isHidden(r) || fs.isNamed(r, from, oldName, target) {
		return fs.renameRPC(r, from, oldName, to, newName)
	}
	if err := fs.sillyRename(r, to, newName, target); err != nil {
		return err
	}
	if err = fs.renameWaiting(r, from, oldName, to, newName); err != nil {
		fs.unhide(r, to, newName, target)
	}
	return err
}

// isHidden reports whether an open file has a hidden name that another request has given to it.
func (ino *inode) isHidden(r *request) bool {
	silly := ino.silly.Load()
	return silly != nil && (r.state == nil || silly.name != r.sillyName())
}

// removedBefore returns nil for NFS3ERR_NOENT if an earlier process may have removed the name.
func (r *request) removedBefore(err error) error {
	if nfs.HasStatus(err, nfs.ErrNoEnt) && r.sentBefore() {
		return nil
	}
	return err
}

// isNow reports whether name stands for ino.
func (fs *FS) isNow(r *request, dir *inode, name string, ino *inode) bool {
	fh, ok, err := fs.lookupHandle(r, dir, name)
	return err == nil && ok && fh == ino.fh
}

// isNamed reports whether name stands for ino. A file that is renamed to itself must not be hidden.
func (fs *FS) isNamed(r *request, dir *inode, name string, ino *inode) bool {
	var res nfs.LookupResult
	_, err := fs.lookupRPC(r, dir, name, &res)
	return err != nil || res.FH == ino.fh
}

// unhide renames a hidden file back to its name after the rename over it failed.
func (fs *FS) unhide(r *request, dir *inode, name string, ino *inode) {
	silly := ino.takeSillyName()
	if silly == nil {
		return
	}
	if fs.renameWaiting(r, silly.dir, silly.name, dir, name) != nil {
		ino.setSilly(silly)
		return
	}
	fs.inodes.beginHiddenRemoval(silly.dir)
	fs.inodes.endHiddenRemoval(silly.dir)
	fs.state.freeHidden(silly)
}

// renameWaiting renames, and retries after NFS3ERR_JUKEBOX.
func (fs *FS) renameWaiting(r *request, from *inode, oldName string, to *inode, newName string) (err error) {
	for try := 0; ; try++ {
		if err = fs.renameRPC(r, from, oldName, to, newName); !fs.busy.Retry(r, err, try) {
			return err
		}
	}
}

func (fs *FS) renameRPC(r *request, from *inode, oldName string, to *inode, newName string) error {
	start := fs.attrs.Now()
	res, err := fs.server.Rename(r, r.cred, from.fh, oldName, to.fh, newName)
	end := fs.attrs.RenameEnded()
	fs.nameMoved(from, oldName, to, newName)
	seen, only := fs.attrs.OnlyRename(start, end)
	fs.updateChange(from, &res.From, start, true)
	if from != to {
		fs.updateChange(to, &res.To, start, true)
	}
	if only {
		from.attr.SawRenames(start, seen)
		to.attr.SawRenames(start, seen)
	}
	if nfs.HasStatus(err, nfs.ErrStale) {
		fs.invalidateAttr(to)
	}
	return err
}
