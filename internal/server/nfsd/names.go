package nfsd

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
)

// nameOf checks that a filename3 is one path element (RFC 1813 §2.5) and returns it.
func nameOf(b []byte) (string, error) {
	switch {
	case len(b) > nfs3.MaxName:
		return "", unix.ENAMETOOLONG
	case len(b) == 0:
		return "", unix.EINVAL
	case bytes.IndexByte(b, '/') >= 0 || bytes.IndexByte(b, 0) >= 0:
		return "", unix.EACCES
	}
	return string(b), nil
}

// newName is nameOf for a name that a call creates or removes; dots is the error for "." and "..".
func newName(b []byte, dots error) (string, error) {
	name, err := nameOf(b)
	if err == nil && (name == "." || name == "..") {
		err = dots
	}
	return name, err
}

// lookup handles LOOKUP (RFC 1813 §3.3.3).
func (c *call) lookup() error {
	name, err := nameOf(c.args.Name)
	if err != nil {
		return err
	}
	var st unix.Stat_t
	if err := c.searchable(c.obj, &st); err != nil {
		return err
	}
	fh, attr, err := c.entry(c.obj, name)
	if err != nil {
		return err
	}
	c.out = nfs3.AppendFH(c.out, &fh)
	c.out = nfs3.AppendPostOpAttr(c.out, &attr)
	dir := c.attrOf(&st)
	c.out = nfs3.AppendPostOpAttr(c.out, &dir)
	return nil
}

// searchable checks that o is a directory that the caller may search, and reads its attributes.
func (c *call) searchable(o *object, st *unix.Stat_t) error {
	if err := o.stat(st); err != nil {
		return err
	}
	if o.kind != unix.S_IFDIR {
		return unix.ENOTDIR
	}
	return c.permit(o, st, permExec)
}

// entry returns handle and attributes of an entry of dir. The parent of the export's root is the
// root itself.
func (c *call) entry(dir *object, name string) (fh nfs3.FH, a nfs3.Attr, err error) {
	var fd int
	switch {
	case name == "." || name == ".." && dir.key == c.rootKey:
		var st unix.Stat_t
		err = dir.stat(&st)
		return dir.fh, c.attrOf(&st), err
	case c.nowait && (name == ".." || c.paths != nil):
		err = errNotNow
	case name == "..":
		fd, err = openParent(dir.path)
	case c.nowait:
		if fd, err = openCached(dir.path, name); err == unix.EAGAIN || err == unix.EINVAL {
			err = errNotNow
		}
	default:
		fd, err = openPath(dir.path, name)
	}
	if err != nil {
		return fh, a, err
	}
	defer unix.Close(fd)
	if name == ".." {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return fh, a, err
		}
		if keyOf(&st) == c.rootKey {
			return c.rootFH, c.attrOf(&st), nil
		}
		if !c.inside(fd, &st) { // the directory was moved out of the export
			return fh, a, unix.ESTALE
		}
		fh, err = c.handleOf(fd, nil, "")
		return fh, c.attrOf(&st), err
	}
	return c.describe(fd, dir, name)
}

// describe returns handle and attributes of an open object, which was found as name in dir.
func (c *call) describe(fd int, dir *object, name string) (fh nfs3.FH, a nfs3.Attr, err error) {
	var st unix.Stat_t
	if err = unix.Fstat(fd, &st); err != nil {
		return fh, a, err
	}
	fh, err = c.handleOf(fd, dir, name)
	return fh, c.attrOf(&st), err
}

// creation begins a call that makes an entry in c.obj, and returns the new name.
func (c *call) creation() (string, error) {
	name, err := newName(c.args.Name, unix.EEXIST)
	if err != nil {
		return "", err
	}
	if c.obj.kind != unix.S_IFDIR {
		return "", unix.ENOTDIR
	}
	return name, c.begin(&c.w, c.obj)
}

