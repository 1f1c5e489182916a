package fusefs

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

const (
	busyThreads = 6
	// busyNames is the number of files that a busyThread keeps.
	busyNames = 5
)

// busyPrograms use a directory of the mount until stop.
type busyPrograms struct {
	group   errgroup.Group
	ended   atomic.Bool
	threads [busyThreads]busyThread
}

func startBusy(dir, local string) *busyPrograms {
	b := &busyPrograms{}
	for i := range b.threads {
		t := &b.threads[i]
		name := fmt.Sprintf("thread%d", i)
		*t = busyThread{dir: filepath.Join(dir, name), local: filepath.Join(local, name), log: -1,
			random: rand.New(rand.NewPCG(7, uint64(i))), files: make(map[string][]byte)}
		b.group.Go(func() error { return t.run(&b.ended) })
	}
	return b
}

// stop ends the programs and compares the files on the server.
func (b *busyPrograms) stop() error {
	b.ended.Store(true)
	if err := b.group.Wait(); err != nil {
		return err
	}
	for i := range b.threads {
		if err := b.threads[i].verify(); err != nil {
			return err
		}
	}
	return nil
}

// A busyThread works in one directory.
type busyThread struct {
	dir, local string
	random     *rand.Rand
	log        int    // descriptor of a file to which each round appends
	lines      []byte // content of the log
	files      map[string][]byte
}

func (t *busyThread) path(name string) string { return filepath.Join(t.dir, name) }

func (t *busyThread) run(ended *atomic.Bool) (err error) {
	if err := unix.Mkdir(t.dir, 0o755); err != nil {
		return fmt.Errorf("mkdir: %w", err)
	}
	t.log, err = unix.Open(t.path("log"), unix.O_CREAT|unix.O_WRONLY|unix.O_APPEND|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return fmt.Errorf("open log: %w", err)
	}
	for round := 0; !ended.Load() && err == nil; round++ {
		if err = t.round(round); err != nil {
			err = fmt.Errorf("%s: round %d: %w", t.dir, round, err)
		}
	}
	return errors.Join(err, unix.Close(t.log))
}

func (t *busyThread) round(round int) error {
	data := make([]byte, 1+t.random.IntN(3*takeoverBuffer))
	for i := range data {
		data[i] = byte(t.random.Uint32())
	}
	fd, err := unix.Open(t.path("new"), unix.O_CREAT|unix.O_EXCL|unix.O_RDWR|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return fmt.Errorf("create: %w", err)
	}
	defer unix.Close(fd)
	for done := 0; done < len(data); {
		n, err := unix.Write(fd, data[done:min(len(data), done+20000)])
		if err != nil {
			return fmt.Errorf("write: %w", err)
		}
		done += n
	}
	if round%3 == 0 {
		if err := unix.Fsync(fd); err != nil {
			return fmt.Errorf("fsync: %w", err)
		}
	}
	if err := reads(fd, data); err != nil {
		return err
	}
	return errors.Join(t.replace(fmt.Sprintf("file%d", t.random.IntN(busyNames)), data), t.names(round),
		t.appendLine(round), reads(fd, data))
}

func reads(fd int, want []byte) error {
	got := make([]byte, len(want)+1)
	n := 0
	for n < len(got) {
		k, err := unix.Pread(fd, got[n:], int64(n))
		if err != nil {
			return fmt.Errorf("read at %d: %w", n, err)
		}
		if k == 0 {
			break
		}
		n += k
	}
	if !bytes.Equal(got[:n], want) {
		return fmt.Errorf("read: got %d bytes, want %d other bytes", n, len(want))
	}
	return nil
}

// replace renames the new file over another one, which is open.
func (t *busyThread) replace(name string, data []byte) error {
	old := t.files[name]
	fd := -1
	var err error
	if old != nil {
		if fd, err = unix.Open(t.path(name), unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
			return fmt.Errorf("open %s: %w", name, err)
		}
		defer unix.Close(fd)
	}
	if err := unix.Rename(t.path("new"), t.path(name)); err != nil {
		return fmt.Errorf("rename to %s: %w", name, err)
	}
	t.files[name] = data
	if old != nil {
		if err := reads(fd, old); err != nil {
			return fmt.Errorf("replaced file %s: %w", name, err)
		}
	}
	return nil
}

// names makes and removes names.
func (t *busyThread) names(round int) error {
	var st unix.Stat_t
	missing := unix.Lstat(t.path("missing"), &st)
	if !errors.Is(missing, unix.ENOENT) {
		return fmt.Errorf("lstat of a missing name: %w", missing)
	}
	d, l := t.path(fmt.Sprintf("dir%d", round)), t.path("link")
	for _, step := range []struct {
		name string
		do   func() error
	}{
		{"mkdir", func() error { return unix.Mkdir(d, 0o755) }},
		{"symlink", func() error { return unix.Symlink("x", l) }},
		{"mkfifo", func() error { return unix.Mkfifo(d+"/p", 0o644) }},
		{"unlink", func() error { return unix.Unlink(l) }},
		{"unlink fifo", func() error { return unix.Unlink(d + "/p") }},
		{"rmdir", func() error { return unix.Rmdir(d) }},
	} {
		if err := step.do(); err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
	}
	return nil
}

func (t *busyThread) appendLine(round int) error {
	line := fmt.Appendf(nil, "round %d\n", round)
	if n, err := unix.Write(t.log, line); err != nil || n != len(line) {
		return fmt.Errorf("append: got %d, %w", n, err)
	}
	t.lines = append(t.lines, line...)
	return nil
}

// verify compares the directory on the server.
func (t *busyThread) verify() error {
	want := make([]string, 0, len(t.files)+1)
	t.files["log"] = t.lines
	for name, data := range t.files {
		want = append(want, name)
		got, err := os.ReadFile(filepath.Join(t.local, name))
		if err != nil {
			return err
		}
		if !bytes.Equal(got, data) {
			return fmt.Errorf("content of %s/%s: got %d bytes, want %d other bytes", t.local, name, len(got), len(data))
		}
	}
	slices.Sort(want)
	r := opRun{local: t.local}
	return lists(want...)(&r)
}
