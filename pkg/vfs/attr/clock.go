package attr

import (
	"sync"
	"sync/atomic"
	"time"
)

// A Clock is the logical clock of one mount. It orders calls and changes: a reply whose call was
// sent before a change may not show the change. A Clock is safe for concurrent use. Its zero value
// is ready for use.
type Clock struct {
	// Removal is the end of the last removal of a name, and Lock that of the last lock that the
	// server granted.
	Removal, Lock Moment
	// BlindRemoval and BlindRename are the ends of the last removal and the last rename of an object
	// that the cache of names did not know. The attributes of any object may have changed.
	BlindRemoval, BlindRename Moment

	now     atomic.Uint64
	renames sync.Mutex // held while rename changes
	rename  atomic.Uint64
}

// Now returns the time at which a call begins. Keep it with the attributes of the reply.
func (c *Clock) Now() uint64 { return c.now.Load() }

// Tick returns the time of a change. It is later than all earlier results of Now and Tick.
func (c *Clock) Tick() uint64 { return c.now.Add(1) }

// A Moment is the time of the last event of a kind; 0 means that there was none.
type Moment struct{ at atomic.Uint64 }

// At returns the time.
func (m *Moment) At() uint64 { return m.at.Load() }

// Mark sets a Moment to the time of a new change. It never sets it back.
func (c *Clock) Mark(m *Moment) {
	now := c.Tick()
	for old := m.at.Load(); old < now && !m.at.CompareAndSwap(old, now); old = m.at.Load() {
	}
}

// A Rename is the end of a rename, and of the one before it.
type Rename struct{ now, before uint64 }

// RenameEnded records the end of a rename.
func (c *Clock) RenameEnded() (e Rename) {
	c.renames.Lock()
	defer c.renames.Unlock()
	e.before, e.now = c.rename.Load(), c.Tick()
	c.rename.Store(e.now)
	return e
}

// LastRename returns the end of the last rename, or 0.
func (c *Clock) LastRename() uint64 { return c.rename.Load() }

// OnlyRename reports whether no other rename has ended since start, where e is the end of a rename
// that began at start. Renames that end later have higher times than seen.
func (c *Clock) OnlyRename(start uint64, e Rename) (seen uint64, only bool) {
	c.renames.Lock()
	defer c.renames.Unlock()
	return c.Now(), e.before <= start && c.rename.Load() == e.now
}

// An Instant is a time of the monotonic clock of this process. It has a third of the size of a
// time.Time.
type Instant time.Duration

var processStart = time.Now()

// Now returns the current time.
func Now() Instant { return Instant(time.Since(processStart)) }

// Add returns the time d after t.
func (t Instant) Add(d time.Duration) Instant { return t + Instant(d) }

// Sub returns the time from u to t.
func (t Instant) Sub(u Instant) time.Duration { return time.Duration(t - u) }
