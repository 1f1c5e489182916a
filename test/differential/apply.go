package differential

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// slots is the number of files that a stream can have open at once.
const slots = 4

// A Field is one compared value.
type Field struct{ Name, Value string }

// A side is one of the two directories, with the files that a stream has open in it.
type side struct {
	root      string
	fds       [slots]int          // -1 if not open
	openers   [slots]int          // users who opened the files
	seen      map[uint64]observed // last observation by inode number
	maps      [slots]mapping      // of the files that were open in the slots
	closeWait time.Duration       // pause after a file is closed
	likeNFS   bool                // the reference of a Run with LikeNFS
	released  bool                // the current operation closed a file without a name
	toEnd     bool                // of Run
	show      bool                // of Run
}

func newSide(root string) *side {
	w := &side{root: root, seen: make(map[uint64]observed)}
	for i := range w.fds {
		w.fds[i] = -1
	}
	return w
}

func (w *side) close() {
	for i := range w.fds {
		_ = w.unmap(i)
		w.closeSlot(i)
	}
}

func (w *side) closeSlot(slot int) {
	if w.fds[slot] >= 0 {
		_ = w.closeFile(slot)
	}
}

// closeFile closes a file and waits until the client has finished. close(2) does not wait, and the
// client's remaining work must not appear as an effect of the next operation.
func (w *side) closeFile(slot int) error {
	fd := w.fds[slot]
	w.fds[slot] = -1
	var st unix.Stat_t
	removed := unix.Fstat(fd, &st) != nil || st.Nlink == 0
	err := unix.Close(fd)
	if err == nil {
		w.awaitRelease(removed)
	}
	return err
}

// awaitRelease waits until a client has released unused files, and clears the observed times. A
// file without a name always needs the time: the client removes it from the server.
func (w *side) awaitRelease(removed bool) {
	if removed {
		w.released = true
		time.Sleep(CloseTime)
	} else {
		time.Sleep(w.closeWait)
	}
	clear(w.seen)
}

func (w *side) abs(path string) string { return w.root + "/" + expandPath(path, len(w.root)) }

// Pattern returns n bytes that depend on their offset and the seed.
func Pattern(seed, off, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		at := off + i
		b[i] = byte(at ^ at>>8*31 ^ at>>16*57 ^ seed)
	}
	return b
}

// Aligned returns a buffer that is aligned for O_DIRECT.
func Aligned(n int) []byte {
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

// timeOf returns the time for a code: 0 keeps the time, 1 is the server's time. The others are old
// times, and times at and beyond the limits of NFSv3.
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

// minNow and maxNow separate times of the server's clock from times that a stream sets.
const minNow, maxNow = 1_000_000_000, 2_000_000_000

type uses uint

const (
	usesPath uses = 1 << iota
	usesTo
	usesFD
)

// A verb executes an operation and returns the observed values beside the error.
type verb struct {
	uses uses
	run  func(w *side, o *Op) ([]Field, error)
}

func count(n int, err error) ([]Field, error) { return []Field{{"n", fmt.Sprint(n)}}, err }

func only(err error) ([]Field, error) { return nil, err }

func got(b []byte, n int, err error) ([]Field, error) {
	if err != nil {
		return nil, err
	}
	return []Field{{"data", digest(b[:n])}}, nil
}

var verbs map[string]*verb

func init() {
	verbs = fileVerbs()
	maps.Copy(verbs, mappingVerbs())
	maps.Copy(verbs, pathVerbs())
}

func onFD(run func(fd int, o *Op) ([]Field, error)) *verb {
	return &verb{usesFD, func(w *side, o *Op) ([]Field, error) { return run(w.fds[o.fd], o) }}
}

func onPath(run func(path string, o *Op) ([]Field, error)) *verb {
	return &verb{usesPath, func(w *side, o *Op) ([]Field, error) { return run(w.abs(o.path), o) }}
}

func onTwoPaths(run func(from, to string, o *Op) ([]Field, error)) *verb {
	return &verb{usesPath | usesTo, func(w *side, o *Op) ([]Field, error) {
		return run(w.abs(o.path), w.abs(o.to), o)
	}}
}

func doWrite(w *side, o *Op) ([]Field, error) {
	fd := w.fds[o.fd]
	n, err := unix.Write(fd, payload(o))
	if flags, e := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0); e == nil && w.toEnd && flags&unix.O_APPEND != 0 {
		_, _ = unix.Seek(fd, 0, unix.SEEK_END)
	}
	return count(n, err)
}

