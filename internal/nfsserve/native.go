package nfsserve

import (
	"bytes"
	"context"
	"encoding/binary"
	"os"
	"path"
	"strings"
	"syscall"

	nfs "github.com/willscott/go-nfs"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// A native executes a procedure that go-nfs lacks or has wrong. handled is false where go-nfs shall
// do it after all.
type native func(c *nfsCall) (body []byte, st uint32, handled bool)

var natives = map[nfs3.Proc]native{
	nfs3.ProcSetAttr: (*nfsCall).setAttr,
	nfs3.ProcLink:    (*nfsCall).link,
	nfs3.ProcMknod:   (*nfsCall).mknod,
	nfs3.ProcCreate:  (*nfsCall).createExclusive,
	nfs3.ProcCommit:  (*nfsCall).commit,
}

// path finds the file of a handle.
func (c *nfsCall) path(fh []byte) (string, uint32) {
	p, ok := c.tree.fromHandle(fh)
	if !ok {
		return "", stStale
	}
	return clean(path.Join(p...)), stOK
}

// child finds the name of an entry of the directory fh.
func (c *nfsCall) child(fh []byte, name string) (string, uint32) {
	p, ok := c.tree.fromHandle(fh)
	if !ok {
		return "", stStale
	}
	if info, err := c.tree.root.Lstat(clean(path.Join(p...))); err != nil || !info.IsDir() {
		return "", stNotDir
	}
	return path.Join(append(p, name)...), stOK
}

// attr appends the post_op_attr of a file, as go-nfs would say it.
func (c *nfsCall) attr(b []byte, name string) []byte {
	var buf bytes.Buffer
	var a *nfs.FileAttribute
	if info, err := c.w.fs.Lstat(name); err == nil {
		a = nfs.ToFileAttribute(info, name)
	}
	if nfs.WritePostOpAttrs(&buf, a) != nil {
		return sunrpc.AppendUint32(b, 0)
	}
	return append(b, buf.Bytes()...)
}

// wcc appends a wcc_data without the attributes before.
func (c *nfsCall) wcc(b []byte, name string) []byte { return c.attr(sunrpc.AppendUint32(b, 0), name) }

func parent(name string) string { return clean(path.Dir(name)) }

// created is the body of CREATE and its like: handle, attributes, the directory's wcc_data.
func (c *nfsCall) created(name string) []byte {
	fh := c.tree.toHandle(splitPath(name))
	b := sunrpc.AppendOpaque(sunrpc.AppendUint32(nil, 1), fh)
	return c.wcc(c.attr(b, name), parent(name))
}

func splitPath(name string) []string {
	if name = clean(name); name == "." {
		return nil
	}
	return strings.Split(name, "/")
}

// setAttr is SETATTR (RFC 1813 §3.3.2). The guard is compared with what this server says ctime is:
// mtime.
func (c *nfsCall) setAttr() ([]byte, uint32, bool) {
	name, st := c.path(c.args.fh)
	if st != stOK {
		return nil, st, true
	}
	if c.readOnly {
		return nil, stROFS, true
	}
	info, err := c.tree.root.Lstat(name)
	if err != nil {
		return nil, status(err), true
	}
	if c.args.guarded {
		if t := nfs.ToNFSTime(info.ModTime()); t.Seconds != c.args.guard.Sec || t.Nseconds != c.args.guard.Nsec {
			return nil, stNotSync, true
		}
	}
	if err := c.applySet(name, info); err != nil {
		return nil, status(err), true
	}
	return c.wcc(nil, name), stOK, true
}

// applySet sets size, owner, mode and times, in that order: each may undo what comes before it in
// another.
func (c *nfsCall) applySet(name string, info os.FileInfo) error {
	s, e := &c.args.set, c.w.fs
	if s.HasSize {
		if s.Size > 1<<63-1 {
			return syscall.EFBIG
		}
		f, err := e.OpenFile(name, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		err = f.Truncate(int64(s.Size))
		if cerr := f.Close(); err == nil {
			err = cerr
		}
		if err != nil {
			return err
		}
	}
	if s.HasUID || s.HasGID {
		uid, gid := -1, -1
		if s.HasUID && s.UID != ownerOf(info) {
			uid = int(s.UID)
		}
		if s.HasGID && s.GID != groupOf(info) {
			gid = int(s.GID)
		}
		if uid >= 0 || gid >= 0 {
			if err := e.Lchown(name, uid, gid); err != nil {
				return err
			}
		}
	}
	if s.HasMode {
		if err := e.chmod(name, s.Mode); err != nil {
			return err
		}
	}
	if s.AtimeHow == nfs3.DontChange && s.MtimeHow == nfs3.DontChange {
		return nil
	}
	return e.utimes(name, [2]unix.Timespec{timespec(s.AtimeHow, s.Atime), timespec(s.MtimeHow, s.Mtime)})
}

func timespec(how nfs3.TimeHow, t nfs3.Time3) unix.Timespec {
	switch how {
	case nfs3.SetToServerTime:
		return unix.Timespec{Nsec: unix.UTIME_NOW}
	case nfs3.SetToClientTime:
		return unix.Timespec{Sec: int64(t.Sec), Nsec: int64(t.Nsec)}
	}
	return unix.Timespec{Nsec: unix.UTIME_OMIT}
}

// link is LINK (RFC 1813 §3.3.15).
func (c *nfsCall) link() ([]byte, uint32, bool) {
	target, st := c.path(c.args.fh)
	if st != stOK {
		return nil, st, true
	}
	name, st := c.child(c.args.fh2, c.args.name)
	if st != stOK {
		return nil, st, true
	}
	if c.readOnly {
		return nil, stROFS, true
	}
	if err := c.w.fs.Link(target, name); err != nil {
		return nil, status(err), true
	}
	c.tree.toHandle(splitPath(name)) // so that the handle outlives its first name
	return c.wcc(c.attr(nil, target), parent(name)), stOK, true
}

// mknod is MKNOD (RFC 1813 §3.3.11); go-nfs answers without making a character device.
func (c *nfsCall) mknod() ([]byte, uint32, bool) {
	var typ uint32
	switch c.args.ftype {
	case nfs3.NF3CHR:
		typ = unix.S_IFCHR
	case nfs3.NF3BLK:
		typ = unix.S_IFBLK
	case nfs3.NF3FIFO:
		typ = unix.S_IFIFO
	case nfs3.NF3SOCK:
		typ = unix.S_IFSOCK
	default:
		return nil, stBadType, true
	}
	name, st := c.child(c.args.fh, c.args.name)
	if st != stOK {
		return nil, st, true
	}
	if c.readOnly {
		return nil, stROFS, true
	}
	mode := uint32(defaultMode)
	if c.args.set.HasMode {
		mode = c.args.set.Mode
	}
	if err := c.w.fs.Mknod(name, typ|mode&0o777, c.args.dev.Major, c.args.dev.Minor); err != nil {
		return nil, status(err), true
	}
	info, err := c.tree.root.Lstat(name)
	if err == nil {
		c.args.set.HasSize = false
		err = c.applySet(name, info)
	}
	if err != nil {
		return nil, status(err), true
	}
	return c.created(name), stOK, true
}

const (
	stBadType   = 10007 // NFS3ERR_BADTYPE
	defaultMode = 0o644
)

// createExclusive is CREATE with EXCLUSIVE (RFC 1813 §3.3.8). The verifier is kept in the new
// file's times until the client sets them, as servers usually do.
func (c *nfsCall) createExclusive() ([]byte, uint32, bool) {
	if c.args.create != nfs3.Exclusive {
		return nil, 0, false
	}
	name, st := c.child(c.args.fh, c.args.name)
	if st != stOK {
		return nil, st, true
	}
	if c.readOnly {
		return nil, stROFS, true
	}
	const mask = 1<<31 - 1 // times that every file system keeps
	a := binary.BigEndian.Uint32(c.args.createVerf[:]) & mask
	m := binary.BigEndian.Uint32(c.args.createVerf[4:]) & mask
	f, err := c.w.fs.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, defaultMode)
	switch status(err) {
	case stOK:
		_ = f.Close()
		if err = c.w.fs.utimes(name, [2]unix.Timespec{{Sec: int64(a)}, {Sec: int64(m)}}); err != nil {
			return nil, status(err), true
		}
	case stExist, stIsDir, stInval:
		info, err := c.tree.root.Lstat(name)
		if err != nil || !info.Mode().IsRegular() || info.Size() != 0 {
			return nil, stExist, true
		}
		sys, ok := info.Sys().(*syscall.Stat_t)
		if !ok || sys.Atim.Sec != int64(a) || sys.Mtim.Sec != int64(m) {
			return nil, stExist, true
		}
	default:
		return nil, status(err), true
	}
	return c.created(name), stOK, true
}

// commit is COMMIT (RFC 1813 §3.3.21), with the fsync that go-nfs leaves out.
func (c *nfsCall) commit() ([]byte, uint32, bool) {
	name, st := c.path(c.args.fh)
	if st != stOK {
		return nil, st, true
	}
	if c.readOnly {
		return nil, stROFS, true
	}
	info, err := c.tree.root.Lstat(name)
	switch {
	case err != nil:
		return nil, status(err), true
	// a pipe would be waited for, a device be touched, a link be followed
	case !info.Mode().IsRegular():
		return nil, status(irregular(info)), true
	}
	f, err := c.tree.root.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, status(err), true
	}
	defer f.Close()
	if err := f.Sync(); err != nil {
		return nil, status(err), true
	}
	return append(c.wcc(nil, name), c.verifier[:]...), stOK, true
}

