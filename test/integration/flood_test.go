package integration

import (
	"bufio"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

const (
	// floodEnv sets how long TestFlood measures each flood, in the form of time.ParseDuration.
	// `make soak` sets 10s.
	floodEnv = "NFSRDMAD_FLOOD"
	// floodHelper makes the test program a user of a mount: "UID KIND THREADS DIR".
	floodHelper = "NFSRDMAD_FLOOD_HELPER"
	floodBlock  = 128 << 10 // bytes
	floodFile   = 64 << 20  // bytes
	smallFiles  = 64
	floodDirs   = 1024
	floodOpen   = 500 // directories that a thread keeps open
)

// floods are the kinds of work of a user. Each prepares one thread in a directory, and returns the
// step that the thread repeats. The threads are prepared one after the other.
var floods = map[string]func(dir string, thread int) (func() error, error){
	"visit": func(dir string, _ int) (func() error, error) {
		i := 0
		return func() error {
			i++
			return visit(filepath.Join(dir, strconv.Itoa(i%smallFiles)))
		}, nil
	},
	"read": func(dir string, _ int) (func() error, error) {
		fd, err := unix.Open(filepath.Join(dir, "large"), unix.O_RDONLY|unix.O_DIRECT|unix.O_CLOEXEC, 0)
		buf := make([]byte, floodBlock)
		return func() error {
			_, err := unix.Pread(fd, buf, rand.Int64N(floodFile/floodBlock)*floodBlock)
			return err
		}, err
	},
	"write": func(dir string, thread int) (func() error, error) {
		fd, err := unix.Open(filepath.Join(dir, fmt.Sprint("written", thread%16)),
			unix.O_WRONLY|unix.O_CREAT|unix.O_CLOEXEC, 0o666)
		buf := make([]byte, floodBlock)
		return func() error {
			_, err := unix.Pwrite(fd, buf, rand.Int64N(floodFile/floodBlock)*floodBlock)
			return err
		}, err
	},
	"directory": func(dir string, thread int) (func() error, error) {
		i, last := thread, make([]int, 0, floodOpen)
		return func() error {
			if len(last) == floodOpen {
				for _, fd := range last {
					unix.Close(fd)
				}
				last = last[:0]
			}
			i = (i + 31) % floodDirs
			fd, err := unix.Open(filepath.Join(dir, "dirs", strconv.Itoa(i)),
				unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
			if err == nil {
				last = append(last, fd)
			}
			return err
		}, nil
	},
	"lock": func(dir string, _ int) (func() error, error) {
		fd, err := unix.Open(filepath.Join(dir, "locked"), unix.O_RDWR|unix.O_CLOEXEC, 0)
		return func() error {
			for _, kind := range []int16{unix.F_WRLCK, unix.F_UNLCK} {
				lock := unix.Flock_t{Type: kind, Len: 1}
				if err := unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLKW, &lock); err != nil {
					return err
				}
			}
			return nil
		}, err
	},
}

// runFloodHelper runs the threads of one user of a mount until standard input ends. For each line of
// standard input it prints what they did since the last one: how often, the median and the 99th
// percentile of the times, in nanoseconds.
func runFloodHelper(args string) {
	var uid, threads int
	var kind, dir string
	_, err := fmt.Sscan(args, &uid, &kind, &threads, &dir)
	check := func(err error) {
		if err != nil {
			fmt.Println("error:", err)
			os.Exit(1)
		}
	}
	check(err)
	check(syscall.Setgroups(nil))
	check(syscall.Setresgid(uid, uid, uid))
	check(syscall.Setresuid(uid, uid, uid))
	var mu sync.Mutex
	var times []time.Duration
	var stop atomic.Bool
	var wg sync.WaitGroup
	for i := range threads {
		do, err := floods[kind](dir, i)
		check(err)
		wg.Go(func() {
			for !stop.Load() {
				began := time.Now()
				check(do())
				mu.Lock()
				times = append(times, time.Since(began))
				mu.Unlock()
			}
		})
	}
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		mu.Lock()
		slices.Sort(times)
		n := len(times)
		var p50, p99 time.Duration
		if n > 0 {
			p50, p99 = times[n/2], times[n*99/100]
		}
		times = times[:0]
		mu.Unlock()
		fmt.Println(n, int64(p50), int64(p99))
	}
	stop.Store(true)
	wg.Wait()
}

