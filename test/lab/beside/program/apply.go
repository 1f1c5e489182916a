package main

import (
	"crypto/sha256"
	"fmt"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// slots is the number of files that a stream has open at once.
const slots = 4

// users are who does the operations of a stream. The first one looks at what they did.
var users = []struct {
	id     int
	groups []uint32
}{{0, nil}, {1000, []uint32{1000}}, {1001, []uint32{1000, 1001}}, {1002, manyGroups}}

// manyGroups are more than an RPC carries (RFC 5531 appendix A): it leaves out lastGroup.
var manyGroups = func() (groups []uint32) {
	for g := uint32(2001); len(groups) < 19; g++ {
		groups = append(groups, g)
	}
	return append(groups, lastGroup)
}()

const lastGroup = 3000

// become makes the calling thread, which must be locked to its goroutine, one of users. Linux keeps
// these per thread; the system call itself is what tells libraries nothing.
func become(as int) {
	root := func() { unix.RawSyscall(unix.SYS_SETFSUID, 0, 0, 0) }
	root()
	u := users[as]
	if len(u.groups) == 0 {
		unix.RawSyscall(unix.SYS_SETGROUPS, 0, 0, 0)
	} else {
		unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(u.groups)), uintptr(unsafe.Pointer(&u.groups[0])), 0)
	}
	unix.RawSyscall(unix.SYS_SETFSGID, uintptr(u.id), 0, 0)
	unix.RawSyscall(unix.SYS_SETFSUID, uintptr(u.id), 0, 0)
}

// A field is one thing that is compared.
type field struct{ name, value string }

// A world is one of the two directories, and what a stream has open in it.
type world struct {
	root      string
	fds       [slots]int          // -1: not open
	seen      map[uint64]observed // by inode number
	maps      [slots][]byte       // what is mapped of the files that the slots had open
	closeWait time.Duration       // behind what closes a file
}

func newWorld(root string) *world {
	w := &world{root: root, seen: make(map[uint64]observed)}
	for i := range w.fds {
		w.fds[i] = -1
	}
	return w
}

func (w *world) close() {
	for i := range w.fds {
		_ = w.unmap(i)
		w.closeSlot(i)
	}
}

func (w *world) closeSlot(slot int) {
	if w.fds[slot] >= 0 {
		_ = w.closeFile(slot)
	}
}

// closeFile closes a file. What the client does behind that, for which close(2) does not wait,
// should not show as something that the next operation did.
func (w *world) closeFile(slot int) error {
	fd := w.fds[slot]
	w.fds[slot] = -1
	err := unix.Close(fd)
	if err == nil {
		w.letGo()
	}
	return err
}

// letGo waits for what a client does when a file is not in use any more, and forgets when the files
// were seen to have changed.
func (w *world) letGo() {
	time.Sleep(w.closeWait)
	clear(w.seen)
}

func (w *world) abs(path string) string { return w.root + "/" + real(path, len(w.root)) }

// pattern is n octets that differ at each place, and from those of another seed.
func pattern(seed, off, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		at := off + i
		b[i] = byte(at ^ at>>8*31 ^ at>>16*57 ^ seed)
	}
	return b
}

// aligned is a buffer that O_DIRECT takes.
func aligned(n int) []byte {
	const page = 4096
	b := make([]byte, n+page)
	at := (page - int(uintptr(unsafe.Pointer(&b[0]))%page)) % page
	return b[at : at+n]
}

func digest(b []byte) string {
	if len(b) <= 16 {
		return fmt.Sprintf("%d:%x", len(b), b)
	}
	sum := sha256.Sum256(b)
	return fmt.Sprintf("%d:%x..:%x", len(b), b[:8], sum[:4])
}

