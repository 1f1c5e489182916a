package slotfile

import (
	"errors"
	"fmt"
	"math"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
)

// Errors of this package. Test for them with errors.Is.
var (
	// ErrVersion means that a file has another format version, schema version or other tables. The
	// error is a *VersionError.
	ErrVersion = errors.New("unknown version")
	// ErrCorrupt means that a file is damaged, or that this package did not make it.
	ErrCorrupt = errors.New("file is damaged")
	// ErrLocked means that a process, or another File of this process, has the file open.
	ErrLocked = errors.New("file is in use")
	// ErrFull means that a table has its maximum number of slots.
	ErrFull = errors.New("table is full")
)

// A VersionError tells the versions of a file that Open does not accept. If both versions are those
// that the caller expects, then the tables differ from those of the caller.
type VersionError struct {
	Format uint32 // of this package
	Schema uint32 // of the caller; only valid if this package knows the format
}

func (e *VersionError) Error() string {
	return fmt.Sprintf("%v: format %d, schema %d, or other tables", ErrVersion, e.Format, e.Schema)
}

// Unwrap returns ErrVersion.
func (e *VersionError) Unwrap() error { return ErrVersion }

func corrupt(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrCorrupt, fmt.Sprintf(format, args...))
}

// A File is an open file with tables. See the package comment about concurrency.
type File struct {
	fd       int    // of a description that only this File has; -1 after Close
	mem      []byte // the mapping of the whole file
	restarts *atomic.Uint64
	tables   []*Table
}

// Create makes a shared memory file with empty tables. The kernel shows the name in /proc/PID/fd as
// memfd:name. schema is the version of the caller's records, which Open compares. The file has no
// memory except for its header, until Alloc is called.
//
// The file lasts as long as a process has it open: give the result of Descriptor to a descriptor
// store.
func Create(name string, schema uint32, tables []TableSpec) (*File, error) {
	f, err := create(name, schema, tables)
	if err != nil {
		return nil, fmt.Errorf("slotfile: create %s: %w", name, err)
	}
	return f, nil
}

func create(name string, schema uint32, specs []TableSpec) (_ *File, err error) {
	offsets, size, err := place(specs)
	if err != nil {
		return nil, err
	}
	fd, err := membuf.CreateFile(name, size, membuf.Sealed)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
		}
	}()
	if err := membuf.AllocateFile(fd, 0, headerBytes); err != nil {
		return nil, err
	}
	if _, err := unix.Pwrite(fd, header(schema, specs, offsets, size), 0); err != nil {
		return nil, fmt.Errorf("write header: %w", err)
	}
	return attach(fd, int(size), schema, specs)
}

// Open opens a file that Create made, and adds 1 to its restart count. The caller keeps f and may
// close it. schema and tables must be equal to those of Create, except for MaxSlots: the file keeps
// the maximum that it was created with.
//
// Open checks the file and every record in it. It returns an error with ErrVersion, ErrCorrupt or
// ErrLocked, and then leaves the file unchanged. The lock of a killed process ends after the
// process is reaped at the latest, unless the process had a child that has not yet called execve.
// Retry on ErrLocked for a short time.
func Open(f *os.File, schema uint32, tables []TableSpec) (*File, error) {
	opened, err := open(int(f.Fd()), schema, tables)
	if err != nil {
		return nil, fmt.Errorf("slotfile: open %s: %w", f.Name(), err)
	}
	return opened, nil
}

func open(shared int, schema uint32, specs []TableSpec) (_ *File, err error) {
	// The seals come first: only files in shared memory have any, so reopen has no side effects.
	have, err := unix.FcntlInt(uintptr(shared), unix.F_GET_SEALS, 0)
	if err == unix.EINVAL {
		return nil, corrupt("not a shared memory file")
	}
	if err != nil {
		return nil, fmt.Errorf("get seals: %w", err)
	}
	if have&membuf.Sealed != membuf.Sealed || have&(unix.F_SEAL_WRITE|unix.F_SEAL_FUTURE_WRITE) != 0 {
		return nil, corrupt("seals are %#x, want %#x", have, membuf.Sealed)
	}
	var st unix.Stat_t
	if err := unix.Fstat(shared, &st); err != nil {
		return nil, fmt.Errorf("fstat: %w", err)
	}
	if st.Size < headerBytes || st.Size > min(MaxFileBytes, math.MaxInt) {
		return nil, corrupt("size is %d bytes", st.Size)
	}
	fd, err := reopen(shared)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			unlock(fd)
			unix.Close(fd)
		}
	}()
	file, err := attach(fd, int(st.Size), schema, specs)
	if err != nil {
		return nil, err
	}
	file.restarts.Store(checked(file.Restarts() + 1))
	return file, nil
}

