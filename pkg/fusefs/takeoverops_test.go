package fusefs

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A programOrder is a message to the process that uses the mount.
type programOrder struct {
	Op    string // name of a takeoverOp
	Phase string // "prepare", "do" or "check"
	Dir   string // a new directory on the mount
	Local string // the same directory on the server
}

// A programReport is the reply to a programOrder.
type programReport struct{ Err string }

// runPrograms is the process that uses the mount. It starts no process: a new process would close
// its copies of the descriptors of open files and wait for the server.
func runPrograms(c *control) error {
	unix.Umask(0)
	runs := make(map[string]*opRun)
	for {
		var o programOrder
		if _, err := c.receive(&o); err != nil {
			return nil // the test has ended
		}
		r := runs[o.Dir]
		if r == nil {
			r = &opRun{dir: o.Dir, local: o.Local, fd: -1}
			runs[o.Dir] = r
		}
		var report programReport
		if err := r.run(&o); err != nil {
			report.Err = err.Error()
		}
		if o.Phase == "check" {
			if r.fd >= 0 {
				_ = unix.Close(r.fd)
			}
			for _, fd := range r.open2 {
				_ = unix.Close(fd)
			}
			delete(runs, o.Dir)
		}
		if err := c.send(&report); err != nil {
			return err
		}
	}
}

// An opRun is one run of a takeoverOp.
type opRun struct {
	dir, local string
	fd         int   // of an open file, or -1
	open2      []int // more open files
	data       []byte
	mem        []byte
	names      []string
	busy       *busyPrograms
}

func (r *opRun) run(o *programOrder) error {
	i := slices.IndexFunc(takeoverOps, func(op takeoverOp) bool { return op.name == o.Op })
	if i < 0 {
		return fmt.Errorf("unknown operation %q", o.Op)
	}
	op := &takeoverOps[i]
	f := op.do
	switch o.Phase {
	case "prepare":
		if err := unix.Mkdir(r.dir, 0o755); err != nil {
			return err
		}
		f = op.prepare
	case "check":
		f = op.check
	}
	if f == nil {
		return nil
	}
	return f(r)
}

func (r *opRun) path(name string) string   { return filepath.Join(r.dir, name) }
func (r *opRun) server(name string) string { return filepath.Join(r.local, name) }

// A takeoverOp is an operation that must have its effect exactly once, without an error, however
// often its server process is killed.
type takeoverOp struct {
	name               string
	prepare, do, check func(r *opRun) error
	// many is true for an operation with so many changes of records that only its calls and
	// requests are events.
	many bool
	// shared is true for an operation whose directory on the server is prepared once.
	shared bool
	// unclear is true for an operation that fails because of another client, so that no one can
	// know whether it failed if the server has lost its duplicate request cache.
	unclear bool
}

const opTime = 5 * time.Second // for what the kernel does later

var content = []byte("the content of a file\n")

// make makes a file through the mount.
func (r *opRun) make(name string, data []byte) error {
	return os.WriteFile(r.path(name), data, 0o644)
}

// open opens a file through the mount.
func (r *opRun) open(name string, flags int) (err error) {
	r.fd, err = unix.Open(r.path(name), flags|unix.O_CLOEXEC, 0o644)
	return err
}

func (r *opRun) close() error {
	fd := r.fd
	r.fd = -1
	return unix.Close(fd)
}

// steps combines functions to one that ends at the first error.
func steps(f ...func(r *opRun) error) func(r *opRun) error {
	return func(r *opRun) error {
		for _, f := range f {
			if err := f(r); err != nil {
				return err
			}
		}
		return nil
	}
}

func makes(name string) func(*opRun) error {
	return func(r *opRun) error { return r.make(name, content) }
}

func opens(name string, flags int) func(*opRun) error {
	return func(r *opRun) error { return r.open(name, flags) }
}

func closes(r *opRun) error { return r.close() }

