package vfs

import (
	"context"
	"errors"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/attr"
)

// statBlock is the unit of st_blocks in bytes (stat(2)).
const statBlock = 512

var modeOfType = [...]uint32{
	nfs.Regular:     syscall.S_IFREG,
	nfs.Directory:   syscall.S_IFDIR,
	nfs.BlockDevice: syscall.S_IFBLK,
	nfs.CharDevice:  syscall.S_IFCHR,
	nfs.Symlink:     syscall.S_IFLNK,
	nfs.Socket:      syscall.S_IFSOCK,
	nfs.FIFO:        syscall.S_IFIFO,
}

// fileMode returns the st_mode for attributes.
func fileMode(a *nfs.Attr) uint32 {
	if int(a.Type) >= len(modeOfType) {
		return a.Mode & nfs.ModeMask
	}
	return modeOfType[a.Type] | a.Mode&nfs.ModeMask
}

// nsec returns the server's nanoseconds, below one second as the kernel requires.
func nsec(t nfs.Time) uint32 { return min(t.Nsec, uint32(time.Second-1)) }

// fillAttr sets out to the attributes a of the server. The size includes data that the server may
// have lost.
func (fs *FS) fillAttr(ino *inode, out *fuse.Attr, a *nfs.Attr) {
	*out = fuse.Attr{
		Ino: a.FileID, Size: max(a.Size, ino.data.Load().end()), Blocks: (a.Used + statBlock - 1) / statBlock,
		Atime: uint64(a.Atime.Sec), Atimensec: nsec(a.Atime),
		Mtime: uint64(a.Mtime.Sec), Mtimensec: nsec(a.Mtime),
		Ctime: uint64(a.Ctime.Sec), Ctimensec: nsec(a.Ctime),
		Mode: fileMode(a), Nlink: a.Nlink, Owner: fuse.Owner{Uid: a.UID, Gid: a.GID},
		Blksize: uint32(fs.opts.WSize),
	}
	if a.Type == nfs.BlockDevice || a.Type == nfs.CharDevice {
		// The kernel's FUSE protocol carries a device in 32 bits, encoded by new_encode_dev.
		out.Rdev = uint32(unix.Mkdev(a.Rdev.Major, a.Rdev.Minor))
	}
}

// updateAttr stores attributes from a reply whose call was sent at start. updateAttr returns false
// and stores nothing in three cases: the node was changed or updated after start, so that the newer
// state is unknown; the node has data that the server does not have; or the attributes describe
// another object. When the attributes show a change by another client, the cached pages of a file
// become stale, and the cached names of a directory expire.
func (fs *FS) updateAttr(ino *inode, a *nfs.Attr, start uint64) bool {
	ino.mu.Lock()
	stored, expired := fs.updateAttrLocked(ino, a, start)
	ino.mu.Unlock()
	fs.expireNames(ino, expired)
	return stored
}

// updateAttrLocked is updateAttr for callers that hold ino.mu. They pass expired to expireNames
// afterwards.
func (fs *FS) updateAttrLocked(ino *inode, a *nfs.Attr, start uint64) (stored bool, expired map[string]cachedName) {
	if start < ino.changeClock || ino.pending > 0 || ino.isOtherObjectLocked(a) {
		return false, nil
	}
	next := a.Stamp()
	changed := ino.known && ino.attr.Stamp() != next
	foreign := ino.known && fs.changedByOther(ino, ino.attr.Stamp(), next)
	if foreign && a.Type == nfs.Directory {
		ino.newEpoch(fs)
		expired = ino.takeNamesLocked()
	}
	if ino.pageStampValid {
		ino.pageStampValid = !fs.changedByOther(ino, ino.pageStamp, next)
		ino.pageStamp = next
	}
	fs.ageLocked(ino, a, changed)
	ino.attr, ino.known, ino.valid = *a, true, true
	ino.receivedAt, ino.requestClock = attr.Now(), start
	if ino.silly != nil && ino.attr.Nlink > 0 {
		ino.attr.Nlink-- // do not count the hidden name
	}
	ino.size, ino.sizeUnknown = a.Size, false
	ino.changeClock = fs.clock.Tick()
	return true, expired
}