// fileVerbs returns the verbs that use the file in a slot.
func fileVerbs() map[string]*verb {
	return map[string]*verb{
		"open":    {usesPath | usesFD, doOpen},
		"tmpfile": {usesPath | usesFD, doTmpfile},
		"close":   {usesFD, func(w *side, o *Op) ([]Field, error) { return only(w.closeFile(o.fd)) }},
		"closeall": {0, func(w *side, _ *Op) ([]Field, error) {
			w.close()
			return nil, nil
		}},
		"forget": {0, func(w *side, _ *Op) ([]Field, error) {
			clear(w.seen)
			return nil, nil
		}},
		"dup": {usesFD, doDup},
		"read": onFD(func(fd int, o *Op) ([]Field, error) {
			b := Aligned(o.n)
			n, err := unix.Read(fd, b)
			return got(b, n, err)
		}),
		"pread": onFD(func(fd int, o *Op) ([]Field, error) {
			b := Aligned(o.n)
			n, err := unix.Pread(fd, b, int64(o.off))
			return got(b, n, err)
		}),
		"write": {usesFD, doWrite},
		"pwrite": onFD(func(fd int, o *Op) ([]Field, error) {
			return count(unix.Pwrite(fd, payload(o), int64(o.off)))
		}),
		"lseek": onFD(func(fd int, o *Op) ([]Field, error) {
			n, err := unix.Seek(fd, int64(o.off), o.flags)
			return []Field{{"n", fmt.Sprint(n)}}, err
		}),
		"ftruncate": onFD(func(fd int, o *Op) ([]Field, error) { return only(unix.Ftruncate(fd, int64(o.n))) }),
		"fallocate": onFD(func(fd int, o *Op) ([]Field, error) {
			return only(unix.Fallocate(fd, uint32(o.flags), int64(o.off), int64(o.n)))
		}),
		"append": onFD(func(fd int, o *Op) ([]Field, error) {
			return count(unix.Pwritev2(fd, [][]byte{payload(o)}, 0, unix.RWF_APPEND))
		}),
		"fadvise": onFD(func(fd int, o *Op) ([]Field, error) {
			return only(unix.Fadvise(fd, 0, 0, unix.FADV_DONTNEED))
		}),
		"dropcaches": {0, func(*side, *Op) ([]Field, error) {
			return only(os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0))
		}},
		"fdatasync": onFD(func(fd int, _ *Op) ([]Field, error) { return only(unix.Fdatasync(fd)) }),
		"futimens": onFD(func(fd int, o *Op) ([]Field, error) {
			times := [2]unix.Timespec{timeOf(o.atime), timeOf(o.mtime)}
			if _, _, e := unix.Syscall6(unix.SYS_UTIMENSAT, uintptr(fd), 0, uintptr(unsafe.Pointer(&times[0])), 0, 0,
				0); e != 0 {
				return nil, e
			}
			return nil, nil
		}),
		"fchown": onFD(func(fd int, o *Op) ([]Field, error) { return only(unix.Fchown(fd, o.uid, o.gid)) }),
		"sendfile": {usesFD, func(w *side, o *Op) ([]Field, error) {
			return count(unix.Sendfile(w.fds[o.off%slots], w.fds[o.fd], nil, o.n))
		}},
		"fsync":  onFD(func(fd int, _ *Op) ([]Field, error) { return only(unix.Fsync(fd)) }),
		"fchmod": onFD(func(fd int, o *Op) ([]Field, error) { return only(unix.Fchmod(fd, uint32(o.mode))) }),
		"flock":  onFD(func(fd int, o *Op) ([]Field, error) { return only(unix.Flock(fd, o.flags)) }),
		"lock": onFD(func(fd int, o *Op) ([]Field, error) {
			l := unix.Flock_t{Type: int16(o.flags), Start: int64(o.off), Len: int64(o.n)}
			return only(unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &l))
		}),
		"plock": onFD(func(fd int, o *Op) ([]Field, error) {
			l := unix.Flock_t{Type: int16(o.flags), Start: int64(o.off), Len: int64(o.n)}
			return only(unix.FcntlFlock(uintptr(fd), unix.F_SETLK, &l))
		}),
		"getlk": onFD(func(fd int, o *Op) ([]Field, error) {
			l := unix.Flock_t{Type: int16(o.flags), Start: int64(o.off), Len: int64(o.n)}
			err := unix.FcntlFlock(uintptr(fd), unix.F_GETLK, &l)
			return []Field{{"type", fmt.Sprint(l.Type)}}, err
		}),
		"copyrange": {usesFD, func(w *side, o *Op) ([]Field, error) {
			return count(unix.CopyFileRange(w.fds[o.fd], nil, w.fds[o.off%slots], nil, o.n, 0))
		}},
	}
}

