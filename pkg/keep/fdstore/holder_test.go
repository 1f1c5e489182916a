package fdstore

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// killHolder kills a holder and waits until its process has ended.
func killHolder(t testing.TB, socket string, pid int) {
	t.Helper()
	if err := unix.Kill(pid, unix.SIGKILL); err != nil && err != unix.ESRCH {
		t.Fatal(err)
	}
	waitEnd(t, socket, pid)
}

func waitEnd(t testing.TB, socket string, pid int) {
	t.Helper()
	kit.Eventually(t, "end of the holder", func() bool { return holderPID(t, socket) != pid })
}

func TestHolderIsDetached(t *testing.T) {
	setenv(t, "NOTIFY_SOCKET", "")
	socket := testConfig(t).Socket
	leaked, err := os.Open("/dev/zero")
	kit.Must(t, err)
	defer leaked.Close()
	const scoreFile = "/proc/self/oom_score_adj"
	score, err := os.ReadFile(scoreFile)
	kit.Must(t, err)
	kit.Must(t, os.WriteFile(scoreFile, []byte("300"), 0)) // no privilege is needed to lower it again
	t.Cleanup(func() { kit.Must(t, os.WriteFile(scoreFile, score, 0)) })
	d := startDaemon(t, socket, func(cmd *exec.Cmd) {
		cmd.ExtraFiles = []*os.File{leaked} // the daemon inherits it without FD_CLOEXEC
		cmd.Env = append(os.Environ(), "SECRET=1")
	}, func(int) {})
	pid := runningHolder(t, socket)
	proc := func(pid int, file string) string {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, file))
		kit.Must(t, err)
		return strings.TrimSpace(string(b))
	}
	daemonPID := d.cmd.Process.Pid
	if of, holder := proc(daemonPID, "oom_score_adj"), proc(pid, "oom_score_adj"); of != "300" || holder != "200" {
		t.Errorf("OOM scores: got %s of the daemon and %s of the holder, want 300 and 200", of, holder)
	}
	if env := proc(pid, "environ"); env != "" {
		t.Errorf("environment: got %q, want none", env)
	}
	if cwd, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", pid)); cwd != "/" {
		t.Errorf("working directory: got %q, %v; want /", cwd, err)
	}
	sid, err := unix.Getsid(pid)
	daemonSID, _ := unix.Getsid(daemonPID)
	if err != nil || sid == daemonSID || sid == pid {
		t.Errorf("session: got %d of holder %d and daemon session %d, %v; want another, and no leader", sid, pid,
			daemonSID, err)
	}
	if strings.Contains(proc(pid, "status"), fmt.Sprintf("PPid:\t%d\n", daemonPID)) {
		t.Error("the holder is a child of the daemon")
	}
	if children := proc(daemonPID, fmt.Sprintf("task/%d/children", daemonPID)); children != "" {
		t.Errorf("the daemon has children %s, want none", children)
	}
	// 3 to 5 of listener, lock and connection; the runtime has an epoll descriptor and an eventfd,
	// and reads the limits of the cgroup
	allowed := regexp.MustCompile(`^(socket:|anon_inode:|/sys/fs/cgroup/|` + regexp.QuoteMeta(socket+lockSuffix) + `$)`)
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	kit.Must(t, err)
	for _, e := range fds {
		target, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, e.Name()))
		isStandard := len(e.Name()) == 1 && e.Name() <= "2"
		if err != nil || isStandard && target != os.DevNull || !isStandard && !allowed.MatchString(target) {
			t.Errorf("descriptor %s of the holder: unexpected %s, %v", e.Name(), target, err)
		}
	}
}

// wantEntries closes a store and checks what the next daemon finds.
func wantEntries(t *testing.T, s Store, cfg Config, want map[string]string) {
	t.Helper()
	kit.Must(t, s.Close())
	got := make(map[string]string)
	for _, e := range open(t, Holder, cfg).Kept() {
		got[e.Name] = contentOf(e.File)
	}
	if !maps.Equal(got, want) {
		t.Errorf("entries of the next daemon: got %v, want %v", got, want)
	}
}