// timeOf are the times that a stream sets, by their codes: 0 is left alone, 1 the server's time,
// then times of long ago, and those that NFSv3 cannot carry or just can.
func timeOf(code int) unix.Timespec {
	switch code {
	case 0:
		return unix.Timespec{Nsec: unix.UTIME_OMIT}
	case 1:
		return unix.Timespec{Nsec: unix.UTIME_NOW}
	case 2:
		return unix.Timespec{Sec: -5, Nsec: 7}
	case 3:
		return unix.Timespec{Sec: 1 << 33, Nsec: 7}
	case 10:
		return unix.Timespec{Sec: 1<<32 - 1}
	case 11:
		return unix.Timespec{Sec: 1 << 31, Nsec: 999_999_999}
	case 12:
		return unix.Timespec{}
	case 13:
		return unix.Timespec{Sec: 1, Nsec: 1_000_000_000}
	}
	return unix.Timespec{Sec: int64(code) * 100_000_000, Nsec: int64(code) * 111_111_111}
}

// longAgo and farOff part times that a stream set from those of the server's clock.
const longAgo, farOff = 1_000_000_000, 2_000_000_000

type uses uint

const (
	usesPath uses = 1 << iota
	usesTo
	usesFD
)

// A verb does an operation. It returns what it saw beside the error.
type verb struct {
	uses uses
	run  func(w *world, o *op) ([]field, error)
}

func count(n int, err error) ([]field, error) { return []field{{"n", fmt.Sprint(n)}}, err }

func only(err error) ([]field, error) { return nil, err }

func got(b []byte, n int, err error) ([]field, error) {
	if err != nil {
		return nil, err
	}
	return []field{{"data", digest(b[:n])}}, nil
}

var verbs map[string]*verb