// mappingVerbs returns the verbs that use the mapping of the file in a slot.
func mappingVerbs() map[string]*verb {
	return map[string]*verb{
		"mmap":   {usesFD, doMmap},
		"mread":  {usesFD, doMread},
		"mwrite": {usesFD, doMwrite},
		"munmap": {usesFD, func(w *side, o *Op) ([]Field, error) { return only(w.unmap(o.fd)) }},
	}
}

// pathVerbs returns the verbs that use paths, or nothing.
func pathVerbs() map[string]*verb {
	return map[string]*verb{
		"truncate": onPath(func(p string, o *Op) ([]Field, error) { return only(unix.Truncate(p, int64(o.n))) }),
		"mkdir":    onPath(func(p string, o *Op) ([]Field, error) { return only(unix.Mkdir(p, uint32(o.mode))) }),
		"rmdir":    onPath(func(p string, _ *Op) ([]Field, error) { return only(unix.Rmdir(p)) }),
		"unlink":   onPath(func(p string, _ *Op) ([]Field, error) { return only(unix.Unlink(p)) }),
		"rename": onTwoPaths(func(p, q string, o *Op) ([]Field, error) {
			return only(unix.Renameat2(unix.AT_FDCWD, p, unix.AT_FDCWD, q, uint(o.flags)))
		}),
		"link": onTwoPaths(func(p, q string, _ *Op) ([]Field, error) { return only(unix.Link(p, q)) }),
		"symlink": onPath(func(p string, o *Op) ([]Field, error) {
			return only(unix.Symlink(expandPath(o.to, -1), p))
		}),
		"readlink": onPath(func(p string, _ *Op) ([]Field, error) {
			b := make([]byte, 4096)
			n, err := unix.Readlink(p, b)
			return got(b, n, err)
		}),
		"chmod":   onPath(func(p string, o *Op) ([]Field, error) { return only(unix.Chmod(p, uint32(o.mode))) }),
		"chown":   onPath(func(p string, o *Op) ([]Field, error) { return only(unix.Chown(p, o.uid, o.gid)) }),
		"lchown":  onPath(func(p string, o *Op) ([]Field, error) { return only(unix.Lchown(p, o.uid, o.gid)) }),
		"utimens": onPath(doUtimens),
		"stat":    onPath(doStat),
		"access": onPath(func(p string, o *Op) ([]Field, error) {
			return only(unix.Faccessat(unix.AT_FDCWD, p, uint32(o.flags), unix.AT_EACCESS))
		}),
		"mknod": onPath(func(p string, o *Op) ([]Field, error) {
			return only(unix.Mknod(p, uint32(o.mode), int(unix.Mkdev(1, 3))))
		}),
		"setxattr": onPath(func(p string, _ *Op) ([]Field, error) {
			return only(unix.Setxattr(p, xattr, []byte("value"), 0))
		}),
		"getxattr": onPath(func(p string, _ *Op) ([]Field, error) {
			return count(unix.Getxattr(p, xattr, make([]byte, 100)))
		}),
		"listxattr": onPath(func(p string, _ *Op) ([]Field, error) {
			return count(unix.Listxattr(p, make([]byte, 1000)))
		}),
		"removexattr": onPath(func(p string, _ *Op) ([]Field, error) { return only(unix.Removexattr(p, xattr)) }),
		"readdir":     onPath(doReaddir),
		"fill":        onPath(doFill),
		"sweep":       onPath(doSweep),
		"seekdir":     onPath(doSeekdir),
		"statfs":      onPath(doStatfs),
		"same":        onTwoPaths(doSame),
		"walk":        {0, func(w *side, _ *Op) ([]Field, error) { return doWalk(w.root) }},
	}
}

