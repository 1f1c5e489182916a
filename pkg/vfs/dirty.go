package vfs

import (
	"sync"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/fairqueue"
)

// DefaultDirtyExpire is the age at which Linux users can expect data of an open file on the server.
// The kernel's NFS client writes data back after 30 to 35 s (dirty_expire_centisecs).
const DefaultDirtyExpire = 5 * time.Second

// dirtyReserve is the number of buffers of each FS that do not count against a DirtyTotal. An FS
// with a server that answers therefore continues while other mounts hold the whole total.
const dirtyReserve = 2

// A DirtyTotal bounds the dirty data of several file systems together. It is safe for concurrent
// use.
type DirtyTotal struct {
	mu    sync.Mutex
	limit int64 // bytes
	used  int64 // bytes; more than limit only by takeAlways
}

// NewDirtyTotal returns a DirtyTotal of at most limit bytes. Each FS may hold two more buffers.
func NewDirtyTotal(limit int64) *DirtyTotal { return &DirtyTotal{limit: limit} }

// take reserves n bytes, and returns false if they exceed the limit. A nil total has no limit.
func (t *DirtyTotal) take(n int64) bool {
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
func (t *DirtyTotal) takeAlways(n int64) {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.used += n
}

func (t *DirtyTotal) give(n int64) {
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
	inodes map[*inode]*dirtyFile // files that hold buffers
	bytes  int64                 // buffers of extents, and buffers that a writer is about to fill

	// Writers that wait for room, and those whose file holds its share. The latter are parked: they
	// wait until their file holds less.
	waiters fairqueue.Queue[*dirtyWaiter]
	parked  map[*inode]*fairqueue.Queue[*dirtyWaiter]

	// One timer serves all files. It runs until due while a file is dirty.
	timer   *time.Timer
	due     time.Time // zero while the timer does not run
	stopped bool

	lost map[*inode]*Loss // data that the end of the mount discarded
}

// A dirtyWaiter is a writer that waits until its file may hold another buffer.
type dirtyWaiter struct {
	ino    *inode
	user   uint32
	parked bool // in parked, not in waiters
	entry  fairqueue.Entry[*dirtyWaiter]
	ready  chan bool // gets one value: whether a buffer is taken; otherwise waiting is useless
}

// join adds a writer to waiters. The caller holds d.
func (d *dirtySet) join(w *dirtyWaiter) {
	w.ino.wb().waiters++
	d.waiters.Add(&w.entry, w.user)
}

// take removes and returns the writer whose turn it is, or nil. The caller holds d.
func (d *dirtySet) take() *dirtyWaiter {
	e := d.waiters.Take()
	if e == nil {
		return nil
	}
	e.Value.ino.wb().waiters--
	return e.Value
}

// leave removes a writer that does not wait any more. The caller holds d.
func (d *dirtySet) leave(w *dirtyWaiter) {
	switch {
	case !w.entry.Queued():
	case w.parked:
		d.parked[w.ino].Remove(&w.entry)
	default:
		d.waiters.Remove(&w.entry)
		w.ino.wb().waiters--
	}
}

// park lets a writer wait until its file holds less. The caller holds d.
func (d *dirtySet) park(w *dirtyWaiter) {
	w.parked = true
	if d.parked == nil {
		d.parked = make(map[*inode]*fairqueue.Queue[*dirtyWaiter])
	}
	q := d.parked[w.ino]
	if q == nil {
		q = &fairqueue.Queue[*dirtyWaiter]{}
		d.parked[w.ino] = q
	}
	q.Add(&w.entry, w.user)
}

// A dirtyFile describes the data of one file.
type dirtyFile struct {
	since    time.Time // no data is older, except data that a flush is writing
	flushing bool      // expire or reclaim has started a flush that has not ended
}

// markDirty adds a file to the set of files that hold buffers. The caller holds writeback.mu.
func (fs *FS) markDirty(ino *inode) {
	d := &fs.dirty
	d.Lock()
	defer d.Unlock()
	if d.inodes[ino] == nil {
		d.inodes[ino] = &dirtyFile{since: time.Now()}
		fs.armExpiry(fs.opts.DirtyExpire)
	}
}

// unmarkDirty removes a file that holds no buffer. The caller holds writeback.mu.
func (fs *FS) unmarkDirty(ino *inode) {
	fs.dirty.Lock()
	defer fs.dirty.Unlock()
	delete(fs.dirty.inodes, ino)
	fs.serveWriters()
}

// dirtyFiles returns the files that hold buffers now.
func (fs *FS) dirtyFiles() []*inode {
	fs.dirty.Lock()
	defer fs.dirty.Unlock()
	all := make([]*inode, 0, len(fs.dirty.inodes))
	for ino := range fs.dirty.inodes {
		all = append(all, ino)
	}
	return all
}

// armExpiry makes the timer run expire after left or earlier. The caller holds dirty.
func (fs *FS) armExpiry(left time.Duration) {
	d := &fs.dirty
	due := time.Now().Add(left)
	if fs.opts.DirtyExpire <= 0 || d.stopped || !d.due.IsZero() && !due.Before(d.due) {
		return
	}
	d.due = due
	if d.timer == nil {
		d.timer = time.AfterFunc(left, fs.expire)
	} else {
		d.timer.Reset(left)
	}
}

// stopExpiry ends the timer. No flush begins afterwards.
func (fs *FS) stopExpiry() {
	fs.dirty.Lock()
	defer fs.dirty.Unlock()
	fs.dirty.stopped = true
	if fs.dirty.timer != nil {
		fs.dirty.timer.Stop()
	}
}

// expire starts to write back the files whose data is older than DirtyExpire.
func (fs *FS) expire() {
	defer fs.recovered()
	d := &fs.dirty
	d.Lock()
	defer d.Unlock()
	d.due = time.Time{}
	if d.stopped {
		return
	}
	now := time.Now()
	for ino, file := range d.inodes {
		if file.flushing {
			continue
		}
		left := fs.opts.DirtyExpire - now.Sub(file.since)
		if left > 0 {
			fs.armExpiry(left)
			continue
		}
		file.flushing, file.since = true, now
		fs.spawn(func() { fs.flushExpired(ino, file) })
	}
}

// flushExpired writes a file back. Data that arrives during the write expires later.
func (fs *FS) flushExpired(ino *inode, file *dirtyFile) {
	_ = fs.sync(background{fs}, ino) // the open files report the error
	fs.dirty.Lock()
	defer fs.dirty.Unlock()
	file.flushing = false
	fs.serveWriters()
	if fs.dirty.inodes[ino] == file {
		fs.armExpiry(fs.opts.DirtyExpire - time.Since(file.since))
	}
}
