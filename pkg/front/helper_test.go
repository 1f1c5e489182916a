package front

import (
	"bytes"
	"errors"
	"fmt"
	"io"
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
	must(t, d.UseHelper(helperCommand))
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
	fs.read = func(_ <-chan struct{}, in *fuse.ReadIn) (fuse.ReadResult, fuse.Status) {
		once.Do(func() { close(h.began) })
		<-h.release
		return fs.data(in), fuse.OK
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
	must(t, err)
	defer r.Close()
	_, err = unix.FcntlInt(w.Fd(), unix.F_SETFD, 0)
	must(t, err)
	pid := useHelper(t, m.dev)
	must(t, w.Close())
	must(t, r.SetReadDeadline(time.Now().Add(testTimeout)))
	if _, err := r.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("pipe that the helper inherited: got %v, want EOF", err)
	}
	if comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid)); string(comm) != helperComm+"\n" {
		t.Errorf("name: got %q, want %s", comm, helperComm)
	}
	if group, err := unix.Getpgid(pid); err != nil || group != pid {
		t.Errorf("process group: got %d, %v, want %d", group, err, pid)
	}
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	must(t, err)
	for _, e := range fds {
		to, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, e.Name()))
		fd, _ := strconv.Atoi(e.Name())
		if fd > helperSocketFD && !strings.HasPrefix(to, "anon_inode:") && !strings.HasPrefix(to, "/sys/fs/cgroup") {
			t.Errorf("descriptor %d of the helper: %s", fd, to)
		}
	}
	for _, s := range []syscall.Signal{unix.SIGHUP, unix.SIGINT, unix.SIGTERM} {
		must(t, unix.Kill(pid, s))
	}
	must(t, m.dev.InvalInode(fileNode, 0, 0))
	if now := helperPID(m.dev); now != pid || isGone(pid) {
		t.Errorf("helper after signals: got process %d, want %d", now, pid)
	}
	if err := m.dev.UseHelper(helperCommand); !errors.Is(err, os.ErrExist) {
		t.Errorf("second UseHelper: got %v, want %v", err, os.ErrExist)
	}
	must(t, unix.Unmount(m.dir, 0))
	m.awaitEnd(t)
	must(t, m.dev.Close())
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

// TestHelperErrors compares the results with those of notifications without helper.
func TestHelperErrors(t *testing.T) {
	m := mount(t, newTestFS())
	useHelper(t, m.dev)
	long := strings.Repeat("x", 2*maxNotification)
	direct := &Device{file: m.dev.file, conn: m.dev.conn}
	for _, c := range []struct {
		name string
		call func(d *Device) error
		want error
	}{
		{"unknown node", func(d *Device) error { return d.InvalInode(77, 0, 0) }, nil},
		{"empty name", func(d *Device) error { return d.InvalEntry(fuse.FUSE_ROOT_ID, "") }, nil},
		{"long name", func(d *Device) error { return d.InvalEntry(fuse.FUSE_ROOT_ID, long[:maxNotification-100]) },
			unix.ENAMETOOLONG},
		{"longer than a message", func(d *Device) error { return d.InvalEntry(fuse.FUSE_ROOT_ID, long) },
			unix.ENAMETOOLONG},
		{"size", func(d *Device) error { return d.ExtendSize(77, 4096) }, nil},
		{"unknown kind", func(d *Device) error { return d.notify(newNotification(waitsNever, -99)) }, unix.EINVAL},
	} {
		got, want := c.call(m.dev), c.call(direct)
		if !errors.Is(got, c.want) || fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: got %v, without helper %v, want %v", c.name, got, want, c.want)
		}
	}
}

func TestUseHelperReportsStart(t *testing.T) {
	d, err := OpenDevice()
	must(t, err)
	defer d.Close()
	for _, command := range [][]string{nil, {"/nonexistent"}, {"/bin/false"}} {
		if err := d.UseHelper(command); err == nil || d.helper.Load() != nil {
			t.Errorf("UseHelper(%q): got error %v, want one and no helper", command, err)
		}
	}
}

// TestRunHelperChecksDescriptors runs the helper as a user would.
func TestRunHelperChecksDescriptors(t *testing.T) {
	null, err := os.Open(os.DevNull)
	must(t, err)
	defer null.Close()
	for _, files := range [][]*os.File{nil, {null, null}} {
		c := exec.Command(helperCommand[0], helperCommand[1:]...)
		c.ExtraFiles = files
		out, err := c.CombinedOutput()
		if err == nil || !strings.Contains(string(out), "only the daemon starts the helper") {
			t.Errorf("helper with descriptors %v: got %v, %s", files, err, out)
		}
	}
}

