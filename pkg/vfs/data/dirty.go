package data

import (
	"sync"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/fair"
)

// DefaultExpire is the age at which Linux users can expect data of an open file on the server.
// The kernel's NFS client writes data back after 30 to 35 s (dirty_expire_centisecs).
const DefaultExpire = 5 * time.Second

// dirtyReserve is the number of buffers of each FS that do not count against a Total. An FS
// with a server that answers therefore continues while other mounts hold the whole total.
const dirtyReserve = 2

// A Total bounds the dirty data of several file systems together. It is safe for concurrent
// use.
type Total struct {
	mu    sync.Mutex
	limit int64 // bytes
	used  int64 // bytes; more than limit only by takeAlways
}

// NewTotal returns a Total of at most limit bytes. Each FS may hold two more buffers.
func NewTotal(limit int64) *Total { return &Total{limit: limit} }

// take reserves n bytes, and returns false if they exceed the limit. A nil total has no limit.
func (t *Total) take(n int64) bool {
	if t == nil {
		return true
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.used+n > t.limit {
		return false
	}
	t.used += n
	return true
}

// takeAlways reserves n bytes, also beyond the limit.
func (t *Total) takeAlways(n int64) {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.used += n
}

func (t *Total) give(n int64) {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.used -= n
}

// A dirtySet holds the files of one FS with data that is not known to be stable. It bounds their
// memory and the age of their data.
type dirtySet struct {
	sync.Mutex
	files map[*File]*dirtyFile // files that hold buffers
	bytes int64                // buffers of extents, and buffers that a writer is about to fill

	// Writers that wait for room, and those whose file holds its share. The latter are parked: they
	// wait until their file holds less.
	waiters fair.Queue[*dirtyWaiter]
	parked  map[*File]*fair.Queue[*dirtyWaiter]

	// One timer serves all files. It runs until due while a file is dirty.
	timer   *time.Timer
	due     time.Time // zero while the timer does not run
	stopped bool

	lost map[*File]*Loss // data that the end of the mount discarded
}

// A dirtyWaiter is a writer that waits until its file may hold another buffer.
type dirtyWaiter struct {
	file   *File
	user   uint32
	parked bool // in parked, not in waiters
	entry  fair.Entry[*dirtyWaiter]
	ready  chan bool // gets one value: whether a buffer is taken; otherwise waiting is useless
}

// join adds a writer to waiters. The caller holds d.
func (d *dirtySet) join(w *dirtyWaiter) {
	w.file.waiters++
	d.waiters.Add(&w.entry, w.user)
}

// take removes and returns the writer whose turn it is, or nil. The caller holds d.
func (d *dirtySet) take() *dirtyWaiter {
	e := d.waiters.Take()
	if e == nil {
		return nil
	}
	e.Value.file.waiters--
	return e.Value
}

// leave removes a writer that does not wait any more. The caller holds d.
func (d *dirtySet) leave(w *dirtyWaiter) {
	switch {
	case !w.entry.Queued():
	case w.parked:
		d.parked[w.file].Remove(&w.entry)
	default:
		d.waiters.Remove(&w.entry)
		w.file.waiters--
	}
}

// park lets a writer wait until its file holds less. The caller holds d.
func (d *dirtySet) park(w *dirtyWaiter) {
	w.parked = true
	if d.parked == nil {
		d.parked = make(map[*File]*fair.Queue[*dirtyWaiter])
	}
	q := d.parked[w.file]
	if q == nil {
		q = &fair.Queue[*dirtyWaiter]{}
		d.parked[w.file] = q
	}
	q.Add(&w.entry, w.user)
}

// A dirtyFile describes the data of one file.
type dirtyFile struct {
	since    time.Time // no data is older, except data that a flush is writing
	flushing bool      // expire or reclaim has started a flush that has not ended
}

// mark adds a file to the set of files that hold buffers. The caller holds File.mu.
func (f *File) mark() {
	d := &f.s.dirty
	d.Lock()
	defer d.Unlock()
	if d.files[f] == nil {
		d.files[f] = &dirtyFile{since: time.Now()}
		f.s.armExpiry(f.s.cfg.Expire)
	}
}

// unmark removes a file that holds no buffer. The caller holds File.mu.
func (f *File) unmark() {
	d := &f.s.dirty
	d.Lock()
	defer d.Unlock()
	delete(d.files, f)
	f.s.serveWriters()
}

// Dirty returns the files that hold buffers now.
func (s *Store) Dirty() []*File {
	s.dirty.Lock()
	defer s.dirty.Unlock()
	all := make([]*File, 0, len(s.dirty.files))
	for f := range s.dirty.files {
		all = append(all, f)
	}
	return all
}

// armExpiry makes the timer run expire after left or earlier. The caller holds dirty.
func (s *Store) armExpiry(left time.Duration) {
	d := &s.dirty
	due := time.Now().Add(left)
	if s.cfg.Expire <= 0 || d.stopped || !d.due.IsZero() && !due.Before(d.due) {
		return
	}
	d.due = due
	if d.timer == nil {
		d.timer = time.AfterFunc(left, s.expire)
	} else {
		d.timer.Reset(left)
	}
}

// StopTimer ends the timer. No flush begins afterwards.
func (s *Store) StopTimer() {
	s.dirty.Lock()
	defer s.dirty.Unlock()
	s.dirty.stopped = true
	if s.dirty.timer != nil {
		s.dirty.timer.Stop()
	}
}

// expire starts to write back the files whose data is older than DirtyExpire.
func (s *Store) expire() {
	defer s.cfg.Recovered()
	d := &s.dirty
	d.Lock()
	defer d.Unlock()
	d.due = time.Time{}
	if d.stopped {
		return
	}
	now := time.Now()
	for f, file := range d.files {
		if file.flushing {
			continue
		}
		left := s.cfg.Expire - now.Sub(file.since)
		if left > 0 {
			s.armExpiry(left)
			continue
		}
		file.flushing, file.since = true, now
		s.cfg.Spawn(func() { f.flush(file) })
	}
}

// flush writes a file back. Data that arrives during the write expires later.
func (f *File) flush(file *dirtyFile) {
	s := f.s
	_ = f.Sync(s.cfg.Background) // the open files report the error
	s.dirty.Lock()
	defer s.dirty.Unlock()
	file.flushing = false
	s.serveWriters()
	if s.dirty.files[f] == file {
		s.armExpiry(s.cfg.Expire - time.Since(file.since))
	}
}
