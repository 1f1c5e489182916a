package vfs

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/running"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
)

// A Loss is data that a program wrote and that is not known to be on stable storage.
type Loss struct {
	FileID      uint64 // inode number on the server
	Handle      string // file handle in hexadecimal
	Offset, End uint64 // bounds of the lost ranges in bytes
	Bytes       uint64
	// Err is the error of WRITE or COMMIT. The open files of the program report it. Err is nil when
	// the mount ended before the data was stable.
	Err error
}

// mappedFlushes is the number of files whose mapped pages the kernel writes at the same time.
const mappedFlushes = 8

// Drain makes all later writes synchronous and writes the data of all files to stable storage. It
// returns true when the data that was written before is stable or rejected. It returns false when
// ctx ends, and when the server accepts nothing during the time stall. A stall of 0 is no limit.
func (fs *FS) Drain(ctx context.Context, stall time.Duration) (complete bool) {
	fs.draining.Store(true)
	return fs.flush(ctx, stall) && fs.flushMapped(ctx, stall) &&
		fs.flush(ctx, stall) // data of mappings
}

// flush writes the data that the files hold now to stable storage. It ends as Drain does.
func (fs *FS) flush(ctx context.Context, stall time.Duration) (complete bool) {
	ctx, cancel := context.WithCancel(context.WithValue(ctx, backgroundKey{}, background{fs}))
	defer cancel()
	dirty := fs.dirtyFiles() // not more than buffers
	return fs.inParallel(ctx, len(dirty), len(dirty), stall, func(i int) {
		_ = fs.sync(ctx, dirty[i]) // the open files report the error
	})
}

// flushMapped makes the kernel send the data that programs stored in shared mappings of open files.
// The kernel sends this data as WRITEs before it drops the pages. flushMapped ends as flush does.
func (fs *FS) flushMapped(ctx context.Context, stall time.Duration) (complete bool) {
	d := fs.device.Load()
	if d == nil {
		return true
	}
	files := fs.writableFiles()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	return fs.inParallel(ctx, len(files), mappedFlushes, stall, func(i int) {
		// A process that is killed during a notification cannot exit before the kernel has locked
		// the pages. Send none to a server that does not answer.
		h := files[i]
		var a nfs.Attr
		if fs.getAttr(ctx, h.cred, h.ino, &a) == nil {
			_ = d.InvalInode(h.ino.id, 0, 0)
			fs.progress.Add(1)
		}
	})
}

// writableFiles returns one open file of each inode that is open for writing.
func (fs *FS) writableFiles() []*fileHandle {
	fs.handles.Lock()
	defer fs.handles.Unlock()
	var all []*fileHandle
	seen := make(map[*inode]bool)
	for _, h := range fs.handles.files {
		if h.writable && !seen[h.ino] {
			seen[h.ino] = true
			all = append(all, h)
		}
	}
	return all
}

// inParallel calls do with the numbers below n on up to parallel goroutines, and returns true when
// all calls have returned. It ends as flush does. The last calls may still run then.
func (fs *FS) inParallel(ctx context.Context, n, parallel int, stall time.Duration, do func(int)) (complete bool) {
	var running sync.WaitGroup
	var next atomic.Int64
	for range min(parallel, n) {
		running.Add(1)
		fs.spawn(func() {
			defer running.Done()
			for i := int(next.Add(1)) - 1; i < n && ctx.Err() == nil; i = int(next.Add(1)) - 1 {
				do(i)
			}
		})
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		running.Wait()
	}()
	return fs.awaitProgress(ctx, done, stall)
}

// awaitProgress returns true when done is closed. It returns false when ctx or the mount ends, and
// when the server accepts nothing during the time stall.
func (fs *FS) awaitProgress(ctx context.Context, done <-chan struct{}, stall time.Duration) bool {
	var tick <-chan time.Time
	if stall > 0 {
		t := time.NewTicker(stall)
		defer t.Stop()
		tick = t.C
	}
	stops := running.NewDetector(stall, 0, time.Now())
	for before := fs.progress.Load(); ; {
		select {
		case <-done:
			return true
		case <-ctx.Done():
			return false
		case <-fs.aborted:
			return false
		case <-tick:
			if _, check := stops.Tick(time.Now()); !check {
				continue // this process was stopped, not the server
			}
			now := fs.progress.Load()
			if now == before {
				return false
			}
			before = now
		}
	}
}

// drop releases an extent whose data cannot become stable, and records err for the open files. The
// extent must not be in any list. The caller holds writeback.mu.
func (fs *FS) drop(ino *inode, e *extent, err error) {
	fs.Counters.WriteErrors.Add(1)
	ino.wb().fail(err)
	fs.keepFileError(ino)
	if fs.isAborted() {
		fs.recordLoss(ino, e)
	} else {
		fs.dropPages(ino, e)
		loss := fs.lossOf(ino)
		loss.Offset, loss.End, loss.Bytes, loss.Err = e.off, e.end(), uint64(e.n), err
		fs.reportLoss(loss)
	}
	fs.release(ino, e)
}

// keepFileError records the error of a file for its open files. The caller holds writeback.mu.
func (fs *FS) keepFileError(ino *inode) {
	if fs.state == nil {
		return
	}
	fs.handles.Lock()
	defer fs.handles.Unlock()
	for _, h := range fs.handles.files {
		if h.ino == ino {
			fs.state.setFileError(h, ino.wb().err)
		}
	}
}

// recordLoss records that the end of the mount discards an extent. The caller holds writeback.mu.
func (fs *FS) recordLoss(ino *inode, e *extent) {
	loss := fs.lossOf(ino)
	d := &fs.dirty
	d.Lock()
	defer d.Unlock()
	if d.lost == nil {
		d.lost = make(map[*inode]*Loss)
	}
	if d.lost[ino] == nil {
		loss.Offset, loss.End = e.off, e.end()
		d.lost[ino] = &loss
	}
	l := d.lost[ino]
	l.Offset, l.End, l.Bytes = min(l.Offset, e.off), max(l.End, e.end()), l.Bytes+uint64(e.n)
}

func (fs *FS) lossOf(ino *inode) Loss {
	a, _ := ino.attr.Attr()
	return Loss{FileID: a.FileID, Handle: ino.fh.String()}
}

func (fs *FS) reportLoss(l Loss) {
	if fs.opts.Lost != nil {
		fs.opts.Lost(l)
	}
}

// freeExtents discards all data that is left, after all calls have ended, and reports it.
func (fs *FS) freeExtents() {
	for _, ino := range fs.dirtyFiles() {
		fs.freeExtentsOf(ino)
	}
	fs.dirty.Lock()
	lost := make([]*Loss, 0, len(fs.dirty.lost))
	for _, l := range fs.dirty.lost {
		lost = append(lost, l)
	}
	fs.dirty.Unlock()
	slices.SortFunc(lost, func(a, b *Loss) int { return cmp.Compare(a.FileID, b.FileID) })
	for _, l := range lost {
		fs.reportLoss(*l)
	}
}

func (fs *FS) freeExtentsOf(ino *inode) {
	w := ino.wb()
	w.mu.Lock()
	defer w.mu.Unlock()
	left := slices.Concat(w.sending, w.unstable) // sending is empty unless a sender panicked
	if w.filling != nil {
		left = append(left, w.filling)
	}
	w.filling, w.sending, w.unstable = nil, nil, nil
	for _, e := range left {
		fs.drop(ino, e, syscall.EIO)
	}
}
