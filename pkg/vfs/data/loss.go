package data

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/running"
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

// Flush writes the data that the files hold now to stable storage. It returns
// true when the data that was written before is stable or rejected. It returns false when ctx ends, and
// when the server accepts nothing during the time stall. A stall of 0 is no limit.
func (s *Store) Flush(ctx context.Context, stall time.Duration) (complete bool) {
	ctx, cancel := context.WithCancel(s.cfg.Owned(ctx))
	defer cancel()
	dirty := s.Dirty() // not more than buffers
	return s.InParallel(ctx, len(dirty), len(dirty), stall, func(i int) {
		_ = dirty[i].Sync(ctx) // the open files report the error
	})
}

// InParallel calls do with the numbers below n on up to parallel goroutines, and returns true when
// all calls have returned. It ends as Flush does. The last calls may still run then.
func (s *Store) InParallel(ctx context.Context, n, parallel int, stall time.Duration, do func(int)) (complete bool) {
	var running sync.WaitGroup
	var next atomic.Int64
	for range min(parallel, n) {
		running.Add(1)
		s.cfg.Spawn(func() {
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
	return s.awaitProgress(ctx, done, stall)
}

// awaitProgress returns true when done is closed. It returns false when ctx or the mount ends, and
// when the server accepts nothing during the time stall.
func (s *Store) awaitProgress(ctx context.Context, done <-chan struct{}, stall time.Duration) bool {
	var tick <-chan time.Time
	if stall > 0 {
		t := time.NewTicker(stall)
		defer t.Stop()
		tick = t.C
	}
	stops := running.NewDetector(stall, 0, time.Now())
	for before := s.progress.Load(); ; {
		select {
		case <-done:
			return true
		case <-ctx.Done():
			return false
		case <-s.cfg.Background.Done():
			return false
		case <-tick:
			if _, check := stops.Tick(time.Now()); !check {
				continue // this process was stopped, not the server
			}
			now := s.progress.Load()
			if now == before {
				return false
			}
			before = now
		}
	}
}

// drop releases an extent whose data cannot become stable, and records err for the open files. The
// extent must not be in any list. The caller holds File.mu.
func (f *File) drop(e *extent, err error) {
	f.s.cfg.Counters.WriteErrors.Add(1)
	f.fail(err)
	f.s.cfg.Failed(f, f.err)
	if f.s.cfg.Background.Err() != nil {
		f.recordLoss(e)
		f.release(e)
		return
	}
	f.dropPages(e)
	loss := f.loss()
	loss.Offset, loss.End, loss.Bytes, loss.Err = e.off, e.end(), uint64(e.n), err
	f.release(e)
	f.s.cfg.Lost(loss)
}

// recordLoss records that the end of the mount discards an extent. The caller holds File.mu.
func (f *File) recordLoss(e *extent) {
	loss := f.loss()
	d := &f.s.dirty
	d.Lock()
	defer d.Unlock()
	if d.lost == nil {
		d.lost = make(map[*File]*Loss)
	}
	if d.lost[f] == nil {
		loss.Offset, loss.End = e.off, e.end()
		d.lost[f] = &loss
	}
	l := d.lost[f]
	l.Offset, l.End, l.Bytes = min(l.Offset, e.off), max(l.End, e.end()), l.Bytes+uint64(e.n)
}

func (f *File) loss() Loss {
	a, _ := f.attrs.Attr()
	return Loss{FileID: a.FileID, Handle: f.Handle.String()}
}

// Close discards all data that is left, after all calls have ended, and reports it.
func (s *Store) Close() {
	for _, f := range s.Dirty() {
		f.free()
	}
	s.dirty.Lock()
	lost := make([]*Loss, 0, len(s.dirty.lost))
	for _, l := range s.dirty.lost {
		lost = append(lost, l)
	}
	s.dirty.Unlock()
	slices.SortFunc(lost, func(a, b *Loss) int { return cmp.Compare(a.FileID, b.FileID) })
	for _, l := range lost {
		s.cfg.Lost(*l)
	}
}

func (f *File) free() {
	f.mu.Lock()
	defer f.mu.Unlock()
	left := slices.Concat(f.sending, f.unstable) // sending is empty unless a sender panicked
	if f.filling != nil {
		left = append(left, f.filling)
	}
	f.filling, f.sending, f.unstable = nil, nil, nil
	for _, e := range left {
		f.drop(e, syscall.EIO)
	}
}