// has checks the content of a file on the server and on the mount.
func has(name string, want []byte) func(*opRun) error {
	return func(r *opRun) error {
		for _, path := range []string{r.server(name), r.path(name)} {
			got, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			if !bytes.Equal(got, want) {
				return fmt.Errorf("content of %s: got %d bytes %.40q, want %d bytes %.40q", path, len(got), got,
					len(want), want)
			}
		}
		return nil
	}
}

// lists checks the names in the directory on the server.
func lists(names ...string) func(*opRun) error {
	return func(r *opRun) error {
		var got []string
		for end := time.Now().Add(opTime); ; time.Sleep(10 * time.Millisecond) { // close(2) does not wait for RELEASE
			entries, err := os.ReadDir(r.local)
			if err != nil {
				return err
			}
			got = nil
			for _, e := range entries {
				got = append(got, e.Name())
			}
			if slices.Equal(got, names) {
				return nil
			}
			if time.Now().After(end) {
				return fmt.Errorf("names on the server: got %q, want %q", got, names)
			}
		}
	}
}

// readsOpen checks the content of the open file.
func readsOpen(want []byte) func(*opRun) error {
	return func(r *opRun) error {
		b := make([]byte, len(want)+1)
		n, err := unix.Pread(r.fd, b, 0)
		if err != nil || !bytes.Equal(b[:n], want) {
			return fmt.Errorf("read of the open file: got %.40q, %w; want %.40q", b[:max(n, 0)], err, want)
		}
		return nil
	}
}

// hasMode checks type and mode on the server and on the mount.
func hasMode(name string, mode uint32) func(*opRun) error {
	return func(r *opRun) error {
		for _, path := range []string{r.server(name), r.path(name)} {
			var st unix.Stat_t
			if err := unix.Lstat(path, &st); err != nil {
				return fmt.Errorf("lstat %s: %w", path, err)
			}
			if st.Mode != mode {
				return fmt.Errorf("mode of %s: got %o, want %o", path, st.Mode, mode)
			}
		}
		return nil
	}
}

// wants returns nil if err is want.
func wants(want, err error) error {
	if !errors.Is(err, want) {
		return fmt.Errorf("got error %w, want %w", err, want)
	}
	return nil
}

func writes(data []byte) func(*opRun) error {
	return func(r *opRun) error {
		if n, err := unix.Write(r.fd, data); err != nil || n != len(data) {
			return fmt.Errorf("write: got %d, %w", n, err)
		}
		return nil
	}
}

// unknown makes the kernel learn that a name does not exist.
func unknown(name string) func(*opRun) error {
	return func(r *opRun) error {
		var st unix.Stat_t
		return wants(unix.ENOENT, unix.Lstat(r.path(name), &st))
	}
}

// other makes a file on the server, as another client does.
func other(name string) func(*opRun) error {
	return func(r *opRun) error { return os.WriteFile(r.server(name), content, 0o644) }
}

func otherRemoves(name string) func(*opRun) error {
	return func(r *opRun) error { return os.Remove(r.server(name)) }
}

// immutableFlag is FS_IMMUTABLE_FL of include/uapi/linux/fs.h: root cannot change the file either.
const immutableFlag = 0x10

func immutable(name string, on bool) func(*opRun) error {
	return func(r *opRun) error {
		f, err := os.Open(r.server(name))
		if err != nil {
			return err
		}
		defer f.Close()
		flags, err := unix.IoctlGetUint32(int(f.Fd()), unix.FS_IOC_GETFLAGS)
		if err != nil {
			return err
		}
		flags &^= immutableFlag
		if on {
			flags |= immutableFlag
		}
		return unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, int(flags))
	}
}

func locks(typ int16) func(*opRun) error {
	return func(r *opRun) error {
		if err := unix.FcntlFlock(uintptr(r.fd), unix.F_SETLK, &unix.Flock_t{Type: typ}); err != nil {
			return fmt.Errorf("fcntl lock of type %d: %w", typ, err)
		}
		return nil
	}
}

