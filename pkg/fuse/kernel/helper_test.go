package kernel

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// helperArg makes the test binary run RunHelper.
const helperArg = "notify-helper"

var helperCommand = []string{"/proc/self/exe", helperArg}

// useHelper starts a helper and returns its pid.
func useHelper(t testing.TB, d *Device) int {
	t.Helper()
	kit.Must(t, d.UseHelper(helperCommand))
	return helperPID(d)
}

func helperPID(d *Device) int {
	h := d.helper.Load()
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.process.cmd.Process.Pid
}

// state returns the state of a process as in proc_pid_stat(5), or "" without a process.
func state(pid int) string {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	_, fields, _ := strings.Cut(string(stat), ") ")
	return fields[:1]
}

// isGone reports whether a process has ended. The parent of an orphan may reap it late.
func isGone(pid int) bool {
	s := state(pid)
	if s != "Z" {
		return s == "" || s == "X"
	}
	threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	return err != nil || len(threads) == 1
}

// A heldPage is a page of the file "data" whose READ waits for release.
type heldPage struct {
	began, release chan struct{}
	read           chan error
}

// holdPage makes READs of fs wait. Call it before the mount.
func holdPage(fs *testFS) *heldPage {
	h := &heldPage{began: make(chan struct{}), release: make(chan struct{}), read: make(chan error, 1)}
	var once sync.Once
	fs.read = func(r *Request, in *fuse.ReadIn) ([][]byte, fuse.Status) {
		once.Do(func() { close(h.began) })
		<-h.release
		return give(r, fileData(int64(in.Offset), int(in.Size))), fuse.OK
	}
	return h
}

// begin lets a program read the page.
func (h *heldPage) begin(t *testing.T, m *testMount) {
	t.Helper()
	fd := open(t, m.path("data"), unix.O_RDONLY)
	go func() {
		buf := make([]byte, 4096)
		_, err := unix.Pread(fd, buf, 0)
		if err == nil && !bytes.Equal(buf, fileData(0, len(buf))) {
			err = errors.New("read other data")
		}
		h.read <- err
	}()
	<-h.began
}

func (h *heldPage) end(t *testing.T) {
	t.Helper()
	close(h.release)
	if err := <-h.read; err != nil {
		t.Errorf("read: %v", err)
	}
}

func TestHelperProcess(t *testing.T) {
	m := mount(t, newTestFS())
	// A descriptor that each child inherits.
	r, w, err := os.Pipe()
	kit.Must(t, err)
	defer r.Close()
	_, err = unix.FcntlInt(w.Fd(), unix.F_SETFD, 0)
	kit.Must(t, err)
	pid := useHelper(t, m.dev)
	kit.Must(t, w.Close())
	kit.Must(t, r.SetReadDeadline(time.Now().Add(kit.Timeout)))
	if _, err := r.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("pipe that the helper inherited: got %v, want EOF", err)
	}
	if comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid)); string(comm) != helperComm+"\n" {
		t.Errorf("name: got %q, want %s", comm, helperComm)
	}
	score := func(process string) (n int) {
		b, _ := os.ReadFile("/proc/" + process + "/oom_score_adj")
		n, _ = strconv.Atoi(strings.TrimSpace(string(b)))
		return n
	}
	if got, want := score(strconv.Itoa(pid)), min(score("self")+oomAdjust, 1000); got != want {
		t.Errorf("OOM score: got %d, want %d", got, want)
	}
	if group, err := unix.Getpgid(pid); err != nil || group != pid {
		t.Errorf("process group: got %d, %v, want %d", group, err, pid)
	}
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	kit.Must(t, err)
	for _, e := range fds {
		to, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, e.Name()))
		fd, _ := strconv.Atoi(e.Name())
		if fd > helperSocketFD && !strings.HasPrefix(to, "anon_inode:") && !strings.HasPrefix(to, "/sys/fs/cgroup") {
			t.Errorf("descriptor %d of the helper: %s", fd, to)
		}
	}
	for _, s := range []syscall.Signal{unix.SIGHUP, unix.SIGINT, unix.SIGTERM} {
		kit.Must(t, unix.Kill(pid, s))
	}
	kit.Must(t, m.dev.InvalInode(fileNode, 0, 0))
	if now := helperPID(m.dev); now != pid || isGone(pid) {
		t.Errorf("helper after signals: got process %d, want %d", now, pid)
	}
	if err := m.dev.UseHelper(helperCommand); !errors.Is(err, os.ErrExist) {
		t.Errorf("second UseHelper: got %v, want %v", err, os.ErrExist)
	}
	kit.Must(t, unix.Unmount(m.dir, 0))
	m.awaitEnd(t)
	kit.Must(t, m.dev.Close())
	if !isGone(pid) || unix.Kill(pid, 0) != unix.ESRCH {
		t.Error("helper after Close: runs, want ended and waited for")
	}
	if err := m.dev.InvalInode(fileNode, -1, 0); !errors.Is(err, os.ErrClosed) {
		t.Errorf("notification after Close: got %v, want %v", err, os.ErrClosed)
	}
	if err := m.dev.UseHelper(helperCommand); err == nil {
		t.Error("UseHelper after Close: got no error")
	}
}