// A daemon has entries of an earlier daemon and its own ones. Its holder is killed several times.
func TestKilledHolderIsReplaced(t *testing.T) {
	cfg, s, pid := holderWithEntry(t)
	kit.Must(t, s.Close())
	s = open(t, Holder, cfg)
	put(t, s, "b", "2")
	put(t, s, "c", "3")
	for kills := uint64(1); kills <= 3; kills++ {
		killHolder(t, cfg.Socket, pid)
		kit.Eventually(t, "another holder", func() bool { return s.Restarts() == kills })
		if err := s.Problem(); err != nil {
			t.Errorf("problem after the replacement: got %v, want none", err)
		}
		pid = runningHolder(t, cfg.Socket)
	}
	kit.Must(t, s.Remove("c"))
	put(t, s, "b", "4")
	if fi, err := os.Stat(cfg.Socket); err != nil || fi.Mode() != os.ModeSocket|0o600 {
		t.Errorf("mode of the socket: got %v, %v; want %v", fi, err, os.ModeSocket|0o600)
	}
	wantEntries(t, s, cfg, map[string]string{"a": "1", "b": "4"})
}

// The store has no holder for some time. It remembers what happens meanwhile.
func TestHolderThatCannotStart(t *testing.T) {
	cfg, s, pid := holderWithEntry(t)
	put(t, s, "b", "2")
	h := s.(*holderStore)
	setCommand := func(command []string) {
		h.mu.Lock()
		h.cfg.Command = command
		h.mu.Unlock()
	}
	setCommand([]string{"/bin/false"})
	killHolder(t, cfg.Socket, pid)
	kit.Eventually(t, "attempt to replace the holder", func() bool {
		return s.Problem() != nil && strings.Contains(s.Problem().Error(), "exit status 1")
	})
	put(t, s, "c", "3")
	put(t, s, "a", "4")
	kit.Must(t, s.Remove("b"))
	f := memfd("5")
	defer f.Close()
	kit.Must(t, s.Put("d", f))
	if err := s.Put("e", f); !errors.Is(err, ErrDuplicate) {
		t.Errorf("put the same file under another name: got %v, want %v", err, ErrDuplicate)
	}
	if err := s.Verify(); err == nil || !strings.Contains(err.Error(), "replace "+s.String()+": start holder") {
		t.Errorf("verify: got %v, want an error of the start", err)
	}
	setCommand(cfg.Command)
	if err := errors.Join(s.Verify(), s.Problem()); err != nil || s.Restarts() != 1 {
		t.Errorf("verify: got %v after %d restarts, want no error after 1", err, s.Restarts())
	}
	wantEntries(t, s, cfg, map[string]string{"a": "4", "c": "3", "d": "5"})
}

// A holder runs, but the next daemon would not get all entries.
func TestVerifyReplacesIncompleteHolder(t *testing.T) {
	for what, damage := range map[string]func(t *testing.T, s Store, cfg Config){
		"socket removed": func(t *testing.T, _ Store, cfg Config) { kit.Must(t, os.Remove(cfg.Socket)) },
		"entry missing": func(t *testing.T, s Store, _ Config) {
			kit.Must(t, s.(*holderStore).conn.call(opRemove, "a", -1, nil))
		},
		"other entry": func(t *testing.T, s Store, _ Config) {
			f := memfd("x")
			defer f.Close()
			kit.Must(t, withFD(f, func(fd int) error { return s.(*holderStore).conn.call(opPut, "a", fd, nil) }))
		},
	} {
		t.Run(what, func(t *testing.T) {
			cfg, s, _ := holderWithEntry(t)
			kit.Must(t, s.Verify())
			if n := s.Restarts(); n != 0 {
				t.Errorf("restarts of a complete holder: got %d, want 0", n)
			}
			damage(t, s, cfg)
			kit.Must(t, s.Verify())
			wantEntries(t, s, cfg, map[string]string{"a": "1"})
		})
	}
}

