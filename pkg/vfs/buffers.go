package vfs

import (
	"context"
	"math"
	"syscall"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// Reads and written data share the pool. The buffers of a read return soon: a read holds no buffer
// while the server is busy. Written data holds its buffers until it is stable, so it may not take
// all of them, and the data of one file may not take all that written data may take. When the data
// of busy files holds all that, other files are written without keeping data.

const (
	// bufferPollInterval is the time between two files that are written back while requests wait
	// for buffers of the pool. While writers wait for room, an event also begins one.
	bufferPollInterval = 20 * time.Millisecond
	// fileShareNum / fileShareDen is the part of the dirty buffers that one of several files may
	// hold.
	fileShareNum, fileShareDen = 3, 4
	// readShare is the part of a small pool that written data leaves to reads: 1/8.
	readShare = 8
)

// dirtyLimit returns how many buffers of the pool may hold written data. With a single buffer the
// result is 0, and nothing is kept.
func (fs *FS) dirtyLimit() int {
	n := fs.buffers.Limit()
	n -= min(max(1, n/readShare), readBuffers)
	return min(n, max(1, int(fs.opts.DirtyBytes/int64(fs.buffers.Size()))))
}

// getBuffer takes a buffer from the pool for the user of a credential. When the pool is empty,
// getBuffer waits for its turn, and reclaimer writes back other files, so that readers and writers
// cannot starve each other. getBuffer returns nil when ctx ends. The caller must hold no lock and no
// other buffer.
func (fs *FS) getBuffer(ctx context.Context, cred []byte) []byte {
	if b := fs.buffers.TryGet(); b != nil {
		return b
	}
	fs.Counters.BufferWaits.Add(1)
	fs.reclaimer.begin(fs.makeRoom)
	defer fs.reclaimer.end()
	return fs.buffers.Get(ctx.Done(), sunrpc.CredUID(cred))
}

// getDirtyBuffer returns a buffer for data written to an open file. While the FS or the file holds as
// much dirty data as it may, getDirtyBuffer makes data stable and waits for its turn. It returns nil
// when ctx ends. It returns nil and through when waiting is useless, because the server is busy with
// all files that hold data: the caller must then write without keeping data. The caller must hold no
// lock and no other buffer.
func (fs *FS) getDirtyBuffer(ctx context.Context, h *fileHandle) (b []byte, through bool) {
	if taken, through := fs.getDirty(ctx, h); !taken {
		return nil, through
	}
	if b = fs.getBuffer(ctx, h.cred); b == nil {
		fs.giveDirty(h.ino)
	}
	return b, false
}

// getDirty counts one buffer as dirty data of an open file, or returns false as getDirtyBuffer
// does.
func (fs *FS) getDirty(ctx context.Context, h *fileHandle) (taken, through bool) {
	w := fs.beginDirty(h)
	if w == nil {
		return true, false
	}
	select {
	case taken = <-w.ready:
		return taken, !taken
	default:
	}
	fs.Counters.BufferWaits.Add(1)
	fs.reclaimer.begin(fs.makeRoom)
	defer fs.reclaimer.end()
	select {
	case taken = <-w.ready:
		return taken, !taken
	case <-ctx.Done():
	}
	fs.endDirtyWait(w)
	select {
	case taken = <-w.ready:
		if taken {
			fs.giveDirty(h.ino)
		}
	default:
	}
	return false, false
}

// beginDirty counts one buffer as dirty data of an open file and returns nil, or returns a writer
// that waits for it.
func (fs *FS) beginDirty(h *fileHandle) *dirtyWaiter {
	d, ino := &fs.dirty, h.ino
	d.Lock()
	defer d.Unlock()
	if d.waiters.Len() == 0 && fs.takeDirty(ino) {
		return nil
	}
	w := &dirtyWaiter{ino: ino, user: sunrpc.CredUID(h.cred), ready: make(chan bool, 1)}
	w.entry.Value = w
	if d.parked[ino] != nil || fs.dirtyRoom(ino, fs.dirtyLimit()) <= ino.wb().waiters {
		d.park(w)
	} else {
		d.join(w)
	}
	fs.serveWriters()
	return w
}

// endDirtyWait ends the wait of a writer.
func (fs *FS) endDirtyWait(w *dirtyWaiter) {
	fs.dirty.Lock()
	defer fs.dirty.Unlock()
	fs.dirty.leave(w)
}

// putDirtyBuffer returns a buffer of getDirtyBuffer.
func (fs *FS) putDirtyBuffer(ino *inode, b []byte) {
	fs.buffers.Put(b)
	fs.giveDirty(ino)
}

// takeDirty counts one buffer as dirty data of a file, unless the buffer exceeds a limit. The caller
// holds dirty.
func (fs *FS) takeDirty(ino *inode) bool {
	d, size := &fs.dirty, int64(fs.buffers.Size())
	limit := fs.dirtyLimit()
	next := d.bytes + size
	if next > int64(limit)*size || fs.dirtyRoom(ino, limit) <= 0 ||
		next > dirtyReserve*size && !fs.opts.DirtyTotal.take(size) {
		return false
	}
	d.bytes = next
	ino.wb().held++
	return true
}

// takeDirtyAlways is takeDirty for data that an earlier process has taken.
func (fs *FS) takeDirtyAlways(ino *inode) {
	d, size := &fs.dirty, int64(fs.buffers.Size())
	d.Lock()
	defer d.Unlock()
	if d.bytes += size; d.bytes > dirtyReserve*size {
		fs.opts.DirtyTotal.takeAlways(size)
	}
	ino.wb().held++
}

// dirtyRoom returns how many more dirty buffers a file may hold, which may be less than 0. A file may
// hold a part of the limit of all files while the server is busy with it, or while other files hold
// data too. The caller holds dirty.
func (fs *FS) dirtyRoom(ino *inode, limit int) int {
	w := ino.wb()
	if w.busy == 0 && len(fs.dirty.inodes) <= 1 {
		return math.MaxInt
	}
	return max(1, limit*fileShareNum/fileShareDen) - w.held
}

// giveDirty reverses takeDirty.
func (fs *FS) giveDirty(ino *inode) {
	d, size := &fs.dirty, int64(fs.buffers.Size())
	d.Lock()
	defer d.Unlock()
	if d.bytes > dirtyReserve*size {
		fs.opts.DirtyTotal.give(size)
	}
	d.bytes -= size
	ino.wb().held--
	fs.serveWriters()
}

// serveWriters lets writers continue, each user in turn, and writes back a file while others wait.
// It must run after each change that a writer may wait for. The caller holds dirty.
func (fs *FS) serveWriters() {
	d := &fs.dirty
	limit := fs.dirtyLimit()
	for ino, parked := range d.parked {
		for range min(fs.dirtyRoom(ino, limit)-ino.wb().waiters, parked.Len()) {
			w := parked.Take().Value
			w.parked = false
			d.join(w)
		}
		if parked.Len() == 0 {
			delete(d.parked, ino)
		}
	}
	for e := d.waiters.First(); e != nil; e = d.waiters.First() {
		w := e.Value
		if fs.dirtyRoom(w.ino, limit) <= 0 {
			d.leave(w)
			d.park(w)
			continue
		}
		if !fs.takeDirty(w.ino) {
			break
		}
		d.take()
		w.ready <- true
	}
	for ino := range d.parked {
		if fs.dirtyRoom(ino, limit) <= 0 {
			fs.reclaim(ino)
		}
	}
	if d.waiters.Len() > 0 {
		fs.reclaim(nil)
		fs.endUselessWaits()
	}
}

// endUselessWaits lets writers write without keeping data when the server is busy with all files
// that hold data. A writer of a busy file would wait for the server in any case. The caller holds
// dirty.
func (fs *FS) endUselessWaits() {
	d := &fs.dirty
	for ino := range d.inodes {
		if ino.wb().busy == 0 {
			return
		}
	}
	var others []*dirtyWaiter
	for w := d.take(); w != nil; w = d.take() {
		if w.ino.wb().busy > 0 {
			others = append(others, w)
		} else {
			w.ready <- false
		}
	}
	for _, w := range others {
		d.join(w)
	}
}

// makeRoom serves the writers after other file systems have returned bytes, and writes back a file
// while requests wait for buffers.
func (fs *FS) makeRoom() {
	defer fs.recovered()
	fs.dirty.Lock()
	defer fs.dirty.Unlock()
	fs.serveWriters()
	if fs.dirty.waiters.Len() == 0 {
		fs.reclaim(nil)
	}
}

// reclaim starts to write back one file: ino, when it holds more than its share, or else the file
// with the most buffers. It passes over files with which the server is busy and files that are
// being written back. It does not wait. The caller holds dirty.
func (fs *FS) reclaim(ino *inode) {
	d := &fs.dirty
	var most *inode
	for other, file := range d.inodes {
		if other.wb().busy > 0 || file.flushing {
			continue
		}
		if most == nil || other.wb().held > most.wb().held {
			most = other
		}
	}
	if ino != nil && fs.dirtyRoom(ino, fs.dirtyLimit()) <= 0 {
		if file := d.inodes[ino]; file == nil || file.flushing || ino.wb().busy > 0 {
			return
		}
		most = ino
	}
	if most == nil || d.stopped {
		return
	}
	file := d.inodes[most]
	file.flushing, file.since = true, time.Now()
	fs.spawn(func() { fs.flushExpired(most, file) })
}

// writeThrough writes the first bytes of data to stable storage and keeps none of it. It gives its
// buffer back while the server is busy with this file. It returns the number of bytes.
func (fs *FS) writeThrough(r *request, h *fileHandle, off uint64, data []byte) (int, error) {
	fs.Counters.WriteThroughs.Add(1)
	// A replay of older data must not overwrite this data.
	if err := fs.sync(r, h.ino); err != nil {
		return 0, err
	}
	for try := 0; ; try++ {
		n, err := fs.writeThroughOnce(r, h, off, data)
		if !fs.busy.Retry(r, err, try) {
			return n, err
		}
	}
}

func (fs *FS) writeThroughOnce(r *request, h *fileHandle, off uint64, data []byte) (int, error) {
	ino, w := h.ino, h.ino.wb()
	buf := fs.getBuffer(r, h.cred)
	if buf == nil {
		return 0, syscall.EINTR
	}
	defer fs.buffers.Put(buf)
	e := extent{off: off, buf: buf, cred: h.cred, open: h.open}
	e.n = copy(buf[:fs.opts.WSize], data)
	ino.attr.BeginWrite()
	start := fs.attrs.Now()
	res, err := fs.callWrite(r, ino, &e, 0, nfs.FileSync)
	if err == nil {
		ino.attr.Wrote(&w.chain, &res.Change)
	}
	if err == nil && res.Committed != nfs.FileSync {
		// RFC 1813 §3.3.7
		err = fs.invalidReply(ino, "WRITE stores the data in a less stable way than requested")
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if err == nil {
		fs.attrs.Extend(&ino.attr, off+uint64(res.Count))
		fs.Counters.SentBytes.Add(uint64(res.Count))
		fs.progress.Add(1)
	}
	fs.extentWritten(ino, &res.Change, start, err)
	if err != nil {
		return 0, fs.checkStale(ino, err)
	}
	return int(res.Count), nil
}
