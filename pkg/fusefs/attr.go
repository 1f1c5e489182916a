package fusefs

import (
	"context"
	"errors"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
)

// statBlock is the unit of st_blocks in bytes (stat(2)).
const statBlock = 512

var modeOfType = [...]uint32{
	nfs3.NF3REG:  syscall.S_IFREG,
	nfs3.NF3DIR:  syscall.S_IFDIR,
	nfs3.NF3BLK:  syscall.S_IFBLK,
	nfs3.NF3CHR:  syscall.S_IFCHR,
	nfs3.NF3LNK:  syscall.S_IFLNK,
	nfs3.NF3SOCK: syscall.S_IFSOCK,
	nfs3.NF3FIFO: syscall.S_IFIFO,
}

// fileMode returns the st_mode for attributes.
func fileMode(a *nfs3.Attr) uint32 {
	if int(a.Type) >= len(modeOfType) {
		return a.Mode & nfs3.ModeMask
	}
	return modeOfType[a.Type] | a.Mode&nfs3.ModeMask
}

// nsec returns the server's nanoseconds, below one second as the kernel requires.
func nsec(t nfs3.Time3) uint32 { return min(t.Nsec, uint32(time.Second-1)) }

func (fs *FS) fillAttr(out *fuse.Attr, a *nfs3.Attr) {
	*out = fuse.Attr{
		Ino: a.FileID, Size: a.Size, Blocks: (a.Used + statBlock - 1) / statBlock,
		Atime: uint64(a.Atime.Sec), Atimensec: nsec(a.Atime),
		Mtime: uint64(a.Mtime.Sec), Mtimensec: nsec(a.Mtime),
		Ctime: uint64(a.Ctime.Sec), Ctimensec: nsec(a.Ctime),
		Mode: fileMode(a), Nlink: a.Nlink, Owner: fuse.Owner{Uid: a.UID, Gid: a.GID},
		Blksize: uint32(fs.opts.WSize),
	}
	if a.Type == nfs3.NF3BLK || a.Type == nfs3.NF3CHR {
		// The kernel's FUSE protocol carries a device in 32 bits, encoded by new_encode_dev.
		out.Rdev = uint32(unix.Mkdev(a.Rdev.Major, a.Rdev.Minor))
	}
}

// callStart returns the clock value at which an RPC starts. Pass this value to updateAttr with the
// attributes of the reply.
func (fs *FS) callStart() uint64 { return fs.clock.Load() }

// setToNow advances moment to the current clock value. setToNow never moves moment back.
func (fs *FS) setToNow(moment *atomic.Uint64) {
	now := fs.clock.Add(1)
	for old := moment.Load(); old < now && !moment.CompareAndSwap(old, now); old = moment.Load() {
	}
}

// updateAttr stores attributes from a reply whose call was sent at start. updateAttr returns false
// and stores nothing in three cases: the node was changed or updated after start, so that the newer
// state is unknown; the node has data that the server does not have; or the attributes describe
// another object.
func (fs *FS) updateAttr(ino *inode, a *nfs3.Attr, start uint64) bool {
	ino.mu.Lock()
	defer ino.mu.Unlock()
	if start < ino.changeClock || ino.pending > 0 || ino.isOtherObjectLocked(a) {
		return false
	}
	minAge, maxAge := fs.opts.AcRegMin, fs.opts.AcRegMax
	if a.Type == nfs3.NF3DIR {
		minAge, maxAge = fs.opts.AcDirMin, fs.opts.AcDirMax
	}
	now := time.Now()
	switch {
	case !ino.known || stampOf(&ino.attr) != stampOf(a):
		ino.ttl, ino.ttlSetAt = minAge, now
	case now.Sub(ino.ttlSetAt) >= ino.ttl:
		ino.ttl, ino.ttlSetAt = min(2*max(ino.ttl, minAge), maxAge), now
	}
	ino.attr, ino.known, ino.valid = *a, true, true
	ino.receivedAt, ino.requestClock = now, start
	if ino.silly != nil && ino.attr.Nlink > 0 {
		ino.attr.Nlink-- // do not count the hidden name
	}
	ino.size = a.Size
	ino.changeClock = fs.clock.Add(1)
	return true
}

// invalidateAttr marks the attributes as outdated because the node is being changed. updateAttr
// then refuses replies to calls that were sent before.
func (fs *FS) invalidateAttr(ino *inode) {
	ino.mu.Lock()
	ino.valid, ino.unsent = false, false
	ino.changeClock = fs.clock.Add(1)
	ino.mu.Unlock()
}

