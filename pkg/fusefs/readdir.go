package fusefs

import (
	"errors"
	"sync"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// maxDirReplies bounds the replies that one pass through a directory may take: a server whose
// cookies never repeat and never end would keep a reader busy for ever.
const maxDirReplies = 1 << 20

// maxDirRestarts bounds how often in a row a server may forget its cookies before the reader's next
// entry is found.
const maxDirRestarts = 4

// A dirHandle is one open directory. The server's cookies are the kernel's offsets; cookie 0 is the
// start.
type dirHandle struct {
	ino  *inode
	cred []byte

	mu      sync.Mutex // held during the RPCs of this open directory
	verf    nfs3.Verifier
	entries []dirEntry // the last reply
	pos     int        // the entry of it that comes next, when the reader is at offset
	offset  uint64     // where the reader is: the cookie of the last entry given, or 0
	eof     bool       // the last reply ended the directory
	start   uint64     // FS.clock when the last reply was asked for
	// times in a row that the directory was begun again without another entry found
	begun int

	// seen holds the cookies from which replies were asked for since the start, to notice a
	// directory that runs in circles.
	seen map[uint64]struct{}
}

type dirEntry struct {
	name   string
	fileID uint64
	cookie uint64
	attr   nfs3.PostOpAttr
	hasFH  bool
	fh     nfs3.FH
}

// OpenDir answers opendir(3).
func (fs *FS) OpenDir(cancel <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	r := fs.begin(OpOpenDir, cancel, &in.InHeader)
	return fs.end(OpOpenDir, r, fs.openDir(r, in.NodeId, out))
}

func (fs *FS) openDir(r *request, id uint64, out *fuse.OpenOut) error {
	ino := fs.inodes.get(id)
	if ino == nil {
		return syscall.ESTALE
	}
	// As for files, the server is asked at each open; also, the kernel judges by the mode alone.
	var res nfs3.AccessResult
	if err := fs.askAccess(r, r.cred, ino, nfs3.AccessRead, &res); err != nil {
		return err
	}
	if res.Access&nfs3.AccessRead == 0 {
		return syscall.EACCES
	}
	fs.inodes.open(ino)
	d := &dirHandle{ino: ino, cred: r.cred}
	fs.handlesMu.Lock()
	defer fs.handlesMu.Unlock()
	fs.lastHandle++
	fs.dirs[fs.lastHandle] = d
	out.Fh = fs.lastHandle
	return nil
}

// ReleaseDir ends an open directory.
func (fs *FS) ReleaseDir(in *fuse.ReleaseIn) {
	fs.handlesMu.Lock()
	d := fs.dirs[in.Fh]
	delete(fs.dirs, in.Fh)
	fs.handlesMu.Unlock()
	if d != nil {
		fs.inodes.close(d.ino)
	}
}

// FsyncDir answers fsync(2) of a directory: what an NFSv3 server says it did to a directory is
// stable (RFC 1813 §1.7).
func (fs *FS) FsyncDir(cancel <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	fs.Counters.Ops[OpFsyncDir].Add(1)
	return fuse.OK
}

// ReadDir answers getdents(2) with names.
func (fs *FS) ReadDir(cancel <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	r := fs.begin(OpReadDir, cancel, &in.InHeader)
	return fs.end(OpReadDir, r, fs.readDir(r, in, false, func(_ *dirHandle, e *dirEntry) bool {
		return out.AddDirEntry(e.forKernel())
	}))
}

// ReadDirPlus answers getdents(2) with names and what a lookup of each would return.
func (fs *FS) ReadDirPlus(cancel <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	r := fs.begin(OpReadDirPlus, cancel, &in.InHeader)
	return fs.end(OpReadDirPlus, r, fs.readDir(r, in, true, func(d *dirHandle, e *dirEntry) bool {
		entry := out.AddDirLookupEntry(e.forKernel())
		if entry == nil {
			return false
		}
		fs.fillPlus(d, e, entry)
		return true
	}))
}

func (e *dirEntry) forKernel() fuse.DirEntry {
	de := fuse.DirEntry{Name: e.name, Ino: e.fileID, Off: e.cookie}
	if e.attr.Present {
		de.Mode = fileMode(&e.attr.Attr)
	}
	return de
}

// fillPlus adds the node to an entry. Without one the kernel looks the name up when it needs it: so
// it does for "." and "..", for which it takes no reference, and for nodes that changed since the
// reply was asked for.
func (fs *FS) fillPlus(d *dirHandle, e *dirEntry, out *fuse.EntryOut) {
	if !e.hasFH || !e.attr.Present || e.name == "." || e.name == ".." {
		return
	}
	ino := fs.inodes.ref(e.fh, &e.attr.Attr)
	if !fs.absorb(ino, &e.attr.Attr, d.start) {
		fs.inodes.forget(ino.id, 1)
		return
	}
	ino.mu.Lock()
	a := ino.attr
	ino.mu.Unlock()
	fs.fillEntry(d.ino, ino, &a, true, out)
}

// readDir gives entries from in.Offset on to add until it refuses one or the directory ends.
func (fs *FS) readDir(r *request, in *fuse.ReadIn, plus bool, add func(*dirHandle, *dirEntry) bool) error {
	fs.handlesMu.Lock()
	d := fs.dirs[in.Fh]
	fs.handlesMu.Unlock()
	if d == nil {
		return syscall.EBADF
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.seek(in.Offset)
	for given := false; ; {
		for d.pos < len(d.entries) {
			e := &d.entries[d.pos]
			if !add(d, e) {
				return nil
			}
			given = true
			d.begun = 0
			d.pos++
			d.offset = e.cookie
		}
		if d.eof || given {
			// the kernel comes back for more; what it has is not held up by a slow server
			return nil
		}
		if err := fs.fillDir(r, d, plus); err != nil {
			return err
		}
	}
}

// seek goes to an offset: where the reader is, back to the start, or to the cookie of any entry.
func (d *dirHandle) seek(offset uint64) {
	switch {
	case offset == 0:
		d.rewind(0)
		d.verf = nfs3.Verifier{}
	case offset == d.offset:
	default:
		for i := range d.entries {
			if d.entries[i].cookie == offset {
				d.pos, d.offset = i+1, offset
				return
			}
		}
		d.rewind(offset)
	}
}

// rewind forgets the last reply and the way that led to it.
func (d *dirHandle) rewind(offset uint64) {
	d.entries, d.pos, d.offset, d.eof = d.entries[:0], 0, offset, false
	d.begun = 0
	clear(d.seen)
}

// fillDir asks the server for the entries behind d.offset.
func (fs *FS) fillDir(r *request, d *dirHandle, plus bool) error {
	if d.seen == nil {
		d.seen = make(map[uint64]struct{})
	}
	if _, circle := d.seen[d.offset]; circle || len(d.seen) >= maxDirReplies {
		return syscall.EIO
	}
	d.seen[d.offset] = struct{}{}
	err := fs.dirRPC(r, d, d.offset, plus)
	if hasStatus(err, nfs3.ErrBadCookie) && d.offset != 0 {
		return fs.restart(r, d, plus)
	}
	return err
}

// restart finds the reader's place again after the server has forgotten its cookies: it reads the
// directory from the start until the entry with the reader's cookie.
func (fs *FS) restart(r *request, d *dirHandle, plus bool) error {
	place := d.offset
	for {
		if d.begun++; d.begun > maxDirRestarts {
			return syscall.EIO
		}
		fs.Counters.ReadDirRestarts.Add(1)
		err := fs.findPlace(r, d, plus, place)
		if !hasStatus(err, nfs3.ErrBadCookie) {
			return err
		}
	}
}

// findPlace reads from the start until the entry with the cookie place.
func (fs *FS) findPlace(r *request, d *dirHandle, plus bool, place uint64) error {
	d.verf = nfs3.Verifier{}
	clear(d.seen)
	for from := uint64(0); ; {
		if _, circle := d.seen[from]; circle || len(d.seen) >= maxDirReplies {
			return syscall.EIO
		}
		d.seen[from] = struct{}{}
		if err := fs.dirRPC(r, d, from, plus); err != nil {
			return err
		}
		for i := range d.entries {
			if d.entries[i].cookie == place {
				d.pos = i + 1
				return nil
			}
		}
		if d.eof || len(d.entries) == 0 {
			return syscall.EIO // nobody can tell which entries the reader has had
		}
		from = d.entries[len(d.entries)-1].cookie
	}
}

// unsupported tells whether a server does not have a procedure, which servers say at one of two
// levels.
func unsupported(err error) bool {
	if err == nil {
		return false
	}
	var accept *sunrpc.AcceptError
	return hasStatus(err, nfs3.ErrNotSupp) || errors.As(err, &accept) && accept.Stat == sunrpc.ProcUnavail
}

// dirRPC makes one READDIRPLUS or READDIR call from a cookie.
func (fs *FS) dirRPC(r *request, d *dirHandle, cookie uint64, plus bool) error {
	var res nfs3.ReadDirResult
	plus = plus && !fs.noPlus.Load()
	sane := true
	last := cookie
	keep := func(e *nfs3.DirEntry) bool {
		if e.Cookie == 0 && string(e.Name) == "." {
			// some servers number from 0, which is where the reader begins; nobody misses this
			// entry
			return true
		}
		sane = sane && e.Cookie != 0 && e.Cookie != last
		last = e.Cookie
		d.entries = append(d.entries, dirEntry{name: string(e.Name), fileID: e.FileID, cookie: e.Cookie,
			attr: e.Attr, hasFH: e.HasFH, fh: e.FH})
		return true
	}
	for try := 0; ; try++ {
		d.entries, d.pos, d.eof = d.entries[:0], 0, false
		d.start = fs.tick()
		var err error
		if plus {
			err = fs.client.ReadDirPlus(r, d.cred, d.ino.fh, cookie, d.verf, fs.opts.DirCount, fs.opts.DirCount, &res,
				keep)
		} else {
			err = fs.client.ReadDir(r, d.cred, d.ino.fh, cookie, d.verf, fs.opts.DirCount, &res, keep)
		}
		if plus && unsupported(err) {
			plus = false
			fs.noPlus.Store(true)
			continue
		}
		if fs.again(r, err, try) {
			continue
		}
		if err != nil {
			return fs.nodeErr(d.ino, err)
		}
		break
	}
	if res.DirAttr.Present {
		fs.absorb(d.ino, &res.DirAttr.Attr, d.start)
	}
	d.verf, d.eof = res.Verf, res.EOF
	if !sane || res.Entries == 0 && !res.EOF {
		d.entries = d.entries[:0]
		return syscall.EIO // a directory that does not advance
	}
	return nil
}
