package vfs

import (
	"errors"
	"sync"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/acl"
)

// maxDirReplies bounds the replies of one pass through a directory. Without it, a server whose
// cookies never repeat and never end would keep a reader busy forever.
const maxDirReplies = 1 << 20

// maxDirRestarts bounds the consecutive restarts of a listing that return no further entry.
const maxDirRestarts = 4

// A dirHandle is one open directory. The server's cookies serve as the kernel's offsets. Cookie 0
// is the start.
type dirHandle struct {
	id   uint64
	ino  *inode
	cred []byte
	kept keptSlot

	mu      sync.Mutex // held during the RPCs of this open directory; guards the fields below
	verf    nfs.Verifier
	entries []dirEntry // entries of the last reply
	pos     int        // index of the next entry in entries
	offset  uint64     // reader's position: the cookie of the last returned entry, or 0
	eof     bool       // the last reply ended the directory
	start   uint64     // the clock when the last call was sent
	// index is the number of entries before the next one since the start, or -1 if it is unknown.
	index int
	// restarts counts the consecutive restarts without a further entry.
	restarts int
	// returned holds the names that the reader got; see findPosition. It is empty and partial after
	// seekdir(3) to a position that is not among the last ones.
	returned returnedNames
	// skip holds the names that the reader got before a restart.
	skip nameSet

	// seen holds the cookies of all calls since the start, to detect cookies that repeat.
	seen map[uint64]struct{}
}

type dirEntry struct {
	name   string
	fileID uint64
	cookie uint64
	attr   nfs.PostOpAttr
	hasFH  bool
	fh     nfs.Handle
}

// OpenDir handles opendir(3).
func (fs *FS) OpenDir(k *kernel.Request, _ *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	r, ino, err := fs.onNode(k)
	if err == nil {
		err = fs.openDir(r, ino, out)
	}
	return fs.end(r, err)
}

func (fs *FS) openDir(r *request, ino *inode, out *fuse.OpenOut) error {
	// Each open of a directory asks the server, as for files. The kernel alone would check only the
	// mode.
	start := fs.attrs.Now()
	res, err := fs.askAccess(r, r.cred, ino, nfs.AccessRead|nfs.AccessLookup)
	if err != nil {
		return err
	}
	if res.Access&nfs.AccessRead == 0 {
		return syscall.EACCES
	}
	if res.Access&nfs.AccessLookup != 0 {
		fs.allowSearch(ino, r.cred, start)
	}
	d := &dirHandle{id: fs.nextHandle(), ino: ino, cred: r.cred, returned: returnedNames{all: &fs.returned}}
	r.keepHandle(d.id)
	fs.inodes.open(ino)
	err = fs.inodes.keep(ino)
	if err == nil {
		err = fs.state.addDir(d)
	}
	if err != nil {
		fs.inodes.close(ino)
		return err
	}
	fs.handles.Lock()
	defer fs.handles.Unlock()
	fs.handles.dirs[d.id] = d
	out.Fh = d.id
	return nil
}

// ReleaseDir closes an open directory.
func (fs *FS) ReleaseDir(_ *kernel.Request, in *fuse.ReleaseIn) fuse.Status {
	fs.releaseDir(in.Fh)
	return fuse.OK
}

func (fs *FS) releaseDir(id uint64) {
	fs.handles.Lock()
	d := fs.handles.dirs[id]
	delete(fs.handles.dirs, id)
	fs.handles.Unlock()
	if d != nil {
		fs.state.freeDir(d) // before the record of the node
		fs.inodes.close(d.ino)
		d.mu.Lock()
		defer d.mu.Unlock()
		d.returned.free()
	}
}

// FsyncDir handles fsync(2) of a directory. FsyncDir does nothing: an NFSv3 server replies to
// directory changes after they are stable (RFC 1813 §1.7).
func (fs *FS) FsyncDir(*kernel.Request, *fuse.FsyncIn) fuse.Status {
	fs.Counters.Ops[kernel.OpFsyncDir].Add(1)
	return fuse.OK
}

// ReadDir handles getdents(2) and returns names.
func (fs *FS) ReadDir(k *kernel.Request, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	r := fs.begin(k)
	return fs.end(r, fs.readDir(r, in, false, func(_ *dirHandle, e *dirEntry) bool {
		return out.AddDirEntry(e.fuseEntry())
	}))
}

