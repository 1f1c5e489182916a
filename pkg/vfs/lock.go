package vfs

import (
	"context"
	"sync"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/rangelock"
)

// handleLocks says what an open file needs for its locks, which the nlm.Client has. The number of
// the open file, not its owner, says which locks end with it: see nlm.Client.ReleaseOpen.
type handleLocks struct {
	mu       sync.Mutex
	used     bool          // a lock was requested
	flushed  time.Time     // time of the last FLUSH
	released chan struct{} // closed after the release of the locks; nil while no request waits for it
}

// GetLk handles fcntl(2) with F_GETLK.
func (fs *FS) GetLk(k *kernel.Request, in *fuse.LkIn, out *fuse.LkOut) fuse.Status {
	return fs.lockRequest(k, in, func(r *request, h *fileHandle, l nlm.Lock) error {
		ctx, done := lockContext(r)
		defer done()
		holder, held, err := fs.opts.Locks.Test(ctx, h.cred, h.ino.fh, l)
		if held && holder.Open != 0 && fs.awaitRelease(ctx, h.ino) { // a lock of this mount
			holder, held, err = fs.opts.Locks.Test(ctx, h.cred, h.ino.fh, l)
		}
		if err != nil {
			return err
		}
		out.Lk.Typ = syscall.F_UNLCK
		if held {
			out.Lk = fuse.FileLock{Start: holder.Start, End: holder.End, Typ: syscall.F_RDLCK, Pid: holder.PID}
			if holder.Exclusive {
				out.Lk.Typ = syscall.F_WRLCK
			}
		}
		return nil
	})
}

// SetLk handles fcntl(2) with F_SETLK and flock(2) with LOCK_NB.
func (fs *FS) SetLk(k *kernel.Request, in *fuse.LkIn) fuse.Status {
	return fs.lockRequest(k, in, func(r *request, h *fileHandle, l nlm.Lock) error {
		ctx, done := lockContext(r)
		defer done()
		if in.Lk.Typ == syscall.F_UNLCK {
			return fs.unlock(ctx, r, h, &l)
		}
		err := fs.lock(ctx, r, h, &l, false)
		if err == syscall.EAGAIN && fs.awaitRelease(ctx, h.ino) {
			err = fs.lock(ctx, r, h, &l, false)
		}
		return err
	})
}

// SetLkw handles fcntl(2) with F_SETLKW and flock(2). Any signal ends it; the kernel restarts the
// system call where the program asked for that.
func (fs *FS) SetLkw(k *kernel.Request, in *fuse.LkIn) fuse.Status {
	return fs.lockRequest(k, in, func(r *request, h *fileHandle, l nlm.Lock) error {
		ctx, done := lockContext(r)
		defer done()
		if in.Lk.Typ == syscall.F_UNLCK {
			return fs.unlock(ctx, r, h, &l)
		}
		return fs.lock(ctx, r, h, &l, true)
	})
}

func (fs *FS) lockRequest(k *kernel.Request, in *fuse.LkIn,
	do func(*request, *fileHandle, nlm.Lock) error) fuse.Status {
	if fs.opts.Locks == nil {
		return fuse.ENOSYS
	}
	r := fs.begin(k)
	h := fs.file(in.Fh)
	if h == nil {
		return fs.end(r, syscall.EBADF)
	}
	l := nlm.Lock{Start: in.Lk.Start, End: in.Lk.End, Exclusive: in.Lk.Typ == syscall.F_WRLCK, PID: in.Lk.Pid,
		Open: h.id, Owner: nlm.Owner{Kind: nlm.Posix, ID: in.Owner}}
	if in.LkFlags&fuse.FUSE_LK_FLOCK != 0 {
		l.Owner.Kind = nlm.Flock
	}
	if l.End > rangelock.MaxOffset || l.Start > l.End {
		return fs.end(r, syscall.EINVAL)
	}
	return fs.end(r, do(r, h, l))
}

// lockContext returns a context that ends with r. A context that is derived from r may use r after its
// end, when r is another request. The caller must call done before r ends.
func lockContext(r *request) (ctx context.Context, done func()) {
	ctx, stop := context.WithCancel(context.Background())
	ended := r.Done()
	go func() {
		select {
		case <-ended:
		case <-ctx.Done():
		}
		stop()
	}()
	return ctx, stop
}

// lock sets a lock. Locks make the data of clients coherent, as in Linux's client: dirty data is on
// the server before the lock is requested, and the kernel's cached pages are dropped after the lock
// is granted. Attributes cannot tell whether the file has changed: clients that lock in turn can
// change it several times within one tick of the server's clock. Missing names that were looked up
// before the lock are looked up again: a database finds out by the name of its journal that another
// client was killed in a transaction.
func (fs *FS) lock(ctx context.Context, r *request, h *fileHandle, l *nlm.Lock, wait bool) error {
	fs.flushPages(h.ino)
	if err := fs.sync(r, h.ino); err != nil {
		return err
	}
	h.locks.mu.Lock()
	h.locks.used = true
	h.locks.mu.Unlock()
	if err := fs.opts.Locks.Lock(ctx, h.cred, h.ino.fh, *l, wait); err != nil {
		return err
	}
	fs.attrs.Mark(&fs.attrs.Lock)
	h.ino.attr.ForgetPages()
	var a nfs.Attr
	cacheable, err := fs.fetch(r, h.cred, h.ino, &a)
	if err != nil {
		fs.dropCache(h.ino) // return no error: the lock is set, and only its owner can release it
		return nil
	}
	fs.revalidate(h.ino, &a, cacheable)
	return nil
}