func TestOtherFileIsNotReplaced(t *testing.T) {
	cfg := testConfig(t)
	kit.Must(t, os.WriteFile(cfg.Socket, []byte("x"), 0o600))
	if s, err := Holder(cfg); err == nil || !strings.Contains(err.Error(), "is not a socket") {
		t.Errorf("got %v, %v; want an error that the file is not a socket", s, err)
	}
}

func TestSecondDaemonGetsError(t *testing.T) {
	cfg := testConfig(t)
	first := open(t, Holder, cfg)
	put(t, first, "a", "1")
	_, err := Holder(cfg)
	if pid := fmt.Sprintf("pid %d", os.Getpid()); !errors.Is(err, ErrBusy) || !strings.Contains(err.Error(), pid) {
		t.Errorf("second daemon: got %v, want %v with %s", err, ErrBusy, pid)
	}
	put(t, first, "b", "2")
	kit.Must(t, first.Close())
	if next := open(t, Holder, cfg); len(next.Kept()) != 2 {
		t.Errorf("entries after the first daemon: got %v, want 2", next.Kept())
	}
}

// Many daemons start at the same time without a holder. One gets the store.
func TestConcurrentStartsHaveOneWinner(t *testing.T) {
	cfg := testConfig(t)
	const daemons = 6
	type result struct {
		s   Store
		err error
	}
	results := make(chan result)
	for range daemons {
		go func() {
			s, err := Holder(cfg)
			results <- result{s, err}
		}()
	}
	var winners []Store
	for range daemons {
		switch r := <-results; {
		case r.err == nil:
			winners = append(winners, r.s)
		case !errors.Is(r.err, ErrBusy):
			t.Errorf("got %v, want %v", r.err, ErrBusy)
		}
	}
	if len(winners) != 1 {
		t.Errorf("daemons with the store: got %d, want 1", len(winners))
	}
	pid := runningHolder(t, cfg.Socket)
	for _, s := range winners {
		s.Close()
	}
	waitEnd(t, cfg.Socket, pid)
}

// holderWithEntry starts a holder with the entry "a", and returns its store and its process.
func holderWithEntry(t *testing.T) (cfg Config, s Store, pid int) {
	t.Helper()
	cfg = testConfig(t)
	s = open(t, Holder, cfg)
	pid = runningHolder(t, cfg.Socket)
	put(t, s, "a", "1")
	return cfg, s, pid
}

func TestEmptyHolderEnds(t *testing.T) {
	cfg, s, pid := holderWithEntry(t)
	s.Close()
	s = open(t, Holder, cfg)
	if now := holderPID(t, cfg.Socket); now != pid || len(s.Kept()) != 1 {
		t.Fatalf("holder with an entry: got pid %d with %v, want %d with one entry", now, s.Kept(), pid)
	}
	kit.Must(t, s.Remove("a"))
	put(t, s, "b", "2")
	kit.Must(t, s.Remove("b"))
	s.Close()
	waitEnd(t, cfg.Socket, pid)
	if _, err := os.Lstat(cfg.Socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("socket: got %v, want %v", err, os.ErrNotExist)
	}
}

// Without its socket, no daemon can reach the holder. Its entries must not stay for ever.
func TestUnreachableHolderEnds(t *testing.T) {
	kit.Long(t)
	for _, connected := range []bool{true, false} {
		t.Run(fmt.Sprintf("connected=%v", connected), func(t *testing.T) {
			cfg := testConfig(t)
			s := open(t, Holder, cfg)
			pid := runningHolder(t, cfg.Socket)
			put(t, s, "a", "1")
			if !connected {
				s.Close()
			}
			kit.Must(t, os.Remove(cfg.Socket))
			if connected {
				put(t, s, "b", "1")
				s.Close()
			}
			waitEnd(t, cfg.Socket, pid)
		})
	}
}

func TestTerminatedHolderWaitsForDaemon(t *testing.T) {
	cfg, s, pid := holderWithEntry(t)
	for _, sig := range []unix.Signal{unix.SIGHUP, unix.SIGINT, unix.SIGTERM} {
		kit.Must(t, unix.Kill(pid, sig))
	}
	put(t, s, "b", "1")
	s.Close()
	waitEnd(t, cfg.Socket, pid)
}

