package fusefs

import (
	"context"
	"sync"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
)

// An extent is a run of written octets in one pool buffer, on its way to the server:
//
//	filling --seal--> sending --WRITE, UNSTABLE--> unstable --COMMIT, same verifier--> gone
//	                     |                            ^  |
//	                     +--WRITE, FILE_SYNC--> gone  +--+ another verifier: WRITE again
//
// An error of WRITE or COMMIT gives the data up and is remembered for the file.
type extent struct {
	seq     uint64 // order in which extents were sealed: a later one wins where two overlap
	off     uint64
	buf     []byte // a pool buffer
	n       int    // octets of it that are filled
	cred    []byte // of the file that was written through
	stable  nfs3.StableHow
	started bool // WRITE is on its way
	verf    nfs3.Verifier
	lost    bool // parts of it are known to have been written under different verifiers
}

func (e *extent) end() uint64 { return e.off + uint64(e.n) }

func (e *extent) overlaps(f *extent) bool { return e.off < f.end() && f.off < e.end() }

// A writeback is the data of one file that is not known to be on stable storage.
type writeback struct {
	mu sync.Mutex
	// closed and forgotten when anything below changes; nil while nobody waits
	wake     chan struct{}
	seq      uint64
	filling  *extent
	sending  []*extent // sealed, in order
	unstable []*extent // written UNSTABLE, in no order
	syncing  bool      // one sync at a time
	held     bool      // no WRITE may start: a replay is under way
	err      syscall.Errno
	errSeq   uint64 // number of errors so far: each open file reports those it has not seen
}

// changed wakes those who wait. Called with mu held.
func (w *writeback) changed() {
	if w.wake != nil {
		close(w.wake)
		w.wake = nil
	}
}

// wait lets go of mu until something changed; it returns EINTR when ctx ended, with mu held in any
// case.
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

// fail remembers an error. Called with mu held.
func (w *writeback) fail(err error) {
	w.err = errno(err)
	if w.err == syscall.EINTR {
		w.err = syscall.EIO // it was the mount that ended, not the call of whoever hears of it
	}
	w.errSeq++
}

// report is the error that h has not heard of yet.
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

// Write takes data from the kernel: from write(2), and from pages that were written through a
// mapping.
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
		return 0, syscall.EFBIG // now: at close(2) nobody could tell which write it was
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

// endOfFile is where data for a file opened with O_APPEND goes. What others append at the same time
// is not seen: NFSv3 has no append.
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

// buffer copies data into extents. It returns how much of it was taken, less than all of it only
// with an error.
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
				fs.grew(h.ino, off+uint64(n))
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

// take copies as much of data as belongs into the extent and fits; 0 when it does not continue or
// overwrite it.
func (e *extent) take(cred []byte, off uint64, data []byte, room int) int {
	if off < e.off || off > e.end() || &cred[0] != &e.cred[0] {
		return 0
	}
	at := int(off - e.off)
	n := copy(e.buf[at:room], data)
	e.n = max(e.n, at+n)
	return n
}

// grew notes that the file was written up to end. Called with writeback.mu held.
func (fs *FS) grew(ino *inode, end uint64) {
	ino.mu.Lock()
	ino.size = max(ino.size, end)
	ino.valid = false
	ino.attrClock = fs.clock.Add(1)
	ino.mu.Unlock()
}

// seal ends the filling extent, which is not nil, and sends it. Called with mu held.
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