// ageLocked sets how long the new attributes a may be cached, as Linux's NFS client does
// (nfs_update_inode). The time is the minimum after a change, and doubles while the object stays
// the same for that time. The caller holds ino.mu.
func (fs *FS) ageLocked(ino *inode, a *nfs.Attr, changed bool) {
	minAge, maxAge := fs.opts.AcRegMin, fs.opts.AcRegMax
	if a.Type == nfs.Directory {
		minAge, maxAge = fs.opts.AcDirMin, fs.opts.AcDirMax
	}
	at := attr.Now()
	switch {
	case !ino.known || changed:
		ino.ttl, ino.ttlSetAt = minAge, at
	case at.Sub(ino.ttlSetAt) >= ino.ttl:
		ino.ttl, ino.ttlSetAt = min(2*max(ino.ttl, minAge), maxAge), at
	}
}

// mayHaveSetID reports whether the file had a set-user-ID or set-group-ID bit when its attributes
// were last known.
func (ino *inode) mayHaveSetID() bool {
	ino.mu.Lock()
	defer ino.mu.Unlock()
	return ino.attr.Mode&(syscall.S_ISUID|syscall.S_ISGID) != 0
}

// invalidateAttr marks the attributes as outdated because the node is being changed. updateAttr
// then refuses replies to calls that were sent before.
func (fs *FS) invalidateAttr(ino *inode) {
	ino.mu.Lock()
	defer ino.mu.Unlock()
	ino.invalidateLocked(fs)
}

func (ino *inode) invalidateLocked(fs *FS) {
	ino.valid, ino.unsent = false, false
	ino.changeClock = fs.clock.Tick()
}

// setSent records that the kernel gets the attributes a.
func (ino *inode) setSent(a *nfs.Attr) {
	ino.mu.Lock()
	defer ino.mu.Unlock()
	ino.sent = a.Stamp()
}

// takeUnsent returns attributes that came with the reply to a change by this mount and that the
// kernel does not have yet. The kernel requests the attributes because of that change. left is how
// long the kernel may cache the attributes. ok is false when the node has no such attributes.
// takeUnsent returns them once, so a second request sends a GETATTR to the server.
func (fs *FS) takeUnsent(ino *inode, a *nfs.Attr) (left time.Duration, ok bool) {
	ino.mu.Lock()
	defer ino.mu.Unlock()
	sent := !ino.unsent
	ino.unsent = false
	left = ino.ttl - attr.Now().Sub(ino.receivedAt)
	if sent || !ino.valid || ino.pending > 0 || ino.requestClock < fs.lastUnseenChange(ino) || left <= 0 ||
		fs.opts.NoAC {
		return 0, false
	}
	*a = ino.attr
	return left, true
}

// updateWcc stores the attributes in the reply to a change by this mount (RFC 1813 §2.6). alone
// means that this mount had no other change of the object in flight. Only then do the attributes
// before the call show changes by other clients. A change by this mount alone keeps cached pages,
// names, and the age of the attributes.
func (fs *FS) updateWcc(ino *inode, wcc *nfs.Change, start uint64, alone bool) {
	ino.mu.Lock()
	own := fs.ownChangeLocked(ino, wcc, alone)
	if own && wcc.HasAfter {
		ino.attr.Size, ino.attr.Mtime, ino.attr.Ctime = wcc.After.Size, wcc.After.Mtime, wcc.After.Ctime
	}
	if ino.pageStampValid {
		ino.pageStampValid = own
		if wcc.HasAfter {
			ino.pageStamp = wcc.After.Stamp()
		}
	}
	if c := ino.acls; c != nil && wcc.HasBefore && wcc.HasAfter && c.ctime == wcc.Before.Ctime {
		c.ctime = wcc.After.Ctime // a new entry or new data did not change the ACL
	}
	stored := false
	var expired map[string]cachedName
	if wcc.HasAfter {
		stored, expired = fs.updateAttrLocked(ino, &wcc.After, start)
	}
	if ino.unsent = stored; !stored {
		ino.invalidateLocked(fs)
	}
	ino.mu.Unlock()
	fs.expireNames(ino, expired)
}

// sawChange records that the attributes of a node, from the reply to a call sent at start, include
// all renames of this mount until the clock seen.
func (ino *inode) sawChange(start, seen uint64) {
	ino.mu.Lock()
	defer ino.mu.Unlock()
	if ino.requestClock == start {
		ino.requestClock = seen
	}
}

// updateCommitted stores the attributes in the reply to a COMMIT, which changes no attribute.
func (fs *FS) updateCommitted(ino *inode, wcc *nfs.Change, start uint64) {
	stored := wcc.HasAfter && fs.updateAttr(ino, &wcc.After, start)
	ino.mu.Lock()
	defer ino.mu.Unlock()
	if ino.unsent = stored && ino.valid; !stored {
		ino.invalidateLocked(fs)
	}
}

