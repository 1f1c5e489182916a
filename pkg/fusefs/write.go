package fusefs

import (
	"context"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
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
	stable  nfs3.StableHow
	started bool // WRITE was sent
	verf    nfs3.Verifier
	lost    bool // parts were written under different verifiers
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
	unstable []*extent // written UNSTABLE, in any order
	syncing  bool      // a sync is running; others wait
	paused   bool      // no WRITE may start because a replay is running
	err      syscall.Errno
	errSeq   uint64 // number of errors so far; each open file reports those it has not reported
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
	w.err = errno(err)
	if w.err == syscall.EINTR {
		// The mount was aborted. EINTR would mean that a signal interrupted the caller.
		w.err = syscall.EIO
	}
	w.errSeq++
}

// report returns the file's last error if h has not reported it, else nil.
func (h *fileHandle) report() error {
	w := &h.ino.wb
	w.mu.Lock()
	defer w.mu.Unlock()
	if h.errSeen == w.errSeq {
		return nil
	}
	h.errSeen = w.errSeq
	return w.err
}

// Write takes data from the kernel: from write(2), and from pages written through a mapping.
func (fs *FS) Write(cancel <-chan struct{}, in *fuse.WriteIn, data []byte) (uint32, fuse.Status) {
	r := fs.begin(OpWrite, cancel, &in.InHeader)
	n, err := fs.write(r, in, data)
	fs.Counters.WrittenBytes.Add(uint64(n))
	return uint32(n), fs.end(OpWrite, r, err)
}

func (fs *FS) write(r *request, in *fuse.WriteIn, data []byte) (int, error) {
	h := fs.file(in.Fh)
	if h == nil {
		return 0, syscall.EBADF
	}
	if err := h.report(); err != nil {
		return 0, err
	}
	off := in.Offset
	if in.Flags&syscall.O_APPEND != 0 && in.WriteFlags&fuse.WRITE_CACHE == 0 {
		var err error
		if off, err = fs.endOfFile(r, h); err != nil {
			return 0, err
		}
	}
	if len(data) > 0 && off >= fs.maxFileSize {
		return 0, syscall.EFBIG // return the error now: close(2) could not say which write failed
	}
	data = data[:min(uint64(len(data)), fs.maxFileSize-min(off, fs.maxFileSize))]
	n, err := fs.buffer(r, h, off, data)
	if n == 0 && err != nil {
		return 0, err
	}
	if fs.opts.NoAC || in.Flags&(syscall.O_SYNC|syscall.O_DSYNC|syscall.O_DIRECT) != 0 {
		if err := fs.sync(r, h.ino); err != nil {
			return 0, err
		}
		if err := h.report(); err != nil {
			return 0, err
		}
	}
	return n, nil
}

// endOfFile returns the offset for data of a file opened with O_APPEND. NFSv3 has no append, so
// concurrent appends by other clients are not seen.
func (fs *FS) endOfFile(r *request, h *fileHandle) (uint64, error) {
	w, ino := &h.ino.wb, h.ino
	w.mu.Lock()
	pending := w.filling != nil || len(w.sending) > 0
	w.mu.Unlock()
	ino.mu.Lock()
	size, valid := ino.size, ino.valid
	ino.mu.Unlock()
	if pending || valid {
		return size, nil
	}
	var a nfs3.Attr
	if _, err := fs.fetch(r, h.cred, ino, &a); err != nil {
		return 0, err
	}
	return a.Size, nil
}

