package bench

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Bounds and defaults of Options.
const (
	MinSize      = 1 << 20
	MaxSize      = 1 << 40
	DefaultSize  = 128 << 20
	DefaultTime  = 2 * time.Second
	DefaultFiles = 1000
	MaxFiles     = 1 << 20
)

// Options says what a Dir measures. Zero values of Size, Time and Files select the defaults.
type Options struct {
	Path  string        // directory in which Open creates the directory for the files
	Size  int64         // of the file for data, in bytes, a multiple of 1 MiB
	Time  time.Duration // maximum of one measurement; an fsync(2) at its end can exceed it
	Files int           // maximum number of files that create makes
	// Watch has the processes whose processor time and context switches are measured.
	Watch Processes
}

// A Dir is a new directory in which workloads run.
type Dir struct {
	opts   Options
	path   string
	caches Caches
	size   int64    // of the file for data
	names  []string // paths of the files of create
	seed   uint64
	direct bool // the file system supports O_DIRECT
}

// Open creates a directory in o.Path. It changes nothing else there.
func Open(o Options) (*Dir, error) {
	if o.Size == 0 {
		o.Size = DefaultSize
	}
	if o.Time == 0 {
		o.Time = DefaultTime
	}
	if o.Files == 0 {
		o.Files = DefaultFiles
	}
	if o.Size < MinSize || o.Size > MaxSize || o.Size%large != 0 || o.Time < 0 || o.Files < 0 || o.Files > MaxFiles {
		return nil, fmt.Errorf("invalid options: %d bytes, %v, %d files", o.Size, o.Time, o.Files)
	}
	path, err := os.MkdirTemp(o.Path, "nfsrdmad-bench-")
	if err != nil {
		return nil, err
	}
	return &Dir{opts: o, path: path, caches: usableCaches(), direct: true}, nil
}

// Caches returns how Run empties the caches of the client.
func (d *Dir) Caches() Caches { return d.caches }

// Direct reports whether the random reads use O_DIRECT. It is true before they run.
func (d *Dir) Direct() bool { return d.direct }

// Close removes the directory with everything in it.
func (d *Dir) Close() error { return os.RemoveAll(d.path) }

// Run runs a workload once. It returns the error of ctx soon after ctx ends, unless a system call
// waits for the server.
func (d *Dir) Run(ctx context.Context, w Workload) (Sample, error) {
	d.seed++
	m := &measurement{ctx: ctx, limit: d.opts.Time, watch: d.opts.Watch}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := w.run(d, m); err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return Sample{}, fmt.Errorf("%s: %w", w.Name, err)
	}
	m.sample.Workload, m.sample.Callers = w.Name, w.Callers
	return m.sample, nil
}

// A measurement is one run of a workload.
type measurement struct {
	ctx    context.Context
	limit  time.Duration
	watch  Processes
	end    time.Time
	sample Sample
}

// errDone ends the calls of a measurement.
var errDone = errors.New("measurement is complete")

// time measures f, which calls next before each call and counts calls and bytes in m.sample.
func (m *measurement) time(f func() error) error {
	before, err := m.watch.Usage()
	if err != nil {
		return err
	}
	begin := time.Now()
	m.end = begin.Add(m.limit)
	if err := f(); err != nil {
		return err
	}
	m.sample.Seconds = time.Since(begin).Seconds()
	after, err := m.watch.Usage()
	if err != nil {
		return err
	}
	m.sample.Processes = after.Since(before)
	return nil
}

// next returns errDone when the time of the measurement is over, and an error when it is
// interrupted.
func (m *measurement) next() error {
	if err := m.ctx.Err(); err != nil {
		return err
	}
	if time.Now().After(m.end) {
		return errDone
	}
	return nil
}

// loop calls f with the numbers below n until the time is over, but at least once.
func (m *measurement) loop(n int, f func(i int) error) error {
	for i := range n {
		if err := m.next(); err != nil && (err != errDone || i > 0) {
			return finished(err)
		}
		if err := f(i); err != nil {
			return err
		}
		m.sample.Calls++
	}
	return nil
}

func finished(err error) error {
	if err == errDone {
		return nil
	}
	return err
}

// parallel runs f on n locked threads at the same time and returns the number of calls of all. Go
// runs the threads at the same time only with enough processors of its scheduler: a thread without
// one would wait after each system call.
func parallel(n int, f func(caller int) (calls int, err error)) (int, error) {
	if before := runtime.GOMAXPROCS(0); before < n+2 {
		runtime.GOMAXPROCS(n + 2)
		defer runtime.GOMAXPROCS(before)
	}
	var wg sync.WaitGroup
	calls, errs := make([]int, n), make([]error, n)
	for i := range n {
		wg.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			calls[i], errs[i] = f(i)
		})
	}
	wg.Wait()
	sum := 0
	for _, c := range calls {
		sum += c
	}
	return sum, errors.Join(errs...)
}

// open opens a file without Go's poller, which would make system calls besides those that are
// measured.
func open(path string, flags int) (int, error) {
	for {
		fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0o644)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return -1, &fs.PathError{Op: "open", Path: path, Err: err}
		}
		return fd, nil
	}
}

// retry repeats a system call that a signal interrupts, and names the call in an error.
func retry(op, path string, call func() (int, error)) (int, error) {
	for {
		n, err := call()
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return n, &fs.PathError{Op: op, Path: path, Err: err}
		}
		return n, nil
	}
}

func (d *Dir) join(name string) string { return filepath.Join(d.path, name) }