func TestStoppedHolderTimesOut(t *testing.T) {
	cfg, s, pid := holderWithEntry(t)
	h := s.(*holderStore)
	h.mu.Lock()
	h.cfg.Timeout, h.conn.timeout = 100*time.Millisecond, 100*time.Millisecond
	h.mu.Unlock()
	kit.Must(t, unix.Kill(pid, unix.SIGSTOP))
	kit.Eventually(t, "stop of all threads of the holder", func() bool {
		tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
		for _, task := range tasks {
			if b, _ := os.ReadFile(task); !strings.Contains(string(b), "State:\tT") {
				return false
			}
		}
		return len(tasks) > 0
	})
	put(t, s, "a", "2") // the holder keeps "1" until the next attempt
	if err := s.Problem(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("problem: got %v, want %v", err, os.ErrDeadlineExceeded)
	}
	if err := s.Verify(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("verify: got %v, want %v", err, os.ErrDeadlineExceeded)
	}
	h.mu.Lock()
	h.cfg.Timeout = cfg.Timeout
	h.mu.Unlock()
	kit.Must(t, unix.Kill(pid, unix.SIGCONT))
	kit.Must(t, s.Verify())
	if now := holderPID(t, cfg.Socket); now != pid {
		t.Errorf("got holder %d, want %d again", now, pid)
	}
	wantEntries(t, s, cfg, map[string]string{"a": "2"})
}

func TestOtherUserIsRefused(t *testing.T) {
	kit.NeedsRoot(t)
	cfg := testConfig(t)
	s := open(t, Holder, cfg)
	put(t, s, "a", "1")
	for dir := filepath.Dir(cfg.Socket); dir != os.TempDir(); dir = filepath.Dir(dir) {
		kit.Must(t, os.Chmod(dir, 0o711))
	}
	s.Close()
	if err := asOther(t, func() error { return dialAndGreet(cfg.Socket) }); !errors.Is(err, unix.EACCES) {
		t.Errorf("mode of the socket: got %v, want %v", err, unix.EACCES)
	}
	kit.Must(t, os.Chmod(cfg.Socket, 0o666))
	if err := asOther(t, func() error { return dialAndGreet(cfg.Socket) }); !errors.Is(err, os.ErrPermission) ||
		errors.Is(err, unix.EACCES) {
		t.Errorf("credentials of the peer: got %v, want %v of the holder", err, os.ErrPermission)
	}
	if err := dialAndGreet(cfg.Socket); err != nil {
		t.Errorf("own user: %v", err)
	}
}

// asOther calls do in a thread of another user.
func asOther(t *testing.T, do func() error) error {
	t.Helper()
	result := make(chan error)
	go func() {
		runtime.LockOSThread() // without unlock: the thread ends with the goroutine
		const other = 65534
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, other, other, other); errno != 0 {
			result <- errno
			return
		}
		result <- do()
	}()
	return <-result
}

// dialAndGreet returns the error of the greeting of a holder. It connects in the calling thread.
func dialAndGreet(socket string) error {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: socket}); err != nil {
		return err
	}
	b := make([]byte, maxMessage)
	n, err := unix.Read(fd, b)
	if err != nil || n < headerBytes {
		return fmt.Errorf("greeting of %d bytes: %w", n, err)
	}
	if b[1] == statusOK {
		return nil
	}
	return &refusedError{status: b[1], text: string(b[headerBytes:n])}
}