// ownChangeLocked reports whether the reply to a change by this mount shows no change by another
// client before it. A file without attributes from before the call counts as unchanged, and a
// directory counts as changed, as in Linux's NFS client. The caller holds ino.mu.
func (fs *FS) ownChangeLocked(ino *inode, wcc *nfs.Change, alone bool) bool {
	switch {
	case !ino.known:
		return false
	case !wcc.HasBefore:
		return !ino.isDir()
	case !alone:
		return true
	}
	return !fs.changedByOther(ino, ino.attr.Stamp(), wcc.Before)
}

// fetchTries is the number of GETATTR calls while other calls keep changing the node.
const fetchTries = 3

// fetch gets the node's attributes from the server (GETATTR) and stores them. cacheable is false
// when other calls of this mount kept changing the node: the attributes must then not be cached.
func (fs *FS) fetch(ctx context.Context, cred []byte, ino *inode, a *nfs.Attr) (cacheable bool, err error) {
	for range fetchTries {
		start := fs.clock.Now()
		if err := fs.getAttr(ctx, cred, ino, a); err != nil {
			return false, err
		}
		if fs.updateAttr(ino, a, start) {
			ino.mu.Lock()
			*a = ino.attr
			ino.mu.Unlock()
			return true, nil
		}
	}
	ino.mu.Lock()
	a.Size = max(a.Size, ino.size)
	ino.mu.Unlock()
	return false, nil
}

func (fs *FS) getAttr(ctx context.Context, cred []byte, ino *inode, a *nfs.Attr) error {
	for try := 0; ; try++ {
		var err error
		*a, err = fs.server.GetAttr(ctx, cred, ino.fh)
		if fs.retryJukebox(ctx, err, try) {
			continue
		}
		if err == nil && ino.isOtherObject(a) {
			fs.dropStale(ino)
			return syscall.ESTALE // the server reused the handle for another object
		}
		return fs.checkStale(ino, err)
	}
}

// attrTimeout returns how long the kernel may cache attributes that were just stored.
func (fs *FS) attrTimeout(ino *inode) time.Duration {
	if fs.opts.NoAC {
		return 0
	}
	ino.mu.Lock()
	defer ino.mu.Unlock()
	if !ino.valid {
		return 0
	}
	return ino.ttl
}

// freshLocked reports whether the cached attributes may be used without asking the server. The
// caller holds ino.mu.
func (fs *FS) freshLocked(ino *inode) bool {
	return ino.valid && !fs.opts.NoAC && attr.Now().Sub(ino.receivedAt) < ino.ttl
}

func hasStatus(err error, s nfs.Status) bool {
	if err == nil {
		return false // returns before the allocation below
	}
	var e *nfs.Error
	return errors.As(err, &e) && e.Status == s
}

// checkStale returns err. checkStale drops the node when the server no longer knows the node's
// handle. checkStale counts and reports an invalid reply.
func (fs *FS) checkStale(ino *inode, err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, nfs.ErrMalformed) {
		_ = fs.invalidReply(ino, err.Error())
		return err // for the error of a mount; the kernel gets EIO
	}
	if isStale(err) {
		fs.dropStale(ino)
	}
	return err
}

// dropStale removes a node from lookups because the server no longer knows its handle. The kernel
// looks up each name of the path once more and repeats the call. More directories of the path may
// be stale, so the server must answer all these lookups.
func (fs *FS) dropStale(ino *inode) {
	fs.Counters.Stale.Add(1)
	fs.inodes.stale(ino)
	fs.lookups.clear()
	fs.invalidateAttr(ino)
}

// errno returns the error number for any error of this package.
func errno(err error) syscall.Errno {
	switch err := err.(type) {
	case nil:
		return 0
	case syscall.Errno:
		return err
	case *nfs.Error:
		if err.Status == nfs.ErrJukebox {
			return syscall.EINTR // only an interrupt ends the retries
		}
		return nfs.Errno(err)
	}
	return wrappedErrno(err)
}

// wrappedErrno is separate from errno because errors.As allocates its targets. Successful calls
// must not pay for this allocation.
func wrappedErrno(err error) syscall.Errno {
	var n syscall.Errno
	var e *nfs.Error
	switch {
	case errors.As(err, &e) && e.Status == nfs.ErrJukebox:
		return syscall.EINTR
	case e == nil && errors.As(err, &n) && n == syscall.EINTR:
		return n
	}
	return nfs.Errno(err)
}

func toStatus(err error) fuse.Status { return fuse.Status(errno(err)) }
