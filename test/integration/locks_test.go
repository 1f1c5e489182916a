package integration

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/nfsserve"
	"github.com/nfsrdmad/nfsrdmad/pkg/fusefs"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/nlm"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
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
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.out = bufio.NewScanner(out)
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
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
	if _, err := fmt.Fprintf(p.in, format+"\n", args...); err != nil {
		p.t.Fatal(err)
	}
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
	var got string
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		p.send(format, args...)
		if got = p.result(); got == want {
			return
		}
	}
	p.t.Errorf("%s: got %s for a minute, want %s", fmt.Sprintf(format, args...), got, want)
}

// A lockMount is one mount with its own lock client, as on another host.
type lockMount struct {
	dir   string
	locks *nlm.Client
}

func (m *lockMount) file() string { return filepath.Join(m.dir, "file") }

// A lockExport is an export that lockMounts mount.
type lockExport struct {
	rdma    netip.AddrPort
	export  mountd.Args
	caller  string
	service *nlm.Service
}

func (e *lockExport) mount(t *testing.T, change func(*fusefs.Options, *nlm.Config)) *lockMount {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	args := e.export
	args.Cred = &sunrpc.AuthSys{Machine: "test"}
	root, err := mountd.Mount(ctx, args)
	if err != nil {
		t.Fatal(err)
	}
	tr, err := xprt.New(xprt.Config{Provider: softiwarp.New(softiwarp.Config{}), Addr: e.rdma})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tr.Close() })
	if err := tr.Connect(ctx); err != nil {
		t.Fatal(err)
	}
	m := &lockMount{}
	opts := fusefs.DefaultOptions()
	var fs *fusefs.FS
	cfg := nlm.Config{Host: args.Host, MountPort: args.Port, MountPortFirst: true, Caller: e.caller,
		Service: e.service, Lost: func(fh nfs3.FH, _ nlm.Owner) { fs.LockLost(fh) }}
	if change != nil {
		change(&opts, &cfg)
	}
	m.locks = nlm.New(cfg)
	t.Cleanup(m.locks.Close)
	opts.Locks = m.locks
	if fs, err = fusefs.New(ctx, nfs3.NewClient(tr, nfs3.Options{}), root.FH, opts); err != nil {
		t.Fatal(err)
	}
	m.dir = mounts.Mount(t, fs, args.Host+":"+args.Export)
	return m
}

// serveLocks runs the embedded server.
func serveLocks(t *testing.T) *lockExport {
	s := serve(t, nfsserve.Config{Dir: t.TempDir()})
	return lockExportOf(t, s)
}

func lockExportOf(t *testing.T, s *nfsserve.Server) *lockExport {
	t.Helper()
	_, port, err := net.SplitHostPort(s.TCPAddr)
	if err != nil {
		t.Fatal(err)
	}
	n, _ := strconv.Atoi(port)
	return &lockExport{caller: "test", rdma: s.RDMAAddr, export: mountd.Args{Host: "127.0.0.1", Port: n, Export: "/"}}
}

func TestLocksOfEmbeddedServer(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	testLocks(t, serveLocks(t))
}

// testLocks runs the cases that every server passes, with two processes on two mounts.
func testLocks(t *testing.T, e *lockExport) (a, b *lockMount) {
	a, b = e.mount(t, nil), e.mount(t, nil)
	for _, x := range []struct {
		name     string
		oneMount bool // both processes use the mount a
		run      func(t *testing.T, a, b *lockMount, p, q *lockProcess)
	}{
		{"conflicts", false, lockScript(conflictsScript)},
		{"ranges", false, lockScript(rangesScript)},
		{"same mount", true, lockScript(sameMountScript)},
		{"flock", false, lockScript(flockScript)},
		{"holder", false, lockScript(holderScript)},
		{"close", false, lockScript(closeScript)},
		{"kill", false, lockScript(killScript)},
		{"wait", false, testLockWaits},
		{"wait on one mount", true, testLockWaitsOnOneMount},
		{"signal", false, testSignalCancels},
		{"upgrade canceled", false, testCanceledUpgradeKeepsLock},
		{"deadlock", true, testDeadlock},
		{"coherence", false, testLockCoherence},
	} {
		t.Run(x.name, func(t *testing.T) {
			p, q := startLockProcess(t), startLockProcess(t)
			if x.oneMount {
				open2(a, a, p, q)
			} else {
				open2(a, b, p, q)
			}
			x.run(t, a, b, p, q)
			p.kill()
			q.kill()
			for _, m := range []*lockMount{a, b} {
				eventually(t, "locks held", func() bool { return m.locks.Counters.Held.Load() == 0 })
			}
		})
	}
	return a, b
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not as expected within a minute", what)
		}
	}
}

