package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

const (
	fileSize = 300_000
	names    = 60 // of the directories that are listed
	// pause is the pause after each round of a task, for an emulated processor.
	pause         = 10 * time.Millisecond
	progressEvery = 200 * time.Millisecond
)

// A load runs tasks at the same time until a signal. Each task works in the directory DIR/TASK.
type load struct {
	dir, served string // on the mount, and the same directory on the server
	tasks       sync.WaitGroup
	stop        chan struct{}

	mu     sync.Mutex // guards the fields below
	rounds map[string]int
	errs   []error
}

// A task prepares its directory and returns the function of a round and that of the end.
type task func(l *load, dir string) (round, end func() error, err error)

var tasks = map[string]task{
	"sync": (*load).syncs, "dirty": (*load).dirty, "lock": (*load).lock, "cwd": (*load).cwd, "read": (*load).read,
	"list": (*load).list, "changing": (*load).changing,
}

// work runs all tasks until SIGTERM. It writes the number of rounds of each task, and errors, to
// the file progress.
func work(dir, served, progress string) error {
	l := &load{dir: dir, served: served, stop: make(chan struct{}), rounds: make(map[string]int)}
	for name, t := range tasks {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(path, 0o755); err != nil {
			return err
		}
		round, end, err := t(l, path)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		l.tasks.Go(func() { l.repeat(name, round, end) })
	}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM)
	for tick := time.Tick(progressEvery); ; {
		select {
		case <-tick:
			if err := l.report(progress); err != nil {
				return err
			}
		case <-signals:
			close(l.stop)
			l.tasks.Wait()
			return errors.Join(l.report(progress), errors.Join(l.errs...))
		}
	}
}

// A report is the content of the progress file.
type report struct {
	Rounds map[string]int
	Errors []string
}

func (l *load) report(path string) error {
	l.mu.Lock()
	r := report{Rounds: l.rounds}
	for _, err := range l.errs {
		r.Errors = append(r.Errors, err.Error())
	}
	b, err := json.Marshal(r)
	l.mu.Unlock()
	if err == nil {
		err = os.WriteFile(path+".new", b, 0o644)
	}
	return errors.Join(err, os.Rename(path+".new", path))
}

// repeat calls round until the load ends or round fails, and then end.
func (l *load) repeat(name string, round, end func() error) {
	for {
		err := round()
		if err != nil {
			l.fail(name, err)
			return
		}
		l.mu.Lock()
		l.rounds[name]++
		l.mu.Unlock()
		select {
		case <-l.stop:
			if err := end(); err != nil {
				l.fail(name, fmt.Errorf("at the end: %w", err))
			}
			return
		case <-time.After(pause):
		}
	}
}

func (l *load) fail(name string, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.errs = append(l.errs, fmt.Errorf("%s at %s, round %d: %w", name, time.Now().Format("15:04:05.000"),
		l.rounds[name], err))
}

// onServer returns the path on the server of a file on the mount.
func (l *load) onServer(path string) string { return l.served + path[len(l.dir):] }

func nothing() error { return nil }

// syncs changes a file, calls fsync, and compares the file of the server.
func (l *load) syncs(dir string) (round, end func() error, err error) {
	path := filepath.Join(dir, "file")
	f, data, err := create(path)
	round = func() error {
		if err := change(f, data); err != nil {
			return err
		}
		if err := f.Sync(); err != nil {
			return err
		}
		return compare(l.onServer(path), data)
	}
	return round, f.Close, err
}

// dirty changes a file and does not call fsync. It reads the file from time to time.
func (l *load) dirty(dir string) (round, end func() error, err error) {
	path := filepath.Join(dir, "file")
	f, data, err := create(path)
	got := make([]byte, fileSize)
	rounds := 0
	round = func() error {
		if err := change(f, data); err != nil {
			return err
		}
		if rounds++; rounds%10 != 0 {
			return nil
		}
		if _, err := f.ReadAt(got, 0); err != nil {
			return err
		}
		return same(path, got, data)
	}
	end = func() error { return errors.Join(f.Close(), compare(l.onServer(path), data)) }
	return round, end, err
}