const xattr = "user.differential"

func payload(o *Op) []byte {
	b := Aligned(o.n)
	copy(b, Pattern(o.seed, o.off, o.n))
	return b
}

// doOpen opens a file without blocking, because a FIFO would block. It closes the slot's file
// first.
func doOpen(w *side, o *Op) ([]Field, error) {
	w.closeSlot(o.fd)
	fd, err := unix.Open(w.abs(o.path), o.flags|unix.O_NONBLOCK|unix.O_CLOEXEC, uint32(o.mode))
	if err != nil {
		return nil, err
	}
	w.fds[o.fd], w.openers[o.fd] = fd, o.as
	if w.likeNFS && o.flags&unix.O_DIRECT != 0 {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_SETFL, o.flags&^unix.O_DIRECT|unix.O_NONBLOCK)
	}
	return nil, err
}

// doDup duplicates a descriptor into another slot, whose file it closes first.
func doDup(w *side, o *Op) ([]Field, error) {
	to := o.off % slots
	if to == o.fd {
		return nil, nil
	}
	w.closeSlot(to)
	fd, err := unix.FcntlInt(uintptr(w.fds[o.fd]), unix.F_DUPFD_CLOEXEC, 3)
	if err == nil {
		w.fds[to], w.openers[to] = fd, w.openers[o.fd]
	}
	return nil, err
}

func doTmpfile(w *side, o *Op) ([]Field, error) {
	fd, err := unix.Open(w.abs(o.path), unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err == nil {
		unix.Close(fd)
	}
	return nil, err
}

func doUtimens(p string, o *Op) ([]Field, error) {
	flags := 0
	if o.flags != 0 {
		flags = unix.AT_SYMLINK_NOFOLLOW
	}
	err := unix.UtimesNanoAt(unix.AT_FDCWD, p, []unix.Timespec{timeOf(o.atime), timeOf(o.mtime)}, flags)
	var st unix.Stat_t
	if err != nil || unix.Fstatat(unix.AT_FDCWD, p, &st, flags) != nil || o.atime == 0 {
		return nil, err
	}
	return []Field{{"atime", timeClass(st.Atim)}}, nil
}

func timeClass(t unix.Timespec) string {
	if t.Sec >= minNow && t.Sec < maxNow {
		return "now"
	}
	return fmt.Sprintf("%d.%09d", t.Sec, t.Nsec)
}

func doStat(p string, _ *Op) ([]Field, error) {
	var st unix.Stat_t
	if err := unix.Stat(p, &st); err != nil {
		return nil, err
	}
	return []Field{{"mode", fmt.Sprintf("%o", st.Mode)}, {"size", sizeOf(&st)}}, nil
}

func doStatfs(p string, _ *Op) ([]Field, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(p, &st); err != nil {
		return nil, err
	}
	unit := st.Frsize
	if unit == 0 {
		unit = st.Bsize
	}
	// The clients use different units.
	return []Field{{"MiB", fmt.Sprint((int64(st.Blocks)*unit + 1<<20 - 1) >> 20)}, {"bsize", fmt.Sprint(st.Bsize)},
		{"frsize", fmt.Sprint(st.Frsize)},
		{"files", fmt.Sprint(st.Files)}, {"namelen", fmt.Sprint(st.Namelen)}}, nil
}

// doSame reports whether two names are links to the same file.
func doSame(p, q string, _ *Op) ([]Field, error) {
	var a, b unix.Stat_t
	if err := unix.Lstat(p, &a); err != nil {
		return nil, err
	}
	if err := unix.Lstat(q, &b); err != nil {
		return nil, err
	}
	return []Field{{"same", fmt.Sprint(a.Ino == b.Ino && a.Dev == b.Dev)}}, nil
}