// lockedForOthers checks that another owner cannot lock the file, or can. It keeps the file open:
// close(2) would release the locks of the process.
func lockedForOthers(locked bool) func(*opRun) error {
	return func(r *opRun) error {
		fd, err := unix.Open(r.path("f"), unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		r.open2 = append(r.open2, fd)
		err = unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK})
		if held := errors.Is(err, unix.EAGAIN); held != locked || !held && err != nil {
			return fmt.Errorf("lock of another owner: got %v, want held=%v", err, locked)
		}
		return nil
	}
}

var long = bytes.Repeat([]byte("0123456789abcdef"), 3*takeoverBuffer/16+10)

const manyNames = 3000

// aclValue is a POSIX ACL with an entry for user 1234, in the form of the kernel: version 2, then
// tag, permissions and ID of each entry.
var aclValue = []byte{2, 0, 0, 0, 1, 0, 6, 0, 255, 255, 255, 255, 2, 0, 4, 0, 0xd2, 4, 0, 0,
	4, 0, 4, 0, 255, 255, 255, 255, 16, 0, 4, 0, 255, 255, 255, 255, 32, 0, 4, 0, 255, 255, 255, 255}

var takeoverOps = []takeoverOp{
	{name: "create exclusive", do: opens("f", unix.O_CREAT|unix.O_EXCL|unix.O_RDWR),
		check: steps(hasMode("f", unix.S_IFREG|0o644), writes(content), closes, has("f", content), lists("f"))},
	{name: "create", do: opens("f", unix.O_CREAT|unix.O_RDWR),
		check: steps(hasMode("f", unix.S_IFREG|0o644), writes(content), closes, has("f", content), lists("f"))},
	{name: "create without right to write", do: func(r *opRun) (err error) {
		r.fd, err = unix.Open(r.path("f"), unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o444)
		return err
	}, check: steps(hasMode("f", unix.S_IFREG|0o444), writes(content), closes, has("f", content))},
	{name: "create of an existing name", prepare: steps(unknown("f"), other("f")), do: func(r *opRun) error {
		return wants(unix.EEXIST, r.open("f", unix.O_CREAT|unix.O_EXCL|unix.O_RDWR))
	}, check: has("f", content), unclear: true},
	{name: "mkdir", do: func(r *opRun) error { return unix.Mkdir(r.path("d"), 0o750) },
		check: steps(hasMode("d", unix.S_IFDIR|0o750), lists("d"))},
	{name: "mkdir of an existing name", prepare: steps(unknown("f"), other("f")), do: func(r *opRun) error {
		return wants(unix.EEXIST, unix.Mkdir(r.path("f"), 0o750))
	}, check: has("f", content)},
	{name: "mkdir of an existing directory", prepare: steps(unknown("d"), func(r *opRun) error {
		return os.Mkdir(r.server("d"), 0o750)
	}), do: func(r *opRun) error { return wants(unix.EEXIST, unix.Mkdir(r.path("d"), 0o750)) }, unclear: true},
	{name: "mkfifo", do: func(r *opRun) error { return unix.Mkfifo(r.path("p"), 0o640) },
		check: steps(hasMode("p", unix.S_IFIFO|0o640), lists("p"))},
	{name: "symlink", do: func(r *opRun) error { return unix.Symlink("target", r.path("l")) },
		check: func(r *opRun) error {
			for _, path := range []string{r.server("l"), r.path("l")} {
				if got, err := os.Readlink(path); err != nil || got != "target" {
					return fmt.Errorf("readlink %s: got %q, %w", path, got, err)
				}
			}
			return nil
		}},
	{name: "link", prepare: makes("f"), do: func(r *opRun) error { return unix.Link(r.path("f"), r.path("g")) },
		check: steps(has("f", content), has("g", content), lists("f", "g"))},
	{name: "unlink", prepare: makes("f"), do: func(r *opRun) error { return unix.Unlink(r.path("f")) },
		check: steps(lists(), unknown("f"))},
	{name: "unlink of an open file", prepare: steps(makes("f"), opens("f", unix.O_RDWR)),
		do:    func(r *opRun) error { return unix.Unlink(r.path("f")) },
		check: steps(unknown("f"), readsOpen(content), closes, lists())},
	{name: "unlink of a missing name", prepare: steps(makes("f"), otherRemoves("f")), do: func(r *opRun) error {
		return wants(unix.ENOENT, unix.Unlink(r.path("f")))
	}, check: lists(), unclear: true},
	{name: "unlink and close", prepare: steps(makes("f"), opens("f", unix.O_RDONLY)), do: func(r *opRun) error {
		return errors.Join(unix.Unlink(r.path("f")), r.close())
	}, check: lists()},
	{name: "rmdir", prepare: func(r *opRun) error { return unix.Mkdir(r.path("d"), 0o755) },
		do: func(r *opRun) error { return unix.Rmdir(r.path("d")) }, check: steps(lists(), unknown("d"))},
	{name: "rmdir after close", prepare: steps(func(r *opRun) error {
		return unix.Mkdir(r.path("d"), 0o755)
	}, makes("d/f"), opens("d/f", unix.O_RDONLY)),
		do: func(r *opRun) error {
			return errors.Join(unix.Unlink(r.path("d/f")), r.close(), unix.Rmdir(r.path("d")))
		}, check: lists()},
	{name: "rename", prepare: makes("f"), do: func(r *opRun) error { return unix.Rename(r.path("f"), r.path("g")) },
		check: steps(has("g", content), lists("g"), unknown("f"))},
	{name: "rename over a file", prepare: steps(makes("f"), other("g")),
		do:    func(r *opRun) error { return unix.Rename(r.path("f"), r.path("g")) },
		check: steps(has("g", content), lists("g"), unknown("f"))},
	{name: "rename over an open file", prepare: steps(makes("f"), func(r *opRun) error {
		return r.make("g", []byte("old"))
	}, opens("g", unix.O_RDWR)), do: func(r *opRun) error { return unix.Rename(r.path("f"), r.path("g")) },
		check: steps(has("g", content), unknown("f"), readsOpen([]byte("old")), closes, lists("g"))},
	{name: "rename of an open file over an open file", prepare: steps(makes("f"), func(r *opRun) error {
		return r.make("g", []byte("old"))
	}, opens("g", unix.O_RDWR), func(r *opRun) error {
		fd := r.fd
		if err := r.open("f", unix.O_RDONLY); err != nil {
			return err
		}
		r.names = []string{fmt.Sprint(fd)}
		return nil
	}), do: func(r *opRun) error { return unix.Rename(r.path("f"), r.path("g")) },
		check: steps(has("g", content), unknown("f"), readsOpen(content), closes, func(r *opRun) error {
			_, err := fmt.Sscan(r.names[0], &r.fd)
			return err
		}, readsOpen([]byte("old")), closes, lists("g"))},
	{name: "rename of a missing name", prepare: steps(makes("f"), otherRemoves("f")), do: func(r *opRun) error {
		return wants(unix.ENOENT, unix.Rename(r.path("f"), r.path("g")))
	}, check: lists()},
	{name: "rename that fails over an open file", prepare: steps(makes("f"), func(r *opRun) error {
		return r.make("g", []byte("old"))
	}, opens("g", unix.O_RDWR), immutable("f", true)), do: func(r *opRun) error {
		if err := unix.Rename(r.path("f"), r.path("g")); err != unix.EPERM && err != unix.EACCES {
			return fmt.Errorf("rename of an immutable file: got %w, want EPERM", err)
		}
		return nil
	}, check: steps(immutable("f", false), readsOpen([]byte("old")), closes, has("f", content), has("g", []byte("old")),
		lists("f", "g"))},
	{name: "chmod", prepare: makes("f"), do: func(r *opRun) error { return unix.Chmod(r.path("f"), 0o600) },
		check: hasMode("f", unix.S_IFREG|0o600)},
	{name: "truncate", prepare: makes("f"), do: func(r *opRun) error { return unix.Truncate(r.path("f"), 3) },
		check: has("f", content[:3])},
	{name: "open with O_TRUNC", prepare: makes("f"), do: opens("f", unix.O_WRONLY|unix.O_TRUNC),
		check: steps(writes([]byte("new")), closes, has("f", []byte("new")))},
	{name: "append", prepare: steps(makes("f"), opens("f", unix.O_WRONLY|unix.O_APPEND)),
		do:    steps(writes([]byte("one,")), writes([]byte("two,")), writes([]byte("three"))),
		check: steps(closes, has("f", append(bytes.Clone(content), "one,two,three"...)))},
	{name: "append and fsync", prepare: steps(makes("f"), opens("f", unix.O_WRONLY|unix.O_APPEND)),
		do: steps(writes([]byte("one,")), func(r *opRun) error { return unix.Fsync(r.fd) }, writes([]byte("two,")),
			func(r *opRun) error { return unix.Fsync(r.fd) }),
		check: steps(closes, has("f", append(bytes.Clone(content), "one,two,"...)))},
	{name: "write and fsync", prepare: opens("f", unix.O_CREAT|unix.O_RDWR),
		do:    steps(writes(long), func(r *opRun) error { return unix.Fsync(r.fd) }),
		check: func(r *opRun) error { return steps(readsOpen(long), has("f", long), closes, has("f", long))(r) }},
	{name: "write and close", prepare: opens("f", unix.O_CREAT|unix.O_WRONLY), do: steps(writes(content), closes),
		check: has("f", content)},
	{name: "write with O_DIRECT", prepare: opens("f", unix.O_CREAT|unix.O_RDWR|unix.O_DIRECT),
		do:    writes(long[:takeoverBuffer]),
		check: steps(closes, has("f", long[:takeoverBuffer]))},
	{name: "write through a mapping", prepare: steps(func(r *opRun) error {
		return r.make("f", make([]byte, 3*4096))
	}, opens("f", unix.O_RDWR)), do: func(r *opRun) (err error) {
		if r.mem == nil {
			if r.mem, err = unix.Mmap(r.fd, 0, 3*4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
				return err
			}
		}
		copy(r.mem, long)
		return errors.Join(unix.Msync(r.mem, unix.MS_SYNC), unix.Fsync(r.fd))
	}, check: func(r *opRun) error {
		if err := has("f", long[:3*4096])(r); err != nil {
			return err
		}
		return errors.Join(unix.Munmap(r.mem), r.close())
	}},
	{name: "readdir", many: true, shared: true, do: func(r *opRun) error {
		entries, err := os.ReadDir(r.local)
		if err != nil {
			return err
		}
		if len(entries) == 0 {
			for i := range manyNames {
				if err := os.WriteFile(r.server(fmt.Sprintf("name%04d", i)), nil, 0o644); err != nil {
					return err
				}
			}
		}
		return r.list()
	}},
	{name: "lookup", prepare: other("f"), do: hasMode("f", unix.S_IFREG|0o644)},
	{name: "open and read", prepare: other("f"), do: steps(opens("f", unix.O_RDONLY), readsOpen(content), closes)},
	{name: "statfs", do: func(r *opRun) error {
		var st unix.Statfs_t
		return unix.Statfs(r.dir, &st)
	}},
	{name: "readlink", prepare: func(r *opRun) error { return os.Symlink("target", r.server("l")) },
		do: func(r *opRun) error {
			if got, err := os.Readlink(r.path("l")); err != nil || got != "target" {
				return fmt.Errorf("readlink: got %q, %w", got, err)
			}
			return nil
		}},
	{name: "set an ACL", prepare: makes("f"), do: func(r *opRun) error {
		err := unix.Setxattr(r.path("f"), "system.posix_acl_access", aclValue, 0)
		if errors.Is(err, unix.EOPNOTSUPP) {
			return nil
		}
		if err != nil {
			return err
		}
		b := make([]byte, 1000)
		n, err := unix.Getxattr(r.path("f"), "system.posix_acl_access", b)
		if err != nil || !bytes.Equal(b[:n], aclValue) {
			return fmt.Errorf("getxattr: got %x, %w, want %x", b[:max(n, 0)], err, aclValue)
		}
		return nil
	}},
	{name: "ftruncate", prepare: steps(opens("f", unix.O_CREAT|unix.O_RDWR), writes(long)),
		do:    func(r *opRun) error { return unix.Ftruncate(r.fd, 70000) },
		check: steps(closes, has("f", long[:70000]))},
	{name: "copy_file_range", prepare: steps(other("f"), opens("g", unix.O_CREAT|unix.O_WRONLY)), do: func(
		r *opRun) error {
		from, err := unix.Open(r.path("f"), unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(from)
		n, err := unix.CopyFileRange(from, nil, r.fd, nil, len(content), 0)
		if err != nil || n != len(content) {
			return fmt.Errorf("copy_file_range: got %d, %w", n, err)
		}
		return nil
	}, check: steps(closes, has("g", content))},
	{name: "write error",
		prepare: steps(makes("f"), opens("f", unix.O_WRONLY), writes(long[:100]), immutable("f", true)),
		do: func(r *opRun) error {
			err := unix.Fsync(r.fd)
			if err != unix.EPERM && err != unix.EACCES && err != unix.EIO {
				return fmt.Errorf("fsync of an immutable file: got %v, want EPERM", err)
			}
			return nil
		}, check: steps(immutable("f", false), func(r *opRun) error {
			if err := unix.Fsync(r.fd); err != nil {
				return fmt.Errorf("second fsync: %w", err)
			}
			return r.close()
		})},
	{name: "lock", prepare: steps(makes("f"), opens("f", unix.O_RDWR)), do: locks(unix.F_WRLCK),
		check: steps(lockedForOthers(true), locks(unix.F_UNLCK), lockedForOthers(false))},
	{name: "unlock", prepare: steps(makes("f"), opens("f", unix.O_RDWR), locks(unix.F_WRLCK)), do: locks(unix.F_UNLCK),
		check: lockedForOthers(false)},
	{name: "lock and close", prepare: steps(makes("f"), opens("f", unix.O_RDWR), locks(unix.F_WRLCK)), do: closes,
		check: lockedForOthers(false)},
	// The rest is not killed at each event; see the tests.
	{name: "write", prepare: opens("f", unix.O_CREAT|unix.O_RDWR), do: func(r *opRun) error {
		n := 1 + int(time.Now().UnixNano())%(len(long)-1)
		r.data = long[:n]
		return writes(r.data)(r)
	}, check: func(r *opRun) error {
		if err := unix.Fsync(r.fd); err != nil {
			return fmt.Errorf("fsync: %w", err)
		}
		if err := has("f", r.data)(r); err != nil {
			return err
		}
		if err := r.close(); err != nil {
			return fmt.Errorf("close: %w", err)
		}
		return nil
	}},
	{name: "busy", do: func(r *opRun) error {
		r.busy = startBusy(r.dir, r.local)
		return nil
	}, check: func(r *opRun) error { return r.busy.stop() }},
}

// list reads the directory on the mount.
func (r *opRun) list() error {
	fd, err := unix.Open(r.dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var names []string
	b := make([]byte, 16<<10)
	for {
		n, err := unix.ReadDirent(fd, b)
		if err != nil {
			return fmt.Errorf("getdents after %d names: %w", len(names), err)
		}
		if n == 0 {
			break
		}
		_, _, names = syscall.ParseDirent(b[:n], -1, names)
	}
	slices.Sort(names)
	if want := len(slices.Compact(slices.Clone(names))); len(names) != manyNames || want != manyNames ||
		!strings.HasPrefix(names[0], "name0000") {
		return fmt.Errorf("getdents: got %d names, %d different ones, want %d", len(names), want, manyNames)
	}
	return nil
}