// asCaller runs one system call as the caller.
func (c *call) asCaller(f func() error) error {
	return c.id.as(&c.who, func() error { return retry(f) })
}

// defaultModes are the modes of new objects for which the client gives none.
const (
	defaultMode    = 0o644
	defaultDirMode = 0o755
)

func modeOf(set *nfs3.SetAttr, mode uint32) uint32 {
	if set.HasMode {
		return set.Mode
	}
	return mode
}

// create handles CREATE (RFC 1813 §3.3.8).
func (c *call) create() error {
	name, err := c.creation()
	if err != nil {
		return err
	}
	set := c.args.Set
	if set.HasSize && set.Size > 1<<63-1 {
		return unix.EFBIG
	}
	for range createTries {
		if err = c.createName(name, set); err != errVanished {
			return err
		}
	}
	return unix.EAGAIN
}

// errVanished means that CREATE found a file and that the file was removed before CREATE opened it.
var errVanished = errors.New("file removed during CREATE")

// createTries bounds how often a CREATE starts again while others create and remove the file.
const createTries = 16

func (c *call) createName(name string, set nfs3.SetAttr) error {
	mode := c.modeFor(unix.S_IFREG, modeOf(&set, defaultMode))
	if c.args.Create == nfs3.Exclusive {
		mode = 0
	}
	fd := -1
	err := c.asCaller(func() (err error) {
		fd, err = unix.Openat(c.obj.path, name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_NOCTTY|
			unix.O_NONBLOCK|unix.O_CLOEXEC, mode)
		return err
	})
	c.between(name)
	switch {
	case err == unix.EEXIST && c.args.Create != nfs3.Guarded:
		return c.createExisting(name)
	case err != nil:
		return err
	}
	o, err := c.createdObject(fd, name)
	if err != nil {
		unix.Close(fd)
		return err
	}
	defer c.objects.release(o)
	o.keepWriter(fd)
	if c.args.Create == nfs3.Exclusive {
		a, m := verifierTimes(c.args.CreateVerf)
		err = utimes(o.path, a, m)
	} else {
		set.HasMode = false
		// A new file is empty. Truncating it would clear the set-id bits of its mode.
		set.HasSize = set.HasSize && set.Size != 0
		if err = c.fixMode(o, mode, mode); err == nil {
			err = c.applySet(o, &set)
		}
	}
	if err != nil {
		return err
	}
	return c.created(o, true)
}

// verifierTimes are the times in which an exclusive CREATE keeps its verifier until the client sets
// others (RFC 1813 §3.3.8). They have 31 bits, which every file system keeps.
func verifierTimes(v nfs3.Verifier) (atime, mtime unix.Timespec) {
	const mask = 1<<31 - 1
	return unix.Timespec{Sec: int64(binary.BigEndian.Uint32(v[:]) & mask)},
		unix.Timespec{Sec: int64(binary.BigEndian.Uint32(v[4:]) & mask)}
}

// createExisting is CREATE of a name that exists: UNCHECKED takes the file and sets its size,
// EXCLUSIVE takes the file of the same verifier.
func (c *call) createExisting(name string) error {
	o, err := c.newObject(name)
	if err == unix.ENOENT {
		return errVanished
	}
	if err != nil {
		return err
	}
	defer c.objects.release(o)
	var st unix.Stat_t
	switch err := o.stat(&st); {
	case err != nil:
		return err
	case c.args.Create == nfs3.Exclusive:
		a, m := verifierTimes(c.args.CreateVerf)
		if o.kind != unix.S_IFREG || st.Size != 0 || st.Atim.Sec != a.Sec || st.Mtim.Sec != m.Sec {
			return unix.EEXIST
		}
		return c.created(o, true)
	case o.kind == unix.S_IFDIR:
		return unix.EISDIR
	case o.kind != unix.S_IFREG:
		return unix.EEXIST
	}
	if c.args.Set.HasSize {
		// A concurrent WRITE must not give its client attributes from before.
		if err := c.begin(&c.w2, o); err != nil {
			return err
		}
		if err := c.truncate(o, c.args.Set.Size); err != nil {
			return err
		}
		if err := c.syncObject(o); err != nil {
			return err
		}
	}
	return c.created(o, false)
}

