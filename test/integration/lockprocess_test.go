package integration

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// lockHelper is the environment variable that makes the test program a lockProcess.
const lockHelper = "NFSRDMAD_LOCK_HELPER"

// The signals of a test go to the main thread, which must be the one that waits for a lock.
func init() {
	if os.Getenv(lockHelper) != "" {
		runtime.LockOSThread()
	}
}

// runLockHelper executes commands from standard input: "open FD PATH", "close FD", "write FD TEXT",
// "read FD", "flock FD OPERATION", and "set|wait|get FD r|w|u START LENGTH" for fcntl(2). It prints
// one line for each.
func runLockHelper() {
	files := make(map[string]int)
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		w := strings.Fields(in.Text())
		out, err := lockCommand(files, w)
		if err != nil {
			var errno syscall.Errno
			out = err.Error()
			if errors.As(err, &errno) {
				out = unix.ErrnoName(errno)
			}
		}
		fmt.Println(out)
	}
}

func lockCommand(files map[string]int, w []string) (string, error) {
	fd := files[w[1]]
	switch w[0] {
	case "open":
		fd, err := unix.Open(w[2], unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o666)
		files[w[1]] = fd
		return "ok", err
	case "close":
		delete(files, w[1])
		return "ok", unix.Close(fd)
	case "write":
		_, err := unix.Pwrite(fd, []byte(w[2]), 0)
		return "ok", err
	case "read":
		b := make([]byte, 100)
		n, err := unix.Pread(fd, b, 0)
		return strconv.Quote(string(b[:max(n, 0)])), err
	case "flock":
		how := map[string]int{"sh": unix.LOCK_SH | unix.LOCK_NB, "ex": unix.LOCK_EX | unix.LOCK_NB, "un": unix.LOCK_UN,
			"waitex": unix.LOCK_EX}[w[2]]
		return "ok", unix.Flock(fd, how)
	}
	start, _ := strconv.ParseInt(w[3], 10, 64)
	length, _ := strconv.ParseInt(w[4], 10, 64)
	l := unix.Flock_t{Type: map[string]int16{"r": unix.F_RDLCK, "w": unix.F_WRLCK, "u": unix.F_UNLCK}[w[2]],
		Start: start, Len: length}
	cmd := map[string]int{"set": unix.F_SETLK, "wait": unix.F_SETLKW, "get": unix.F_GETLK,
		"ofd": unix.F_OFD_SETLK}[w[0]]
	err := unix.FcntlFlock(uintptr(fd), cmd, &l)
	if w[0] == "get" && err == nil {
		return fmt.Sprintf("type %d start %d len %d", l.Type, l.Start, l.Len), nil
	}
	return "ok", err
}

// A lockProcess is a child process that locks files.
type lockProcess struct {
	t   *testing.T
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
}

func startLockProcess(t *testing.T) *lockProcess {
	t.Helper()
	p := &lockProcess{t: t, cmd: exec.Command(os.Args[0])}
	p.cmd.Env = append(os.Environ(), lockHelper+"=1")
	p.cmd.Stderr = os.Stderr
	var err error
	p.in, err = p.cmd.StdinPipe()
	kit.Must(t, err)
	out, err := p.cmd.StdoutPipe()
	kit.Must(t, err)
	p.out = bufio.NewScanner(out)
	kit.Must(t, p.cmd.Start())
	t.Cleanup(func() { p.kill() })
	return p
}

// kill kills the process and waits until it has closed its files.
func (p *lockProcess) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

func (p *lockProcess) send(format string, args ...any) {
	p.t.Helper()
	_, err := fmt.Fprintf(p.in, format+"\n", args...)
	kit.Must(p.t, err)
}

func (p *lockProcess) result() string {
	p.t.Helper()
	if !p.out.Scan() {
		p.t.Fatalf("lock process ended: %v", p.out.Err())
	}
	return p.out.Text()
}

// do executes a command and checks its result.
func (p *lockProcess) do(want, format string, args ...any) {
	p.t.Helper()
	p.send(format, args...)
	p.ends(want, fmt.Sprintf(format, args...))
}

// ends waits for the result of a command that was sent, and checks it.
func (p *lockProcess) ends(want, command string) {
	p.t.Helper()
	if got := p.result(); got != want {
		p.t.Errorf("%s: got %s, want %s", command, got, want)
	}
}

// eventually executes a command until it has the result.
func (p *lockProcess) eventually(want, format string, args ...any) {
	p.t.Helper()
	kit.Eventually(p.t, fmt.Sprintf(format, args...)+" with result "+want, func() bool {
		p.send(format, args...)
		return p.result() == want
	})
}
