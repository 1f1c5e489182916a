package data

import (
	"context"
	"slices"
	"syscall"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
)

// An extent is a range of written bytes in one pool buffer. An extent passes through these states:
//
//	filling --seal--> sending --WRITE, UNSTABLE------> unstable --COMMIT, same verifier--> released
//	                     |                                ^  |
//	                     +--WRITE, FILE_SYNC--> released  +--+ another verifier: WRITE again
//
// After an error of WRITE or COMMIT the data is discarded and the error is recorded for the file.
type extent struct {
	seq     uint64 // order of sealing; where extents overlap, the later one wins
	off     uint64
	buf     []byte // a pool buffer
	n       int    // bytes used in buf
	cred    []byte // of the open file
	open    nfs.OpenState
	stable  nfs.Stability
	started bool // WRITE was sent
	verf    nfs.Verifier
	lost    bool // parts were written under different verifiers
	resent  bool // a replay has sent the data again, or tried to
	kept    Record
}

func (e *extent) end() uint64 { return e.off + uint64(e.n) }

func (e *extent) overlaps(o *extent) bool { return e.off < o.end() && o.off < e.end() }

// changed wakes the goroutines that wait. The caller holds mu.
func (f *File) changed() {
	if f.wake != nil {
		close(f.wake)
		f.wake = nil
	}
}

// wait releases mu until a field changes or ctx ends. wait returns EINTR when ctx ends. wait
// returns with mu held in both cases.
func (f *File) wait(ctx context.Context) error {
	if f.wake == nil {
		f.wake = make(chan struct{})
	}
	wake := f.wake
	f.mu.Unlock()
	defer f.mu.Lock()
	select {
	case <-wake:
		return nil
	case <-ctx.Done():
		return syscall.EINTR
	}
}

// HasUnsent reports whether the server does not have all data.
func (f *File) HasUnsent() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.filling != nil || len(f.sending) > 0
}

// buffer copies data into extents. buffer returns the number of bytes taken, which is less than
// len(data) only with an error.
func (f *File) buffer(ctx context.Context, w *Writer, off uint64, data []byte) (taken int, err error) {
	var spare []byte // a buffer for the next extent
	defer func() {
		if spare != nil {
			f.putBuffer(spare)
		}
	}()
	for taken < len(data) {
		n, filled := f.fill(w, off+uint64(taken), data[taken:], &spare)
		taken += n
		if filled {
			continue
		}
		var through bool
		if spare, through = f.getBuffer(ctx, w); spare != nil {
			continue
		}
		if !through {
			return taken, syscall.EINTR
		}
		n, err = f.writeThrough(ctx, w, off+uint64(taken), data[taken:])
		if taken += n; err != nil {
			return taken, err
		}
	}
	return taken, nil
}

// fill copies data into the filling extent, and seals a full extent and one that data does not
// continue. n is the number of bytes taken. When there is no filling extent, fill begins one with
// spare; ok is false when spare is nil too.
func (f *File) fill(w *Writer, off uint64, data []byte, spare *[]byte) (n int, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.filling == nil {
		if *spare == nil {
			return 0, false
		}
		f.filling = &extent{off: off, buf: *spare, cred: w.Cred, open: w.State}
		*spare = nil
		f.keep(f.filling)
		f.mark()
		f.attrs.BeginWrite()
	}
	e := f.filling
	if n = e.take(w.Cred, off, data, f.s.cfg.WriteSize); n > 0 {
		f.keepLength(e)
		f.s.cfg.Attrs.Extend(f.attrs, off+uint64(n))
	}
	if n == 0 || e.n == f.s.cfg.WriteSize {
		f.seal(nfs.Unstable)
	}
	return n, true
}

// take copies as much of data as fits into the extent. take returns 0 when data neither continues
// nor overwrites the extent.
func (e *extent) take(cred []byte, off uint64, data []byte, limit int) int {
	if off < e.off || off > e.end() || &cred[0] != &e.cred[0] {
		return 0
	}
	at := int(off - e.off)
	n := copy(e.buf[at:limit], data)
	e.n = max(e.n, at+n)
	return n
}

// seal ends the filling extent, which must not be nil, and sends it. The caller holds mu.
func (f *File) seal(stable nfs.Stability) {
	e := f.filling
	f.filling = nil
	f.seq++
	e.seq, e.stable = f.seq, stable
	f.sending = append(f.sending, e)
	f.s.cfg.Spawn(func() { f.send(e) })
}

// send writes a sealed extent to the server.
func (f *File) send(e *extent) {
	bg := f.s.cfg.Background
	f.startSend(bg, e)
	var ch nfs.Change
	committed, start, err := f.writeExtent(bg, e, e.stable, &ch)
	if f.sent(e, &ch, committed, start, err) {
		// Commit early, so that buffers return while the writer continues. Otherwise the writer
		// would wait for all of them at once.
		_ = f.Sync(bg)
	}
}