// newObject returns the object of a new entry of c.obj, with a reference.
func (c *call) newObject(name string) (*object, error) {
	fd, err := openPath(c.obj.path, name)
	if err != nil {
		return nil, err
	}
	return c.objectAt(fd, name)
}

// createdObject returns the object of a created file, with a reference. It does not use the name,
// because another file may have the name already.
func (c *call) createdObject(created int, name string) (*object, error) {
	fd, err := reopenPath(created)
	if err != nil {
		return nil, err
	}
	return c.objectAt(fd, name)
}

// objectAt returns the object of an O_PATH descriptor, with a reference. The descriptor then
// belongs to the object.
func (c *call) objectAt(fd int, name string) (*object, error) {
	var st unix.Stat_t
	err := unix.Fstat(fd, &st)
	var fh nfs3.FH
	if err == nil {
		fh, err = c.handleOf(fd, c.obj, name)
	}
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	return c.objects.add(&fh, fd, &st), nil
}

// fixMode gives a new object the mode bits that the kernel did not take from the system call:
// those in want that made lacks, and those of the umask, which is the server's and not the
// caller's. Where the directory has a default ACL, the kernel ignores the umask.
func (c *call) fixMode(o *object, want, made uint32) error {
	var st unix.Stat_t
	if err := o.stat(&st); err != nil {
		return err
	}
	mode := st.Mode & nfs3.ModeMask
	masked := made & c.umask & 0o777
	if masked != 0 && mode&0o777 == made&^c.umask&0o777 && !hasDefaultACL(c.obj.path) {
		mode |= masked
	}
	mode |= want &^ made
	if mode == st.Mode&nfs3.ModeMask {
		return nil
	}
	return c.asCaller(func() error { return chmod(o.path, mode) })
}

// created ends a call that made o: object and directory are on disk before the reply.
func (c *call) created(o *object, changed bool) error {
	if changed {
		if o.kind == unix.S_IFREG || o.kind == unix.S_IFDIR {
			if err := c.syncObject(o); err != nil {
				return err
			}
		}
		if err := c.syncObject(c.obj); err != nil {
			return err
		}
	}
	var st unix.Stat_t
	if err := o.stat(&st); err != nil {
		return err
	}
	a := c.attrOf(&st)
	c.out = nfs3.AppendPostOpFH(c.out, &o.fh)
	c.out = nfs3.AppendPostOpAttr(c.out, &a)
	c.appendWcc(&c.w, c.obj)
	return nil
}

// make runs the system call f of MKDIR, SYMLINK or MKNOD as the caller, and sets the attributes
// that f does not set. The argument kind has the S_IFMT bits of the new object, and made the mode
// bits that f sets.
func (c *call) make(set nfs3.SetAttr, kind, made uint32, f func(name string) error) error {
	name, err := c.creation()
	if err != nil {
		return err
	}
	if err := c.asCaller(func() error { return f(name) }); err != nil {
		return err
	}
	c.between(name)
	o, err := c.newObject(name)
	if err != nil {
		return err
	}
	defer c.objects.release(o)
	if err := c.checkNew(o, kind); err != nil {
		return err
	}
	if o.kind != unix.S_IFLNK {
		if err := c.fixMode(o, set.Mode, made); err != nil {
			return err
		}
	}
	set.HasMode, set.HasSize = false, false
	if err := c.applySet(o, &set); err != nil {
		return err
	}
	return c.created(o, true)
}

// between runs the hook of a test.
func (c *call) between(name string) {
	if c.cfg.between != nil {
		c.cfg.between(name)
	}
}

// newAge is the largest age of an object that checkNew accepts.
const newAge = time.Second

