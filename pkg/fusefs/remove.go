package fusefs

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
)

// NFSv3 servers know no open files: a file whose last name is removed is gone, also for those who
// have it open. A client that wants to be a UNIX renames such a file instead, to a name that says
// what it is, and removes that name with the last close.

// sillyPrefix begins the names of such files; what cleans up behind crashed clients on servers
// looks for it.
const sillyPrefix = ".nfs"

// A sillyName is where an open file is that its user removed.
type sillyName struct {
	dir  *inode
	name string
	cred []byte // of who removed it
}

func newSillyName() string {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return sillyPrefix + hex.EncodeToString(b[:])
}

// Unlink answers unlink(2).
func (fs *FS) Unlink(cancel <-chan struct{}, h *fuse.InHeader, name string) fuse.Status {
	r := fs.begin(OpUnlink, cancel, h)
	return fs.end(OpUnlink, r, fs.unlink(r, h.NodeId, name))
}

func (fs *FS) unlink(r *request, dirID uint64, name string) error {
	dir := fs.inodes.get(dirID)
	if dir == nil {
		return syscall.ESTALE
	}
	for try := 0; ; try++ {
		err := fs.unlinkOnce(r, dir, name)
		if !fs.again(r, err, try) {
			return err
		}
	}
}

// unlinkOnce removes or hides a name. It gives up at NFS3ERR_JUKEBOX, so that nobody's open waits
// through the pause.
func (fs *FS) unlinkOnce(r *request, dir *inode, name string) error {
	if b := fs.inodes.beginBlind(dir, name); b != nil {
		defer fs.inodes.endBlind(b)
		return fs.removeRPC(r, r.cred, dir, name)
	}
	target, b, err := fs.targetFor(r, dir, name)
	if err != nil {
		return err
	}
	if b != nil {
		defer fs.inodes.endBlind(b)
	}
	if target != nil {
		if fs.inodes.beginRemoval(target) {
			defer fs.inodes.endRemoval(target)
		} else if last, err := fs.lastName(r, target); err != nil {
			return err
		} else if last && target.sillyName() != nil {
			return syscall.EBUSY // it is the hidden name of a file in use
		} else if last {
			return fs.sillyRename(r, dir, name, target)
		}
		defer fs.outdate(target)
	}
	return fs.removeRPC(r, r.cred, dir, name)
}

// targetOf is the inode that name stands for, or nil when the name is missing or the inode unknown,
// and so not open. Only the server can say what a name stands for.
func (fs *FS) targetOf(r *request, dir *inode, name string) (*inode, error) {
	var res nfs3.LookupResult
	if _, err := fs.lookupRPC(r, dir, name, &res); err != nil {
		if hasStatus(err, nfs3.ErrNoEnt) {
			return nil, nil // whoever asked gets the answer of its own call
		}
		return nil, err
	}
	return fs.inodes.find(res.FH), nil
}

// targetFor is targetOf for a removal that begins now: where the inode is unknown it is a blind
// one, so that nobody opens the file beside it.
func (fs *FS) targetFor(r *request, dir *inode, name string) (*inode, *blindRemoval, error) {
	var res nfs3.LookupResult
	if _, err := fs.lookupRPC(r, dir, name, &res); err != nil {
		if hasStatus(err, nfs3.ErrNoEnt) {
			return nil, nil, nil
		}
		return nil, nil, err
	}
	target, b := fs.inodes.findOrBlind(res.FH, dir, name)
	return target, b, nil
}

// lastName tells whether an open file would be gone with one name.
func (fs *FS) lastName(r *request, ino *inode) (bool, error) {
	var a nfs3.Attr
	if err := fs.getAttr(r, r.cred, ino, &a); err != nil {
		return false, err
	}
	return a.Type != nfs3.NF3DIR && a.Nlink <= 1, nil
}

// sillyRename hides an open file instead of removing it.
func (fs *FS) sillyRename(r *request, dir *inode, name string, target *inode) error {
	silly := &sillyName{dir: dir, name: newSillyName(), cred: r.cred}
	if err := fs.renameRPC(r, dir, name, dir, silly.name); err != nil {
		return err
	}
	fs.Counters.SillyRenames.Add(1)
	fs.inodes.hide(dir)
	target.mu.Lock()
	target.silly = silly
	target.mu.Unlock()
	fs.outdate(target)
	// it was closed meanwhile, and whoever closed it saw no name to remove
	if fs.inodes.opensOf(target) == 0 {
		fs.work.Go(func() { fs.removeSilly(background{fs}, target) })
	}
	return nil
}

// removeSilly removes a file that was hidden, if it was, unless it is open again, through
// /proc/PID/fd.
func (fs *FS) removeSilly(ctx context.Context, ino *inode) {
	if !fs.inodes.beginRemoval(ino) {
		return
	}
	defer fs.inodes.endRemoval(ino)
	ino.mu.Lock()
	silly := ino.silly
	ino.silly = nil
	ino.mu.Unlock()
	if silly == nil {
		return
	}
	fs.inodes.leave(silly.dir)
	defer fs.inodes.left(silly.dir)
	for try := 0; fs.again(ctx, fs.removeRPC(ctx, silly.cred, silly.dir, silly.name), try); try++ {
	}
	fs.outdate(ino)
	fs.dropAttr(silly.dir) // nobody asked for this change, so that the kernel does not know of it
}

