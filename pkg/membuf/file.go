package membuf

import (
	"errors"
	"fmt"
	"math"
	"os"

	"golang.org/x/sys/unix"
)

// fileMemory is the memory of a pool with a file. Buffer i is at the offset i*size of the file.
// Each buffer in use or in the pool is an arena.
//
// The mapping covers the whole file, but a buffer has no memory before it is first used. With
// mlockall(2) and MCL_ONFAULT the kernel locks the pages that are used.
type fileMemory struct {
	file *os.File
	size int     // of a buffer
	base uintptr // address of buffer 0

	// Guarded by the pool's state:
	mem  []byte // nil after close
	used []bool // by number of the buffer: it is in the pool or in use
	next int    // no buffer below is unused
	got  bool   // allocNext was called
}

// NewFilePool makes a pool of limit buffers of size bytes each in a new shared memory file. What is
// written to a buffer stays in the file when the process ends, also by SIGKILL: give File to a
// descriptor store, and use OpenFilePool in the next process. The kernel shows the name in
// /proc/PID/fd as memfd:name. size must be a multiple of the page size.
//
// The file has no memory at first. A buffer gets memory when it is first used, and the file keeps
// it until its last descriptor is closed.
func NewFilePool(name string, size, limit int) (*Pool, error) {
	p, err := newFilePool(name, size, limit)
	if err != nil {
		return nil, fmt.Errorf("membuf: create file %s of %d buffers of %d bytes: %w", name, limit, size, err)
	}
	return p, nil
}

func newFilePool(name string, size, limit int) (*Pool, error) {
	total, err := fileSize(size, limit)
	if err != nil {
		return nil, err
	}
	fd, err := CreateFile(name, total, Sealed)
	if err != nil {
		return nil, err
	}
	return mapPool(fd, name, size, limit)
}

// OpenFilePool makes a pool of the file that NewFilePool made in another process. f comes out of a
// descriptor store. The caller keeps f and may close it. size and limit must be those of
// NewFilePool. Call Take for the buffers whose content matters before the first Get.
//
// OpenFilePool returns an error if f is not such a file. It cannot check the content, or that no
// other process writes to the file: the caller must not trust the data of Take any more than that.
func OpenFilePool(f *os.File, size, limit int) (*Pool, error) {
	p, err := openFilePool(f, size, limit)
	if err != nil {
		return nil, fmt.Errorf("membuf: open file %s as %d buffers of %d bytes: %w", f.Name(), limit, size, err)
	}
	return p, nil
}

func openFilePool(f *os.File, size, limit int) (*Pool, error) {
	total, err := fileSize(size, limit)
	if err != nil {
		return nil, err
	}
	conn, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	fd := -1
	closed := conn.Control(func(from uintptr) {
		if err = checkFile(int(from), total); err != nil {
			return
		}
		fd, err = unix.FcntlInt(from, unix.F_DUPFD_CLOEXEC, 0)
		err = os.NewSyscallError("fcntl F_DUPFD_CLOEXEC", err)
	})
	if err := errors.Join(closed, err); err != nil {
		return nil, err
	}
	return mapPool(fd, f.Name(), size, limit)
}

// fileSize returns the size of the file in bytes.
func fileSize(size, limit int) (int64, error) {
	switch {
	case size <= 0 || size%os.Getpagesize() != 0:
		return 0, fmt.Errorf("size of a buffer must be a multiple of the page size of %d bytes", os.Getpagesize())
	case limit <= 0 || limit > math.MaxInt/size:
		return 0, fmt.Errorf("number of buffers must be from 1 to %d", math.MaxInt/size)
	}
	return int64(size) * int64(limit), nil
}

// checkFile checks that fd is a shared memory file of that size, whose size cannot change.
func checkFile(fd int, size int64) error {
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err == unix.EINVAL {
		return errors.New("not a shared memory file")
	}
	if err != nil {
		return os.NewSyscallError("fcntl F_GET_SEALS", err)
	}
	if seals&Sealed != Sealed || seals&(unix.F_SEAL_WRITE|unix.F_SEAL_FUTURE_WRITE) != 0 {
		return fmt.Errorf("seals are %#x, want %#x", seals, Sealed)
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return os.NewSyscallError("fstatfs", err)
	}
	if fs.Type != unix.TMPFS_MAGIC { // files with huge pages also have seals
		return fmt.Errorf("file system type is %#x, want %#x", fs.Type, unix.TMPFS_MAGIC)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return os.NewSyscallError("fstat", err)
	}
	if st.Size != size {
		return fmt.Errorf("size of the file is %d bytes, want %d", st.Size, size)
	}
	return nil
}

