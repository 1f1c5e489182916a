package fusefs

import (
	"context"
	"syscall"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// Reads and written data share the pool. The buffers of a read return soon: a read holds no buffer
// while the server is busy. Written data holds its buffers until it is stable, so it may not take
// all of them, and the data of one file may not take all that written data may take. When the data
// of busy files holds all that, other files are written without keeping data.

const (
	// bufferPollInterval is the time between two files that are written back while requests wait
	// for buffers.
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
	fs.reclaimer.begin(func() { defer fs.recovered(); fs.reclaim(nil) })
	defer fs.reclaimer.end()
	return fs.buffers.Get(ctx.Done(), sunrpc.CredUID(cred))
}

// getDirtyBuffer returns a buffer for data written to an open file. While the FS or the file holds as
// much dirty data as it may, getDirtyBuffer makes data stable and waits. It returns nil when ctx
// ends. It returns nil and through when waiting is useless, because the server is busy with all
// files that hold data: the caller must then write without keeping data. The caller must hold no
// lock and no other buffer.
func (fs *FS) getDirtyBuffer(ctx context.Context, h *fileHandle) (b []byte, through bool) {
	ino := h.ino
	for counted := false; ; counted = true {
		wake, useless := fs.takeDirty(ino)
		if wake == nil {
			break
		}
		if !counted {
			fs.Counters.BufferWaits.Add(1)
		}
		if useless {
			return nil, true
		}
		fs.reclaim(ino)
		poll := time.NewTimer(bufferPollInterval) // other file systems may have returned bytes
		select {
		case <-wake:
		case <-poll.C:
		case <-ctx.Done():
		}
		poll.Stop()
		if ctx.Err() != nil {
			return nil, false
		}
	}
	if b = fs.getBuffer(ctx, h.cred); b == nil {
		fs.giveDirty(ino)
	}
	return b, false
}

// putDirtyBuffer returns a buffer of getDirtyBuffer.
func (fs *FS) putDirtyBuffer(ino *inode, b []byte) {
	fs.buffers.Put(b)
	fs.giveDirty(ino)
}

// takeDirty counts one buffer as dirty data of a file and returns nil. If the buffer exceeds a
// limit, takeDirty returns a channel that is closed when a buffer is released or a file is no
// longer busy. useless means that this wait depends on busy files only.
func (fs *FS) takeDirty(ino *inode) (wake <-chan struct{}, useless bool) {
	d, size := &fs.dirty, int64(fs.buffers.Size())
	d.Lock()
	defer d.Unlock()
	limit := fs.dirtyLimit()
	next := d.bytes + size
	if next <= int64(limit)*size && !fs.exceedsShare(ino, limit) &&
		(next <= dirtyReserve*size || fs.opts.DirtyTotal.take(size)) {
		d.bytes = next
		ino.wb.held++
		return nil, false
	}
	useless = ino.wb.busy == 0
	for other := range d.inodes {
		useless = useless && other.wb.busy > 0
	}
	if d.wake == nil {
		d.wake = make(chan struct{})
	}
	return d.wake, useless
}

// takeDirtyAlways is takeDirty for data that an earlier process has taken.
func (fs *FS) takeDirtyAlways(ino *inode) {
	d, size := &fs.dirty, int64(fs.buffers.Size())
	d.Lock()
	defer d.Unlock()
	if d.bytes += size; d.bytes > dirtyReserve*size {
		fs.opts.DirtyTotal.takeAlways(size)
	}
	ino.wb.held++
}

// exceedsShare reports whether a file holds as many dirty buffers as one file may while the server
// is busy with it, or while other files hold data too. The caller holds dirty.
func (fs *FS) exceedsShare(ino *inode, limit int) bool {
	return ino.wb.held >= max(1, limit*fileShareNum/fileShareDen) && (ino.wb.busy > 0 || len(fs.dirty.inodes) > 1)
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
	ino.wb.held--
	d.changed()
}

// changed wakes the writers that wait. The caller holds d.
func (d *dirtySet) changed() {
	if d.wake != nil {
		close(d.wake)
		d.wake = nil
	}
}

// reclaim starts to write back one file: ino, when it holds more than its share, or else the file
// with the most buffers. It passes over files with which the server is busy and files that are
// being written back. It does not wait.
func (fs *FS) reclaim(ino *inode) {
	d := &fs.dirty
	d.Lock()
	defer d.Unlock()
	var most *inode
	for other, file := range d.inodes {
		if other.wb.busy > 0 || file.flushing {
			continue
		}
		if most == nil || other.wb.held > most.wb.held {
			most = other
		}
	}
	if ino != nil && fs.exceedsShare(ino, fs.dirtyLimit()) {
		if file := d.inodes[ino]; file == nil || file.flushing || ino.wb.busy > 0 {
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
		if !fs.retryJukebox(r, err, try) {
			return n, err
		}
	}
}

func (fs *FS) writeThroughOnce(r *request, h *fileHandle, off uint64, data []byte) (int, error) {
	ino, w := h.ino, &h.ino.wb
	buf := fs.getBuffer(r, h.cred)
	if buf == nil {
		return 0, syscall.EINTR
	}
	defer fs.buffers.Put(buf)
	e := extent{off: off, buf: buf, cred: h.cred}
	e.n = copy(buf[:fs.opts.WSize], data)
	ino.mu.Lock()
	ino.pending++
	ino.mu.Unlock()
	start := fs.callStart()
	var res nfs3.WriteResult
	err := fs.callWrite(r, ino, &e, 0, nfs3.FileSync, &res)
	if err == nil {
		ino.chainWrite(&res.Wcc)
	}
	if err == nil && res.Committed != nfs3.FileSync {
		// RFC 1813 §3.3.7
		err = fs.invalidReply(ino, "WRITE stores the data in a less stable way than requested")
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if err == nil {
		fs.extendSize(ino, off+uint64(res.Count))
		fs.Counters.SentBytes.Add(uint64(res.Count))
		fs.progress.Add(1)
	}
	fs.extentWritten(ino, &res.Wcc, start, err)
	if err != nil {
		return 0, fs.checkStale(ino, err)
	}
	return int(res.Count), nil
}