// visit opens a file, reads it, and drops its pages, so that the next visit reads it again.
func visit(path string) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if n, err := unix.Pread(fd, make([]byte, 10), 0); n != 10 || err != nil {
		return fmt.Errorf("read %s: %d bytes, %w", path, n, err)
	}
	return unix.Fadvise(fd, 0, 0, unix.FADV_DONTNEED)
}

// A floodProcess is a process of runFloodHelper.
type floodProcess struct {
	in  io.WriteCloser
	out *bufio.Reader
	cmd *exec.Cmd
}

func startFlood(t *testing.T, uid int, kind string, threads int, dir string) *floodProcess {
	t.Helper()
	p := &floodProcess{cmd: exec.Command(os.Args[0])}
	p.cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d %s %d %s", floodHelper, uid, kind, threads, dir))
	p.cmd.Stderr = os.Stderr
	var err error
	p.in, err = p.cmd.StdinPipe()
	kit.Must(t, err)
	out, err := p.cmd.StdoutPipe()
	kit.Must(t, err)
	p.out = bufio.NewReader(out)
	kit.Must(t, p.cmd.Start())
	return p
}

// report returns what the process did since the last report.
func (p *floodProcess) report(t *testing.T) (n int, p50, p99 time.Duration) {
	t.Helper()
	_, err := fmt.Fprintln(p.in)
	kit.Must(t, err)
	line, err := p.out.ReadString('\n')
	if _, scan := fmt.Sscan(line, &n, &p50, &p99); scan != nil {
		t.Fatalf("report of a process: %q, %v", line, err)
	}
	return n, p50, p99
}

func (p *floodProcess) end(t *testing.T) {
	t.Helper()
	p.in.Close()
	if err := p.cmd.Wait(); err != nil {
		t.Errorf("process of TestFlood: %v", err)
	}
}

// TestFlood lets many threads of one user work on a mount while another user opens and reads small
// files. Both users must make progress. With floodEnv it logs how much.
func TestFlood(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	type flood struct {
		kind    string
		threads int
	}
	var measure time.Duration
	all := []flood{{"read", 128}, {"write", 16}, {"directory", 4}, {"lock", 16}}
	if s := os.Getenv(floodEnv); s != "" {
		var err error
		measure, err = time.ParseDuration(s)
		kit.Must(t, err)
		all = []flood{{"read", 32}, {"read", 1024}, {"read", 4096}, {"write", 32}, {"write", 1024}, {"directory", 32},
			{"lock", 3000}}
	}
	s := mounts.ServeDir(t, mounts.OpenTempDir(t), "--no-root-squash")
	kit.Must(t, os.Chmod(s.Dir, 0o777))
	kit.Must(t, os.WriteFile(filepath.Join(s.Dir, "large"), make([]byte, floodFile), 0o644))
	kit.Must(t, os.WriteFile(filepath.Join(s.Dir, "locked"), nil, 0o644))
	kit.Must(t, os.Chmod(filepath.Join(s.Dir, "locked"), 0o666))
	for i := range smallFiles {
		kit.Must(t, os.WriteFile(filepath.Join(s.Dir, strconv.Itoa(i)), []byte("0123456789"), 0o644))
	}
	kit.Must(t, os.Mkdir(filepath.Join(s.Dir, "dirs"), 0o755))
	for i := range floodDirs {
		kit.Must(t, os.Mkdir(filepath.Join(s.Dir, "dirs", strconv.Itoa(i)), 0o755))
	}
	dir := mounts.MountServed(t, s)
	visitor := startFlood(t, 4002, "visit", 1, dir)
	defer visitor.end(t)
	progress := func(p *floodProcess, steps int) {
		t.Helper()
		kit.Eventually(t, "progress", func() bool { n, _, _ := p.report(t); steps -= n; return steps <= 0 })
	}
	progress(visitor, smallFiles)
	time.Sleep(measure)
	n, p50, p99 := visitor.report(t)
	t.Logf("no flood: %d opens with a read of the other user, median %v, 99%% %v", n, p50, p99)
	for _, f := range all {
		p := startFlood(t, 4001, f.kind, f.threads, dir)
		progress(p, f.threads)
		progress(visitor, 2)
		p.report(t)
		visitor.report(t)
		time.Sleep(measure)
		steps, _, slowest := p.report(t)
		n, p50, p99 := visitor.report(t)
		t.Logf("%d threads, %s: %d steps, 99%% %v; %d opens with a read of the other user, median %v, 99%% %v",
			f.threads, f.kind, steps, slowest, n, p50, p99)
		p.end(t)
	}
}
