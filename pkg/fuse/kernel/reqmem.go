package kernel

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/ledger"
)

// Request memory begins with a page with a memoryHeader. The small places follow, and then the
// large ones.
type memoryHeader struct{ magic, bufSize uint64 }

const (
	requestMagic = 0x3130747365755100 | 'N' // "NQuest01"
	// smallPlaces and largePlaces bound the requests in progress that another process can handle
	// again. A large place is a buffer for read(2). A request that is small moves to a small place
	// at once. Only what is used takes memory of the host.
	smallPlaces, largePlaces = 8192, 1024
)

// requestMemory has the requests of one connection that have no reply. A place is in use while the
// number of its request is not 0.
type requestMemory struct {
	file *os.File
	all  []byte

	mu    sync.Mutex
	small freePlaces // guarded by mu
	large freePlaces // guarded by mu
	left  [][]byte   // requests of another process
}

// freePlaces are places that are not in use.
type freePlaces struct{ ready, noMemory [][]byte }

func requestMemorySize(bufSize int) int {
	return os.Getpagesize() + smallPlaces*smallRequest + largePlaces*bufSize
}

// newRequestMemory makes request memory. bufSize is a multiple of the page size.
func newRequestMemory(bufSize int) (*requestMemory, error) {
	size := requestMemorySize(bufSize)
	fd, err := membuf.CreateFile("nfsrdmad-requests", int64(size), membuf.Sealed)
	if err != nil {
		return nil, err
	}
	m := &requestMemory{file: os.NewFile(uintptr(fd), "nfsrdmad-requests")}
	if err := m.mapAll(fd, size); err != nil {
		return nil, err
	}
	*(*memoryHeader)(unsafe.Pointer(&m.all[0])) = memoryHeader{requestMagic, uint64(bufSize)}
	m.findPlaces(bufSize)
	return m, nil
}

// openRequestMemory maps the memory of another process, which has exited. It duplicates the
// descriptor.
func openRequestMemory(f *os.File, bufSize int) (*requestMemory, error) {
	var h memoryHeader
	if _, err := f.ReadAt(bytesOf(&h), 0); err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	size := requestMemorySize(bufSize)
	if h.magic != requestMagic || h.bufSize != uint64(bufSize) || st.Size() != int64(size) {
		return nil, errors.New("memory of FUSE requests has an unknown format")
	}
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("fcntl F_DUPFD_CLOEXEC", err)
	}
	m := &requestMemory{file: os.NewFile(uintptr(fd), f.Name())}
	if err := m.mapAll(fd, size); err != nil {
		return nil, err
	}
	m.findPlaces(bufSize)
	return m, nil
}

func (m *requestMemory) mapAll(fd, size int) (err error) {
	if m.all, err = unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		_ = m.file.Close()
		return os.NewSyscallError("mmap of request memory", err)
	}
	return nil
}

// findPlaces sorts the places into free ones and those with requests of another process. A request
// can be in two places if that process was killed after the copy to the small one.
func (m *requestMemory) findPlaces(bufSize int) {
	at := os.Getpagesize()
	found := make(map[uint64]bool)
	sort := func(n, size int, free *freePlaces) {
		for range n {
			place := m.all[at : at+size : at+size]
			at += size
			if !m.used(at-size) || *uniqueOf(place) == 0 || found[*uniqueOf(place)&^resent] {
				free.noMemory = append(free.noMemory, place)
				continue
			}
			*uniqueOf(place) &^= resent // of an earlier version of this package
			found[*uniqueOf(place)] = true
			m.left = append(m.left, place)
		}
	}
	sort(smallPlaces, smallRequest, &m.small)
	sort(largePlaces, bufSize, &m.large)
}

// used reports whether the page of an offset has memory. A page without memory was never written. A
// read through the mapping would give it memory.
func (m *requestMemory) used(at int) bool {
	page := int64(at) &^ int64(os.Getpagesize()-1)
	data, err := unix.Seek(int(m.file.Fd()), page, unix.SEEK_DATA)
	return err == nil && data == page
}

func (m *requestMemory) close() {
	if m != nil {
		_ = unix.Munmap(m.all)
		_ = m.file.Close()
	}
}

// uniqueOf returns the place of the number of a request.
func uniqueOf(place []byte) *uint64 {
	return (*uint64)(unsafe.Pointer(&place[unsafe.Offsetof(fuse.InHeader{}.Unique)]))
}