// TestHelperLimitsWaits sends more notifications that wait than the helper handles at a time.
func TestHelperLimitsWaits(t *testing.T) {
	fs := newTestFS()
	page := holdPage(fs)
	m := mount(t, fs)
	pid := useHelper(t, m.dev)
	page.begin(t, m)
	var calls sync.WaitGroup
	results := make(chan error, maxPending+20)
	for range cap(results) {
		calls.Go(func() { results <- m.dev.InvalInode(fileNode, 0, 0) })
	}
	slots := m.dev.helper.Load().slots[waitsForPages]
	await(t, "notifications to wait", func() bool { return len(slots) == maxPending && threads(pid) > maxPending })
	// Others do not queue behind them.
	must(t, m.dev.InvalInode(fileNode, -1, 0))
	must(t, m.dev.ExpireEntry(fuse.FUSE_ROOT_ID, "other"))
	if n := threads(pid); len(results) != 0 || n > maxPending+30 {
		t.Errorf("while the page is locked: %d results and %d threads, want 0 and about %d", len(results), n,
			maxPending)
	}
	page.end(t)
	calls.Wait()
	for range cap(results) {
		must(t, <-results)
	}
}

func threads(pid int) int {
	all, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	return len(all)
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
			await(t, "the notification to wait", func() bool { return waitsInKernel(pid) })
			must(t, unix.Kill(pid, sig))
			// The thread that waits in the kernel keeps the socket open.
			select {
			case err := <-result:
				if !errors.Is(err, ErrHelper) {
					t.Errorf("notification: got %v, want %v", err, ErrHelper)
				}
			case <-time.After(testTimeout):
				t.Error("notification did not return")
			}
			// No new helper within a second after the start of the last one: the notification is
			// direct.
			h.mu.Lock()
			h.started = time.Now().Add(time.Hour)
			h.mu.Unlock()
			must(t, m.dev.InvalInode(fileNode, -1, 0))
			if now := helperPID(m.dev); now != pid {
				t.Errorf("helper within a second: got process %d, want %d", now, pid)
			}
			h.mu.Lock()
			h.started = time.Time{}
			h.mu.Unlock()
			must(t, m.dev.InvalInode(fileNode, -1, 0))
			if now := helperPID(m.dev); now == pid || isGone(now) {
				t.Errorf("helper later: got process %d, want another one than %d", now, pid)
			}
			page.end(t)
			await(t, "the killed helper to end", func() bool { return isGone(pid) })

			// A helper that cannot start: the notification is direct.
			next := helperPID(m.dev)
			must(t, unix.Kill(next, unix.SIGKILL))
			await(t, "the end of the helper", func() bool { return !h.process.runs() })
			h.mu.Lock()
			h.started, h.command = time.Time{}, []string{"/nonexistent"}
			h.mu.Unlock()
			must(t, m.dev.InvalInode(fileNode, 0, 0))
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

// TestSlowNotificationKeepsHelper checks that a helper that reacts is not killed.
func TestSlowNotificationKeepsHelper(t *testing.T) {
	fs := newTestFS()
	page := holdPage(fs)
	m := mount(t, fs)
	pid := useHelper(t, m.dev)
	h := m.dev.helper.Load()
	const check = 100 * time.Millisecond
	setCheck(h, check)
	page.begin(t, m)
	result := make(chan error, 1)
	go func() { result <- m.dev.InvalInode(fileNode, 0, 0) }()
	time.Sleep((maxMissed + 15) * check)
	if len(result) != 0 || isGone(pid) {
		t.Error("a notification that waits ended, or the helper was killed")
	}
	page.end(t)
	must(t, <-result)
	h.process.mu.Lock()
	defer h.process.mu.Unlock()
	if len(h.process.pending) != 0 {
		t.Errorf("requests in progress: got %d, want 0", len(h.process.pending))
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
			must(t, err)
			must(t, dev.Use(func(fd int) { mountTest(t, dir, fd) }))
			defer unix.Unmount(dir, unix.MNT_DETACH)
			_, err = NewDevFuse(dev, newTestFS(), resumeOptions())
			must(t, err)
			pid := useHelper(t, dev)
			result := make(chan error, 1)
			go func() { result <- unix.Stat(dir+"/none", new(unix.Stat_t)) }()
			must(t, dev.Use(func(fd int) { // the program waits
				_, err := readRequest(fd, make([]byte, 2<<20))
				must(t, err)
			}))
			if stopped {
				must(t, unix.Kill(pid, unix.SIGSTOP))
			}
			start := time.Now()
			must(t, dev.Close())
			if d := time.Since(start); d > 2*closeTimeout {
				t.Errorf("Close took %v, want at most %v", d, closeTimeout)
			}
			select {
			case err := <-result:
				if !errors.Is(err, unix.ECONNABORTED) {
					t.Errorf("program: got %v, want ECONNABORTED", err)
				}
			case <-time.After(testTimeout):
				t.Error("the connection did not end")
			}
			await(t, "the helper to end", func() bool { return isGone(pid) })
		})
	}
}