func TestUseHelperReportsStart(t *testing.T) {
	d, err := OpenDevice()
	kit.Must(t, err)
	defer d.Close()
	for _, command := range [][]string{nil, {"/nonexistent"}, {"/bin/false"}} {
		if err := d.UseHelper(command); err == nil || d.helper.Load() != nil {
			t.Errorf("UseHelper(%q): got error %v, want one and no helper", command, err)
		}
	}
}

// TestKilledHelperIsReplaced kills the helper while the kernel handles a notification.
func TestKilledHelperIsReplaced(t *testing.T) {
	for _, sig := range []syscall.Signal{unix.SIGKILL, unix.SIGSTOP} {
		t.Run(unix.SignalName(sig), func(t *testing.T) {
			fs := newTestFS()
			page := holdPage(fs)
			m := mount(t, fs)
			pid := useHelper(t, m.dev)
			h := m.dev.helper.Load()
			setCheck(h, 20*time.Millisecond)
			page.begin(t, m)
			result := make(chan error, 1)
			go func() { result <- m.dev.InvalInode(fileNode, 0, 0) }()
			kit.Eventually(t, "the notification to wait", func() bool { return waitsInKernel(pid) })
			kit.Must(t, unix.Kill(pid, sig))
			// The thread that waits in the kernel keeps the socket open.
			select {
			case err := <-result:
				if !errors.Is(err, ErrHelper) {
					t.Errorf("notification: got %v, want %v", err, ErrHelper)
				}
			case <-time.After(kit.Timeout):
				t.Error("notification did not return")
			}
			// No new helper within a second after the start of the last one: the notification is
			// direct.
			h.mu.Lock()
			h.started = time.Now().Add(time.Hour)
			h.mu.Unlock()
			kit.Must(t, m.dev.InvalInode(fileNode, -1, 0))
			if now := helperPID(m.dev); now != pid {
				t.Errorf("helper within a second: got process %d, want %d", now, pid)
			}
			h.mu.Lock()
			h.started = time.Time{}
			h.mu.Unlock()
			kit.Must(t, m.dev.InvalInode(fileNode, -1, 0))
			if now := helperPID(m.dev); now == pid || isGone(now) {
				t.Errorf("helper later: got process %d, want another one than %d", now, pid)
			}
			page.end(t)
			kit.Eventually(t, "the killed helper to end", func() bool { return isGone(pid) })

			// A helper that cannot start: the notification is direct.
			next := helperPID(m.dev)
			kit.Must(t, unix.Kill(next, unix.SIGKILL))
			kit.Eventually(t, "the end of the helper", func() bool { return !h.process.runs() })
			h.mu.Lock()
			h.started, h.command = time.Time{}, []string{"/nonexistent"}
			h.mu.Unlock()
			kit.Must(t, m.dev.InvalInode(fileNode, 0, 0))
		})
	}
}

func setCheck(h *helper, d time.Duration) {
	h.process.mu.Lock()
	defer h.process.mu.Unlock()
	h.process.check = d
}

