package nfsd

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// blockSize is the unit of st_blocks in bytes (stat(2)).
const blockSize = 512

func typeOf(mode uint32) nfs3.FileType {
	switch mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return nfs3.NF3DIR
	case unix.S_IFLNK:
		return nfs3.NF3LNK
	case unix.S_IFBLK:
		return nfs3.NF3BLK
	case unix.S_IFCHR:
		return nfs3.NF3CHR
	case unix.S_IFSOCK:
		return nfs3.NF3SOCK
	case unix.S_IFIFO:
		return nfs3.NF3FIFO
	}
	return nfs3.NF3REG
}

func timeOf(t unix.Timespec) nfs3.Time3 { return nfs.TimeOf(time.Unix(t.Unix())) }

// attrOf converts attributes to fattr3. The fsid differs between parts of one mount that number
// their inodes separately, as btrfs subvolumes do.
func (s *Server) attrOf(st *unix.Stat_t) nfs3.Attr {
	a := nfs3.Attr{Type: typeOf(st.Mode), Mode: st.Mode & nfs3.ModeMask, Nlink: uint32(st.Nlink), UID: st.Uid,
		GID: st.Gid, Size: uint64(st.Size), Used: uint64(st.Blocks) * blockSize, FSID: s.fsid, FileID: st.Ino,
		Atime: timeOf(st.Atim), Mtime: timeOf(st.Mtim), Ctime: timeOf(st.Ctim)}
	if uint64(st.Dev) != s.rootKey.dev {
		a.FSID ^= uint64(st.Dev)
	}
	if a.Type == nfs3.NF3BLK || a.Type == nfs3.NF3CHR {
		a.Rdev = nfs3.Device{Major: unix.Major(uint64(st.Rdev)), Minor: unix.Minor(uint64(st.Rdev))}
	}
	return a
}

func wccOf(st *unix.Stat_t) nfs3.WccAttr {
	return nfs3.WccAttr{Size: uint64(st.Size), Mtime: timeOf(st.Mtim), Ctime: timeOf(st.Ctim)}
}

// permit checks one access of the caller and returns the error that a local caller gets.
func (c *call) permit(o *object, st *unix.Stat_t, want uint32) error {
	bits, noWrite, err := o.permissions(c.id, &c.who, st)
	switch {
	case err != nil:
		return err
	case bits&want == want:
		return nil
	case want == permWrite && noWrite != nil:
		return noWrite
	}
	return unix.EACCES
}

// permitData is permit for the data of a file. Its owner may read and write it whatever the mode
// says, because a local process keeps the access that it had when it opened the file (RFC 1813
// §4.4). Whoever may execute a file may read it, because a client reads it to execute it.
func (c *call) permitData(o *object, st *unix.Stat_t, want uint32) error {
	err := c.permit(o, st, want)
	if err != unix.EACCES {
		return err
	}
	if c.id.switches && st.Uid == c.who.uid {
		return nil
	}
	if want == permRead && st.Mode&unix.S_IFMT == unix.S_IFREG {
		return c.permit(o, st, permExec)
	}
	return err
}

// getAttr handles GETATTR (RFC 1813 §3.3.1).
func (c *call) getAttr() error {
	var st unix.Stat_t
	if err := c.obj.stat(&st); err != nil {
		return err
	}
	a := c.attrOf(&st)
	c.out = nfs3.AppendAttr(c.out, &a)
	return nil
}

// access handles ACCESS (RFC 1813 §3.3.4): the kernel says what the caller may do.
func (c *call) access() error {
	var st unix.Stat_t
	if err := c.obj.stat(&st); err != nil {
		return err
	}
	bits, _, err := c.obj.permissions(c.id, &c.who, &st)
	if err != nil {
		return err
	}
	var allowed uint32
	if bits&permRead != 0 {
		allowed |= nfs3.AccessRead
	}
	dir := c.obj.kind == unix.S_IFDIR
	switch {
	case c.cfg.ReadOnly || bits&permWrite == 0:
	case !dir:
		allowed |= nfs3.AccessModify | nfs3.AccessExtend
	case bits&permExec != 0: // entries are changed with both rights only
		allowed |= nfs3.AccessModify | nfs3.AccessExtend | nfs3.AccessDelete
	}
	switch {
	case bits&permExec == 0:
	case dir:
		allowed |= nfs3.AccessLookup
	default:
		allowed |= nfs3.AccessExecute
	}
	a := c.attrOf(&st)
	c.out = nfs3.AppendPostOpAttr(c.out, &a)
	c.out = sunrpc.AppendUint32(c.out, c.args.Access&allowed)
	return nil
}

