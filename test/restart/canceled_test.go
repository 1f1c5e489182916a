package restart

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// A counter counts the calls of a task.
type counter struct {
	calls    atomic.Int64 // that have returned
	canceled atomic.Int64 // that failed with ECANCELED
}

// canceledTasks are the tasks that repeat calls which fail with ECANCELED. The kernel did not send
// the request of such a call, so the repeated call must succeed. Each file system call is counted.
var canceledTasks = []string{"names", "buffered", "unbuffered", "stat"}

func init() {
	for name, run := range map[string]func(*caller) error{
		"names": (*caller).names, "buffered": func(c *caller) error { return c.data(0) },
		"unbuffered": func(c *caller) error { return c.data(syscall.O_DIRECT) }, "stat": (*caller).stats,
	} {
		tasks[name] = func(l *load, dir string, rng *rand.Rand) error {
			return run(&caller{load: l, name: name, dir: dir, rng: rng, counter: l.counter(name)})
		}
	}
}

// A caller makes the calls of one task.
type caller struct {
	*load
	*counter
	name, dir string
	rng       *rand.Rand
}

// counter returns the counter of a task.
func (l *load) counter(name string) *counter {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.counters[name] == nil {
		l.counters[name] = new(counter)
	}
	return l.counters[name]
}

// call makes a call, and makes it again while the call fails with ECANCELED. It repeats calls with
// EINTR as package os does: the Go runtime sends signals to its threads.
func (c *caller) call(what string, f func() error) error {
	for end := time.Now().Add(limit); ; {
		err := f()
		c.calls.Add(1)
		canceled := errors.Is(err, syscall.ECANCELED)
		switch {
		case err == nil:
			return nil
		case !canceled && !errors.Is(err, syscall.EINTR) || time.Now().After(end):
			return fmt.Errorf("%s: %w", what, err)
		case canceled:
			c.canceled.Add(1)
		}
		time.Sleep(time.Millisecond)
	}
}

