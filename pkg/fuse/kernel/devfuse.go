package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/observe/ledger"
)

const (
	// minReadBuffer is the smallest buffer that the kernel accepts in read(2).
	minReadBuffer = 8192
	// smallRequest bounds the requests that a worker copies, so that the large buffer is free for
	// the next request.
	smallRequest = 1024
	// maxWaiting bounds the goroutines that wait for a request.
	maxWaiting = 16
	// maxIdle bounds the workers that are kept for later requests.
	maxIdle = 64
	// retryRead is the pause after an unexpected error of read(2).
	retryRead = 100 * time.Millisecond
)

// A DevFuse serves one connection through /dev/fuse.
type DevFuse struct {
	*Handler
	dev     *Device
	memory  *requestMemory // nil without KeepRequests
	resumed bool           // by Resume
	bufSize int            // of a buffer for read(2)
	fd      int            // of dev; set by Serve
	start   func()         // work

	workers sync.WaitGroup

	readers struct {
		sync.Mutex
		waiting int      // goroutines that wait for a request, and one that begins
		max     int      // bounds waiting
		free    [][]byte // buffers for read(2)
	}
	idle struct { // workers that no goroutine uses
		sync.Mutex
		workers []*worker
	}
}

// NewDevFuse negotiates the FUSE protocol on the connection of dev, whose file system must be
// mounted. The caller closes dev after Serve.
func NewDevFuse(dev *Device, fs FileSystem, opts Options) (*DevFuse, error) {
	s := newDevFuse(dev, fs, opts)
	var err error
	if closed := dev.Use(func(fd int) { err = s.negotiate(fd) }); closed != nil {
		err = closed
	}
	if err != nil {
		return nil, fmt.Errorf("negotiate the FUSE protocol: %w", err)
	}
	return s, nil
}

// Resume takes over a connection that another process served, which has exited. init is what Init
// of that process returned, and mem what Memory returned; the caller closes mem. opts must be the
// options of that process, with CAP_HAS_RESEND. fs must know all nodes and
// open files of the kernel before Serve, as requests may name any of them: the kernel does not tell
// what it knows.
//
// Serve then first handles the requests again that have no reply. The other process may have
// executed them, see Request.Resent. The requests come from the kernel, or from mem after
// KeepRequests. An INTERRUPT for them comes again, too. The kernel drops a request that waits to be
// sent again when the caller of the request is killed. Linux before 6.9 cannot send requests again:
// Resume without mem returns ErrNoResend.
func Resume(dev *Device, fs FileSystem, opts Options, init []byte, mem *os.File) (*DevFuse, error) {
	s := newDevFuse(dev, fs, opts)
	_, err := s.Negotiate(init)
	switch {
	case err != nil:
	case mem != nil:
		s.memory, err = openRequestMemory(mem, s.bufSize)
	case s.kernel.Flags64()&opts.Capabilities&fuse.CAP_HAS_RESEND == 0:
		return nil, ErrNoResend
	}
	if err != nil {
		return nil, fmt.Errorf("resume a FUSE connection: %w", err)
	}
	s.resumed = true
	return s, nil
}