// Programs beside NFS (RFC 1813 §5, RFC 1833 §3).
const (
	progMount   = 100005
	versMount   = 3
	progPortmap = 100000
	versPortmap = 2

	mountNull    = 0
	mountMnt     = 1
	mountDump    = 2
	mountUmnt    = 3
	mountUmntAll = 4
	mountExport  = 5

	pmapNull    = 0
	pmapGetPort = 3
	pmapDump    = 4
	ipprotoTCP  = 6
)

// mount answers MOUNT version 3.
func (e *export) mount(ctx context.Context, h *sunrpc.CallHeader, call, a, reply []byte) ([]byte, error) {
	if h.Vers != versMount {
		return sunrpc.AppendProgMismatchReply(reply, h.XID, versMount, versMount), nil
	}
	d := sunrpc.NewDecoder(a)
	switch h.Proc {
	case mountNull, mountUmntAll:
		return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.Success), nil
	case mountMnt, mountUmnt:
		d.Opaque(nfs.MntPathLen)
		if d.Err() != nil || d.Remaining() != 0 {
			return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.GarbageArgs), nil
		}
		if h.Proc == mountUmnt {
			return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.Success), nil
		}
	case mountDump: // no list of mounts is kept
		return sunrpc.AppendUint32(sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.Success), 0), nil
	case mountExport:
		reply = sunrpc.AppendUint32(sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.Success), 1)
		reply = sunrpc.AppendString(reply, "/")
		return append(reply, make([]byte, 8)...), nil // no groups, no further export
	default:
		return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.ProcUnavail), nil
	}
	w, err := e.take(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { e.workers <- w }()
	got, err := w.call(call)
	if err != nil {
		return nil, err
	}
	return append(reply, got...), nil
}