// startSend waits until e may be sent.
func (f *File) startSend(ctx context.Context, e *extent) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for f.paused || f.blocked(e) {
		if f.wait(ctx) != nil {
			break // aborted: the WRITE fails at once
		}
	}
	e.started = true
}

// sent records the result of the WRITE of an extent. commit is true when a COMMIT should follow.
func (f *File) sent(e *extent, ch *nfs.Change, committed nfs.Stability, start uint64,
	err error) (commit bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sending = removeExtent(f.sending, e)
	f.extentWritten(ch, start, err)
	switch {
	case err != nil:
		f.drop(e, err)
	case committed == nfs.FileSync && !f.overlapsUnstable(e):
		f.release(e)
	default:
		f.unstable = append(f.unstable, e)
	}
	f.changed()
	return len(f.unstable) >= commitExtents && !f.syncing
}

// blocked reports whether e must wait because an earlier extent in sending overlaps it. The server
// may execute WRITEs in any order.
func (f *File) blocked(e *extent) bool {
	for _, o := range f.sending {
		if o.seq < e.seq && o.overlaps(e) {
			return true
		}
	}
	return false
}

// overlapsUnstable reports whether an unstable extent overlaps e. If that extent is replayed, e
// must be replayed after it.
func (f *File) overlapsUnstable(e *extent) bool {
	for _, o := range f.unstable {
		if o.overlaps(e) {
			return true
		}
	}
	return false
}

// writeExtent sends the WRITEs for e and sets its verifier. committed is the lowest stability level
// of the replies. wcc is that of the last reply, whose call was sent at start. writeExtent holds a
// slot for WRITE calls during each call, but not while the server is busy.
func (f *File) writeExtent(ctx context.Context, e *extent, stable nfs.Stability,
	ch *nfs.Change) (committed nfs.Stability, start uint64, err error) {
	committed, e.lost = nfs.FileSync, false
	var res nfs.WriteResult
	var busy busyMark
	defer f.clearBusy(&busy)
	for done, try := 0, 0; done < e.n; {
		start = f.s.cfg.Attrs.Now()
		var err error
		res, err = f.callWrite(ctx, e, done, stable)
		if f.retryBusy(ctx, &err, try, &busy) {
			try++
			continue
		}
		if err != nil {
			return committed, start, f.s.cfg.Check(f, err)
		}
		f.attrs.Wrote(&f.chain, &res.Change)
		f.s.cfg.Counters.SentBytes.Add(uint64(res.Count))
		f.s.progress.Add(1)
		if done > 0 && res.Verf != e.verf {
			e.lost = true
		}
		e.verf = res.Verf
		committed = min(committed, res.Committed)
		done += int(res.Count)
		try = 0
	}
	*ch = res.Change
	return committed, start, nil
}

// callWrite sends one WRITE for e from byte done on. It holds a slot for WRITE calls meanwhile. The
// error is EINTR when ctx ends before a slot is free.
func (f *File) callWrite(ctx context.Context, e *extent, done int,
	stable nfs.Stability) (res nfs.WriteResult, err error) {
	select {
	case f.s.writeSlots <- struct{}{}:
	case <-ctx.Done(): // other calls may hold the slots until the server answers
		return res, syscall.EINTR
	}
	defer func() { <-f.s.writeSlots }()
	return f.s.cfg.Server.Write(ctx, e.cred, f.Handle, e.open, e.off+uint64(done), e.buf[done:e.n], stable)
}

// extentWritten counts an extent as known to the server. ch is that of the last reply. The caller
// holds File.mu.
func (f *File) extentWritten(ch *nfs.Change, start uint64, err error) {
	f.s.cfg.Attrs.EndWrite(f.attrs, &f.chain, ch, start, err != nil)
	f.s.cfg.Written(f, ch)
}

// Push sends the unsent data and waits until the server has all of it, so that the server's replies
// include the data. Push does not make data stable.
func (f *File) Push(ctx context.Context) error {
	if f == nil {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.filling != nil {
		f.seal(nfs.Unstable)
	}
	last := f.seq
	for len(f.sending) > 0 && f.sending[0].seq <= last {
		if err := f.wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

// release returns the extent's buffer to the pool. The extent must not be in any list. The caller
// holds File.mu.
func (f *File) release(e *extent) {
	if e.resent {
		f.replayed++
	}
	f.freeRecord(e) // before another request uses the buffer
	f.putBuffer(e.buf)
	e.buf = nil
	f.s.progress.Add(1)
	if f.clean() {
		f.unmark()
	}
}

func removeExtent(list []*extent, e *extent) []*extent {
	if i := slices.Index(list, e); i >= 0 {
		return slices.Delete(list, i, i+1)
	}
	return list
}