// Memory returns a duplicate of the descriptor of the memory for Resume, or nil for a connection
// without KeepRequests. The caller closes it.
func (s *DevFuse) Memory() (*os.File, error) {
	if s.memory == nil {
		return nil, nil
	}
	f := s.memory.file
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("fcntl F_DUPFD_CLOEXEC", err)
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

// ErrNoResend means that the kernel cannot send requests again.
var ErrNoResend = errors.New("resume a FUSE connection: the kernel cannot resend requests; use Linux 6.9 or later")

// resent is FUSE_UNIQUE_RESEND of include/uapi/linux/fuse.h. The reply to a request that was sent
// again, and the INTERRUPT of that request, have the bit, too.
const resent = 1 << 63

func newDevFuse(dev *Device, fs FileSystem, opts Options) *DevFuse {
	page := os.Getpagesize()
	bufSize := max(opts.MaxWrite+int(unsafe.Sizeof(fuse.WriteIn{})), minReadBuffer)
	s := &DevFuse{Handler: NewHandler(fs, opts), dev: dev, bufSize: (bufSize + page - 1) / page * page}
	s.poll = true
	s.start = s.work
	s.readers.max = min(max(runtime.GOMAXPROCS(0), 2), maxWaiting)
	return s
}

// negotiate reads the first request, INIT, and replies.
func (s *DevFuse) negotiate(fd int) error {
	in := make([]byte, s.bufSize)
	n, err := readRequest(fd, in)
	if err != nil {
		return err
	}
	reply, initErr := s.Negotiate(in[:n])
	if len(reply) > 0 {
		if _, err := unix.Write(fd, reply); err != nil {
			return fmt.Errorf("reply to INIT: %w", err)
		}
	}
	return initErr
}

// Serve handles requests until the connection ends. It returns when all requests have ended.
func (s *DevFuse) Serve() {
	_ = s.dev.Use(func(fd int) {
		s.fd = fd
		switch {
		case s.memory != nil:
			s.repeat()
		case s.resumed:
			if err := s.dev.resend(); err != nil {
				s.fs.Warn("FUSE requests of an earlier process are lost", "error", err)
			}
		}
		s.readers.waiting++
		s.workers.Add(1)
		go s.start()
		s.workers.Wait()
	})
	s.memory.close()
}

// A worker is one goroutine that reads requests and handles them, one after the other.
type worker struct {
	s       *DevFuse
	request *Request
	iov     []unix.Iovec
	small   [smallRequest / 8]uint64 // the request, if it is small
}

func (s *DevFuse) newWorker() *worker {
	w := &worker{s: s}
	w.request = s.NewRequest(w)
	return w
}

// getWorker returns a worker that no goroutine uses.
func (s *DevFuse) getWorker() *worker {
	s.idle.Lock()
	defer s.idle.Unlock()
	n := len(s.idle.workers)
	if n == 0 {
		return s.newWorker()
	}
	w := s.idle.workers[n-1]
	s.idle.workers = s.idle.workers[:n-1]
	return w
}

// putWorker keeps a worker for getWorker.
func (s *DevFuse) putWorker(w *worker) {
	s.idle.Lock()
	defer s.idle.Unlock()
	if len(s.idle.workers) < maxIdle {
		s.idle.workers = append(s.idle.workers, w)
	}
}

// work handles requests until the connection ends, or until enough other workers wait.
func (s *DevFuse) work() {
	defer s.workers.Done()
	w := s.getWorker()
	defer s.putWorker(w)
	for counted := true; ; counted = false { // endRead has counted this goroutine
		buf := s.beginRead(counted)
		if buf == nil {
			return
		}
		n, err := readRequest(s.fd, buf)
		if err != nil {
			s.endRead(buf, false)
			if !s.retry(err) {
				return
			}
			continue
		}
		received := ledger.Now()
		replace := !isForget(buf[:n]) // the kernel sends many, and they are handled at once
		if n <= smallRequest {
			kept := s.memory.keep(buf[:n])
			in := kept
			if in == nil {
				in = bytesOf(&w.small)[:copy(bytesOf(&w.small), buf[:n])]
			}
			s.endRead(buf, replace)
			w.request.Handle(Message{In: in, Received: received})
			if kept != nil {
				s.memory.done(kept)
			}
			continue
		}
		s.endRead(nil, replace)
		w.request.Handle(Message{In: buf[:n], Received: received})
		s.readers.Lock()
		s.addFree(buf)
		s.readers.Unlock()
	}
}

// beginRead counts a waiting worker, unless it is counted already, and returns its buffer.
// beginRead returns nil when enough workers wait.
func (s *DevFuse) beginRead(counted bool) []byte {
	r := &s.readers
	r.Lock()
	defer r.Unlock()
	if !counted {
		if r.waiting == r.max {
			return nil
		}
		r.waiting++
	}
	if n := len(r.free); n > 0 {
		buf := r.free[n-1]
		r.free = r.free[:n-1]
		return buf
	}
	if buf := s.memory.buffer(); buf != nil {
		return buf
	}
	buf := bytesOfWords(make([]uint64, s.bufSize/8))
	makeResident(buf)
	return buf
}

// makeResident gives memory to all pages of b. A thread of a process that was killed may still take
// a request in read(2). The kernel then refuses to get memory for a missing page, and ends the
// request with EIO instead of keeping it for the next process (fuse_copy_fill, fuse_dev_do_read).
func makeResident(b []byte) {
	for i := 0; i < len(b); i += os.Getpagesize() {
		b[i] = 1
	}
	b[len(b)-1] = 1
}

// endRead reverses beginRead. It keeps buf, unless nil, for the next worker. When replace is set
// and no worker waits, it starts one.
func (s *DevFuse) endRead(buf []byte, replace bool) {
	r := &s.readers
	r.Lock()
	defer r.Unlock()
	r.waiting--
	if buf != nil {
		s.addFree(buf)
	}
	if replace && r.waiting == 0 {
		r.waiting++
		s.workers.Add(1)
		go s.start()
	}
}

// addFree keeps a buffer for the next worker. The caller holds readers.
func (s *DevFuse) addFree(buf []byte) {
	if r := &s.readers; len(r.free) < r.max {
		atomic.StoreUint64(uniqueOf(buf), 0) // see requestMemory
		r.free = append(r.free, buf)
		return
	}
	s.memory.done(buf)
}

// readRequest reads one request.
func readRequest(fd int, buf []byte) (int, error) {
	for {
		n, err := unix.Read(fd, buf)
		switch {
		case err == unix.EINTR, err == unix.ENOENT: // ENOENT: the caller of the request is gone
		case err != nil:
			return 0, os.NewSyscallError("read", err)
		case n == 0:
			return 0, unix.ENODEV // a socket, whose other end is closed
		case n < int(unsafe.Sizeof(fuse.InHeader{})):
			return 0, fmt.Errorf("read: request of %d bytes", n)
		default:
			return n, nil
		}
	}
}

// retry reports whether a worker reads again after an error. It pauses before, unless the
// connection has ended.
func (s *DevFuse) retry(err error) bool {
	if errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ECONNABORTED) {
		s.requests.Disconnect()
		return false
	}
	s.opts.Logger.Printf("FUSE request: %v", err)
	time.Sleep(retryRead)
	return true
}