// portmap answers the port mapper, version 2: everything is on this port.
func (e *export) portmap(h *sunrpc.CallHeader, a, reply []byte) []byte {
	if h.Vers != versPortmap {
		return sunrpc.AppendProgMismatchReply(reply, h.XID, versPortmap, versPortmap)
	}
	served := [][2]uint32{{nfs3.Program, nfs3.Version}, {progMount, versMount}}
	ok := func() []byte { return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.Success) }
	switch h.Proc {
	case pmapNull:
		return ok()
	case pmapGetPort:
		d := sunrpc.NewDecoder(a)
		want, proto := [2]uint32{d.Uint32(), d.Uint32()}, d.Uint32()
		if d.Err() != nil {
			return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.GarbageArgs)
		}
		for _, s := range served {
			if s == want && proto == ipprotoTCP {
				return sunrpc.AppendUint32(ok(), uint32(e.port))
			}
		}
		return sunrpc.AppendUint32(ok(), 0)
	case pmapDump:
		reply = ok()
		for _, s := range served {
			for _, v := range []uint32{1, s[0], s[1], ipprotoTCP, uint32(e.port)} {
				reply = sunrpc.AppendUint32(reply, v)
			}
		}
		return sunrpc.AppendUint32(reply, 0)
	}
	return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.ProcUnavail)
}