// send brings a sealed extent to the server.
func (fs *FS) send(ino *inode, e *extent) {
	defer fs.work.Done()
	w := &ino.wb
	bg := background{fs}

	w.mu.Lock()
	for w.held || w.blocked(e) {
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
	w.sending = without(w.sending, e)
	fs.arrived(ino, &wcc, start, err)
	switch {
	case err != nil:
		fs.Counters.WriteErrors.Add(1)
		w.fail(err)
		fs.release(ino, e)
	case committed == nfs3.FileSync && !w.replayable(e):
		fs.release(ino, e)
	default:
		w.unstable = append(w.unstable, e)
	}
	commit := len(w.unstable) >= commitExtents && !w.syncing
	w.changed()
	w.mu.Unlock()
	if commit {
		// Buffers come back while the writer goes on: it would wait for all of them at once
		// otherwise.
		_ = fs.sync(bg, ino)
	}
}

// blocked tells whether e must wait because an earlier extent in sending holds some of the same
// octets: the server may execute WRITEs in any order.
func (w *writeback) blocked(e *extent) bool {
	for _, f := range w.sending {
		if f.seq < e.seq && f.overlaps(e) {
			return true
		}
	}
	return false
}

// replayable tells whether an older extent that overlaps e might be sent again, which e must then
// follow.
func (w *writeback) replayable(e *extent) bool {
	for _, f := range w.unstable {
		if f.overlaps(e) {
			return true
		}
	}
	return false
}

// writeExtent makes the WRITE calls for e and sets its verifier. committed is the least stability
// among the replies; wcc is that of the last of them, whose call was sent at start.
func (fs *FS) writeExtent(ctx context.Context, ino *inode, e *extent, stable nfs3.StableHow,
	wcc *nfs3.WccData) (committed nfs3.StableHow, start uint64, err error) {
	committed, e.lost = nfs3.FileSync, false
	var res nfs3.WriteResult
	for done, try := 0, 0; done < e.n; {
		start = fs.tick()
		err := fs.client.Write(ctx, e.cred, ino.fh, e.off+uint64(done), e.buf[done:e.n], stable, &res)
		if fs.again(ctx, err, try) {
			try++
			continue
		}
		if err != nil {
			return committed, start, fs.nodeErr(ino, err)
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

// arrived counts an extent as known to the server. What the last reply says of the file holds when
// no other extent is on its way, and no other reply came while it was: the server may have worked
// on the calls in another order than it answered them. Called with writeback.mu held.
func (fs *FS) arrived(ino *inode, wcc *nfs3.WccData, start uint64, err error) {
	ino.mu.Lock()
	ino.pending--
	alone := ino.pending == 0
	if !alone {
		ino.attrClock = fs.clock.Add(1) // absorb refuses what was asked for before
	}
	ino.mu.Unlock()
	switch {
	case err != nil:
		fs.outdate(ino)
	case alone:
		fs.absorbWcc(ino, wcc, start, false)
	}
}

// push sends what is written and not sent, and waits until the server has all of it, so that its
// answers take it into account. It makes nothing stable.
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

// markDirty and release keep the set of files that hold buffers. Called with writeback.mu held.
func (fs *FS) markDirty(ino *inode) {
	fs.dirtyMu.Lock()
	fs.dirty[ino] = struct{}{}
	fs.dirtyMu.Unlock()
}

// release gives the extent's buffer back; the extent is in none of the lists any more.
func (fs *FS) release(ino *inode, e *extent) {
	fs.buffers.Put(e.buf)
	e.buf = nil
	if ino.wb.clean() {
		fs.dirtyMu.Lock()
		delete(fs.dirty, ino)
		fs.dirtyMu.Unlock()
	}
}

// bufferPoll is how long to wait for a buffer before looking again whether some file holds one
// without need.
const bufferPoll = 20 * time.Millisecond

// getBuffer takes a buffer from the pool. When there is none, it makes other files' data stable to
// free theirs, so that readers and writers cannot starve each other. It returns nil when ctx ended.
// The caller holds no lock and no other buffer.
func (fs *FS) getBuffer(ctx context.Context) []byte {
	if b := fs.buffers.TryGet(); b != nil {
		return b
	}
	fs.Counters.BufferWaits.Add(1)
	for ctx.Err() == nil {
		fs.reclaim(ctx)
		over := make(chan struct{})
		timer := time.AfterFunc(bufferPoll, func() { close(over) })
		b := fs.buffers.Get(over)
		timer.Stop()
		if b != nil {
			return b
		}
	}
	return nil
}

// reclaim frees the buffers of one file that holds some.
func (fs *FS) reclaim(ctx context.Context) {
	fs.dirtyMu.Lock()
	var ino *inode
	for ino = range fs.dirty {
		break
	}
	fs.dirtyMu.Unlock()
	if ino != nil {
		_ = fs.sync(ctx, ino) // its own writers hear of an error
	}
}

func without(list []*extent, e *extent) []*extent {
	for i, f := range list {
		if f == e {
			return append(list[:i], list[i+1:]...)
		}
	}
	return list
}
