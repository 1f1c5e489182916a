package data

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
	// ReadBuffers of a pool are left for reads.
	ReadBuffers = 8
	// readShare is the part of a small pool that written data leaves to reads: 1/8.
	readShare = 8
)

// limit returns how many buffers of the pool may hold written data. With a single buffer the
// result is 0, and nothing is kept.
func (s *Store) limit() int {
	n := s.cfg.Buffers.Limit()
	n -= min(max(1, n/readShare), ReadBuffers)
	return min(n, max(1, int(s.cfg.Limit/int64(s.cfg.Buffers.Size()))))
}

// Buffer takes a buffer from the pool for the user of a credential. When the pool is empty,
// Buffer waits for its turn, and reclaimer writes back other files, so that readers and writers
// cannot starve each other. Buffer returns nil when ctx ends. The caller must hold no lock and no
// other buffer.
func (s *Store) Buffer(ctx context.Context, cred []byte) []byte {
	if b := s.cfg.Buffers.TryGet(); b != nil {
		return b
	}
	s.cfg.Counters.BufferWaits.Add(1)
	s.reclaimer.begin(s.makeRoom)
	defer s.reclaimer.end()
	return s.cfg.Buffers.Get(ctx.Done(), sunrpc.CredUID(cred))
}

// getBuffer returns a buffer for data written to an open file. While the FS or the file holds as
// much dirty data as it may, getBuffer makes data stable and waits for its turn. It returns nil
// when ctx ends. It returns nil and through when waiting is useless, because the server is busy with
// all files that hold data: the caller must then write without keeping data. The caller must hold no
// lock and no other buffer.
func (f *File) getBuffer(ctx context.Context, w *Writer) (b []byte, through bool) {
	if taken, through := f.getRoom(ctx, w); !taken {
		return nil, through
	}
	if b = f.s.Buffer(ctx, w.Cred); b == nil {
		f.give()
	}
	return b, false
}

// getRoom counts one buffer as dirty data of an open file, or returns false as getBuffer
// does.
func (f *File) getRoom(ctx context.Context, writer *Writer) (taken, through bool) {
	s := f.s
	w := f.begin(writer)
	if w == nil {
		return true, false
	}
	select {
	case taken = <-w.ready:
		return taken, !taken
	default:
	}
	s.cfg.Counters.BufferWaits.Add(1)
	s.reclaimer.begin(s.makeRoom)
	defer s.reclaimer.end()
	select {
	case taken = <-w.ready:
		return taken, !taken
	case <-ctx.Done():
	}
	s.endWait(w)
	select {
	case taken = <-w.ready:
		if taken {
			f.give()
		}
	default:
	}
	return false, false
}

// begin counts one buffer as dirty data of an open file and returns nil, or returns a writer
// that waits for it.
func (f *File) begin(writer *Writer) *dirtyWaiter {
	s, d := f.s, &f.s.dirty
	d.Lock()
	defer d.Unlock()
	if d.waiters.Len() == 0 && f.take() {
		return nil
	}
	w := &dirtyWaiter{file: f, user: sunrpc.CredUID(writer.Cred), ready: make(chan bool, 1)}
	w.entry.Value = w
	if d.parked[f] != nil || f.room(s.limit()) <= f.waiters {
		d.park(w)
	} else {
		d.join(w)
	}
	s.serveWriters()
	return w
}

// endWait ends the wait of a writer.
func (s *Store) endWait(w *dirtyWaiter) {
	s.dirty.Lock()
	defer s.dirty.Unlock()
	s.dirty.leave(w)
}

// putBuffer returns a buffer of getBuffer.
func (f *File) putBuffer(b []byte) {
	f.s.cfg.Buffers.Put(b)
	f.give()
}

// take counts one buffer as dirty data of a file, unless the buffer exceeds a limit. The caller
// holds dirty.
func (f *File) take() bool {
	s := f.s
	d, size := &s.dirty, int64(s.cfg.Buffers.Size())
	limit := s.limit()
	next := d.bytes + size
	if next > int64(limit)*size || f.room(limit) <= 0 ||
		next > dirtyReserve*size && !s.cfg.Total.take(size) {
		return false
	}
	d.bytes = next
	f.held++
	return true
}

// takeAlways is take for data that an earlier process has taken.
func (f *File) takeAlways() {
	s := f.s
	d, size := &s.dirty, int64(s.cfg.Buffers.Size())
	d.Lock()
	defer d.Unlock()
	if d.bytes += size; d.bytes > dirtyReserve*size {
		s.cfg.Total.takeAlways(size)
	}
	f.held++
}

// room returns how many more dirty buffers a file may hold, which may be less than 0. A file may
// hold a part of the limit of all files while the server is busy with it, or while other files hold
// data too. The caller holds dirty.
func (f *File) room(limit int) int {
	if f.busy == 0 && len(f.s.dirty.files) <= 1 {
		return math.MaxInt
	}
	return max(1, limit*fileShareNum/fileShareDen) - f.held
}

