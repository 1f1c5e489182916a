package vfs

import "github.com/nfsrdmad/nfsrdmad/pkg/vfs/name"

// renews reports whether attributes are cached, so that a renewal is useful.
func (fs *FS) renews() bool { return !fs.opts.NoAC && fs.opts.AcRegMin > 0 && !fs.noPlus.Load() }

// renewed records that attributes of a renewal have answered a request.
func (fs *FS) renewed(ino *inode) {
	at := ino.dir.Place()
	if dir := fs.inodes.get(at.Dir); dir != nil {
		dir.dir.Renewed(at.Index)
	}
}

// renew is called for a request that needs the attributes of ino from the server. When a program walks
// a directory, renew gets these attributes and those of the entries that follow with one READDIRPLUS,
// see package name. ok is false if it did not renew those of ino. dir is the directory of the request;
// nil stands for the last that listed ino.
func (fs *FS) renew(r *request, dir, ino *inode) (ok bool) {
	if !fs.renews() {
		return false
	}
	at := ino.dir.Place()
	if dir == nil && at.Dir != 0 {
		dir = fs.inodes.get(at.Dir)
	}
	if dir == nil || dir.id != at.Dir {
		return false
	}
	cookie, verf, began := dir.dir.BeginRenewal(at.Index)
	if !began {
		return false
	}
	failed := true
	defer func() { dir.dir.EndRenewal(ok, failed) }()
	d := &dirHandle{ino: dir, cred: r.cred, verf: verf, index: int(at.Index / name.Chunk * name.Chunk)}
	if err := fs.dirRPC(r, d, cookie, true); err != nil {
		return false
	}
	failed = false
	fs.Counters.Renewals.Add(1)
	for i := range d.entries {
		if e := &d.entries[i]; e.hasFH && e.attr.Present && fs.renewEntry(d, e) == ino {
			ok = true
		}
		d.index++
	}
	return ok
}

// renewEntry stores the attributes of an entry, and what its name stands for. It returns the node
// of the entry if the kernel gets the attributes with its next request.
func (fs *FS) renewEntry(d *dirHandle, e *dirEntry) *inode {
	if e.name == "." || e.name == ".." {
		return nil
	}
	ino := fs.inodes.find(e.fh)
	if ino == nil || !fs.updateAttr(ino, &e.attr.Attr, d.start) {
		return nil
	}
	ino.attr.Offer()
	ino.dir.SetPlace(d.ino.id, d.index)
	fs.dropStalePages(ino)
	fs.keepLookup(d.ino, e.name, ino.id, d.start)
	return ino
}
