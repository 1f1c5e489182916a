package nfsd

import (
	"math"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// Sizes of directory entries in bytes, without names and handles (RFC 1813 §3.3.16, §3.3.17).
const (
	entrySize = sunrpc.SizeBool + sunrpc.SizeUint64 + sunrpc.SizeUint32 + sunrpc.SizeUint64
	listEnd   = 2 * sunrpc.SizeBool // no further entry, eof
)

// readDir handles READDIR and READDIRPLUS (RFC 1813 §3.3.16, §3.3.17). A cookie is the position
// that the file system itself gives an entry (d_off of getdents64), so that cookies stay valid
// while other clients create and remove entries, and when the server restarts.
func (c *call) readDir() error {
	if c.obj.kind != unix.S_IFDIR {
		return unix.ENOTDIR
	}
	var st unix.Stat_t
	if err := c.obj.stat(&st); err != nil {
		return err
	}
	if err := c.permit(c.obj, &st, permRead); err != nil {
		return err
	}
	a := &c.args
	if a.Cookie != 0 && a.CookieVerf != c.cookies || a.Cookie > math.MaxInt64 {
		return statusError(nfs3.ErrBadCookie)
	}
	attr := c.attrOf(&st)
	start := len(c.out)
	c.out = nfs3.AppendPostOpAttr(c.out, &attr)
	c.out = append(c.out, c.cookies[:]...)
	l := listing{call: c, plus: c.proc == nfs3.ProcReadDirPlus,
		end: min(start+int(min(a.Count, MaxIO)), c.limit) - listEnd}
	if l.plus {
		l.names = int(min(a.DirCount, MaxIO))
		l.handles = c.permit(c.obj, &st, permExec) == nil
	}
	if err := l.read(int64(a.Cookie)); err != nil {
		return err
	}
	if l.entries == 0 && !l.eof {
		return statusError(nfs3.ErrTooSmall)
	}
	c.out = sunrpc.AppendBool(c.out, false)
	c.out = sunrpc.AppendBool(c.out, l.eof)
	return nil
}

// A listing is the entries of one reply.
type listing struct {
	*call
	plus    bool
	handles bool // the caller may search the directory
	end     int  // where the entries must end in the reply
	names   int  // bytes left of dircount
	entries int
	eof     bool
}

// read appends entries from the position cookie on until the reply is full.
func (l *listing) read(cookie int64) error {
	o := l.obj
	o.open.Lock() // the position of the descriptor is shared
	defer o.open.Unlock()
	fd, err := o.readerLocked()
	if err != nil {
		return err
	}
	if _, err := unix.Seek(fd, cookie, unix.SEEK_SET); err != nil {
		return statusError(nfs3.ErrBadCookie)
	}
	buf := make([]byte, max(1024, min(direntsRoom, l.end-len(l.out))))
	for reopened := false; ; {
		var n int
		if err := retry(func() (err error) { n, err = unix.Getdents(fd, buf); return err }); err != nil {
			return err
		}
		if n <= 0 && cookie == 0 && l.entries == 0 && !reopened {
			// A directory has at least "." and "..". Before Linux 6.13, a descriptor of ext4 that
			// was first read at the end of the directory finds nothing at the start.
			reopened = true
			if fd, err = o.reopenLocked(); err != nil {
				return err
			}
			continue
		}
		if n <= 0 {
			l.eof = true
			return nil
		}
		for e := range dirents(buf[:n]) {
			if !l.add(&e) {
				return nil
			}
		}
	}
}

// add appends one entry; false means that the reply is full.
func (l *listing) add(e *dirent) bool {
	size := entrySize + sunrpc.Pad4(len(e.name))
	if l.plus {
		// At least one entry fits any dircount: it is a hint.
		if l.names -= size - sunrpc.SizeBool; l.names < 0 && l.entries > 0 {
			return false
		}
	}
	mark := len(l.out)
	name := string(e.name)
	ino := e.ino
	if name == ".." && l.obj.key == l.rootKey {
		ino = l.rootKey.ino // the parent of the root is the root
	}
	b := sunrpc.AppendBool(l.out, true)
	b = sunrpc.AppendUint64(b, ino)
	b = sunrpc.AppendString(b, name)
	b = sunrpc.AppendUint64(b, uint64(e.next))
	if l.plus {
		b = l.appendPlus(b, name)
	}
	if len(b) > l.end {
		l.out = b[:mark]
		return false
	}
	l.out = b
	l.entries++
	return true
}

// appendPlus appends attributes and handle of an entry, where they can be had: not of what was
// removed meanwhile, nor of a directory on which another file system is mounted. A caller who may
// read the directory but not search it gets attributes without handles: the type of each entry is
// in the attributes, and the handle would give access to the entry.
func (l *listing) appendPlus(b []byte, name string) []byte {
	fh, a, err := l.entry(l.obj, name)
	if err != nil {
		return sunrpc.AppendBool(nfs3.AppendPostOpAttr(b, nil), false)
	}
	b = nfs3.AppendPostOpAttr(b, &a)
	if !l.handles {
		return sunrpc.AppendBool(b, false)
	}
	return nfs3.AppendPostOpFH(b, &fh)
}
