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

// statBlock is the unit of st_blocks in octets (stat(2)).
const statBlock = 512

var modeOfType = [...]uint32{nfs3.NF3REG: syscall.S_IFREG, nfs3.NF3DIR: syscall.S_IFDIR, nfs3.NF3BLK: syscall.S_IFBLK,
	nfs3.NF3CHR: syscall.S_IFCHR, nfs3.NF3LNK: syscall.S_IFLNK, nfs3.NF3SOCK: syscall.S_IFSOCK, nfs3.NF3FIFO: syscall.S_IFIFO}

// fileMode is the st_mode of attributes.
func fileMode(a *nfs3.Attr) uint32 {
	if int(a.Type) >= len(modeOfType) {
		return a.Mode & nfs3.ModeMask
	}
	return modeOfType[a.Type] | a.Mode&nfs3.ModeMask
}

// nsec keeps a server's nanoseconds below a second, as the kernel expects them.
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
		// The kernel's FUSE carries a device in 32 bits, in the encoding of its new_encode_dev.
		out.Rdev = uint32(unix.Mkdev(a.Rdev.Major, a.Rdev.Minor))
	}
}

// tick begins an RPC whose attributes will be absorbed: they are as fresh as the moment it was
// sent.
func (fs *FS) tick() uint64 { return fs.clock.Load() }

// mark sets a moment of the clock to now, unless it is later already.
func (fs *FS) mark(moment *atomic.Uint64) {
	now := fs.clock.Add(1)
	for old := moment.Load(); old < now && !moment.CompareAndSwap(old, now); old = moment.Load() {
	}
}

// absorb takes over attributes from a reply whose call was sent at start. It returns false, and
// does nothing, when the node was changed or seen since then, because nobody could tell which of
// the two is newer, while it has data that the server has not, and when they are another object's.
func (fs *FS) absorb(ino *inode, a *nfs3.Attr, start uint64) bool {
	ino.mu.Lock()
	defer ino.mu.Unlock()
	if start < ino.attrClock || ino.pending > 0 || ino.isOther(a) {
		return false
	}
	least, most := fs.opts.AcRegMin, fs.opts.AcRegMax
	if a.Type == nfs3.NF3DIR {
		least, most = fs.opts.AcDirMin, fs.opts.AcDirMax
	}
	now := time.Now()
	switch {
	case !ino.known || stampOf(&ino.attr) != stampOf(a):
		ino.ttl, ino.checked = least, now
	case now.Sub(ino.checked) >= ino.ttl:
		ino.ttl, ino.checked = min(2*max(ino.ttl, least), most), now
	}
	ino.attr, ino.known, ino.valid = *a, true, true
	ino.seen, ino.seenClock = now, start
	if ino.silly != nil && ino.attr.Nlink > 0 {
		ino.attr.Nlink-- // the name that is left is not one of the user's
	}
	ino.size = a.Size
	ino.attrClock = fs.clock.Add(1)
	return true
}

// outdate says that the node is being changed: attributes fetched before now are not to be
// believed.
func (fs *FS) outdate(ino *inode) {
	ino.mu.Lock()
	ino.valid, ino.untold = false, false
	ino.attrClock = fs.clock.Add(1)
	ino.mu.Unlock()
}

// news are attributes that the kernel has not been told yet, and asks for because of the very
// change whose reply they came with: for how long it may believe them, and false if there are none.
// Whoever asks a second time wants the server's word.
func (fs *FS) news(ino *inode, a *nfs3.Attr) (left time.Duration, ok bool) {
	ino.mu.Lock()
	defer ino.mu.Unlock()
	told := !ino.untold
	ino.untold = false
	// A removal changes an object of which its reply says nothing, and a rename may change a
	// directory in such a way.
	other := fs.renamed.Load()
	if !ino.isDir() {
		other = max(other, fs.removed.Load())
	}
	left = ino.ttl - time.Since(ino.seen)
	if told || !ino.valid || ino.pending > 0 || ino.seenClock < other || left <= 0 || fs.opts.NoAC {
		return 0, false
	}
	*a = ino.attr
	return left, true
}