func TestHolderSurvivesHostileMessages(t *testing.T) {
	cfg := testConfig(t)
	s := open(t, Holder, cfg)
	put(t, s, "a", "1")
	pid := runningHolder(t, cfg.Socket)
	before := descriptors(t, pid) // of the holder, with one connection
	s.Close()
	const closed = 255 // the holder sends no reply
	name := func(n int) string { return strings.Repeat("n", n) }
	for _, c := range []struct {
		what    string
		message string
		fds     int
		status  byte
	}{
		{"empty message", "", 0, closed},
		{"empty message with a descriptor", "", 1, closed},
		{"one byte", "\x01", 0, statusInvalid},
		{"version 0", "\x00\x01a", 1, statusVersion},
		{"version 2", "\x02\x01a", 1, statusVersion},
		{"unknown operation", "\x01\x04", 0, statusInvalid},
		{"operation 255", "\x01\xffa", 1, statusInvalid},
		{"put without name", "\x01\x01", 1, statusInvalid},
		{"put without descriptor", "\x01\x01b", 0, statusInvalid},
		{"put with two descriptors", "\x01\x01b", 2, statusInvalid},
		{"put with 253 descriptors", "\x01\x01b", 253, statusInvalid},
		{"long name", "\x01\x01" + name(MaxName+1), 1, statusInvalid},
		{"message of maximal length", "\x01\x01" + name(maxMessage-headerBytes), 1, statusInvalid},
		{"long message", "\x01\x01" + name(maxMessage), 1, statusInvalid},
		{"very long message", "\x01\x01" + name(100000), 1, statusInvalid},
		{"colon", "\x01\x01a:b", 1, statusInvalid},
		{"NUL", "\x01\x01a\x00b", 1, statusInvalid},
		{"not ASCII", "\x01\x01\xc3\xa4", 1, statusInvalid},
		{"remove with descriptor", "\x01\x02a", 1, statusInvalid},
		{"remove without name", "\x01\x02", 0, statusInvalid},
		{"list with name", "\x01\x03a", 0, statusInvalid},
		{"list with descriptor", "\x01\x03", 1, statusInvalid},
	} {
		conn := connect(t, cfg.Socket)
		var oob []byte
		if c.fds > 0 {
			oob = unix.UnixRights(make([]int, c.fds)...) // standard input
		}
		if err := sendRaw(conn, []byte(c.message), oob); err != nil {
			t.Fatalf("%s: %v", c.what, err)
		}
		b, _, err := receive(conn)
		if c.status == closed {
			if !errors.Is(err, io.EOF) {
				t.Errorf("%s: got %q, %v; want %v", c.what, b, err, io.EOF)
			}
		} else if err != nil || b[0] != protocolVersion || b[1] != c.status {
			t.Errorf("%s: got %q, %v; want status %d", c.what, b, err, c.status)
		} else if _, _, err := receive(conn); err == nil {
			t.Errorf("%s: the connection is open", c.what)
		}
		conn.Close()
	}
	if holderPID(t, cfg.Socket) != pid {
		t.Fatal("the holder has ended")
	}
	next := open(t, Holder, cfg)
	if kept := next.Kept(); len(kept) != 1 || kept[0].Name != "a" || contentOf(kept[0].File) != "1" {
		t.Errorf("entries: got %v, want a", kept)
	}
	kit.Eventually(t, "the descriptors from before in the holder", func() bool { return descriptors(t, pid) == before })
}

// sendRaw sends a message. Unlike the functions of package unix, it can send a descriptor without
// data.
func sendRaw(conn *net.UnixConn, message, oob []byte) error {
	iov := unix.Iovec{Base: unsafe.SliceData(message)}
	iov.SetLen(len(message))
	header := unix.Msghdr{Iov: &iov, Control: unsafe.SliceData(oob)}
	header.SetIovlen(1)
	header.SetControllen(len(oob))
	return withFD(conn, func(fd int) error {
		_, _, errno := unix.Syscall(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(&header)), 0)
		if errno != 0 {
			return errno
		}
		return nil
	})
}

// connect connects to a holder and reads its greeting.
func connect(t testing.TB, socket string) *net.UnixConn {
	t.Helper()
	conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: socket, Net: "unixpacket"})
	kit.Must(t, err)
	kit.Must(t, conn.SetDeadline(time.Now().Add(kit.Timeout)))
	if b, _, err := receive(conn); err != nil || !bytes.Equal(b, []byte{protocolVersion, statusOK}) {
		t.Fatalf("greeting: got %q, %v", b, err)
	}
	return conn
}