// give reverses take.
func (f *File) give() {
	s := f.s
	d, size := &s.dirty, int64(s.cfg.Buffers.Size())
	d.Lock()
	defer d.Unlock()
	if d.bytes > dirtyReserve*size {
		s.cfg.Total.give(size)
	}
	d.bytes -= size
	f.held--
	s.serveWriters()
}

// serveWriters lets writers continue, each user in turn, and writes back a file while others wait.
// It must run after each change that a writer may wait for. The caller holds dirty.
func (s *Store) serveWriters() {
	d := &s.dirty
	limit := s.limit()
	for f, parked := range d.parked {
		for range min(f.room(limit)-f.waiters, parked.Len()) {
			w := parked.Take().Value
			w.parked = false
			d.join(w)
		}
		if parked.Len() == 0 {
			delete(d.parked, f)
		}
	}
	for e := d.waiters.First(); e != nil; e = d.waiters.First() {
		w := e.Value
		if w.file.room(limit) <= 0 {
			d.leave(w)
			d.park(w)
			continue
		}
		if !w.file.take() {
			break
		}
		d.take()
		w.ready <- true
	}
	for f := range d.parked {
		if f.room(limit) <= 0 {
			s.reclaim(f)
		}
	}
	if d.waiters.Len() > 0 {
		s.reclaim(nil)
		s.endUselessWaits()
	}
}

// endUselessWaits lets writers write without keeping data when the server is busy with all files
// that hold data. A writer of a busy file would wait for the server in any case. The caller holds
// dirty.
func (s *Store) endUselessWaits() {
	d := &s.dirty
	for f := range d.files {
		if f.busy == 0 {
			return
		}
	}
	var others []*dirtyWaiter
	for w := d.take(); w != nil; w = d.take() {
		if w.file.busy > 0 {
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
func (s *Store) makeRoom() {
	defer s.cfg.Recovered()
	s.dirty.Lock()
	defer s.dirty.Unlock()
	s.serveWriters()
	if s.dirty.waiters.Len() == 0 {
		s.reclaim(nil)
	}
}

// reclaim starts to write back one file: f, when it holds more than its share, or else the file
// with the most buffers. It passes over files with which the server is busy and files that are
// being written back. It does not wait. The caller holds dirty.
func (s *Store) reclaim(f *File) {
	d := &s.dirty
	var most *File
	for other, file := range d.files {
		if other.busy > 0 || file.flushing {
			continue
		}
		if most == nil || other.held > most.held {
			most = other
		}
	}
	if f != nil && f.room(s.limit()) <= 0 {
		if file := d.files[f]; file == nil || file.flushing || f.busy > 0 {
			return
		}
		most = f
	}
	if most == nil || d.stopped {
		return
	}
	file := d.files[most]
	file.flushing, file.since = true, time.Now()
	s.cfg.Spawn(func() { most.flush(file) })
}

// writeThrough writes the first bytes of data to stable storage and keeps none of it. It gives its
// buffer back while the server is busy with this file. It returns the number of bytes.
func (f *File) writeThrough(ctx context.Context, w *Writer, off uint64, data []byte) (int, error) {
	f.s.cfg.Counters.WriteThroughs.Add(1)
	// A replay of older data must not overwrite this data.
	if err := f.Sync(ctx); err != nil {
		return 0, err
	}
	for try := 0; ; try++ {
		n, err := f.writeThroughOnce(ctx, w, off, data)
		if !f.s.cfg.Busy.Retry(ctx, err, try) {
			return n, err
		}
	}
}

func (f *File) writeThroughOnce(ctx context.Context, w *Writer, off uint64, data []byte) (int, error) {
	s := f.s
	buf := s.Buffer(ctx, w.Cred)
	if buf == nil {
		return 0, syscall.EINTR
	}
	defer s.cfg.Buffers.Put(buf)
	e := extent{off: off, buf: buf, cred: w.Cred, open: w.State}
	e.n = copy(buf[:s.cfg.WriteSize], data)
	f.attrs.BeginWrite()
	start := s.cfg.Attrs.Now()
	res, err := f.callWrite(ctx, &e, 0, nfs.FileSync)
	if err == nil {
		f.attrs.Wrote(&f.chain, &res.Change)
	}
	if err == nil && res.Committed != nfs.FileSync {
		// RFC 1813 §3.3.7
		err = s.cfg.Invalid(f, "WRITE stores the data in a less stable way than requested")
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if err == nil {
		s.cfg.Attrs.Extend(f.attrs, off+uint64(res.Count))
		s.cfg.Counters.SentBytes.Add(uint64(res.Count))
		s.progress.Add(1)
	}
	f.extentWritten(&res.Change, start, err)
	if err != nil {
		return 0, s.cfg.Check(f, err)
	}
	return int(res.Count), nil
}
