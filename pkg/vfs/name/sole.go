package name

import (
	"sync/atomic"
	"time"
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
	// SoleTime is how long the kernel keeps names for a sole user.
	SoleTime = time.Second
	// SoleEndTime is how long lookups wait when a second user comes. It includes the time until the
	// kernel has handled the replies that were made before.
	SoleEndTime = 2 * time.Second
)

// A SoleUser tells whether one user alone has used a mount. It is safe for concurrent use. The zero
// value has seen no user.
type SoleUser struct {
	// Keep, if not nil, records the state for the next process. It must be set before.
	Keep func(state uint64)

	state atomic.Uint64             // noUser, oneUser plus the uid, or ManyUsers
	until atomic.Pointer[time.Time] // end of the wait of lookups; nil: no wait
}

// States of a SoleUser.
const (
	noUser    = 0
	oneUser   = 1 << 32
	ManyUsers = 1 << 33
)

// Alone reports whether at most one user has used the mount.
func (s *SoleUser) Alone() bool { return s.state.Load() != ManyUsers }

// Admit records a lookup of uid. It waits when uid is a second user, and returns false when done is
// closed before.
func (s *SoleUser) Admit(uid uint32, done <-chan struct{}) bool {
	me := oneUser | uint64(uid)
	if s.state.Load() == me {
		return true
	}
	if s.state.CompareAndSwap(noUser, me) {
		s.keep(me)
		return true
	}
	if before := s.state.Load(); before != ManyUsers {
		end := time.Now().Add(SoleEndTime)
		s.until.CompareAndSwap(nil, &end)
		s.state.CompareAndSwap(before, ManyUsers)
		s.keep(ManyUsers)
	}
	until := s.until.Load()
	if until == nil {
		return true
	}
	wait := time.Until(*until)
	if wait <= 0 {
		s.until.Store(nil)
		return true
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-done:
		return false
	}
}

func (s *SoleUser) keep(state uint64) {
	if s.Keep != nil {
		s.Keep(state)
	}
}

// Restore sets the state that an earlier process recorded. The kernel may have names of the first user
// until end.
func (s *SoleUser) Restore(state uint64, end time.Time) {
	s.state.Store(state)
	if state == ManyUsers {
		s.until.Store(&end)
	}
}