// absorbWcc takes over what a reply says of an object that our own call changed (RFC 1813 §2.6).
// alone says that no other call of ours was changing it at the time; only then do the attributes
// before the call tell of others.
func (fs *FS) absorbWcc(ino *inode, wcc *nfs3.WccData, start uint64, alone bool) {
	ino.mu.Lock()
	if alone && wcc.HasBefore && ino.baseOK && stampOfWcc(&wcc.Before) != ino.base {
		ino.baseOK = false
	}
	if wcc.HasAfter && ino.baseOK {
		ino.base = stampOf(&wcc.After)
	}
	ino.mu.Unlock()
	if !wcc.HasAfter || !fs.absorb(ino, &wcc.After, start) {
		fs.outdate(ino)
		return
	}
	ino.mu.Lock()
	ino.untold = ino.valid
	ino.mu.Unlock()
}

// fetchTries is how often attributes are asked for again because the node changed meanwhile.
const fetchTries = 3

// fetch asks the server for the node's attributes (GETATTR) and absorbs them. settled is false when
// others of our calls kept changing the node: then the attributes must not be cached.
func (fs *FS) fetch(ctx context.Context, cred []byte, ino *inode, a *nfs3.Attr) (settled bool, err error) {
	for range fetchTries {
		start := fs.tick()
		if err := fs.getAttr(ctx, cred, ino, a); err != nil {
			return false, err
		}
		if fs.absorb(ino, a, start) {
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
		if fs.again(ctx, err, try) {
			continue
		}
		if err == nil && ino.otherObject(a) {
			fs.dropStale(ino)
			return syscall.ESTALE // the server uses the handle again
		}
		return fs.nodeErr(ino, err)
	}
}

// timeout is for how long the kernel may believe attributes that were just absorbed.
func (fs *FS) timeout(ino *inode) time.Duration {
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

// jukeboxFirst and jukeboxMost bound the pause before a call is made again after NFS3ERR_JUKEBOX
// (RFC 1813 §2.6: wait and try again).
const (
	jukeboxFirst = 100 * time.Millisecond
	jukeboxMost  = 5 * time.Second
)

// again tells whether to make a call again that returned err, after a pause: the server asked for
// it, and ctx has not ended.
func (fs *FS) again(ctx context.Context, err error, try int) bool {
	if err == nil || !hasStatus(err, nfs3.ErrJukebox) {
		return false
	}
	pause := jukeboxMost
	if try < 6 { // 2^6 times the first pause is beyond the most
		pause = min(jukeboxFirst<<try, jukeboxMost)
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
		return false // without the allocation below
	}
	var e *nfs3.Error
	return errors.As(err, &e) && e.Status == s
}

// nodeErr passes err on, and drops the node when the server does not know it any more.
func (fs *FS) nodeErr(ino *inode, err error) error {
	if err != nil && (hasStatus(err, nfs3.ErrStale) || hasStatus(err, nfs3.ErrBadHandle)) {
		fs.dropStale(ino)
	}
	return err
}

// dropStale makes lookups miss a node that the server does not know any more.
func (fs *FS) dropStale(ino *inode) {
	fs.Counters.Stale.Add(1)
	fs.inodes.stale(ino)
	fs.outdate(ino)
}

// errno is the error number of any error that this package meets.
func errno(err error) syscall.Errno {
	switch err := err.(type) {
	case nil:
		return 0
	case syscall.Errno:
		return err
	case *nfs3.Error:
		if err.Status == nfs3.ErrJukebox {
			return syscall.EINTR // only an interrupt ends the waiting
		}
		return nfs3.Errno(err)
	}
	return wrappedErrno(err)
}

// wrappedErrno is apart from errno because what it looks for would be allocated at each of the
// calls that go well.
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