// ReadDirPlus handles getdents(2) and returns names with the result of a lookup for each.
func (fs *FS) ReadDirPlus(k *kernel.Request, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	r := fs.begin(k)
	var listed []acl.Node // whose ACLs will be needed
	var dir *dirHandle
	wantACLs := false
	err := fs.readDir(r, in, true, func(d *dirHandle, e *dirEntry) bool {
		entry := out.AddDirLookupEntry(e.fuseEntry())
		if entry == nil {
			return false
		}
		if dir == nil {
			dir, wantACLs = d, fs.acl != nil && !fs.opts.NoAC && d.ino.dir.WantsACLs(d.cred)
		}
		if ino := fs.fillPlus(d, e, entry); ino != nil && wantACLs && e.attr.Attr.Type != nfs.Symlink {
			listed = append(listed, fs.aclNode(ino))
		}
		return true
	})
	if len(listed) > 0 {
		fs.acl.Fetch(dir.cred, listed)
	}
	return fs.end(r, err)
}

func (e *dirEntry) fuseEntry() fuse.DirEntry {
	de := fuse.DirEntry{Name: e.name, Ino: e.fileID, Off: e.cookie}
	if e.attr.Present {
		de.Mode = fileMode(&e.attr.Attr)
	}
	return de
}

// fillPlus adds the node to an entry and returns it, or nil. For an entry without a node, the
// kernel sends a lookup when it needs the node. "." and ".." have no node because the kernel takes
// no reference to them. Nodes that changed since the call was sent are also left out.
func (fs *FS) fillPlus(d *dirHandle, e *dirEntry, out *fuse.EntryOut) *inode {
	if !e.hasFH || !e.attr.Present || e.name == "." || e.name == ".." {
		return nil
	}
	ino := fs.inodes.ref(e.fh, &e.attr.Attr)
	if !fs.updateAttr(ino, &e.attr.Attr, d.start) {
		fs.inodes.forget(ino.id, 1)
		return nil
	}
	a, _ := ino.attr.Attr()
	fs.keepLookup(d.ino, e.name, ino.id, d.start)
	fs.fillEntry(d.ino, ino, &a, true, out)
	fs.cacheName(d.ino, e.name, d.start, out)
	ino.setFound(d.ino, e.name)
	ino.dir.SetPlace(d.ino.id, d.index)
	return ino
}