// mapPool makes the pool of a file. It owns fd, also when it returns an error.
func mapPool(fd int, name string, size, limit int) (*Pool, error) {
	mem, err := unix.Mmap(fd, 0, size*limit, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		unix.Close(fd)
		return nil, os.NewSyscallError("mmap", err)
	}
	// A core dump would read the holes of the file, and so fill them with memory.
	if err := unix.Madvise(mem, unix.MADV_DONTDUMP); err != nil {
		_ = unix.Munmap(mem)
		unix.Close(fd)
		return nil, os.NewSyscallError("madvise", err)
	}
	p := NewPool(size, limit)
	p.file = &fileMemory{file: os.NewFile(uintptr(fd), name), size: size, base: address(mem), mem: mem,
		used: make([]bool, limit)}
	return p, nil
}

// File returns the file of the pool, for a descriptor store, or nil for a pool without file. Close
// closes it. The caller must not close it.
func (p *Pool) File() *os.File {
	if p.file == nil {
		return nil
	}
	return p.file.file
}

// Index returns the number of a buffer in the file, from 0 to Limit()-1. b may be any reslice that
// starts at the first byte. Index returns false for memory that is no buffer of the pool, and for
// all memory if the pool has no file. Index takes no lock.
func (p *Pool) Index(b []byte) (int, bool) {
	if p.file == nil || cap(b) == 0 {
		return 0, false
	}
	off := address(b) - p.file.base // wraps below the base
	i := off / uintptr(p.size)
	return int(i), off%uintptr(p.size) == 0 && i < uintptr(p.limit)
}

// Take returns the buffer with number i, as an earlier process left it. The buffer is then in use
// until Put. A buffer that was never used is zero. Take returns an error if the pool has no file or
// no buffer i, if the buffer was already taken, after the first Get or TryGet, or when the system
// has no memory for a buffer that was never used.
func (p *Pool) Take(i int) ([]byte, error) {
	p.state.Lock()
	defer p.state.Unlock()
	b, err := p.take(i)
	if err != nil {
		return nil, fmt.Errorf("membuf: take buffer %d: %w", i, err)
	}
	p.state.allocated++
	return b, nil
}

func (p *Pool) take(i int) ([]byte, error) {
	switch f := p.file; {
	case f == nil:
		return nil, errors.New("pool has no file")
	case p.state.closed:
		return nil, os.ErrClosed
	case f.got:
		return nil, errors.New("pool is already in use")
	case i < 0 || i >= p.limit:
		return nil, fmt.Errorf("pool has %d buffers", p.limit)
	case f.used[i]:
		return nil, errors.New("buffer is already in use")
	default:
		return f.alloc(i)
	}
}

// allocNext returns an unused buffer, of which there must be one.
func (f *fileMemory) allocNext() ([]byte, error) {
	f.got = true
	for f.used[f.next] {
		f.next++
	}
	return f.alloc(f.next)
}

// alloc gives memory to buffer i. It keeps the content.
func (f *fileMemory) alloc(i int) (b []byte, err error) {
	start := i * f.size
	closed := f.control(func(fd int) { err = AllocateFile(fd, int64(start), int64(f.size)) })
	if err := errors.Join(closed, err); err != nil {
		return nil, err
	}
	f.used[i] = true
	b = f.mem[start : start+f.size : start+f.size]
	track(b)
	return b, nil
}

func (f *fileMemory) control(use func(fd int)) error {
	conn, err := f.file.SyscallConn()
	if err != nil {
		return err
	}
	return conn.Control(func(fd uintptr) { use(int(fd)) })
}

// close unmaps and closes the file when no buffer is in use. Further calls have no effect.
func (f *fileMemory) close() {
	if f.mem == nil {
		return
	}
	if err := unix.Munmap(f.mem); err != nil {
		panic(fmt.Sprintf("membuf: unmap file of %d bytes: %v", len(f.mem), err))
	}
	f.mem = nil
	_ = f.file.Close()
}