// take returns a place that is free, or nil. The place has memory.
func (m *requestMemory) take(free *freePlaces) []byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	if n := len(free.ready); n > 0 {
		place := free.ready[n-1]
		free.ready = free.ready[:n-1]
		return place
	}
	n := len(free.noMemory)
	if n == 0 {
		return nil
	}
	place := free.noMemory[n-1]
	if membuf.AllocateFile(int(m.file.Fd()), int64(m.offset(place)), int64(len(place))) != nil {
		return nil
	}
	free.noMemory = free.noMemory[:n-1]
	makeResident(place)
	atomic.StoreUint64(uniqueOf(place), 0)
	return place
}

// offset returns the offset of a place in m.all. It is len(m.all) or more for other memory.
func (m *requestMemory) offset(place []byte) uintptr {
	return uintptr(unsafe.Pointer(&place[0])) - uintptr(unsafe.Pointer(&m.all[0]))
}

// buffer returns a large place for read(2), or nil.
func (m *requestMemory) buffer() []byte {
	if m == nil {
		return nil
	}
	return m.take(&m.large)
}

// keep copies a small request to a small place. It returns nil if there is none.
func (m *requestMemory) keep(in []byte) []byte {
	if m == nil || !hasReply(in) {
		return nil
	}
	place := m.take(&m.small)
	if place == nil {
		return nil
	}
	const at, end = unsafe.Offsetof(fuse.InHeader{}.Unique), unsafe.Offsetof(fuse.InHeader{}.NodeId)
	copy(place[:at], in)
	copy(place[end:], in[end:])
	atomic.StoreUint64(uniqueOf(place), header(in).Unique) // now the request is complete
	return place[:len(in)]
}

// done ends the use of a place: its request has its reply, or is in another place.
func (m *requestMemory) done(place []byte) {
	if m == nil {
		return
	}
	place = place[:cap(place)]
	atomic.StoreUint64(uniqueOf(place), 0)
	if m.offset(place) >= uintptr(len(m.all)) {
		return
	}
	large := len(place) > smallRequest
	if large {
		_ = unix.Madvise(place, unix.MADV_REMOVE) // gives the memory back
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if large {
		m.large.noMemory = append(m.large.noMemory, place)
	} else {
		m.small.ready = append(m.small.ready, place)
	}
}

// hasReply reports whether the kernel waits for a reply to a request.
func hasReply(in []byte) bool { return operationOf(Op(header(in).Opcode)).replies() }

// KeepRequests makes the connection keep its requests in memory that Memory returns. Another
// process can then handle the requests without reply again. Kernels before 6.9 need it, because
// they cannot send requests again. KeepRequests must be called before Serve. It keeps 1,024
// requests of over 1 KiB and 8,192 smaller ones at a time. If this process is killed with more, the
// callers of the others wait until the connection ends.
func (s *DevFuse) KeepRequests() error {
	m, err := newRequestMemory(s.bufSize)
	if err != nil {
		return fmt.Errorf("keep FUSE requests: %w", err)
	}
	s.memory = m
	return nil
}

// repeat handles the requests of another process again, unless the kernel has their replies.
func (s *DevFuse) repeat() {
	for _, place := range s.memory.left {
		h := header(place)
		if size := int(h.Length); size < int(unsafe.Sizeof(*h)) || size > len(place) || !hasReply(place) ||
			!s.isWaiting(h.Unique) {
			s.memory.done(place)
			continue
		}
		s.workers.Go(func() {
			w := s.getWorker()
			defer s.putWorker(w)
			w.request.Handle(Message{In: place[:h.Length], Received: ledger.Now(), Resent: true})
			s.memory.done(place)
		})
	}
	s.memory.left = nil
}

// interruptBit is FUSE_INT_REQ_BIT: the number of an INTERRUPT is that of its request with this
// bit.
const interruptBit = 1

// isWaiting reports whether the kernel still waits for the reply to a request. It answers an
// INTERRUPT of the request with EAGAIN. The kernel returns ENOENT if the request has ended.
// Otherwise it sends the INTERRUPT again, or returns EINVAL if there was none (fuse_dev_do_write of
// fs/fuse/dev.c).
func (s *DevFuse) isWaiting(unique uint64) bool {
	var reply [headerSize]byte
	_, err := unix.Write(s.fd, reply[:putError(reply[:], unique|interruptBit, unix.EAGAIN)])
	return err != unix.ENOENT && err != unix.ENODEV
}