func open2(a, b *lockMount, p, q *lockProcess) {
	p.do("ok", "open 1 %s", a.file())
	q.do("ok", "open 1 %s", b.file())
}

// waits returns when a request of the mount waits for another client.
func (m *lockMount) waits(t *testing.T) {
	t.Helper()
	eventually(t, "a pending lock", func() bool { return m.locks.Counters.Pending.Load() == 1 })
}

func testLockWaits(t *testing.T, a, b *lockMount, p, q *lockProcess) {
	p.do("ok", "set 1 w 0 0")
	q.send("wait 1 w 0 0")
	b.waits(t)
	p.do("ok", "set 1 u 0 0")
	q.ends("ok", "waiting lock")
	p.do("EAGAIN", "set 1 r 0 0")
	p.send("flock 1 waitex")
	a.waits(t)
	q.kill()
	p.ends("ok", "waiting flock")
}

func testLockWaitsOnOneMount(t *testing.T, a, _ *lockMount, p, q *lockProcess) {
	p.do("ok", "set 1 w 0 0")
	q.send("wait 1 w 0 0")
	a.waits(t)
	p.do("ok", "set 1 u 0 0")
	q.ends("ok", "waiting lock")
	p.do("EAGAIN", "set 1 w 0 0")
}

// testSignalCancels kills a process that waits. Its request must not get the lock later.
func testSignalCancels(t *testing.T, a, b *lockMount, p, q *lockProcess) {
	p.do("ok", "set 1 w 0 0")
	q.send("wait 1 w 0 0")
	b.waits(t)
	q.kill()
	eventually(t, "no pending lock", func() bool { return b.locks.Counters.Pending.Load() == 0 })
	p.do("ok", "set 1 u 0 0")
	r := startLockProcess(t)
	r.do("ok", "open 1 %s", a.file())
	r.eventually("ok", "set 1 w 0 0")
	r.do("ok", "set 1 u 0 0")
	r.kill()
}

// testCanceledUpgradeKeepsLock sends a harmless signal to a process that holds a shared lock and
// waits for an exclusive one.
func testCanceledUpgradeKeepsLock(t *testing.T, a, b *lockMount, p, q *lockProcess) {
	p.do("ok", "set 1 r 0 100")
	q.do("ok", "set 1 r 0 100")
	q.send("wait 1 w 0 50")
	b.waits(t)
	canceled := b.locks.Counters.Canceled.Load()
	// Go's runtime handles the signal with SA_RESTART: the kernel sends the request again.
	if err := q.cmd.Process.Signal(syscall.SIGURG); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a canceled request", func() bool { return b.locks.Counters.Canceled.Load() > canceled })
	b.waits(t)
	p.do("EAGAIN", "set 1 w 0 100") // q still has its shared lock
	p.do("ok", "set 1 u 0 100")
	q.ends("ok", "upgrade")
	p.do("EAGAIN", "set 1 r 0 50")
	p.do("ok", "set 1 r 50 50")
}

func testDeadlock(t *testing.T, a, _ *lockMount, p, q *lockProcess) {
	p.do("ok", "set 1 w 0 1")
	q.do("ok", "set 1 w 1 1")
	p.send("wait 1 w 1 1")
	a.waits(t)
	q.do("EDEADLK", "wait 1 w 0 1")
	q.do("ok", "set 1 u 1 1")
	p.ends("ok", "waiting lock")
}

func testLockCoherence(t *testing.T, a, b *lockMount, p, q *lockProcess) {
	p.do("ok", "set 1 w 0 0")
	p.do("ok", "write 1 first")
	p.do("ok", "set 1 u 0 0")
	q.do("ok", "set 1 w 0 0")
	q.do(`"first"`, "read 1") // and caches it
	q.do("ok", "set 1 u 0 0")
	for i := range 5 {
		text := fmt.Sprintf("text%d", i)
		p.do("ok", "set 1 w 0 0")
		p.do("ok", "write 1 %s", text)
		p.do("ok", "set 1 u 0 0")
		q.do("ok", "set 1 r 0 0")
		q.do(strconv.Quote(text), "read 1")
		q.do("ok", "set 1 u 0 0")
	}
}
