package data

import (
	"context"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/attr"
)

// A Config configures a Store. All fields but Total and Records are required.
type Config struct {
	Server  nfs.Server
	Attrs   *attr.Cache
	Busy    *nfs.BusyPolicy
	Buffers *membuf.Pool
	// BusyErrno is the error of written data when the server was busy for too long.
	BusyErrno syscall.Errno
	WriteSize int           // bound of one WRITE in bytes; not more than the size of a buffer
	MaxWrites int           // bound of the WRITE calls in flight
	Expire    time.Duration // age after which data is made stable; 0: none
	Limit     int64         // bound of the buffers of data that is not stable, in bytes
	Total     *Total        // bounds the data of several Stores; nil: none
	Counters  *Counters
	Records   Records // nil if the data does not survive the process

	// Background is the context of work that serves no single request. It ends when the mount is
	// aborted. Owned returns a context that ends with ctx, and whose calls belong to this work.
	Background context.Context
	Owned      func(ctx context.Context) context.Context
	// Spawn runs a function on a goroutine, and Recovered is deferred by functions of timers.
	Spawn     func(func())
	Recovered func()
	// Check handles the error of a call for a file and returns the error of the data. Invalid does the
	// same for a reply that breaks the protocol.
	Check   func(f *File, err error) error
	Invalid func(f *File, reason string) error
	// Written is called with the reply to a WRITE. Failed is called when the error of a file has
	// changed. Both are called with locks of the file held and must not call the file.
	Written func(f *File, ch *nfs.Change)
	Failed  func(f *File, err syscall.Errno)
	// Restarted is called when the server has lost data, because it has restarted.
	Restarted func()
	// DropPages makes the kernel drop its pages of a range. It may wait for READs and WRITEs.
	DropPages func(f *File, off, n uint64)
	// Lost is called for data that is discarded: for each range that the server rejects, and in Close
	// for each file. It must not block.
	Lost func(Loss)
}

// Counters are the counters of a Store.
type Counters struct {
	SentBytes     *atomic.Uint64 // bytes accepted by WRITE, including replays
	Commits       *atomic.Uint64 // COMMIT calls
	Replays       *atomic.Uint64 // replays after a write verifier changed
	ReplayedBytes *atomic.Uint64 // bytes sent again by replays
	WriteErrors   *atomic.Uint64 // extents whose data was discarded after an error
	BufferWaits   *atomic.Uint64 // requests that waited for a buffer or for room for written data
	WriteThroughs *atomic.Uint64 // writes without write-behind because the server was busy with other files
}

// Records keep written data for the next process. The data is in the buffers. The methods are called
// with File.mu held.
type Records interface {
	// AddExtent records an extent without data. ok is false if there is no room.
	AddExtent(f *File, cred []byte, open nfs.OpenState, off uint64, buf []byte) (ref Record, ok bool)
	// SetLength records the number of bytes of an extent, after they were copied.
	SetLength(ref Record, n int)
	// FreeExtent ends the record of an extent.
	FreeExtent(ref Record)
}

// A Record refers to the record of an extent; 0 means that there is none.
type Record uint32

// A Store holds the written data of one mount that is not known to be on stable storage. It is safe for
// concurrent use.
type Store struct {
	cfg        Config
	dirty      dirtySet
	reclaimer  reclaimer
	progress   atomic.Uint64 // changes while the server accepts data
	writeSlots chan struct{}
}

// Init prepares a Store. It must be called once, before anything else.
func (s *Store) Init(cfg Config) {
	s.cfg = cfg
	s.dirty.files = make(map[*File]*dirtyFile)
	s.writeSlots = make(chan struct{}, cfg.MaxWrites)
}

// Progress returns a number that grows whenever the server accepts written data.
func (s *Store) Progress() uint64 { return s.progress.Load() }

// Progressed records that the server has accepted data or answered otherwise.
func (s *Store) Progressed() { s.progress.Add(1) }

// A Writer says on whose behalf data is written: all WRITEs of an open file have its credential.
type Writer struct {
	Cred  []byte
	State nfs.OpenState
}

