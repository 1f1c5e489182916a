package vfs

import (
	"context"
	"slices"
	"sync"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/attr"
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
	kept    keptSlot
}

func (e *extent) end() uint64 { return e.off + uint64(e.n) }

func (e *extent) overlaps(f *extent) bool { return e.off < f.end() && f.off < e.end() }

// A writeback holds the data of one file that is not known to be on stable storage.
type writeback struct {
	mu sync.Mutex
	// wake is closed and set to nil when a field below changes. wake is nil while no goroutine
	// waits.
	wake     chan struct{}
	seq      uint64
	filling  *extent
	sending  []*extent // sealed, in order
	unstable []*extent // written UNSTABLE; those that overlap are in order
	syncing  bool      // a sync is running; others wait
	paused   bool      // no WRITE may start because a replay is running
	err      syscall.Errno
	errSeq   uint64 // number of errors so far; each open file reports those it has not reported
	replayed uint64 // number of replayed extents that were released

	// Guarded by FS.dirty.
	held    int // buffers that count as dirty
	waiters int // writers of the file in dirtySet.waiters
	busy    int // calls with this data that the server answers with NFS3ERR_JUKEBOX

	chain attr.Chain

	toDrop   pageRange // whose pages the kernel must drop
	dropping bool      // sendRanges is running
}

// changed wakes the goroutines that wait. The caller holds mu.
func (w *writeback) changed() {
	if w.wake != nil {
		close(w.wake)
		w.wake = nil
	}
}

// wait releases mu until a field changes or ctx ends. wait returns EINTR when ctx ends. wait
// returns with mu held in both cases.
func (w *writeback) wait(ctx context.Context) error {
	if w.wake == nil {
		w.wake = make(chan struct{})
	}
	wake := w.wake
	w.mu.Unlock()
	defer w.mu.Lock()
	select {
	case <-wake:
		return nil
	case <-ctx.Done():
		return syscall.EINTR
	}
}

func (w *writeback) clean() bool {
	return w.filling == nil && len(w.sending) == 0 && len(w.unstable) == 0
}

// fail records an error. The caller holds mu.
func (w *writeback) fail(err error) {
	w.err = nfs.CallErrno(err)
	if w.err == syscall.EINTR {
		// The mount was aborted. EINTR would mean that a signal interrupted the caller.
		w.err = syscall.EIO
	}
	w.errSeq++
}

// report returns the file's last error if h has not reported it, else nil. The request r returns
// the error again if the kernel sends the request again.
func (h *fileHandle) report(r *request) error {
	w := h.ino.data.Load()
	if w == nil {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if h.errSeen == w.errSeq {
		return nil
	}
	h.errSeen = w.errSeq
	if r.keepError(w.err) {
		h.state.setFileError(h, 0)
	}
	return w.err
}

// reportedBefore returns the error with which an earlier process ended r, or nil. The file has then
// reported the error.
func (h *fileHandle) reportedBefore(r *request) error {
	err := r.earlierError()
	if err == nil {
		return nil
	}
	w := h.ino.wb()
	w.mu.Lock()
	defer w.mu.Unlock()
	if h.errSeen != w.errSeq && err == w.err {
		h.errSeen = w.errSeq
		h.state.setFileError(h, 0)
	}
	return err
}

// Write takes data from the kernel: from write(2), and from pages written through a mapping.
func (fs *FS) Write(k *kernel.Request, in *fuse.WriteIn, data [][]byte) (uint32, fuse.Status) {
	r := fs.begin(k)
	n, err := fs.write(r, in, data)
	r.Bytes = n
	fs.Counters.WrittenBytes.Add(uint64(n))
	return uint32(n), fs.end(r, err)
}

func (fs *FS) write(r *request, in *fuse.WriteIn, data pieces) (int, error) {
	h := fs.file(in.Fh)
	if h == nil || !h.writable {
		return 0, syscall.EBADF
	}
	if err := h.reportedBefore(r); err != nil {
		return 0, err
	}
	if err := fs.lostLock(h); err != nil {
		return 0, err
	}
	if fs.reportsErrors(in) {
		if err := h.report(r); err != nil {
			return 0, err
		}
	}
	off := in.Offset
	if in.Flags&syscall.O_APPEND != 0 && in.WriteFlags&fuse.WRITE_CACHE == 0 && !fs.opts.Writeback {
		var err error
		if off, err = fs.appendOffset(r, h); err != nil {
			return 0, err
		}
	}
	size := data.size()
	if size > 0 && off >= fs.maxFileSize {
		return 0, syscall.EFBIG // return the error now: close(2) could not say which write failed
	}
	size = int(min(uint64(size), fs.maxFileSize-min(off, fs.maxFileSize)))
	n, err := fs.bufferPieces(r, h, off, data, size)
	// A program repeats the rest of a short write. The kernel does not repeat the rest of its
	// pages.
	if err != nil && (n == 0 || in.WriteFlags&fuse.WRITE_CACHE != 0) {
		return 0, err
	}
	if h.ino.attr.MayHaveSetID() {
		h.setID.Store(true)
	}
	if h.direct && in.WriteFlags&fuse.WRITE_CACHE == 0 && n > 0 {
		fs.dropWritten(r, h, in.Flags, pageRange{off, off + uint64(n)})
	}
	// Check draining after the data is in an extent. Drain then either writes the data or is seen
	// here. The kernel sends dirty pages with WRITE_CACHE. No program waits for these.
	drains := fs.draining.Load() && in.WriteFlags&fuse.WRITE_CACHE == 0
	if drains || fs.opts.NoAC || in.Flags&(syscall.O_SYNC|syscall.O_DSYNC|syscall.O_DIRECT) != 0 {
		if err := fs.sync(r, h.ino); err != nil {
			return 0, err
		}
		if err := h.report(r); err != nil {
			return 0, err
		}
	}
	return n, nil
}

// appendOffset returns the offset for data of a file opened with O_APPEND. A request that the
// kernel sends again has the same offset again.
func (fs *FS) appendOffset(r *request, h *fileHandle) (off uint64, err error) {
	if off, ok := r.keptOffset(); ok {
		return off, nil
	}
	if off, err = fs.endOfFile(r, h); err == nil {
		r.keepOffset(off)
	}
	return off, err
}

// endOfFile returns the offset for data of a file opened with O_APPEND: the end of the file on the
// server, or of the data that the server does not have yet. NFSv3 has no append, so appends of two
// clients can overwrite each other unless the clients use locks.
func (fs *FS) endOfFile(r *request, h *fileHandle) (uint64, error) {
	ino := h.ino
	w := ino.wb()
	pending, end := w.hasUnsent(), w.end() // the server may have lost data up to end
	if v := fs.attrs.View(&ino.attr); pending && v.SizeKnown {
		return max(v.Written, end), nil
	}
	if err := fs.push(r, ino); err != nil {
		return 0, err
	}
	end = w.end() // without rejected data; before the GETATTR, because a replay may end meanwhile
	var a nfs.Attr
	if _, err := fs.fetch(r, h.cred, ino, &a); err != nil {
		return 0, err
	}
	return max(a.Size, end), nil
}

// hasUnsent reports whether the server does not have all data.
func (w *writeback) hasUnsent() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.filling != nil || len(w.sending) > 0
}