// getStuck serves the connection of descriptor 3 until it is killed. It answers no READ. It writes
// the INIT request to descriptor 4. When a notification waits for a READ, getStuck writes the pid
// of the helper to descriptor 5.
func getStuck(mode string) error {
	signal.Ignore(unix.SIGPIPE)
	dev, err := DeviceOf(os.NewFile(3, "fuse"))
	if err != nil {
		return err
	}
	began := make(chan struct{})
	begin := sync.OnceFunc(func() { close(began) })
	fs := newTestFS()
	fs.read = func(<-chan struct{}, *fuse.ReadIn) (fuse.ReadResult, fuse.Status) {
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
	pid := os.Getpid()
	if mode != "stuck without helper" {
		if err := dev.UseHelper(helperCommand); err != nil {
			return err
		}
		pid = helperPID(dev)
	}
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
// start another one: see TestResumeAfterKill.
func startCall(t *testing.T, call string) *exec.Cmd {
	t.Helper()
	c := exec.Command("/proc/self/exe")
	c.Env = append(os.Environ(), serverEnv+"=call", callEnv+"="+call)
	c.Stderr = os.Stderr
	must(t, c.Start())
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
	must(t, err)
	must(t, dev.Use(func(fd int) { mountTest(t, dir, fd) }))
	kept, err := dev.File()
	must(t, err)
	must(t, dev.Close())
	defer kept.Close()

	initEnd, initWrite, err := os.Pipe()
	must(t, err)
	defer initEnd.Close()
	stuckEnd, stuckWrite, err := os.Pipe()
	must(t, err)
	defer stuckEnd.Close()
	owner := exec.Command("/proc/self/exe")
	owner.Env = append(os.Environ(), serverEnv+"=stuck")
	owner.Stderr = os.Stderr
	owner.ExtraFiles = []*os.File{kept, initWrite, stuckWrite}
	must(t, owner.Start())
	must(t, errors.Join(initWrite.Close(), stuckWrite.Close()))
	init, err := io.ReadAll(initEnd)
	must(t, err)
	read := waitFor(startCall(t, "read "+dir+"/data"))
	var pid int
	must(t, stuckEnd.SetReadDeadline(time.Now().Add(testTimeout)))
	_, err = fmt.Fscanln(stuckEnd, &pid)
	must(t, err)

	must(t, owner.Process.Kill())
	ended := waitFor(owner)
	select {
	case <-ended:
	case <-time.After(testTimeout):
		t.Error("the killed process did not exit")
	}
	if len(read) > 0 {
		t.Errorf("read without a server: got %v", <-read)
	}
	next := startServer(t, kept, "devfuse", &testServer{init: init})
	select {
	case err := <-read:
		must(t, err)
	case <-time.After(testTimeout):
		t.Error("read did not end after the resumption")
		_ = unix.Unmount(dir, unix.MNT_FORCE)
	}
	await(t, "the earlier helper to end", func() bool { return isGone(pid) })
	must(t, unix.Unmount(dir, unix.MNT_DETACH))
	must(t, next.Wait())
}

// BenchmarkNotify compares notifications from this process with those through a helper.
func BenchmarkNotify(b *testing.B) {
	m := mount(b, newTestFS())
	open(b, m.path("data"), unix.O_RDONLY)
	run := func(b *testing.B) {
		b.Run("attributes", func(b *testing.B) {
			for b.Loop() {
				must(b, m.dev.InvalInode(fileNode, -1, 0))
			}
		})
		b.Run("pages", func(b *testing.B) {
			for b.Loop() {
				must(b, m.dev.InvalInode(fileNode, 0, 0))
			}
		})
		b.Run("attributes-8", func(b *testing.B) {
			b.SetParallelism(4)
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					must(b, m.dev.InvalInode(fileNode, -1, 0))
				}
			})
		})
	}
	b.Run("direct", run)
	useHelper(b, m.dev)
	b.Run("helper", run)
}