func (fs *FS) removeRPC(ctx context.Context, cred []byte, dir *inode, name string) error {
	var wcc nfs3.WccData
	start := fs.tick()
	err := fs.client.Remove(ctx, cred, dir.fh, name, &wcc)
	fs.mark(&fs.removed)
	fs.absorbWcc(dir, &wcc, start, true)
	return fs.nodeErr(dir, err)
}

// Rmdir answers rmdir(2).
func (fs *FS) Rmdir(cancel <-chan struct{}, h *fuse.InHeader, name string) fuse.Status {
	r := fs.begin(OpRmdir, cancel, h)
	return fs.end(OpRmdir, r, fs.rmdir(r, h.NodeId, name))
}

func (fs *FS) rmdir(r *request, dirID uint64, name string) error {
	dir := fs.inodes.get(dirID)
	if dir == nil {
		return syscall.ESTALE
	}
	err := fs.rmdirRPC(r, dir, name)
	if err != syscall.ENOTEMPTY {
		return err
	}
	target, lookupErr := fs.targetOf(r, dir, name)
	if lookupErr != nil || target == nil || !fs.awaitHidden(r, target) {
		return err
	}
	return fs.rmdirRPC(r, dir, name)
}

// rmdirRPC makes the RMDIR call. Whatever the server's words, its error for a directory that is not
// empty is ENOTEMPTY.
func (fs *FS) rmdirRPC(r *request, dir *inode, name string) error {
	for try := 0; ; try++ {
		var wcc nfs3.WccData
		start := fs.tick()
		err := fs.client.Rmdir(r, r.cred, dir.fh, name, &wcc)
		if fs.again(r, err, try) {
			continue
		}
		fs.absorbWcc(dir, &wcc, start, true)
		// some servers say the latter
		if hasStatus(err, nfs3.ErrNotEmpty) || hasStatus(err, nfs3.ErrExist) {
			return syscall.ENOTEMPTY
		}
		return fs.nodeErr(dir, err)
	}
}

// Rename answers rename(2). NFSv3 has none of renameat2(2)'s flags.
func (fs *FS) Rename(cancel <-chan struct{}, in *fuse.RenameIn, oldName, newName string) fuse.Status {
	r := fs.begin(OpRename, cancel, &in.InHeader)
	return fs.end(OpRename, r, fs.rename(r, in, oldName, newName))
}

func (fs *FS) rename(r *request, in *fuse.RenameIn, oldName, newName string) error {
	if in.Flags != 0 {
		return syscall.EINVAL
	}
	from, to := fs.inodes.get(in.NodeId), fs.inodes.get(in.Newdir)
	if from == nil || to == nil {
		return syscall.ESTALE
	}
	for try := 0; ; try++ {
		err := fs.renameOnce(r, from, oldName, to, newName)
		if !fs.again(r, err, try) {
			return err
		}
	}
}

// renameOnce renames, and hides what it would remove if that is open. It gives up at
// NFS3ERR_JUKEBOX as unlinkOnce does.
func (fs *FS) renameOnce(r *request, from *inode, oldName string, to *inode, newName string) error {
	if b := fs.inodes.beginBlind(to, newName); b != nil {
		defer fs.inodes.endBlind(b)
		return fs.renameRPC(r, from, oldName, to, newName)
	}
	target, b, err := fs.targetFor(r, to, newName)
	if err != nil {
		return err
	}
	if b != nil {
		defer fs.inodes.endBlind(b)
	}
	if target == nil {
		return fs.renameRPC(r, from, oldName, to, newName)
	}
	defer fs.outdate(target)
	if fs.inodes.beginRemoval(target) {
		defer fs.inodes.endRemoval(target)
		return fs.renameRPC(r, from, oldName, to, newName)
	}
	last, err := fs.lastName(r, target)
	if err != nil {
		return err
	}
	if !last || target.sillyName() != nil || fs.isNamed(r, from, oldName, target) {
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

// isNamed tells whether name stands for ino: a file must not be hidden from a rename to itself.
func (fs *FS) isNamed(r *request, dir *inode, name string, ino *inode) bool {
	var res nfs3.LookupResult
	_, err := fs.lookupRPC(r, dir, name, &res)
	return err != nil || res.FH == ino.fh
}

// unhide gives a hidden file its name back, after what hid it failed.
func (fs *FS) unhide(r *request, dir *inode, name string, ino *inode) {
	ino.mu.Lock()
	silly := ino.silly
	ino.silly = nil
	ino.mu.Unlock()
	if silly == nil {
		return
	}
	if fs.renameWaiting(r, silly.dir, silly.name, dir, name) != nil {
		ino.mu.Lock()
		ino.silly = silly
		ino.mu.Unlock()
		return
	}
	fs.inodes.leave(silly.dir)
	fs.inodes.left(silly.dir)
}

// renameWaiting renames, and waits where the server asks for it.
func (fs *FS) renameWaiting(r *request, from *inode, oldName string, to *inode, newName string) (err error) {
	for try := 0; ; try++ {
		if err = fs.renameRPC(r, from, oldName, to, newName); !fs.again(r, err, try) {
			return err
		}
	}
}

func (fs *FS) renameRPC(r *request, from *inode, oldName string, to *inode, newName string) error {
	var res nfs3.RenameResult
	start := fs.tick()
	err := fs.client.Rename(r, r.cred, from.fh, oldName, to.fh, newName, &res)
	fs.mark(&fs.renamed)
	fs.absorbWcc(from, &res.From, start, true)
	if from != to {
		fs.absorbWcc(to, &res.To, start, true)
	}
	if hasStatus(err, nfs3.ErrStale) {
		fs.outdate(to)
	}
	return err
}