// setAttr handles SETATTR (RFC 1813 §3.3.2).
func (c *call) setAttr() error {
	c.obj.setting.Lock() // between the guard and the change
	defer c.obj.setting.Unlock()
	if err := c.begin(&c.w, c.obj); err != nil {
		return err
	}
	if c.args.HasGuard && c.args.Guard != c.w.before.Ctime {
		return statusError(nfs3.ErrNotSync)
	}
	if c.args.Set != (nfs3.SetAttr{}) {
		if err := c.applySet(c.obj, &c.args.Set); err != nil {
			return err
		}
		if err := c.syncAny(c.obj); err != nil {
			return err
		}
	}
	c.appendWcc(&c.w, c.obj)
	return nil
}

// applySet sets size, owner, mode and times as the caller. The order matters: a new size and a new
// owner clear set-id bits, and all three change the times.
func (c *call) applySet(o *object, set *nfs3.SetAttr) error {
	mtimeHow := set.MtimeHow
	if set.HasSize {
		if err := c.truncate(o, set.Size); err != nil {
			return err
		}
		// The truncation has set this time. A second change needs more than write permission.
		if mtimeHow == nfs3.SetToServerTime && set.AtimeHow == nfs3.DontChange {
			mtimeHow = nfs3.DontChange
		}
	}
	if !set.HasUID && !set.HasGID && !set.HasMode && set.AtimeHow == nfs3.DontChange &&
		mtimeHow == nfs3.DontChange {
		return nil
	}
	return c.id.as(&c.who, func() error {
		if set.HasUID || set.HasGID {
			if err := chown(o.path, set); err != nil {
				return err
			}
		}
		if set.HasMode && o.kind != unix.S_IFLNK { // the mode of a link has no meaning
			if err := chmod(o.path, c.modeFor(o.kind, set.Mode)); err != nil {
				return err
			}
		}
		if set.AtimeHow == nfs3.DontChange && mtimeHow == nfs3.DontChange {
			return nil
		}
		// some of these have a meaning for utimensat
		if max(set.Atime.Nsec, set.Mtime.Nsec) >= 1e9 {
			return unix.EINVAL
		}
		return utimes(o.path, timespec(set.AtimeHow, set.Atime), timespec(mtimeHow, set.Mtime))
	})
}

// modeFor returns the mode that the caller may give an object of a type (S_IFMT): that of a file
// has no set-id bits, unless the server allows them. A caller could else run a program as any user
// that AUTH_SYS lets it claim to be.
func (c *call) modeFor(kind, mode uint32) uint32 {
	if !c.cfg.AllowSUID && kind != unix.S_IFDIR {
		mode &^= unix.S_ISUID | unix.S_ISGID
	}
	return mode
}

// truncate sets the size of a regular file.
func (c *call) truncate(o *object, size uint64) error {
	switch {
	case o.kind == unix.S_IFDIR:
		return unix.EISDIR
	case o.kind != unix.S_IFREG:
		return unix.EINVAL
	case size > 1<<63-1:
		return unix.EFBIG
	}
	var st unix.Stat_t
	if err := o.stat(&st); err != nil {
		return err
	}
	if err := c.permitData(o, &st, permWrite); err != nil {
		return err
	}
	fd, err := o.writer()
	if err != nil {
		return err
	}
	return c.id.as(&c.who, func() error {
		return retry(func() error { return unix.Ftruncate(fd, int64(size)) })
	})
}

// chown sets owner and group.
func chown(fd int, set *nfs3.SetAttr) error {
	uid, gid := -1, -1
	if set.HasUID {
		if set.UID == badID {
			return unix.EINVAL
		}
		uid = int(set.UID)
	}
	if set.HasGID {
		if set.GID == badID {
			return unix.EINVAL
		}
		gid = int(set.GID)
	}
	return retry(func() error { return unix.Fchownat(fd, "", uid, gid, unix.AT_EMPTY_PATH) })
}

// chmod sets the mode of the object of an O_PATH descriptor. Kernels before 6.6 have no fchmodat2.
func chmod(fd int, mode uint32) error {
	err := retry(func() error { return unix.Fchmodat(fd, "", mode, unix.AT_EMPTY_PATH) })
	if err == unix.ENOSYS || err == unix.EOPNOTSUPP || err == unix.EINVAL {
		err = retry(func() error { return unix.Fchmodat(unix.AT_FDCWD, procFD(fd), mode, 0) })
	}
	return err
}

// utimes sets the times of the object of an O_PATH descriptor, also of a symbolic link.
func utimes(fd int, atime, mtime unix.Timespec) error {
	ts := []unix.Timespec{atime, mtime}
	return retry(func() error { return unix.UtimesNanoAt(fd, "", ts, unix.AT_EMPTY_PATH) })
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