func init() {
	fd := func(run func(fd int, o *op) ([]field, error)) *verb {
		return &verb{usesFD, func(w *world, o *op) ([]field, error) { return run(w.fds[o.fd], o) }}
	}
	path := func(run func(path string, o *op) ([]field, error)) *verb {
		return &verb{usesPath, func(w *world, o *op) ([]field, error) { return run(w.abs(o.path), o) }}
	}
	two := func(run func(from, to string, o *op) ([]field, error)) *verb {
		return &verb{usesPath | usesTo, func(w *world, o *op) ([]field,
			error) {
			return run(w.abs(o.path), w.abs(o.to), o)
		}}
	}
	verbs = map[string]*verb{
		"open":    {usesPath | usesFD, doOpen},
		"tmpfile": {usesPath | usesFD, doTmpfile},
		"close":   {usesFD, func(w *world, o *op) ([]field, error) { return only(w.closeFile(o.fd)) }},
		"read": fd(func(fd int, o *op) ([]field, error) {
			b := aligned(o.n)
			n, err := unix.Read(fd, b)
			return got(b, n, err)
		}),
		"pread": fd(func(fd int, o *op) ([]field, error) {
			b := aligned(o.n)
			n, err := unix.Pread(fd, b, int64(o.off))
			return got(b, n, err)
		}),
		"write":  fd(func(fd int, o *op) ([]field, error) { return count(unix.Write(fd, payload(o))) }),
		"pwrite": fd(func(fd int, o *op) ([]field, error) { return count(unix.Pwrite(fd, payload(o), int64(o.off))) }),
		"lseek": fd(func(fd int, o *op) ([]field, error) {
			n, err := unix.Seek(fd, int64(o.off), o.flags)
			return []field{{"n", fmt.Sprint(n)}}, err
		}),
		"ftruncate": fd(func(fd int, o *op) ([]field, error) { return only(unix.Ftruncate(fd, int64(o.n))) }),
		"fallocate": fd(func(fd int, o *op) ([]field, error) {
			return only(unix.Fallocate(fd, uint32(o.flags), int64(o.off), int64(o.n)))
		}),
		"mmap":   {usesFD, doMmap},
		"mread":  {usesFD, doMread},
		"mwrite": {usesFD, doMwrite},
		"munmap": {usesFD, func(w *world, o *op) ([]field, error) { return only(w.unmap(o.fd)) }},
		"append": fd(func(fd int, o *op) ([]field, error) {
			return count(unix.Pwritev2(fd, [][]byte{payload(o)}, 0, unix.RWF_APPEND))
		}),
		"fadvise": fd(func(fd int, o *op) ([]field, error) { return only(unix.Fadvise(fd, 0, 0, unix.FADV_DONTNEED)) }),
		"dropcaches": {0, func(*world, *op) ([]field, error) {
			return only(os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0))
		}},
		"fdatasync": fd(func(fd int, _ *op) ([]field, error) { return only(unix.Fdatasync(fd)) }),
		"futimens": fd(func(fd int, o *op) ([]field, error) {
			times := [2]unix.Timespec{timeOf(o.atime), timeOf(o.mtime)}
			if _, _, e := unix.Syscall6(unix.SYS_UTIMENSAT, uintptr(fd), 0, uintptr(unsafe.Pointer(&times[0])), 0, 0,
				0); e != 0 {
				return nil, e
			}
			return nil, nil
		}),
		"fchown": fd(func(fd int, o *op) ([]field, error) { return only(unix.Fchown(fd, o.uid, o.gid)) }),
		"sendfile": {usesFD, func(w *world, o *op) ([]field, error) {
			return count(unix.Sendfile(w.fds[o.off%slots], w.fds[o.fd], nil, o.n))
		}},
		"fsync":  fd(func(fd int, _ *op) ([]field, error) { return only(unix.Fsync(fd)) }),
		"fchmod": fd(func(fd int, o *op) ([]field, error) { return only(unix.Fchmod(fd, uint32(o.mode))) }),
		"flock":  fd(func(fd int, o *op) ([]field, error) { return only(unix.Flock(fd, o.flags)) }),
		"lock": fd(func(fd int, o *op) ([]field, error) {
			l := unix.Flock_t{Type: int16(o.flags), Start: int64(o.off), Len: int64(o.n)}
			return only(unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &l))
		}),
		"copyrange": {usesFD, func(w *world, o *op) ([]field, error) {
			return count(unix.CopyFileRange(w.fds[o.fd], nil, w.fds[o.off%slots], nil, o.n, 0))
		}},
		"truncate": path(func(p string, o *op) ([]field, error) { return only(unix.Truncate(p, int64(o.n))) }),
		"mkdir":    path(func(p string, o *op) ([]field, error) { return only(unix.Mkdir(p, uint32(o.mode))) }),
		"rmdir":    path(func(p string, _ *op) ([]field, error) { return only(unix.Rmdir(p)) }),
		"unlink":   path(func(p string, _ *op) ([]field, error) { return only(unix.Unlink(p)) }),
		"rename": two(func(p, q string, o *op) ([]field, error) {
			return only(unix.Renameat2(unix.AT_FDCWD, p, unix.AT_FDCWD, q, uint(o.flags)))
		}),
		"link":    two(func(p, q string, _ *op) ([]field, error) { return only(unix.Link(p, q)) }),
		"symlink": path(func(p string, o *op) ([]field, error) { return only(unix.Symlink(real(o.to, -1), p)) }),
		"readlink": path(func(p string, _ *op) ([]field, error) {
			b := make([]byte, 4096)
			n, err := unix.Readlink(p, b)
			return got(b, n, err)
		}),
		"chmod":   path(func(p string, o *op) ([]field, error) { return only(unix.Chmod(p, uint32(o.mode))) }),
		"chown":   path(func(p string, o *op) ([]field, error) { return only(unix.Chown(p, o.uid, o.gid)) }),
		"lchown":  path(func(p string, o *op) ([]field, error) { return only(unix.Lchown(p, o.uid, o.gid)) }),
		"utimens": path(doUtimens),
		"stat":    path(doStat),
		"access": path(func(p string, o *op) ([]field, error) {
			return only(unix.Faccessat(unix.AT_FDCWD, p, uint32(o.flags), unix.AT_EACCESS))
		}),
		"mknod": path(func(p string, o *op) ([]field, error) {
			return only(unix.Mknod(p, uint32(o.mode), int(unix.Mkdev(1, 3))))
		}),
		"setxattr": path(func(p string, _ *op) ([]field,
			error) {
			return only(unix.Setxattr(p, xattr, []byte("value"), 0))
		}),
		"getxattr": path(func(p string, _ *op) ([]field,
			error) {
			return count(unix.Getxattr(p, xattr, make([]byte, 100)))
		}),
		"listxattr": path(func(p string, _ *op) ([]field,
			error) {
			return count(unix.Listxattr(p, make([]byte, 1000)))
		}),
		"removexattr": path(func(p string, _ *op) ([]field, error) { return only(unix.Removexattr(p, xattr)) }),
		"readdir":     path(doReaddir),
		"fill":        path(doFill),
		"sweep":       path(doSweep),
		"seekdir":     path(doSeekdir),
		"statfs":      path(doStatfs),
		"same":        two(doSame),
		"walk":        {0, func(w *world, _ *op) ([]field, error) { return doWalk(w.root) }},
	}
}