// waitsInKernel reports whether a thread of a process waits for a page.
func waitsInKernel(pid int) bool {
	all, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	for _, e := range all {
		if stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/stat", pid, e.Name())); err == nil {
			if _, fields, _ := strings.Cut(string(stat), ") "); strings.HasPrefix(fields, "D") {
				return true
			}
		}
	}
	return false
}

// TestSilentHelperIsGivenUp checks a helper with a notification in progress. The helper is given up
// only when it does not reply to a number of pings.
func TestSilentHelperIsGivenUp(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	kit.Must(t, err)
	defer unix.Close(fds[1])
	own := os.NewFile(uintptr(fds[0]), "helper")
	conn, err := net.FileConn(own)
	kit.Must(t, errors.Join(err, own.Close()))
	defer conn.Close()
	p := &helperProcess{conn: conn.(*net.UnixConn), check: time.Hour, pending: map[uint64]chan error{1: nil}}
	for range 3 * maxMissed {
		if !p.reacts() {
			t.Fatal("a helper that replies to pings was given up")
		}
		p.finish(0, 0)
	}
	for range maxMissed {
		if !p.reacts() {
			t.Fatal("a helper was given up too early")
		}
	}
	if p.reacts() {
		t.Errorf("a helper without reply to %d pings was not given up", maxMissed)
	}
}

// TestCloseEndsConnection closes the last descriptor while a program waits. The helper runs or is
// stopped.
func TestCloseEndsConnection(t *testing.T) {
	for _, stopped := range []bool{false, true} {
		t.Run(fmt.Sprintf("stopped=%v", stopped), func(t *testing.T) {
			kit.NeedsFUSE(t)
			dir := t.TempDir()
			dev, err := OpenDevice()
			kit.Must(t, err)
			kit.Must(t, dev.Use(func(fd int) { mountTest(t, dir, fd) }))
			defer unix.Unmount(dir, unix.MNT_DETACH)
			_, err = NewDevFuse(dev, newTestFS(), resumeOptions())
			kit.Must(t, err)
			pid := useHelper(t, dev)
			result := make(chan error, 1)
			go func() { result <- unix.Stat(dir+"/none", new(unix.Stat_t)) }()
			kit.Must(t, dev.Use(func(fd int) { // the program waits
				_, err := readRequest(fd, make([]byte, 2<<20))
				kit.Must(t, err)
			}))
			if stopped {
				kit.Must(t, unix.Kill(pid, unix.SIGSTOP))
			}
			kit.Must(t, dev.Close())
			select {
			case err := <-result:
				if !errors.Is(err, unix.ECONNABORTED) {
					t.Errorf("program: got %v, want ECONNABORTED", err)
				}
			case <-time.After(kit.Timeout):
				t.Error("the connection did not end")
			}
			kit.Eventually(t, "the helper to end", func() bool { return isGone(pid) })
		})
	}
}

// getStuck serves the connection of descriptor 3 until it is killed. It answers no READ. It writes
// the INIT request to descriptor 4. When a notification waits for a READ, getStuck writes the pid
// of the helper to descriptor 5.
func getStuck(string) error {
	signal.Ignore(unix.SIGPIPE)
	dev, err := DeviceOf(os.NewFile(3, "fuse"))
	if err != nil {
		return err
	}
	began := make(chan struct{})
	begin := sync.OnceFunc(func() { close(began) })
	fs := newTestFS()
	fs.read = func(*Request, *fuse.ReadIn) ([][]byte, fuse.Status) {
		begin()
		select {}
	}
	s, err := NewDevFuse(dev, fs, resumeOptions())
	if err != nil {
		return err
	}
	initFile := os.NewFile(4, "init")
	if _, err := initFile.Write(s.Init()); err != nil {
		return err
	}
	initFile.Close()
	if err := dev.UseHelper(helperCommand); err != nil {
		return err
	}
	pid := helperPID(dev)
	go s.Serve()
	<-began
	result := make(chan error, 1)
	go func() { result <- dev.InvalInode(fileNode, 0, 0) }()
	for !waitsInKernel(pid) {
		time.Sleep(time.Millisecond)
	}
	if len(result) > 0 {
		return fmt.Errorf("notification ended: %w", <-result)
	}
	if _, err := fmt.Fprintln(os.NewFile(5, "stuck"), pid); err != nil {
		return err
	}
	select {}
}