// names makes, renames and removes objects. The calls fail when the server executes them twice.
func (c *caller) names() error {
	d, e := filepath.Join(c.dir, "d"), filepath.Join(c.dir, "e")
	a, b := filepath.Join(e, "a"), filepath.Join(e, "b")
	for range c.each(c.name) {
		fd := -1
		for _, step := range []struct {
			what string
			f    func() error
		}{
			{"mkdir", func() error { return unix.Mkdir(d, 0o755) }},
			{"rename directory", func() error { return unix.Rename(d, e) }},
			{"symlink", func() error { return unix.Symlink("target", a) }},
			{"link", func() error { return unix.Link(a, b) }},
			{"unlink", func() error { return unix.Unlink(a) }},
			{"create", func() (err error) {
				fd, err = unix.Open(a, unix.O_CREAT|unix.O_EXCL|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
				return err
			}},
			{"replace", func() error { return unix.Rename(a, b) }},
			{"chmod", func() error { return unix.Fchmod(fd, 0o640) }},
			{"unlink open file", func() error { return unix.Unlink(b) }},
		} {
			if err := c.call(step.what, step.f); err != nil {
				return err
			}
		}
		if err := c.close(fd); err != nil {
			return err
		}
		if err := c.rmdir(e); err != nil {
			return err
		}
	}
	return nil
}

// rmdir removes a directory. The server has a removed file under a hidden name until RELEASE, which
// comes after close(2).
func (c *caller) rmdir(dir string) error {
	for end := time.Now().Add(limit); ; time.Sleep(time.Millisecond) {
		err := c.call("rmdir", func() error { return unix.Rmdir(dir) })
		if !errors.Is(err, syscall.ENOTEMPTY) || time.Now().After(end) {
			return err
		}
	}
}

// close closes a file. close(2) releases the descriptor also when it fails.
func (c *caller) close(fd int) error {
	err := unix.Close(fd)
	c.calls.Add(1)
	switch {
	case errors.Is(err, syscall.ECANCELED):
		c.canceled.Add(1)
		return nil
	case errors.Is(err, syscall.EINTR):
		return nil
	}
	return err
}

// data writes and reads random parts of a file, which it opens again in each round.
func (c *caller) data(flag int) error {
	const size, most = 256 << 10, 100_000
	path := filepath.Join(c.dir, "file")
	data, got := make([]byte, size), make([]byte, most)
	for k := range c.each(c.name) {
		fd := -1
		if err := c.call("open", func() (err error) {
			fd, err = unix.Open(path, unix.O_CREAT|unix.O_RDWR|unix.O_CLOEXEC|flag, 0o600)
			return err
		}); err != nil {
			return err
		}
		if k == 0 {
			if err := c.pwrite(fd, data, 0); err != nil {
				return err
			}
		}
		for range 8 {
			n := 1 + c.rng.IntN(most)
			off := c.rng.IntN(size - n)
			copy(data[off:], kit.RandomBytes(c.rng.Uint64(), n/10))
			if err := c.pwrite(fd, data[off:off+n/10], int64(off)); err != nil {
				return err
			}
			if err := c.pread(fd, got[:n], int64(off)); err != nil {
				return err
			}
			if !bytes.Equal(got[:n], data[off:off+n]) {
				return fmt.Errorf("other data at %d, %d bytes", off, n)
			}
		}
		if err := c.call("fsync", func() error { return unix.Fsync(fd) }); err != nil {
			return err
		}
		if err := c.close(fd); err != nil {
			return err
		}
	}
	return c.keep(path, data)
}

func (c *caller) pwrite(fd int, b []byte, off int64) error {
	for len(b) > 0 {
		n := 0
		if err := c.call("pwrite", func() (err error) {
			n, err = unix.Pwrite(fd, b, off)
			return err
		}); err != nil {
			return err
		}
		b, off = b[n:], off+int64(n)
	}
	return nil
}

func (c *caller) pread(fd int, b []byte, off int64) error {
	for len(b) > 0 {
		n := 0
		if err := c.call("pread", func() (err error) {
			n, err = unix.Pread(fd, b, off)
			return err
		}); err != nil {
			return err
		}
		if n == 0 {
			return fmt.Errorf("end of file at %d", off)
		}
		b, off = b[n:], off+int64(n)
	}
	return nil
}

// statFiles is the number of files of task stat.
const statFiles = 40

// stats looks at the attributes and names of a directory that does not change.
func (c *caller) stats() error {
	for i := range statFiles {
		path := filepath.Join(c.dir, fmt.Sprint("file", i))
		fd := -1
		if err := c.call("create", func() (err error) {
			fd, err = unix.Open(path, unix.O_CREAT|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
			return err
		}); err != nil {
			return err
		}
		if err := c.pwrite(fd, make([]byte, i), 0); err != nil {
			return err
		}
		if err := errors.Join(c.close(fd), c.keep(path, make([]byte, i))); err != nil {
			return err
		}
	}
	for range c.each(c.name) {
		for i := range statFiles {
			var st unix.Statx_t
			if err := c.call("statx", func() error {
				return unix.Statx(unix.AT_FDCWD, filepath.Join(c.dir, fmt.Sprint("file", i)),
					unix.AT_STATX_FORCE_SYNC, unix.STATX_BASIC_STATS, &st)
			}); err != nil {
				return err
			}
			if st.Size != uint64(i) {
				return fmt.Errorf("file%d: got size %d", i, st.Size)
			}
		}
		var names []string
		if err := c.call("list", func() error {
			d, err := os.Open(c.dir)
			if err != nil {
				return err
			}
			defer d.Close()
			names, err = d.Readdirnames(-1)
			return err
		}); err != nil {
			return err
		}
		if len(names) != statFiles {
			return fmt.Errorf("directory has %d names, want %d", len(names), statFiles)
		}
	}
	return nil
}