// unlock releases locks after all dirty data is on the server.
func (fs *FS) unlock(ctx context.Context, r *request, h *fileHandle, l *nlm.Lock) error {
	fs.flushPages(h.ino)
	err := fs.sync(r, h.ino) // an interrupted process unlocks nevertheless
	return firstError(fs.opts.Locks.Unlock(ctx, h.cred, h.ino.fh, l.Owner, l.Start, l.End), err)
}

func firstError(a, b error) error {
	if a != nil {
		return a
	}
	return b
}

// flushLocks releases the fcntl(2) locks that a process has on the file: close(2) releases them,
// through whichever open file they were set. It first writes the data that was written under the
// locks, perhaps through another open file.
func (fs *FS) flushLocks(r *request, h *fileHandle, owner uint64) {
	if fs.opts.Locks == nil || !fs.opts.Locks.InUse(h.ino.fh) {
		return
	}
	h.locks.mu.Lock()
	h.locks.flushed = time.Now()
	h.locks.mu.Unlock()
	_ = fs.sync(r, h.ino) // the files that are open for writing report the error
	ctx, done := lockContext(r)
	defer done()
	id := nlm.Owner{Kind: nlm.Posix, ID: owner}
	_ = fs.opts.Locks.ReleaseOwner(ctx, h.cred, h.ino.fh, id)
}

// hasLocks reports whether locks were requested through an open file.
func (h *fileHandle) hasLocks() bool {
	h.locks.mu.Lock()
	defer h.locks.mu.Unlock()
	return h.locks.used
}

// releaseLocks releases the locks that were set through an open file that is released: those of
// flock(2) and of open file descriptions (F_OFD_SETLK).
func (fs *FS) releaseLocks(ctx context.Context, h *fileHandle) {
	_ = fs.opts.Locks.ReleaseOpen(ctx, h.ino.fh, h.id)
	fs.handles.Lock()
	delete(fs.handles.releasing, h)
	fs.handles.Unlock()
	h.locks.mu.Lock()
	defer h.locks.mu.Unlock()
	if h.locks.released != nil {
		close(h.locks.released)
		h.locks.released = nil
	}
	h.locks.used = false
}

// The kernel does not wait for RELEASE, so that close(2) returns before the locks of flock(2) and of
// open file descriptions are released. A request that conflicts with them waits: shortly after the
// close for the RELEASE, which does not come when another descriptor is open, and then for the
// release.
const (
	closingAge  = 200 * time.Millisecond // since FLUSH
	closingWait = 200 * time.Millisecond
)

// awaitRelease waits for the release of the open files of ino that had locks and were just closed.
// It reports whether the conflict may be gone.
func (fs *FS) awaitRelease(ctx context.Context, ino *inode) bool {
	expired := time.After(closingWait)
	closing := fs.closing(ino)
	for h, released := range closing {
		select {
		case <-released:
			continue
		case <-ctx.Done():
			return false
		case <-expired:
		}
		if !fs.isReleasing(h) {
			return true
		}
		select {
		case <-released:
		case <-ctx.Done():
			return false
		}
	}
	return len(closing) > 0
}

// closing returns the open files of ino that had locks and were just closed. The channels are
// closed after the release.
func (fs *FS) closing(ino *inode) map[*fileHandle]<-chan struct{} {
	fs.handles.Lock()
	defer fs.handles.Unlock()
	all := make(map[*fileHandle]<-chan struct{})
	for _, h := range fs.handles.files {
		if h.ino == ino {
			h.locks.addIfFlushed(closingAge, h, all)
		}
	}
	for h := range fs.handles.releasing {
		if h.ino == ino {
			h.locks.addIfFlushed(0, h, all)
		}
	}
	return all
}

// addIfFlushed adds h to all if h had locks and was flushed within age, if that is not 0.
func (l *handleLocks) addIfFlushed(age time.Duration, h *fileHandle, all map[*fileHandle]<-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.used && (age == 0 || time.Since(l.flushed) < age) {
		if l.released == nil {
			l.released = make(chan struct{})
		}
		all[h] = l.released
	}
}

func (fs *FS) isReleasing(h *fileHandle) bool {
	fs.handles.Lock()
	defer fs.handles.Unlock()
	_, releasing := fs.handles.releasing[h]
	return releasing
}

// lostLock returns EIO for an open file whose locks were lost in a restart of the server: another
// client may have changed the file since.
func (fs *FS) lostLock(h *fileHandle) error {
	if fs.opts.Locks == nil || fs.opts.Locks.Counters.Lost.Load() == 0 {
		return nil
	}
	if h.hasLocks() && fs.opts.Locks.Lost(h.ino.fh, h.id) {
		return syscall.EIO
	}
	return nil
}

// IsOpen reports whether a file has an open file with this number, which may be about to end. It is
// for nlm.Client.ReleaseStale.
func (fs *FS) IsOpen(fh nfs.Handle, open uint64) bool {
	fs.handles.Lock()
	defer fs.handles.Unlock()
	if h := fs.handles.files[open]; h != nil {
		return h.ino.fh == fh
	}
	for h := range fs.handles.releasing {
		if h.id == open {
			return h.ino.fh == fh
		}
	}
	return false
}

// LockLost makes the kernel discard the cached pages of a file, so that reads through the owners of
// a lost lock fail. It is for nlm.Config.Lost.
func (fs *FS) LockLost(fh nfs.Handle) {
	if ino := fs.inodes.find(fh); ino != nil {
		fs.dropCache(ino)
	}
}