// takeUnsent returns attributes that came with the reply to a change by this mount and that the
// kernel does not have yet. The kernel requests the attributes because of that change. left is how
// long the kernel may cache the attributes. ok is false when the node has no such attributes.
// takeUnsent returns them once, so a second request sends a GETATTR to the server.
func (fs *FS) takeUnsent(ino *inode, a *nfs3.Attr) (left time.Duration, ok bool) {
	ino.mu.Lock()
	defer ino.mu.Unlock()
	sent := !ino.unsent
	ino.unsent = false
	// The reply to a removal does not contain the attributes of the removed object. A rename can
	// change a directory whose attributes its reply does not contain.
	changed := fs.lastRename.Load()
	if !ino.isDir() {
		changed = max(changed, fs.lastRemoval.Load())
	}
	left = ino.ttl - time.Since(ino.receivedAt)
	if sent || !ino.valid || ino.pending > 0 || ino.requestClock < changed || left <= 0 || fs.opts.NoAC {
		return 0, false
	}
	*a = ino.attr
	return left, true
}

// updateWcc stores the attributes in a reply to a change by this mount (RFC 1813 §2.6). alone means
// that this mount had no other change of the object in flight. Only then do the attributes before
// the call show changes by other clients.
func (fs *FS) updateWcc(ino *inode, wcc *nfs3.WccData, start uint64, alone bool) {
	ino.mu.Lock()
	if alone && wcc.HasBefore && ino.pageStampValid && stampOfWcc(&wcc.Before) != ino.pageStamp {
		ino.pageStampValid = false
	}
	if wcc.HasAfter && ino.pageStampValid {
		ino.pageStamp = stampOf(&wcc.After)
	}
	ino.mu.Unlock()
	if !wcc.HasAfter || !fs.updateAttr(ino, &wcc.After, start) {
		fs.invalidateAttr(ino)
		return
	}
	ino.mu.Lock()
	ino.unsent = ino.valid
	ino.mu.Unlock()
}

// fetchTries is the number of GETATTR calls while other calls keep changing the node.
const fetchTries = 3

// fetch gets the node's attributes from the server (GETATTR) and stores them. cacheable is false
// when other calls of this mount kept changing the node: the attributes must then not be cached.
func (fs *FS) fetch(ctx context.Context, cred []byte, ino *inode, a *nfs3.Attr) (cacheable bool, err error) {
	for range fetchTries {
		start := fs.callStart()
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

func (fs *FS) getAttr(ctx context.Context, cred []byte, ino *inode, a *nfs3.Attr) error {
	for try := 0; ; try++ {
		err := fs.client.GetAttr(ctx, cred, ino.fh, a)
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

// jukeboxMinDelay and jukeboxMaxDelay bound the delay before a retry after NFS3ERR_JUKEBOX (RFC
// 1813 §2.6).
const (
	jukeboxMinDelay = 100 * time.Millisecond
	jukeboxMaxDelay = 5 * time.Second
)

// retryJukebox reports whether to retry a call that returned err, after a delay. retryJukebox
// returns false when the error is not NFS3ERR_JUKEBOX or when ctx ends during the delay.
func (fs *FS) retryJukebox(ctx context.Context, err error, try int) bool {
	if err == nil || !hasStatus(err, nfs3.ErrJukebox) {
		return false
	}
	pause := jukeboxMaxDelay
	if try < 6 { // 2^6 times the minimum exceeds the maximum
		pause = min(jukeboxMinDelay<<try, jukeboxMaxDelay)
	}
	t := time.NewTimer(pause)
	defer t.Stop()
	select {
	case <-t.C:
		fs.Counters.JukeboxRetries.Add(1)
		return true
	case <-ctx.Done():
		return false
	}
}

func hasStatus(err error, s nfs3.Status) bool {
	if err == nil {
		return false // returns before the allocation below
	}
	var e *nfs3.Error
	return errors.As(err, &e) && e.Status == s
}

// checkStale returns err. checkStale drops the node when the server no longer knows the node's
// handle.
func (fs *FS) checkStale(ino *inode, err error) error {
	if err != nil && (hasStatus(err, nfs3.ErrStale) || hasStatus(err, nfs3.ErrBadHandle)) {
		fs.dropStale(ino)
	}
	return err
}

// dropStale removes a node from lookups because the server no longer knows its handle.
func (fs *FS) dropStale(ino *inode) {
	fs.Counters.Stale.Add(1)
	fs.inodes.stale(ino)
	fs.invalidateAttr(ino)
}

// errno returns the error number for any error of this package.
func errno(err error) syscall.Errno {
	switch err := err.(type) {
	case nil:
		return 0
	case syscall.Errno:
		return err
	case *nfs3.Error:
		if err.Status == nfs3.ErrJukebox {
			return syscall.EINTR // only an interrupt ends the retries
		}
		return nfs3.Errno(err)
	}
	return wrappedErrno(err)
}

// wrappedErrno is separate from errno because errors.As allocates its targets. Successful calls
// must not pay for this allocation.
func wrappedErrno(err error) syscall.Errno {
	var n syscall.Errno
	var e *nfs3.Error
	switch {
	case errors.As(err, &e) && e.Status == nfs3.ErrJukebox:
		return syscall.EINTR
	case e == nil && errors.As(err, &n) && n == syscall.EINTR:
		return n
	}
	return nfs3.Errno(err)
}

func toStatus(err error) fuse.Status { return fuse.Status(errno(err)) }
