// Package lockrace runs processes that lock files of mounts again and again, and counts how often
// two of them had an exclusive lock at the same time.
//
// A program that uses it calls [Main] first. A worker is a process of the same program.
package lockrace

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Kinds are the kinds of locks: of fcntl(2), of open file descriptions (F_OFD_SETLK), and of
// flock(2).
var Kinds = []string{"fcntl", "ofd", "flock"}

// A Race is a set of workers that lock one file.
type Race struct {
	Paths  []string // of the file, one for each worker
	Kinds  []string // one for each worker
	Marker string   // a path that does not exist, on another file system
	Rounds int      // of each worker
}

// roundsEnv is the number of rounds of each worker of a long run. "make soak" sets it.
const roundsEnv = "NFSRDMAD_LOCK_ROUNDS"

// Rounds returns the number of rounds of each worker: short, or that of a long run.
func Rounds(tb testing.TB, short int) int {
	tb.Helper()
	s := os.Getenv(roundsEnv)
	if s == "" {
		return short
	}
	n, err := strconv.Atoi(s)
	if err != nil || n <= 0 {
		tb.Fatalf("%s=%s: want a number above 0", roundsEnv, s)
	}
	return n
}

// env makes the program a worker.
const env = "NFSRDMAD_LOCKRACE"

// Main runs a worker, and does not return, in a process that Run started.
func Main() {
	arg := os.Getenv(env)
	if arg == "" {
		return
	}
	w := strings.Split(arg, "|")
	rounds, err := strconv.Atoi(w[3])
	seed, err2 := strconv.ParseUint(w[4], 10, 64)
	x := &worker{kind: w[0], path: w[1], marker: w[2], rnd: rand.New(rand.NewPCG(seed, 1))}
	if err = errors.Join(err, err2); err == nil {
		err = x.run(rounds)
	}
	if err != nil {
		fmt.Println("error:", err)
		os.Exit(1)
	}
	fmt.Println(x.lost, x.rounds)
	os.Exit(0)
}

// Run runs the workers. It returns the number of rounds in which a worker found that another one
// had the lock too, and of all rounds.
func (r *Race) Run() (lost, rounds int, err error) {
	var mu sync.Mutex
	var all sync.WaitGroup
	for i, path := range r.Paths {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s|%s|%s|%d|%d", env, r.Kinds[i], path, r.Marker, r.Rounds, i))
		cmd.Stderr = os.Stderr
		all.Go(func() {
			out, failed := cmd.Output()
			var l, n int
			if failed == nil {
				_, failed = fmt.Sscan(string(out), &l, &n)
			}
			mu.Lock()
			defer mu.Unlock()
			lost, rounds = lost+l, rounds+n
			if failed != nil {
				err = errors.Join(err, fmt.Errorf("worker %d (%s): %w: %s", i, r.Kinds[i], failed, out))
			}
		})
	}
	all.Wait()
	return lost, rounds, err
}

type worker struct {
	kind, path, marker string
	rnd                *rand.Rand
	lost, rounds       int
}

func (w *worker) run(rounds int) error {
	// A signal every few milliseconds interrupts system calls, which the kernel restarts.
	signal.Notify(make(chan os.Signal, 1), unix.SIGALRM)
	tick := unix.Itimerval{Interval: unix.Timeval{Usec: 7000}, Value: unix.Timeval{Usec: 7000}}
	if _, err := unix.Setitimer(unix.ITIMER_REAL, tick); err != nil {
		return err
	}
	for range rounds {
		if err := w.round(); err != nil {
			return err
		}
		w.rounds++
	}
	return nil
}

// round locks, checks that no other worker has the lock, and releases the lock in one of several
// ways.
func (w *worker) round() error {
	fd, err := unix.Open(w.path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open: %w", err)
	}
	closed := false
	defer func() {
		if !closed {
			unix.Close(fd)
		}
	}()
	if err := w.lock(fd); err != nil {
		return fmt.Errorf("lock: %w", err)
	}
	f, err := os.OpenFile(w.marker, os.O_CREATE|os.O_EXCL, 0o600)
	switch {
	case errors.Is(err, fs.ErrExist):
		w.lost++
	case err != nil:
		return err
	default:
		f.Close()
	}
	if w.rnd.IntN(4) == 0 {
		time.Sleep(time.Duration(w.rnd.IntN(300)) * time.Microsecond)
	}
	if err := os.Remove(w.marker); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	switch w.rnd.IntN(8) {
	case 0, 1, 2: // unlock, then close
		if err := w.set(fd, unix.F_UNLCK, false); err != nil {
			return fmt.Errorf("unlock: %w", err)
		}
	case 3: // close another open file: releases fcntl(2) locks only
		other, err := unix.Open(w.path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open again: %w", err)
		}
		unix.Close(other)
	case 4: // close a duplicate first
		if other, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0); err == nil {
			unix.Close(other)
		}
	case 5: // another process has the open file a little longer
		if w.rnd.IntN(20) == 0 {
			other, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
			if err != nil {
				return err
			}
			f := os.NewFile(uintptr(other), w.path)
			p, err := os.StartProcess("/bin/true", []string{"true"}, &os.ProcAttr{Files: []*os.File{f}})
			f.Close()
			if err != nil {
				return err
			}
			defer func() { _, _ = p.Wait() }()
		}
	}
	closed = true
	if err := unix.Close(fd); err != nil {
		return fmt.Errorf("close: %w", err)
	}
	return nil
}

func (w *worker) lock(fd int) error {
	for {
		err := w.set(fd, unix.F_WRLCK, w.rnd.IntN(10) == 0)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, syscall.EAGAIN):
			time.Sleep(time.Duration(w.rnd.IntN(1000)) * time.Microsecond)
		case errors.Is(err, syscall.EINTR):
		default:
			return err
		}
	}
}

func (w *worker) set(fd int, typ int16, wait bool) error {
	cmd := unix.F_SETLK
	switch {
	case w.kind == "flock":
		how := unix.LOCK_EX
		if typ == unix.F_UNLCK {
			how = unix.LOCK_UN
		} else if !wait {
			how |= unix.LOCK_NB
		}
		return unix.Flock(fd, how)
	case w.kind == "ofd" && wait:
		cmd = unix.F_OFD_SETLKW
	case w.kind == "ofd":
		cmd = unix.F_OFD_SETLK
	case wait:
		cmd = unix.F_SETLKW
	}
	return unix.FcntlFlock(uintptr(fd), cmd, &unix.Flock_t{Type: typ})
}