// readDir passes entries from in.Offset on to add, until add refuses one or the directory ends.
func (fs *FS) readDir(r *request, in *fuse.ReadIn, plus bool, add func(*dirHandle, *dirEntry) bool) error {
	fs.handles.Lock()
	d := fs.handles.dirs[in.Fh]
	fs.handles.Unlock()
	if d == nil {
		return syscall.EBADF
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.seek(in.Offset)
	for given := false; ; {
		for d.pos < len(d.entries) {
			e := &d.entries[d.pos]
			d.ino.dir.KeepCookie(d.index, d.offset, d.verf)
			if !d.skip.contains(e.name) {
				if !add(d, e) {
					return nil
				}
				given = true
				d.restarts = 0
				d.returned.add(e.name)
			}
			d.advance(d.pos + 1)
		}
		if d.eof || given {
			// The kernel requests the rest later. A slow server must not delay the entries found so
			// far.
			return nil
		}
		if err := fs.fillDir(r, d, plus); err != nil {
			return err
		}
	}
}

// seek moves to an offset: the current position, the start, or the cookie of an entry.
func (d *dirHandle) seek(offset uint64) {
	switch offset {
	case 0:
		d.rewind(0)
		d.verf = nfs.Verifier{}
	case d.offset:
	default:
		for i := range d.entries {
			if d.entries[i].cookie == offset {
				d.advance(i + 1)
				d.returned.cutAfter(d.entries[i].name)
				return
			}
		}
		d.rewind(offset)
	}
}

// advance moves behind the entry pos-1 of the last reply.
func (d *dirHandle) advance(pos int) {
	if d.index >= 0 {
		d.index += pos - d.pos
	}
	d.pos, d.offset = pos, d.entries[pos-1].cookie
}

// rewind drops the last reply and the seen cookies.
func (d *dirHandle) rewind(offset uint64) {
	d.entries, d.pos, d.offset, d.eof = d.entries[:0], 0, offset, false
	d.restarts, d.skip = 0, nil
	d.returned.reset(offset != 0)
	if d.index = 0; offset != 0 {
		d.index = -1
	}
	clear(d.seen)
}

// fillDir gets the entries after d.offset from the server.
func (fs *FS) fillDir(r *request, d *dirHandle, plus bool) error {
	if d.seen == nil {
		d.seen = make(map[uint64]struct{})
	}
	if _, loop := d.seen[d.offset]; loop || len(d.seen) >= maxDirReplies {
		return fs.invalidReply(d.ino, "READDIR does not reach the end of the directory")
	}
	d.seen[d.offset] = struct{}{}
	err := fs.dirRPC(r, d, d.offset, plus)
	if nfs.HasStatus(err, nfs.ErrBadCookie) && d.offset != 0 {
		return fs.restart(r, d, plus)
	}
	return err
}

// restart finds the reader's position again after the server returned NFS3ERR_BAD_COOKIE.
func (fs *FS) restart(r *request, d *dirHandle, plus bool) error {
	cookie := d.offset
	for {
		if d.restarts++; d.restarts > maxDirRestarts {
			return syscall.EIO
		}
		fs.Counters.ReadDirRestarts.Add(1)
		err := fs.findPosition(r, d, plus, cookie)
		if !nfs.HasStatus(err, nfs.ErrBadCookie) {
			return err
		}
	}
}

// findPosition reads from the start of the directory until the next entry for the reader. The server
// may have numbered the entries again, so findPosition compares names: the next entry is the first
// one that the reader did not get.
//
// If d.returned is partial, the next entry is the one behind the entry that the reader got last, or
// behind the latest of its last entries that still exists. After seekdir(3) only the cookie is known.
func (fs *FS) findPosition(r *request, d *dirHandle, plus bool, cookie uint64) error {
	d.verf, d.index = nfs.Verifier{}, -1
	clear(d.seen)
	returned := d.returned.sorted()
	var order map[uint64]int
	if d.returned.partial {
		order = d.returned.order()
	}
	best, bestCookie := 0, uint64(0)
	for from := uint64(0); ; {
		if _, loop := d.seen[from]; loop || len(d.seen) >= maxDirReplies {
			return fs.invalidReply(d.ino, "READDIR does not reach the end of the directory")
		}
		d.seen[from] = struct{}{}
		if err := fs.dirRPC(r, d, from, plus); err != nil {
			return err
		}
		for i := range d.entries {
			e := &d.entries[i]
			if !d.returned.partial {
				if !returned.contains(e.name) {
					d.pos, d.offset, d.skip = i, from, returned
					return nil
				}
				from = e.cookie
				continue
			}
			n := order[nameHash(e.name)]
			if len(order) > 0 && n == len(order) || len(order) == 0 && e.cookie == cookie {
				d.pos, d.offset, d.skip = i+1, e.cookie, returned
				return nil
			}
			if n > best {
				best, bestCookie = n, e.cookie
			}
		}
		if d.eof || len(d.entries) == 0 {
			break
		}
		from = d.entries[len(d.entries)-1].cookie
	}
	switch {
	case !d.returned.partial: // the reader got all entries
		d.pos = len(d.entries)
		return nil
	case best == 0:
		return syscall.EIO // the entries that the reader already has are unknown
	}
	d.offset, d.skip = bestCookie, returned
	clear(d.seen)
	return fs.dirRPC(r, d, bestCookie, plus)
}

// unsupported reports whether err is NFS3ERR_NOTSUPP or PROC_UNAVAIL: the server does not support
// the procedure.
func unsupported(err error) bool {
	if err == nil {
		return false
	}
	var accept *sunrpc.AcceptError
	return nfs.HasStatus(err, nfs.ErrNotSupp) || errors.As(err, &accept) && accept.Stat == sunrpc.ProcUnavail
}

// dirRPC sends one READDIRPLUS or READDIR from a cookie.
func (fs *FS) dirRPC(r *request, d *dirHandle, cookie uint64, plus bool) error {
	var res nfs.ReadDirResult
	plus = plus && !fs.noPlus.Load()
	valid := true
	last := cookie
	keep := func(e *nfs.DirEntry) bool {
		if e.Cookie == 0 && string(e.Name) == "." {
			// Some servers number entries from 0, but cookie 0 is the start. The "." entry is
			// optional, so skip it.
			return true
		}
		valid = valid && e.Cookie != 0 && e.Cookie != last
		last = e.Cookie
		d.entries = append(d.entries, dirEntry{name: string(e.Name), fileID: e.FileID, cookie: e.Cookie,
			attr: e.Attr, hasFH: e.HasFH, fh: e.FH})
		return true
	}
	for try := 0; ; try++ {
		d.entries, d.pos, d.eof = d.entries[:0], 0, false
		d.start = fs.attrs.Now()
		var err error
		res, err = fs.server.ReadDir(r, d.cred, d.ino.fh, cookie, d.verf, fs.opts.DirCount, plus, keep)
		if plus && unsupported(err) {
			plus = false
			fs.noPlus.Store(true)
			continue
		}
		if fs.busy.Retry(r, err, try) {
			continue
		}
		if err != nil {
			return fs.checkStale(d.ino, err)
		}
		break
	}
	if res.DirAttr.Present {
		fs.updateAttr(d.ino, &res.DirAttr.Attr, d.start)
	}
	d.eof = res.EOF
	fs.state.setVerf(d, res.Verf)
	if !valid || res.Entries == 0 && !res.EOF {
		d.entries = d.entries[:0]
		return fs.invalidReply(d.ino, "READDIR returns no entry, or one cookie twice")
	}
	return nil
}