// The next daemon connects before the holder has read the last request of a killed daemon.
func TestRequestBeforeEndIsExecuted(t *testing.T) {
	cfg := testConfig(t)
	for i := range 10 {
		s := open(t, Holder, cfg)
		if n := len(s.Kept()); n != i {
			t.Fatalf("entries of daemon %d: got %d", i, n)
		}
		f := memfd("x")
		err := withFD(f, func(fd int) error { return send(s.(*holderStore).conn.conn, opPut, strconv.Itoa(i), fd) })
		kit.Must(t, err)
		f.Close()
		s.Close()
	}
}

func TestHolderBoundsEntries(t *testing.T) {
	kit.Long(t)
	cfg := testConfig(t)
	s := open(t, Holder, cfg)
	for i := range MaxEntries {
		put(t, s, strconv.Itoa(i), "x")
	}
	f := memfd("y")
	defer f.Close()
	if err := s.Put("more", f); !errors.Is(err, ErrFull) {
		t.Errorf("put of one more: got %v, want %v", err, ErrFull)
	}
	if err := s.Put("7", f); err != nil {
		t.Errorf("replace in a full store: %v", err)
	}
	s.Close()
	s = open(t, Holder, cfg)
	if n := len(s.Kept()); n != MaxEntries {
		t.Errorf("entries: got %d, want %d", n, MaxEntries)
	}
	for _, e := range s.Kept() {
		want := "x"
		if e.Name == "7" {
			want = "y"
		}
		if got := contentOf(e.File); got != want {
			t.Errorf("entry %s: got %q, want %q", e.Name, got, want)
		}
	}
}

// The connection of a mount exists as long as a descriptor of /dev/fuse is open.
func TestHolderKeepsFUSEConnection(t *testing.T) {
	kit.NeedsFUSE(t)
	cfg := testConfig(t)
	s := open(t, Holder, cfg)
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	kit.Must(t, err)
	f := os.NewFile(uintptr(fd), "/dev/fuse")
	dir := t.TempDir()
	options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fd)
	kit.Must(t, unix.Mount("nfsrdmad-test", dir, "fuse", 0, options))
	defer unix.Unmount(dir, unix.MNT_DETACH) //nolint:errcheck // unmounted below if the test passes
	kit.Must(t, s.Put("fuse", f))
	f.Close()
	s.Close()
	s = open(t, Holder, cfg)
	if len(s.Kept()) != 1 {
		t.Fatalf("entries: got %v, want one", s.Kept())
	}
	f = s.Kept()[0].File
	b := make([]byte, 1<<17)
	n, err := f.Read(b)
	const fuseInit = 26 // FUSE_INIT of linux/fuse.h
	if err != nil || n < 8 || b[4] != fuseInit {
		t.Errorf("first request: got %x, %v; want FUSE_INIT", b[:min(n, 8)], err)
	}
	kit.Must(t, unix.Unmount(dir, 0))
	if _, err := f.Read(b); !errors.Is(err, unix.ENODEV) {
		t.Errorf("read after unmount: got %v, want %v", err, unix.ENODEV)
	}
}

func TestHolderOfOtherVersion(t *testing.T) {
	cfg := testConfig(t)
	l, err := net.Listen("unixpacket", cfg.Socket)
	kit.Must(t, err)
	defer l.Close()
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		_, _ = c.Write([]byte{protocolVersion + 1, statusOK})
		c.Close()
	}()
	if _, err := Holder(cfg); err == nil || !strings.Contains(err.Error(), "version 2 of the protocol, want 1") {
		t.Errorf("got %v, want an error with both versions", err)
	}
}

func TestCommandThatRunsNoHolder(t *testing.T) {
	cfg := testConfig(t)
	for _, command := range [][]string{nil, {"/bin/false"}, {"/nonexistent"}, {"/bin/true"}} {
		cfg.Command = command
		if s, err := Holder(cfg); err == nil {
			t.Errorf("command %q: got %v, want an error", command, s)
		}
		if _, err := os.Lstat(cfg.Socket); len(command) > 0 && command[0] != "/bin/true" && err == nil {
			t.Errorf("command %q: the socket remains", command)
		}
	}
}