// A File holds the data of one file that is not known to be on stable storage. It is safe for
// concurrent use. A nil File has no data.
type File struct {
	ID     uint64 // node number
	Handle nfs.Handle
	Owner  any // of the caller of NewFile
	s      *Store
	attrs  *attr.State

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
	errSeq   uint64    // number of errors so far; each open file reports those it has not reported
	replayed uint64    // number of replayed extents that were released
	toDrop   pageRange // whose pages the kernel must drop
	dropping bool      // sendRanges is running

	// Guarded by Store.dirty.
	held    int // buffers that count as dirty
	waiters int // writers of the file in dirtySet.waiters
	busy    int // calls with this data that the server answers with NFS3ERR_JUKEBOX

	chain attr.Chain // guarded by attrs
}

// NewFile returns a File without data.
func (s *Store) NewFile(id uint64, h nfs.Handle, attrs *attr.State) *File {
	return &File{ID: id, Handle: h, s: s, attrs: attrs}
}

// Clean reports whether all data is stable.
func (f *File) Clean() bool {
	if f == nil {
		return true
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.clean()
}

func (f *File) clean() bool { return f.filling == nil && len(f.sending) == 0 && len(f.unstable) == 0 }

// Write copies the first size bytes of data, in several pieces, into extents. It returns the number of
// bytes taken, which is less than size only with an error: EINTR if ctx ends. Write must hold no buffer
// and no lock.
func (f *File) Write(ctx context.Context, w *Writer, off uint64, data Pieces, size int) (taken int, err error) {
	for _, b := range data {
		n, err := f.buffer(ctx, w, off+uint64(taken), b[:min(len(b), size-taken)])
		if taken += n; err != nil {
			return taken, err
		}
	}
	return taken, nil
}

// fail records an error. The caller holds mu.
func (f *File) fail(err error) {
	f.err = nfs.CallErrno(err)
	if f.err == syscall.EINTR {
		// The mount was aborted. EINTR would mean that a signal interrupted the caller.
		f.err = syscall.EIO
	}
	f.errSeq++
}

// An Errors tells which errors of a file an open file has reported. File.mu guards it.
type Errors struct{ seen uint64 }

// Open makes e ignore the errors so far.
func (f *File) Open(e *Errors) {
	if f != nil {
		f.mu.Lock()
		defer f.mu.Unlock()
		e.seen = f.errSeq
	}
}

// Report returns the last error of the file if e has not reported it, else nil. It calls reported with
// the error, under the lock of the file.
func (f *File) Report(e *Errors, reported func(syscall.Errno)) error {
	if f == nil {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if e.seen == f.errSeq {
		return nil
	}
	e.seen = f.errSeq
	reported(f.err)
	return f.err
}

// Reported makes e ignore the last error of the file if it is err. It returns whether it is.
func (f *File) Reported(e *Errors, err error) bool {
	if f == nil {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if e.seen == f.errSeq || err != f.err {
		return false
	}
	e.seen = f.errSeq
	return true
}

// RestoreError sets the error that an open file of an earlier process has not reported.
func (f *File) RestoreError(err syscall.Errno) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err, f.errSeq = err, 1
}

// RestoreErrors makes e report the last error of the file if unreported is true, and else no error so
// far.
func (f *File) RestoreErrors(e *Errors, unreported bool) {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if e.seen = f.errSeq; unreported {
		e.seen--
	}
}

// RestoreExtent takes data of an earlier process: the first n bytes of a buffer of the pool, to be
// written at off. The returned function sends it.
func (f *File) RestoreExtent(w *Writer, off uint64, buf []byte, n int, ref Record) (send func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.seq++
	e := &extent{seq: f.seq, off: off, buf: buf, n: n, cred: w.Cred, open: w.State, stable: nfs.Unstable, kept: ref}
	f.sending = append(f.sending, e)
	f.takeAlways()
	f.mark()
	f.attrs.RestoreWrite(e.end())
	return func() { f.send(e) }
}

// keep records an extent. The caller holds mu.
func (f *File) keep(e *extent) {
	if r := f.s.cfg.Records; r != nil {
		e.kept, _ = r.AddExtent(f, e.cred, e.open, e.off, e.buf)
	}
}

// keepLength records the length of an extent. The caller holds mu.
func (f *File) keepLength(e *extent) {
	if r := f.s.cfg.Records; r != nil && e.kept != 0 {
		r.SetLength(e.kept, e.n)
	}
}

// freeRecord ends the record of an extent. The caller holds mu.
func (f *File) freeRecord(e *extent) {
	if r := f.s.cfg.Records; r != nil && e.kept != 0 {
		r.FreeExtent(e.kept)
		e.kept = 0
	}
}