func create(path string) (*os.File, []byte, error) {
	f, err := os.Create(path)
	if err != nil {
		return nil, nil, err
	}
	data := kit.RandomBytes(2, fileSize)
	_, err = f.Write(data)
	return f, data, err
}

// change changes a random part of a file and of its copy.
func change(f *os.File, data []byte) error {
	off, n := rand.IntN(fileSize-20_000), rand.IntN(20_000)
	copy(data[off:], kit.RandomBytes(rand.Uint64(), n))
	_, err := f.WriteAt(data[off:off+n], int64(off))
	return err
}

// lock holds a lock and checks that it excludes another open file.
func (l *load) lock(dir string) (round, end func() error, err error) {
	var files [2]*os.File
	for i := range files {
		if files[i], err = os.OpenFile(filepath.Join(dir, "file"), os.O_CREATE|os.O_RDWR, 0o644); err != nil {
			return nil, nil, err
		}
	}
	try := func(f *os.File) error {
		return unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Len: 100})
	}
	round = func() error {
		if err := try(files[1]); !errors.Is(err, unix.EAGAIN) {
			return fmt.Errorf("second lock: got %w, want EAGAIN", err)
		}
		return nil
	}
	end = func() error { return errors.Join(files[0].Close(), try(files[1]), files[1].Close()) }
	return round, end, try(files[0])
}

// cwd uses the working directory of the process.
func (l *load) cwd(dir string) (round, end func() error, err error) {
	round = func() error {
		if wd, err := unix.Getcwd(make([]byte, unix.PathMax)); err != nil || wd == 0 {
			return fmt.Errorf("working directory: %w", err)
		}
		if err := os.WriteFile("file", []byte("text"), 0o644); err != nil {
			return err
		}
		if err := compare("file", []byte("text")); err != nil {
			return err
		}
		return os.Remove("file")
	}
	return round, nothing, os.Chdir(dir)
}

// read reads a file that only the server has changed, without the page cache.
func (l *load) read(dir string) (round, end func() error, err error) {
	path := filepath.Join(dir, "file")
	data := kit.RandomBytes(3, fileSize)
	round = func() error {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
			return err
		}
		got := make([]byte, fileSize)
		if _, err := f.ReadAt(got, 0); err != nil {
			return err
		}
		return same(path, got, data)
	}
	return round, nothing, os.WriteFile(l.onServer(path), data, 0o644)
}

// list lists a directory that does not change.
func (l *load) list(dir string) (round, end func() error, err error) {
	want, err := fill(dir)
	return func() error { return checkNames(dir, want) }, nothing, err
}

// changing lists a directory in which it makes and removes another file.
func (l *load) changing(dir string) (round, end func() error, err error) {
	want, err := fill(dir)
	const other = "other"
	with := append(slices.Clone(want), other)
	slices.Sort(with)
	round = func() error {
		path := filepath.Join(dir, other)
		if err := os.WriteFile(path, nil, 0o644); err != nil {
			return err
		}
		if err := checkNames(dir, with); err != nil {
			return err
		}
		if err := os.Remove(path); err != nil {
			return err
		}
		return checkNames(dir, want)
	}
	return round, nothing, err
}

// fill makes files and returns their names in order.
func fill(dir string) (want []string, err error) {
	for i := range names {
		name := fmt.Sprintf("name-%03d", i)
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o644); err != nil {
			return nil, err
		}
		want = append(want, name)
	}
	return want, nil
}

// checkNames lists a directory. If the names are not those in want, the error has a second list
// too, which shows whether the error is of short duration.
func checkNames(dir string, want []string) error {
	first, err := list(dir)
	if err == nil && slices.Equal(first, want) {
		return nil
	}
	second, secondErr := list(dir)
	return fmt.Errorf("list: got %d names, %w, then %d names, %w, want %d: %v", len(first), err, len(second), secondErr,
		len(want), first)
}

func list(dir string) (all []string, err error) {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all, err
}