// buffer copies data into extents. buffer returns the number of bytes taken, which is less than
// len(data) only with an error.
func (fs *FS) buffer(r *request, h *fileHandle, off uint64, data []byte) (taken int, err error) {
	var spare []byte // a buffer for the next extent
	defer func() {
		if spare != nil {
			fs.putDirtyBuffer(h.ino, spare)
		}
	}()
	for taken < len(data) {
		n, filled := fs.fill(h, off+uint64(taken), data[taken:], &spare)
		taken += n
		if filled {
			continue
		}
		var through bool
		if spare, through = fs.getDirtyBuffer(r, h); spare != nil {
			continue
		}
		if !through {
			return taken, syscall.EINTR
		}
		n, err = fs.writeThrough(r, h, off+uint64(taken), data[taken:])
		if taken += n; err != nil {
			return taken, err
		}
	}
	return taken, nil
}

// fill copies data into the filling extent, and seals a full extent and one that data does not
// continue. n is the number of bytes taken. When there is no filling extent, fill begins one with
// spare; ok is false when spare is nil too.
func (fs *FS) fill(h *fileHandle, off uint64, data []byte, spare *[]byte) (n int, ok bool) {
	w := h.ino.wb()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.filling == nil {
		if *spare == nil {
			return 0, false
		}
		w.filling = &extent{off: off, buf: *spare, cred: h.cred, open: h.open}
		*spare = nil
		fs.state.addExtent(fs, h.ino, w.filling)
		fs.markDirty(h.ino)
		h.ino.attr.BeginWrite()
	}
	e := w.filling
	if n = e.take(h.cred, off, data, fs.opts.WSize); n > 0 {
		fs.state.setLength(e)
		fs.attrs.Extend(&h.ino.attr, off+uint64(n))
	}
	if n == 0 || e.n == fs.opts.WSize {
		fs.seal(h.ino, nfs.Unstable)
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
func (fs *FS) seal(ino *inode, stable nfs.Stability) {
	w := ino.wb()
	e := w.filling
	w.filling = nil
	w.seq++
	e.seq, e.stable = w.seq, stable
	w.sending = append(w.sending, e)
	fs.work.Add(1)
	go fs.spawnedSend(ino, e)
}

// send writes a sealed extent to the server.
func (fs *FS) send(ino *inode, e *extent) {
	w := ino.wb()
	bg := background{fs}
	w.startSend(bg, e)
	var wcc nfs.Change
	committed, start, err := fs.writeExtent(bg, ino, e, e.stable, &wcc)
	if fs.sent(ino, e, &wcc, committed, start, err) {
		// Commit early, so that buffers return while the writer continues. Otherwise the writer
		// would wait for all of them at once.
		_ = fs.sync(bg, ino)
	}
}

// startSend waits until e may be sent.
func (w *writeback) startSend(ctx context.Context, e *extent) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for w.paused || w.blocked(e) {
		if w.wait(ctx) != nil {
			break // aborted: the WRITE fails at once
		}
	}
	e.started = true
}

// sent records the result of the WRITE of an extent. commit is true when a COMMIT should follow.
func (fs *FS) sent(ino *inode, e *extent, wcc *nfs.Change, committed nfs.Stability, start uint64,
	err error) (commit bool) {
	w := ino.wb()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.sending = removeExtent(w.sending, e)
	fs.extentWritten(ino, wcc, start, err)
	switch {
	case err != nil:
		fs.drop(ino, e, err)
	case committed == nfs.FileSync && !w.overlapsUnstable(e):
		fs.release(ino, e)
	default:
		w.unstable = append(w.unstable, e)
	}
	w.changed()
	return len(w.unstable) >= commitExtents && !w.syncing
}

// blocked reports whether e must wait because an earlier extent in sending overlaps it. The server
// may execute WRITEs in any order.
func (w *writeback) blocked(e *extent) bool {
	for _, f := range w.sending {
		if f.seq < e.seq && f.overlaps(e) {
			return true
		}
	}
	return false
}

// overlapsUnstable reports whether an unstable extent overlaps e. If that extent is replayed, e
// must be replayed after it.
func (w *writeback) overlapsUnstable(e *extent) bool {
	for _, f := range w.unstable {
		if f.overlaps(e) {
			return true
		}
	}
	return false
}

// writeExtent sends the WRITEs for e and sets its verifier. committed is the lowest stability level
// of the replies. wcc is that of the last reply, whose call was sent at start. writeExtent holds a
// slot for WRITE calls during each call, but not while the server is busy.
func (fs *FS) writeExtent(ctx context.Context, ino *inode, e *extent, stable nfs.Stability,
	wcc *nfs.Change) (committed nfs.Stability, start uint64, err error) {
	committed, e.lost = nfs.FileSync, false
	var res nfs.WriteResult
	var busy busyMark
	defer fs.clearBusy(ino, &busy)
	for done, try := 0, 0; done < e.n; {
		start = fs.attrs.Now()
		var err error
		res, err = fs.callWrite(ctx, ino, e, done, stable)
		if fs.retryBusy(ctx, ino, &err, try, &busy) {
			try++
			continue
		}
		if err != nil {
			return committed, start, fs.checkStale(ino, err)
		}
		ino.attr.Wrote(&ino.wb().chain, &res.Change)
		fs.Counters.SentBytes.Add(uint64(res.Count))
		fs.progress.Add(1)
		if done > 0 && res.Verf != e.verf {
			e.lost = true
		}
		e.verf = res.Verf
		committed = min(committed, res.Committed)
		done += int(res.Count)
		try = 0
	}
	*wcc = res.Change
	return committed, start, nil
}

// callWrite sends one WRITE for e from byte done on. It holds a slot for WRITE calls meanwhile. The
// error is EINTR when ctx ends before a slot is free.
func (fs *FS) callWrite(ctx context.Context, ino *inode, e *extent, done int,
	stable nfs.Stability) (res nfs.WriteResult, err error) {
	select {
	case fs.writeSlots <- struct{}{}:
	case <-ctx.Done(): // other calls may hold the slots until the server answers
		return res, syscall.EINTR
	}
	defer func() { <-fs.writeSlots }()
	return fs.server.Write(ctx, e.cred, ino.fh, e.open, e.off+uint64(done), e.buf[done:e.n], stable)
}

// extentWritten counts an extent as known to the server. ch is that of the last reply. The caller
// holds writeback.mu.
func (fs *FS) extentWritten(ino *inode, ch *nfs.Change, start uint64, err error) {
	fs.attrs.EndWrite(&ino.attr, &ino.wb().chain, ch, start, err != nil)
	ino.keepACLs(ch)
}

// push sends the unsent data and waits until the server has all of it, so that the server's replies
// include the data. push does not make data stable.
func (fs *FS) push(ctx context.Context, ino *inode) error {
	w := ino.data.Load()
	if w == nil {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.filling != nil {
		fs.seal(ino, nfs.Unstable)
	}
	last := w.seq
	for len(w.sending) > 0 && w.sending[0].seq <= last {
		if err := w.wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

// release returns the extent's buffer to the pool. The extent must not be in any list. The caller
// holds writeback.mu.
func (fs *FS) release(ino *inode, e *extent) {
	if e.resent {
		ino.wb().replayed++
	}
	fs.state.freeExtent(e) // before another request uses the buffer
	fs.putDirtyBuffer(ino, e.buf)
	e.buf = nil
	fs.progress.Add(1)
	if ino.wb().clean() {
		fs.unmarkDirty(ino)
	}
}

func removeExtent(list []*extent, e *extent) []*extent {
	if i := slices.Index(list, e); i >= 0 {
		return slices.Delete(list, i, i+1)
	}
	return list
}