const xattr = "user.beside"

func payload(o *op) []byte {
	b := aligned(o.n)
	copy(b, pattern(o.seed, o.off, o.n))
	return b
}

// doOpen opens without waiting, as a FIFO would have it. What was open there is closed first.
func doOpen(w *world, o *op) ([]field, error) {
	w.closeSlot(o.fd)
	fd, err := unix.Open(w.abs(o.path), o.flags|unix.O_NONBLOCK|unix.O_CLOEXEC, uint32(o.mode))
	if err == nil {
		w.fds[o.fd] = fd
	}
	return nil, err
}

func doTmpfile(w *world, o *op) ([]field, error) {
	fd, err := unix.Open(w.abs(o.path), unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err == nil {
		unix.Close(fd)
	}
	return nil, err
}

func doUtimens(p string, o *op) ([]field, error) {
	flags := 0
	if o.flags != 0 {
		flags = unix.AT_SYMLINK_NOFOLLOW
	}
	err := unix.UtimesNanoAt(unix.AT_FDCWD, p, []unix.Timespec{timeOf(o.atime), timeOf(o.mtime)}, flags)
	var st unix.Stat_t
	if err != nil || unix.Fstatat(unix.AT_FDCWD, p, &st, flags) != nil || o.atime == 0 {
		return nil, err
	}
	return []field{{"atime", timeClass(st.Atim)}}, nil
}

func timeClass(t unix.Timespec) string {
	if t.Sec >= longAgo && t.Sec < farOff {
		return "now"
	}
	return fmt.Sprintf("%d.%09d", t.Sec, t.Nsec)
}

func doStat(p string, _ *op) ([]field, error) {
	var st unix.Stat_t
	if err := unix.Stat(p, &st); err != nil {
		return nil, err
	}
	return []field{{"mode", fmt.Sprintf("%o", st.Mode)}, {"size", sizeOf(&st)}}, nil
}

func doStatfs(p string, _ *op) ([]field, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(p, &st); err != nil {
		return nil, err
	}
	unit := st.Frsize
	if unit == 0 {
		unit = st.Bsize
	}
	// Each client counts in a unit of its own.
	return []field{{"MiB", fmt.Sprint((int64(st.Blocks)*unit + 1<<20 - 1) >> 20)}, {"bsize", fmt.Sprint(st.Bsize)},
		{"frsize", fmt.Sprint(st.Frsize)},
		{"files", fmt.Sprint(st.Files)}, {"namelen", fmt.Sprint(st.Namelen)}}, nil
}

// doSame tells whether two names are of one file.
func doSame(p, q string, _ *op) ([]field, error) {
	var a, b unix.Stat_t
	if err := unix.Lstat(p, &a); err != nil {
		return nil, err
	}
	if err := unix.Lstat(q, &b); err != nil {
		return nil, err
	}
	return []field{{"same", fmt.Sprint(a.Ino == b.Ino && a.Dev == b.Dev)}}, nil
}

// nextTick waits until the clock of which a server in the same kernel takes the times of files has
// gone on: what is done in two operations shows as two times.
func nextTick() {
	var was, now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_REALTIME_COARSE, &was)
	for now = was; now == was; {
		time.Sleep(time.Millisecond)
		_ = unix.ClockGettime(unix.CLOCK_REALTIME_COARSE, &now)
	}
}

// closeTime is for what a client does behind a close(2) that nobody waits for.
const closeTime = 60 * time.Millisecond