// Room returns a size that no reply exceeds.
func (w *worker) Room() int { return math.MaxInt }

// Place returns nil: writev(2) copies the data from the memory of the file system to the kernel.
func (w *worker) Place(int) [][]byte { return nil }

// Send sends a reply: a header, and data that may be empty. No data is in memory of Place.
func (w *worker) Send(reply []byte, data [][]byte, _ int) {
	if len(data) == 0 {
		_, err := unix.Write(w.s.fd, reply)
		w.wrote(err, reply)
		return
	}
	w.iov = appendIovec(w.iov[:0], reply)
	for _, d := range data {
		w.iov = appendIovec(w.iov, d)
	}
	_, _, errno := unix.Syscall(unix.SYS_WRITEV, uintptr(w.s.fd), uintptr(unsafe.Pointer(&w.iov[0])),
		uintptr(len(w.iov)))
	clear(w.iov)
	if errno != 0 {
		w.wrote(errno, reply)
	}
}

// wrote handles the result of the write of a reply, which begins with a header. The kernel keeps a
// request whose reply it rejects, so wrote ends that request with an error.
func (w *worker) wrote(err error, reply []byte) {
	if err == nil || err == unix.ENOENT || err == unix.ENODEV {
		return // ENOENT, ENODEV: the request or the connection has ended
	}
	unique := binary.NativeEndian.Uint64(reply[8:])
	w.s.opts.Logger.Printf("reply to FUSE request %d: write: %v", unique, err)
	_, _ = unix.Write(w.s.fd, reply[:putError(reply, unique, unix.EIO)])
}

func appendIovec(iov []unix.Iovec, b []byte) []unix.Iovec {
	if len(b) == 0 {
		return iov
	}
	v := unix.Iovec{Base: &b[0]}
	v.SetLen(len(b))
	return append(iov, v)
}

// header returns the header of a request of at least the size of fuse.InHeader.
func header(in []byte) *fuse.InHeader { return (*fuse.InHeader)(unsafe.Pointer(&in[0])) }

func isForget(in []byte) bool {
	op := Op(header(in).Opcode)
	return op == OpForget || op == OpBatchForget
}