// checkNew checks that o is the object that this call has just made. The kernel makes directories,
// nodes and links without opening them, so the call opens the new object by its name, and another
// process can put another object there. checkNew returns ENOENT for an object of another type, of
// another owner, or that is not new. Both times that give the age are times of the file system: a
// rename or a link to the name sets the change time. On a file system without birth times only type
// and owner count. A file system without owners gives all objects the owner of the directory.
func (c *call) checkNew(o *object, kind uint32) error {
	var st, dir unix.Stat_t
	if err := o.stat(&st); err != nil {
		return err
	}
	if err := c.obj.stat(&dir); err != nil {
		return err
	}
	owner := c.who.uid
	if !c.id.switches {
		owner = c.id.uid
	}
	changed := time.Unix(st.Ctim.Unix())
	born, known := o.birthTime()
	switch {
	case o.kind != kind, st.Uid != owner && st.Uid != dir.Uid,
		known && changed.Sub(born) > cmp.Or(c.cfg.newAge, newAge):
		c.log.Warn("new object refused: another process has replaced it", "type", kind, "inode", o.key.ino,
			"directory_inode", c.obj.key.ino)
		return unix.ENOENT
	}
	return nil
}

// birthTime returns the creation time of an object, or false if the file system does not know it.
func (o *object) birthTime() (time.Time, bool) {
	var st unix.Statx_t
	err := unix.Statx(o.path, "", unix.AT_EMPTY_PATH, unix.STATX_BTIME, &st)
	if err != nil || st.Mask&unix.STATX_BTIME == 0 {
		return time.Time{}, false
	}
	return time.Unix(st.Btime.Sec, int64(st.Btime.Nsec)), true
}

// mkdir handles MKDIR (RFC 1813 §3.3.9). mkdir(2) ignores the set-id bits of the mode; a directory
// in a set-group-id directory gets that bit from the kernel.
func (c *call) mkdir() error {
	set := c.args.Set
	set.Mode = modeOf(&set, defaultDirMode)
	made := set.Mode & 0o1777
	return c.make(set, unix.S_IFDIR, made, func(name string) error { return unix.Mkdirat(c.obj.path, name, made) })
}

// symlink handles SYMLINK (RFC 1813 §3.3.10). The target is not looked at.
func (c *call) symlink() error {
	target := c.args.Data
	switch {
	case len(target) > nfs3.MaxPath:
		return unix.ENAMETOOLONG
	case len(target) == 0 || bytes.IndexByte(target, 0) >= 0:
		return unix.EINVAL
	}
	return c.make(c.args.Set, unix.S_IFLNK, 0, func(name string) error {
		return unix.Symlinkat(string(target), c.obj.path, name)
	})
}

// mknod handles MKNOD (RFC 1813 §3.3.11). The kernel lets only root make devices.
func (c *call) mknod() error {
	var typ uint32
	switch c.args.Type {
	case nfs3.NF3CHR:
		typ = unix.S_IFCHR
	case nfs3.NF3BLK:
		typ = unix.S_IFBLK
	case nfs3.NF3FIFO:
		typ = unix.S_IFIFO
	case nfs3.NF3SOCK:
		typ = unix.S_IFSOCK
	default:
		return statusError(nfs3.ErrBadType)
	}
	set := c.args.Set
	set.Mode = c.modeFor(typ, modeOf(&set, defaultMode))
	dev := int(unix.Mkdev(c.args.Dev.Major, c.args.Dev.Minor))
	return c.make(set, typ, set.Mode, func(name string) error {
		return unix.Mknodat(c.obj.path, name, typ|set.Mode, dev)
	})
}

// remove handles REMOVE (RFC 1813 §3.3.12).
func (c *call) remove() error { return c.unlink(0, unix.EISDIR, unix.EISDIR) }

// rmdir handles RMDIR (RFC 1813 §3.3.13).
func (c *call) rmdir() error { return c.unlink(unix.AT_REMOVEDIR, unix.EINVAL, unix.EEXIST) }

