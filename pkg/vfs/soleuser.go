package vfs

import (
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
)

// While only one user has used a mount, no other user can use the names that this user looked up.
// The kernel may then keep names for a short time, which saves most of its requests. The kernel
// never keeps names of the root directory: so each user's first path below the mount point causes a
// LOOKUP, and the lookup of a second user is seen here. From then on the kernel keeps no names, and
// lookups wait until the names that the kernel still has are too old.
//
// A second user is not seen at once when its paths do not begin at the root: a process that
// changes its uid has a working directory or an open directory below the root, or a directory below
// the root is bind-mounted elsewhere, for example in a container. This user can use the names that
// the kernel keeps at that moment. The first name that the kernel does not keep causes a LOOKUP.

const (
	// soleNameTime is how long the kernel keeps names for a sole user.
	soleNameTime = time.Second
	// soleEndTime is how long lookups wait when a second user comes. It includes the time until the
	// kernel has handled the replies that were made before.
	soleEndTime = 2 * time.Second
)

// A soleUser tells whether one user alone has used a mount.
type soleUser struct {
	state atomic.Uint64             // noUser, oneUser plus the uid, or manyUsers
	until atomic.Pointer[time.Time] // end of the wait of lookups; nil: no wait
}

const (
	noUser    = 0
	oneUser   = 1 << 32
	manyUsers = 1 << 33
)

// alone reports whether at most one user has used the mount.
func (s *soleUser) alone() bool { return s.state.Load() != manyUsers }

// admit records a lookup of uid. admit waits when uid is a second user, and returns EINTR when r
// ends before.
func (s *soleUser) admit(r *request, uid uint32) error {
	me := oneUser | uint64(uid)
	if s.state.Load() == me {
		return nil
	}
	if s.state.CompareAndSwap(noUser, me) {
		r.state.setSoleUser(me)
		return nil
	}
	if before := s.state.Load(); before != manyUsers {
		end := time.Now().Add(soleEndTime)
		s.until.CompareAndSwap(nil, &end)
		s.state.CompareAndSwap(before, manyUsers)
		r.state.setSoleUser(manyUsers)
	}
	until := s.until.Load()
	if until == nil {
		return nil
	}
	wait := time.Until(*until)
	if wait <= 0 {
		s.until.Store(nil)
		return nil
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-r.Done():
		return syscall.EINTR
	}
}

// kernelNameTime returns how long the kernel may keep names of a directory.
func (fs *FS) kernelNameTime(dir *inode) time.Duration {
	switch {
	case fs.opts.SharedNames:
		return fs.entryTimeout(dir)
	case dir.id == fuse.FUSE_ROOT_ID || !fs.users.alone():
		return 0
	}
	return min(fs.entryTimeout(dir), soleNameTime)
}

// missing returns the result of a lookup of a name that does not exist.
func (fs *FS) missing(dir *inode, out *fuse.EntryOut) (*inode, error) {
	t := min(fs.kernelNameTime(dir), fs.attrTimeout(dir))
	// A lock makes missing names old, and the kernel cannot be told for each of them.
	if t == 0 || fs.opts.LookupCache != LookupCacheAll || fs.clock.Lock.At() != 0 {
		return nil, syscall.ENOENT
	}
	// Node 0 with a timeout makes the kernel cache the name as missing for that time.
	*out = fuse.EntryOut{}
	out.SetEntryTimeout(t)
	return nil, nil
}
