package vfs

import (
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/name"
)

// A call by path can meet a directory whose handle is stale, because the server has another
// directory at that path now. The daemon returns ESTALE, and the kernel walks the path again with a
// LOOKUP of each component. There is one exception: mkdir(2), link(2), symlink(2) and mknod(2)
// first look the new name up, and the kernel does not repeat the walk when this LOOKUP returns
// ESTALE. For a name that does not exist at the path, LOOKUP therefore returns ENOENT. The
// procedure that creates the name then returns ESTALE, and the kernel repeats the walk.

// maxStaleDepth bounds the stale directories in one path.
const maxStaleDepth = 64

// setFound records the name of a node if the node is a directory.
func (ino *inode) setFound(dir *inode, as string) {
	if ino.attr.IsDir() {
		ino.dir.SetFound(name.Found{Dir: dir.id, Name: as})
	}
}

// missingAtPath reports whether the path of a stale directory leads to a directory that does not
// have the name.
func (fs *FS) missingAtPath(r *request, dir *inode, name string) bool {
	fh, ok := fs.handleAtPath(r, dir, 0)
	if !ok || fh == dir.fh {
		return false
	}
	_, err := fs.server.Lookup(r, r.cred, fh, name)
	return nfs.HasStatus(err, nfs.ErrNoEnt)
}

// handleAtPath returns the handle of the directory that is now at the path of dir.
func (fs *FS) handleAtPath(r *request, dir *inode, depth int) (fh nfs.Handle, ok bool) {
	found := dir.dir.Found()
	parent := fs.inodes.get(found.Dir)
	if parent == nil || depth >= maxStaleDepth {
		return fh, false
	}
	res, err := fs.server.Lookup(r, r.cred, parent.fh, found.Name)
	if nfs.IsStale(err) {
		if fh, ok = fs.handleAtPath(r, parent, depth+1); ok {
			res, err = fs.server.Lookup(r, r.cred, fh, found.Name)
		}
	}
	return res.FH, err == nil
}