func (c *call) unlink(flags int, dot, dotDot error) error {
	if string(c.args.Name) == "." {
		return dot
	}
	name, err := newName(c.args.Name, dotDot)
	if err != nil {
		return err
	}
	if c.obj.kind != unix.S_IFDIR {
		return unix.ENOTDIR
	}
	if err := c.begin(&c.w, c.obj); err != nil {
		return err
	}
	victim := c.victim(c.obj, name)
	if err := c.asCaller(func() error { return unix.Unlinkat(c.obj.path, name, flags) }); err != nil {
		return err
	}
	victim()
	if err := c.syncObject(c.obj); err != nil {
		return err
	}
	c.appendWcc(&c.w, c.obj)
	return nil
}

// victim looks at an entry that is about to go. The result is called when the entry is gone: it
// closes the file if that was its last name.
func (c *call) victim(dir *object, name string) (gone func()) {
	var st unix.Stat_t
	if unix.Fstatat(dir.path, name, &st, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT) != nil ||
		st.Nlink > 1 && st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return func() {}
	}
	return func() { c.objects.forget(keyOf(&st)) }
}

// rename handles RENAME (RFC 1813 §3.3.14).
func (c *call) rename() error {
	from, err := newName(c.args.Name, unix.EINVAL)
	if err != nil {
		return err
	}
	to, err := newName(c.args.Name2, unix.EINVAL)
	if err != nil {
		return err
	}
	if c.obj.kind != unix.S_IFDIR || c.obj2.kind != unix.S_IFDIR {
		return unix.ENOTDIR
	}
	if err := c.begin(&c.w, c.obj); err != nil {
		return err
	}
	same := c.obj == c.obj2
	if !same {
		if err := c.begin(&c.w2, c.obj2); err != nil {
			return err
		}
	}
	victim := c.victim(c.obj2, to)
	if err := c.asCaller(func() error {
		return unix.Renameat(c.obj.path, from, c.obj2.path, to)
	}); err != nil {
		return err
	}
	c.renamed(from, to, victim)
	if err := c.syncObject(c.obj2); err != nil {
		return err
	}
	if !same {
		if err := c.syncObject(c.obj); err != nil {
			return err
		}
	}
	c.appendWcc(&c.w, c.obj)
	if same {
		c.w2 = c.w
	}
	c.appendWcc(&c.w2, c.obj2)
	return nil
}

// renamed follows a rename in the tables. Renaming a file to another of its links does nothing
// (rename(2)).
func (c *call) renamed(from, to string, victim func()) {
	var st unix.Stat_t
	if unix.Fstatat(c.obj.path, from, &st, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT) == nil {
		return
	}
	victim()
	if c.paths == nil {
		return
	}
	if unix.Fstatat(c.obj2.path, to, &st, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT) == nil {
		c.paths.add(keyOf(&st), c.obj2.key, to)
	}
}

// link handles LINK (RFC 1813 §3.3.15).
func (c *call) link() error {
	name, err := newName(c.args.Name, unix.EEXIST)
	if err != nil {
		return err
	}
	if c.obj2.kind != unix.S_IFDIR {
		return unix.ENOTDIR
	}
	if err := c.begin(&c.w, c.obj2); err != nil {
		return err
	}
	if err := c.asCaller(func() error {
		return unix.Linkat(unix.AT_FDCWD, c.obj.proc, c.obj2.path, name, unix.AT_SYMLINK_FOLLOW)
	}); err != nil {
		return err
	}
	if c.paths != nil {
		c.paths.add(c.obj.key, c.obj2.key, name)
	}
	if err := c.syncAny(c.obj); err != nil {
		return err
	}
	if err := c.syncObject(c.obj2); err != nil {
		return err
	}
	c.appendPostOp(c.obj)
	c.appendWcc(&c.w, c.obj2)
	return nil
}