// callForTest makes a call on a mount: see callEnv.
func callForTest(string) error {
	kind, path, _ := strings.Cut(os.Getenv(callEnv), " ")
	if kind == "stat" {
		return unix.Stat(path, new(unix.Stat_t))
	}
	flags := unix.O_RDONLY
	if kind == "direct" {
		flags |= unix.O_DIRECT
	}
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	buf := make([]byte, 4096)
	n, err := unix.Pread(fd, buf, 0)
	if err != nil || !bytes.Equal(buf[:n], fileData(0, len(buf))) {
		return fmt.Errorf("read: got %d bytes, %w, want %d bytes of the file", n, err, len(buf))
	}
	return nil
}

// callEnv is "stat PATH", "read PATH" or "direct PATH".
const callEnv = "NFSRDMAD_FRONT_TEST_CALL"

// startCall starts a process that makes one call. A process with an open file on the mount must not
// start another one, which would close its copy of the file and wait.
func startCall(t *testing.T, call string) *exec.Cmd {
	t.Helper()
	c := exec.Command("/proc/self/exe")
	c.Env = append(os.Environ(), serverEnv+"=call", callEnv+"="+call)
	c.Stderr = os.Stderr
	kit.Must(t, c.Start())
	return c
}

func waitFor(c *exec.Cmd) <-chan error {
	ended := make(chan error, 1)
	go func() { ended <- c.Wait() }()
	return ended
}

// TestKilledOwnerExits kills the process that serves a mount while a notification waits for a reply
// of this process. The process must exit, and the next one must serve the mount.
func TestKilledOwnerExits(t *testing.T) {
	kit.NeedsFUSE(t)
	dir := t.TempDir()
	dev, err := OpenDevice()
	kit.Must(t, err)
	kit.Must(t, dev.Use(func(fd int) { mountTest(t, dir, fd) }))
	kept, err := dev.File()
	kit.Must(t, err)
	kit.Must(t, dev.Close())
	defer kept.Close()

	initEnd, initWrite, err := os.Pipe()
	kit.Must(t, err)
	defer initEnd.Close()
	stuckEnd, stuckWrite, err := os.Pipe()
	kit.Must(t, err)
	defer stuckEnd.Close()
	owner := exec.Command("/proc/self/exe")
	owner.Env = append(os.Environ(), serverEnv+"=stuck")
	owner.Stderr = os.Stderr
	owner.ExtraFiles = []*os.File{kept, initWrite, stuckWrite}
	kit.Must(t, owner.Start())
	kit.Must(t, errors.Join(initWrite.Close(), stuckWrite.Close()))
	init, err := io.ReadAll(initEnd)
	kit.Must(t, err)
	read := waitFor(startCall(t, "read "+dir+"/data"))
	var pid int
	kit.Must(t, stuckEnd.SetReadDeadline(time.Now().Add(kit.Timeout)))
	_, err = fmt.Fscanln(stuckEnd, &pid)
	kit.Must(t, err)

	kit.Must(t, owner.Process.Kill())
	ended := waitFor(owner)
	select {
	case <-ended:
	case <-time.After(kit.Timeout):
		t.Error("the killed process did not exit")
	}
	if len(read) > 0 {
		t.Errorf("read without a server: got %v", <-read)
	}
	next := startServer(t, kept, init, nil)
	select {
	case err := <-read:
		kit.Must(t, err)
	case <-time.After(kit.Timeout):
		t.Error("read did not end after the resumption")
		_ = unix.Unmount(dir, unix.MNT_FORCE)
	}
	kit.Eventually(t, "the earlier helper to end", func() bool { return isGone(pid) })
	kit.Must(t, unix.Unmount(dir, unix.MNT_DETACH))
	kit.Must(t, next.Wait())
}
