package restart

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

// workerEnv is the environment variable that makes the test program a worker.
const workerEnv = "NFSRDMAD_RESTART_WORKER"

// A worker is a process that works on a mount.
type worker struct {
	t     *testing.T
	dir   string // the mount
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines chan string // of its output
	ended chan struct{}
	err   mounts.Output
}

// startWorker starts a worker on the mount at dir until the test ends. It must be called while a
// daemon serves the mount.
func startWorker(t *testing.T, dir string) *worker {
	t.Helper()
	w := &worker{t: t, dir: dir, cmd: exec.Command(os.Args[0]), lines: make(chan string, 16),
		ended: make(chan struct{})}
	w.cmd.Env = append(os.Environ(), workerEnv+"="+dir)
	w.cmd.Stderr = &w.err
	w.cmd.WaitDelay = time.Second
	var err error
	w.in, err = w.cmd.StdinPipe()
	kit.Must(t, err)
	out, err := w.cmd.StdoutPipe()
	kit.Must(t, err)
	kit.Must(t, w.cmd.Start())
	go func() {
		defer close(w.ended)
		in := bufio.NewScanner(out)
		in.Buffer(nil, 64<<20) // the checksums of all files
		for in.Scan() {
			w.lines <- in.Text()
		}
		close(w.lines)
		_ = w.cmd.Wait()
	}()
	t.Cleanup(w.kill)
	return w
}

// kill kills the process. If the process waits for its mount, kill ends the mount.
func (w *worker) kill() {
	_ = w.cmd.Process.Kill()
	for _, wait := range []time.Duration{2 * time.Second, limit} {
		select {
		case <-w.ended:
			return
		case <-time.After(wait):
			forceUnmount(w.dir)
		}
	}
	w.t.Errorf("worker %d runs %v after SIGKILL", w.cmd.Process.Pid, limit)
}

// send sends a command.
func (w *worker) send(format string, args ...any) {
	w.t.Helper()
	if _, err := fmt.Fprintf(w.in, format+"\n", args...); err != nil {
		w.t.Fatalf("worker: %v\n%s", err, w.err.String())
	}
}

// result waits for the result of a command that was sent.
func (w *worker) result() string {
	w.t.Helper()
	select {
	case s, ok := <-w.lines:
		if !ok {
			w.t.Fatalf("worker ended:\n%s", w.err.String())
		}
		return s
	case <-time.After(limit):
	}
	_ = w.cmd.Process.Signal(syscall.SIGQUIT) // prints the stacks
	select {
	case <-w.ended:
	case <-time.After(limit):
	}
	w.t.Fatalf("worker has no result after %v:\n%s", limit, w.err.String())
	return ""
}

// advance waits until the load of the worker has made n more rounds.
func (w *worker) advance(n int) {
	w.t.Helper()
	rounds := func() int {
		w.send("rounds")
		text := w.result()
		got, err := strconv.Atoi(text)
		if err != nil {
			w.t.Fatalf("worker: %s", text)
		}
		return got
	}
	want := rounds() + n
	kit.Eventually(w.t, fmt.Sprint("round ", want, " of a worker"), func() bool { return rounds() >= want })
}

// do executes a command and checks its result.
func (w *worker) do(want, format string, args ...any) {
	w.t.Helper()
	w.send(format, args...)
	w.want(want, fmt.Sprintf(format, args...))
}

// want waits for the result of a command and checks it.
func (w *worker) want(want, command string) {
	w.t.Helper()
	if got := w.result(); got != want {
		w.t.Errorf("%s: got %s, want %s", command, got, want)
	}
}

// A workerProcess is the state of a worker, in its process.
type workerProcess struct {
	files map[string]int // descriptors by number
	load  *load
}

// runWorker executes the commands of its input, one per line, and prints the result of each in one
// line: what it returns, or the name of the error number.
func runWorker() {
	p := &workerProcess{files: make(map[string]int)}
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		out, err := p.command(strings.Fields(in.Text()))
		if err != nil {
			var errno syscall.Errno
			out = err.Error()
			if errors.As(err, &errno) && !strings.Contains(out, ":") {
				out = unix.ErrnoName(errno)
			}
		}
		fmt.Println(strings.ReplaceAll(out, "\n", "; "))
	}
}

// command executes one of
//
//	open FD PATH           close FD               sync FD
//	write FD OFFSET LENGTH SEED                   check FD OFFSET LENGTH SEED
//	set FD r|w|u START LENGTH                     flock FD sh|ex|un
//	load SEED SERVED TASK...                      rounds                         end
func (p *workerProcess) command(w []string) (string, error) {
	switch w[0] {
	case "load":
		p.load = startLoad(number(w[1]), os.Getenv(workerEnv), w[2], w[3:])
		return "ok", nil
	case "rounds":
		n, err := p.load.total()
		return strconv.Itoa(n), err
	case "end":
		return p.load.end()
	case "open":
		fd, err := unix.Open(w[2], unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o666)
		p.files[w[1]] = fd
		return "ok", err
	}
	fd := p.files[w[1]]
	switch w[0] {
	case "close":
		delete(p.files, w[1])
		return "ok", unix.Close(fd)
	case "sync":
		return "ok", unix.Fsync(fd)
	case "write":
		_, err := unix.Pwrite(fd, kit.RandomBytes(number(w[4]), int(number(w[3]))), int64(number(w[2])))
		return "ok", err
	case "check":
		want := kit.RandomBytes(number(w[4]), int(number(w[3])))
		got := make([]byte, len(want))
		n, err := unix.Pread(fd, got, int64(number(w[2])))
		if err == nil && string(got[:n]) != string(want) {
			return "other data", nil
		}
		return "ok", err
	case "flock":
		how := map[string]int{"sh": unix.LOCK_SH, "ex": unix.LOCK_EX, "un": unix.LOCK_UN}[w[2]]
		return "ok", unix.Flock(fd, how|unix.LOCK_NB)
	case "set":
		l := unix.Flock_t{Type: map[string]int16{"r": unix.F_RDLCK, "w": unix.F_WRLCK, "u": unix.F_UNLCK}[w[2]],
			Start: int64(number(w[3])), Len: int64(number(w[4]))}
		return "ok", unix.FcntlFlock(uintptr(fd), unix.F_SETLK, &l)
	}
	return "", fmt.Errorf("unknown command %q", w[0])
}

func number(s string) uint64 {
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		panic(err)
	}
	return n
}