// reopen returns a descriptor of the file behind fd, with an open file description that no other
// descriptor has.
func reopen(fd int) (int, error) {
	path := fmt.Sprintf("/proc/self/fd/%d", fd)
	for {
		own, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err == nil {
			return own, nil
		}
		if err != unix.EINTR {
			return -1, fmt.Errorf("open %s: %w", path, err)
		}
	}
}

// attach locks and maps the file of fd. The File owns fd on success.
func attach(fd, size int, schema uint32, specs []TableSpec) (_ *File, err error) {
	switch err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB); err {
	case nil:
	case unix.EWOULDBLOCK:
		return nil, ErrLocked
	default:
		return nil, fmt.Errorf("flock: %w", err)
	}
	mem, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("mmap of %d bytes: %w", size, err)
	}
	defer func() {
		if err != nil {
			unix.Munmap(mem)
		}
	}()
	// A core dump would read the holes of the file, and so fill them with memory.
	if err := unix.Madvise(mem, unix.MADV_DONTDUMP); err != nil {
		return nil, fmt.Errorf("madvise: %w", err)
	}
	f, err := load(mem, schema, specs, func(offset, n int64) error { return membuf.AllocateFile(fd, offset, n) })
	if err != nil {
		return nil, err
	}
	f.fd = fd
	return f, nil
}

// load checks the file whose bytes are mem, and makes the tables. A table calls allocate before it
// uses n more bytes at offset. load does not change mem.
func load(mem []byte, schema uint32, specs []TableSpec, allocate func(offset, n int64) error) (*File, error) {
	own, offsets, err := readHeader(mem, schema, specs)
	if err != nil {
		return nil, err
	}
	f := &File{fd: -1, mem: mem, restarts: word(mem[atRestarts:])}
	if w := f.restarts.Load(); w != checked(uint32(w)) {
		return nil, corrupt("header: restart count is %#x", w)
	}
	for i := range own {
		backed := word(entry(mem, i)[entryBacked:])
		t := newTable(&own[i], uint32(i), mem, offsets[i], backed, allocate)
		if err := t.scan(); err != nil {
			return nil, fmt.Errorf("table %s: %w", t.name, err)
		}
		f.tables = append(f.tables, t)
	}
	return f, nil
}

// Table returns the table with that name, or nil.
func (f *File) Table(name string) *Table {
	for _, t := range f.tables {
		if t.name == name {
			return t
		}
	}
	return nil
}

// Restarts returns the number of times that Open opened the file. It is 0 after Create.
func (f *File) Restarts() uint32 { return uint32(f.restarts.Load()) }

// Descriptor returns a new descriptor of the file, for a descriptor store. It does not share the
// lock of f. The caller closes it.
func (f *File) Descriptor() (*os.File, error) {
	fd, err := reopen(f.fd)
	if err != nil {
		return nil, fmt.Errorf("slotfile: %w", err)
	}
	return os.NewFile(uintptr(fd), "slotfile"), nil
}

// Close unlocks and unmaps the file. The records remain while a process has a descriptor of the
// file. The tables must not be used afterwards. A second Close returns an error.
func (f *File) Close() error {
	if f.fd < 0 {
		return fmt.Errorf("slotfile: close: %w", os.ErrClosed)
	}
	fd, mem := f.fd, f.mem
	f.fd, f.mem = -1, nil
	for _, t := range f.tables {
		t.mem = nil
	}
	f.restarts = nil
	return errors.Join(unix.Munmap(mem), unlock(fd), unix.Close(fd))
}

// unlock ends the lock at once. Close alone would keep it while a child that was forked and has not
// yet called execve has a copy of the descriptor.
func unlock(fd int) error { return unix.Flock(fd, unix.LOCK_UN) }