// buffer copies data into extents. buffer returns the number of bytes taken, which is less than
// len(data) only with an error.
func (fs *FS) buffer(r *request, h *fileHandle, off uint64, data []byte) (taken int, err error) {
	w := &h.ino.wb
	var spare []byte // a buffer for the next extent
	defer func() {
		if spare != nil {
			fs.buffers.Put(spare)
		}
	}()
	for taken < len(data) {
		w.mu.Lock()
		if e := w.filling; e != nil {
			n := e.take(h.cred, off, data[taken:], fs.opts.WSize)
			if n > 0 {
				fs.extendSize(h.ino, off+uint64(n))
				off, taken = off+uint64(n), taken+n
			}
			if n == 0 || e.n == fs.opts.WSize {
				fs.seal(h.ino, nfs3.Unstable)
			}
			w.mu.Unlock()
			continue
		}
		if spare != nil {
			w.filling = &extent{off: off, buf: spare, cred: h.cred}
			spare = nil
			fs.markDirty(h.ino)
			h.ino.mu.Lock()
			h.ino.pending++
			h.ino.mu.Unlock()
			w.mu.Unlock()
			continue
		}
		w.mu.Unlock()
		if spare = fs.getBuffer(r); spare == nil {
			return taken, syscall.EINTR
		}
	}
	return taken, nil
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

// extendSize records that the file was written up to end. The caller holds writeback.mu.
func (fs *FS) extendSize(ino *inode, end uint64) {
	ino.mu.Lock()
	ino.size = max(ino.size, end)
	ino.valid = false
	ino.changeClock = fs.clock.Add(1)
	ino.mu.Unlock()
}

// seal ends the filling extent, which must not be nil, and sends it. The caller holds mu.
func (fs *FS) seal(ino *inode, stable nfs3.StableHow) {
	w := &ino.wb
	e := w.filling
	w.filling = nil
	w.seq++
	e.seq, e.stable = w.seq, stable
	w.sending = append(w.sending, e)
	fs.work.Add(1)
	go fs.send(ino, e)
}

// send writes a sealed extent to the server.
func (fs *FS) send(ino *inode, e *extent) {
	defer fs.work.Done()
	w := &ino.wb
	bg := background{fs}

	w.mu.Lock()
	for w.paused || w.blocked(e) {
		if w.wait(bg) != nil {
			break // aborted: the WRITE below fails at once
		}
	}
	e.started = true
	w.mu.Unlock()

	fs.writeSlots <- struct{}{}
	var wcc nfs3.WccData
	committed, start, err := fs.writeExtent(bg, ino, e, e.stable, &wcc)
	<-fs.writeSlots

	w.mu.Lock()
	w.sending = removeExtent(w.sending, e)
	fs.extentWritten(ino, &wcc, start, err)
	switch {
	case err != nil:
		fs.Counters.WriteErrors.Add(1)
		w.fail(err)
		fs.release(ino, e)
	case committed == nfs3.FileSync && !w.overlapsUnstable(e):
		fs.release(ino, e)
	default:
		w.unstable = append(w.unstable, e)
	}
	commit := len(w.unstable) >= commitExtents && !w.syncing
	w.changed()
	w.mu.Unlock()
	if commit {
		// Commit early, so that buffers return while the writer continues. Otherwise the writer
		// would wait for all of them at once.
		_ = fs.sync(bg, ino)
	}
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
// of the replies. wcc is that of the last reply, whose call was sent at start.
func (fs *FS) writeExtent(ctx context.Context, ino *inode, e *extent, stable nfs3.StableHow,
	wcc *nfs3.WccData) (committed nfs3.StableHow, start uint64, err error) {
	committed, e.lost = nfs3.FileSync, false
	var res nfs3.WriteResult
	for done, try := 0, 0; done < e.n; {
		start = fs.callStart()
		err := fs.client.Write(ctx, e.cred, ino.fh, e.off+uint64(done), e.buf[done:e.n], stable, &res)
		if fs.retryJukebox(ctx, err, try) {
			try++
			continue
		}
		if err != nil {
			return committed, start, fs.checkStale(ino, err)
		}
		fs.Counters.SentBytes.Add(uint64(res.Count))
		if done > 0 && res.Verf != e.verf {
			e.lost = true
		}
		e.verf = res.Verf
		committed = min(committed, res.Committed)
		done += int(res.Count)
		try = 0
	}
	*wcc = res.Wcc
	return committed, start, nil
}

// extentWritten counts an extent as known to the server. extentWritten stores the attributes of the
// last reply only when no other extent was in flight and no other reply arrived in between. The
// server may execute the calls in another order than it answers them. The caller holds
// writeback.mu.
func (fs *FS) extentWritten(ino *inode, wcc *nfs3.WccData, start uint64, err error) {
	ino.mu.Lock()
	ino.pending--
	alone := ino.pending == 0
	if !alone {
		ino.changeClock = fs.clock.Add(1) // updateAttr refuses replies to earlier calls
	}
	ino.mu.Unlock()
	switch {
	case err != nil:
		fs.invalidateAttr(ino)
	case alone:
		fs.updateWcc(ino, wcc, start, false)
	}
}

// push sends the unsent data and waits until the server has all of it, so that the server's replies
// include the data. push does not make data stable.
func (fs *FS) push(ctx context.Context, ino *inode) error {
	w := &ino.wb
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.filling != nil {
		fs.seal(ino, nfs3.Unstable)
	}
	last := w.seq
	for len(w.sending) > 0 && w.sending[0].seq <= last {
		if err := w.wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

// markDirty adds a file to the set of files that hold buffers. The caller holds writeback.mu.
func (fs *FS) markDirty(ino *inode) {
	fs.dirty.Lock()
	fs.dirty.inodes[ino] = struct{}{}
	fs.dirty.Unlock()
}

// release returns the extent's buffer to the pool. The extent must not be in any list. The caller
// holds writeback.mu.
func (fs *FS) release(ino *inode, e *extent) {
	fs.buffers.Put(e.buf)
	e.buf = nil
	if ino.wb.clean() {
		fs.dirty.Lock()
		delete(fs.dirty.inodes, ino)
		fs.dirty.Unlock()
	}
}

// bufferPollInterval is how long getBuffer waits for a buffer before it syncs another file.
const bufferPollInterval = 20 * time.Millisecond

// getBuffer takes a buffer from the pool. When the pool is empty, getBuffer syncs other files to
// free their buffers, so that readers and writers cannot starve each other. getBuffer returns nil
// when ctx ends. The caller must hold no lock and no other buffer.
func (fs *FS) getBuffer(ctx context.Context) []byte {
	if b := fs.buffers.TryGet(); b != nil {
		return b
	}
	fs.Counters.BufferWaits.Add(1)
	for ctx.Err() == nil {
		fs.reclaim(ctx)
		over := make(chan struct{})
		timer := time.AfterFunc(bufferPollInterval, func() { close(over) })
		b := fs.buffers.Get(over)
		timer.Stop()
		if b != nil {
			return b
		}
	}
	return nil
}

// reclaim syncs one file that holds buffers.
func (fs *FS) reclaim(ctx context.Context) {
	fs.dirty.Lock()
	var ino *inode
	for ino = range fs.dirty.inodes {
		break
	}
	fs.dirty.Unlock()
	if ino != nil {
		_ = fs.sync(ctx, ino) // the file's writers get the error
	}
}

func removeExtent(list []*extent, e *extent) []*extent {
	if i := slices.Index(list, e); i >= 0 {
		return slices.Delete(list, i, i+1)
	}
	return list
}
