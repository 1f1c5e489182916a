package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

// pauseLimit bounds a pause. No process waits longer for the server, even if the test fails.
const pauseLimit = limit

// A pausableServer is a "serve" process that the test can stop and continue.
//
// A process with open files of the mount must not start another process during a pause. execve(2)
// closes files, which sends requests to the server. A process that reads /proc of the blocked
// process then blocks too.
type pausableServer struct {
	cmd       *exec.Cmd
	rdma, tcp string
	watchdog  *time.Timer // set during a pause
}

// pause stops the server and returns when all its threads have stopped.
func (p *pausableServer) pause(t *testing.T) {
	t.Helper()
	var ws syscall.WaitStatus
	p.watchdog = time.AfterFunc(pauseLimit, func() { _ = p.cmd.Process.Signal(syscall.SIGCONT) })
	_ = p.cmd.Process.Signal(syscall.SIGSTOP)
	if _, err := syscall.Wait4(p.cmd.Process.Pid, &ws, syscall.WUNTRACED, nil); err != nil || !ws.Stopped() {
		t.Fatalf("stop the server: %v, status %#x", err, ws)
	}
}

// resume continues the server. It fails the test if the pause limit already ended the pause.
func (p *pausableServer) resume(t *testing.T) {
	t.Helper()
	_ = p.cmd.Process.Signal(syscall.SIGCONT)
	if p.watchdog != nil && !p.watchdog.Stop() {
		t.Errorf("the pause took longer than %v", pauseLimit)
	}
	p.watchdog = nil
}

// servePausable starts a server. The cleanup resumes it before the daemons of the test end.
func servePausable(t *testing.T, args ...string) *pausableServer {
	t.Helper()
	listen := []string{"serve", "--rdma-listen", "127.0.0.1:0", "--tcp-listen", "127.0.0.1:0"}
	cmd := program(t, "nfsrdmad", append(listen, args...)...)
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	// Continue the server when the test process dies.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGCONT}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := &pausableServer{cmd: cmd}
	t.Cleanup(func() {
		p.resume(t)
		_ = cmd.Process.Signal(syscall.SIGTERM)
		if err := cmd.Wait(); err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	line, err := bufio.NewReader(stdout).ReadString('\n')
	m := servingLine.FindStringSubmatch(line)
	if err != nil || m == nil {
		t.Fatalf("serve: got output %q, %v", line, err)
	}
	p.rdma, p.tcp = m[1], m[2]
	return p
}

// A pausableMount is a mount of a server that the test can stop.
type pausableMount struct {
	*testEnv
	*pausableServer
	mnt string
}

// newPausableMount mounts a server with the given files: name and size in bytes.
func newPausableMount(t *testing.T, options string, files map[string]int) *pausableMount {
	t.Helper()
	w := newTestEnv(t)
	for name, size := range files {
		if err := os.WriteFile(filepath.Join(w.dir, "export", name), noise(name, size), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	h := &pausableMount{testEnv: w, pausableServer: servePausable(t, filepath.Join(w.dir, "export")),
		mnt: w.mkdir(t, "paused")}
	opts := ports(t, h.rdma, h.tcp) + "," + options
	nfsrdmad(t, "mount", "--control-socket", w.socket, "127.0.0.1:/", h.mnt, "-o", opts).succeeds(t)
	t.Cleanup(func() {
		nfsrdmad(t, "umount", "--control-socket", w.socket, "--force", h.mnt).succeeds(t)
		h.resume(t)
	})
	return h
}

func (h *pausableMount) status(t *testing.T) control.MountStatus {
	t.Helper()
	l, err := control.NewClient(h.socket).Status(t.Context(), h.mnt)
	if err != nil || len(l) != 1 {
		t.Fatalf("status of %s: got %+v, error %v; want one mount", h.mnt, l, err)
	}
	return l[0]
}

// waitStatus reads the status until ok accepts it, for half of the pause limit at most.
func (h *pausableMount) waitStatus(t *testing.T, what string, ok func(*control.MountStatus) bool) control.MountStatus {
	t.Helper()
	for deadline := time.Now().Add(pauseLimit / 2); ; time.Sleep(20 * time.Millisecond) {
		s := h.status(t)
		if ok(&s) {
			return s
		}
		if time.Now().After(deadline) {
			t.Fatalf("no %s: calls %+v, history %+v", what, s.Calls, s.History)
		}
	}
}

func callOf(s *control.MountStatus, is func(*control.PendingCall) bool) *control.PendingCall {
	for i := range s.Calls {
		if is(&s.Calls[i]) {
			return &s.Calls[i]
		}
	}
	return nil
}

// TestStatusShowsConnectionHistory checks that status shows the keepalive call of the daemon, and
// that the history shows the loss of each connection and the next connection.
func TestStatusShowsConnectionHistory(t *testing.T) {
	t.Parallel()
	h := newPausableMount(t, "keepalive=2,nconnect=2", nil)
	h.pause(t)
	h.waitStatus(t, "liveness call", func(s *control.MountStatus) bool {
		isNull := func(c *control.PendingCall) bool {
			return c.Owner == control.OwnerLiveness && c.Procedure == "NULL"
		}
		return callOf(s, isNull) != nil
	})
	h.waitStatus(t, "loss of both connections", func(s *control.MountStatus) bool {
		lost := map[int]bool{}
		for _, n := range s.History {
			if n.Event == "disconnected" {
				lost[n.Connection] = n.Cause != ""
			}
		}
		return lost[0] && lost[1]
	})
	out := nfsrdmad(t, "status", "--control-socket", h.socket, h.mnt).succeeds(t).stdout
	if !strings.Contains(out, "ago  #1 disconnected: ") {
		t.Errorf("got status %s, want a loss of connection 1 in the history", out)
	}
	h.resume(t)
	s := h.waitStatus(t, "connections", func(s *control.MountStatus) bool {
		now := map[int]string{}
		for _, n := range s.History {
			now[n.Connection] = n.Event
		}
		return now[0] == "connected" && now[1] == "connected"
	})
	for i := 1; i < len(s.History); i++ {
		if s.History[i].Time.Before(s.History[i-1].Time) {
			t.Errorf("got history %+v, want it in order of time", s.History)
		}
	}
}

// A callKind is a kind of blocked process. Its script gets the mount point as $0, opens its file,
// prints "ready", reads one line, and makes its call.
type callKind struct {
	script             string
	command, procedure string // as status must show them
	// interruptible: the call belongs to the process, and its end interrupts the call
	interruptible bool
}

// blockedFiles are the files that blocked processes read, with their sizes in bytes.
var blockedFiles = map[string]int{"fresh": 1, "direct": 200_000, "cached": 200_000}

var (
	statter      = callKind{`echo ready; read go; exec stat "$0/fresh"`, "stat", "LOOKUP", true}
	directReader = callKind{`exec 3<"$0/direct"; echo ready; read go
		exec dd iflag=direct bs=64k count=1 status=none <&3`, "dd", "READ", true}
	// The kernel reads ahead for all readers.
	cachedReader = callKind{`exec 3<"$0/cached"; echo ready; read go; exec cat <&3`, "cat", "READ", false}
)

// A blockedProcess makes one call of the mount when the test writes a line to it.
type blockedProcess struct {
	callKind
	cmd  *exec.Cmd
	wake io.WriteCloser
	end  <-chan error
}

// startProcess starts a process of kind k.
func (h *pausableMount) startProcess(t *testing.T, k callKind) *blockedProcess {
	t.Helper()
	cmd := exec.Command("sh", "-c", k.script, h.mnt)
	wake, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	end := make(chan error, 1)
	s := &blockedProcess{k, cmd, wake, end}
	r := bufio.NewReader(stdout)
	line, err := r.ReadString('\n')
	go func() {
		_, _ = io.Copy(io.Discard, r)
		end <- cmd.Wait()
	}()
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	if line != "ready\n" {
		t.Fatalf("%s: %q, %v", k.script, line, err)
	}
	return s
}

// ended waits for the end of the process.
func (s *blockedProcess) ended(t *testing.T) error {
	t.Helper()
	select {
	case err := <-s.end:
		return err
	case <-time.After(pauseLimit / 2):
		t.Fatalf("%s does not exit", s.command)
		return nil
	}
}

// made reports whether the process made call c.
func (s *blockedProcess) made(c *control.PendingCall) bool {
	return c.Owner == control.OwnerProcess && int(c.PID) == s.cmd.Process.Pid
}

// blockProcesses mounts a server, stops the server, lets one process of each kind make its call,
// and waits until status shows all the calls as sent.
func blockProcesses(t *testing.T, kinds ...callKind) (*pausableMount, []*blockedProcess, control.MountStatus) {
	t.Helper()
	h := newPausableMount(t, "keepalive=0,timeo=6000,actimeo=600", blockedFiles)
	var l []*blockedProcess
	for _, k := range kinds {
		l = append(l, h.startProcess(t, k))
	}
	// Fill the attribute cache, so that the first call of each process is the expected one.
	for _, name := range []string{"", "direct", "cached"} {
		if _, err := os.Stat(filepath.Join(h.mnt, name)); err != nil {
			t.Fatal(err)
		}
	}
	h.pause(t)
	for _, s := range l {
		if _, err := io.WriteString(s.wake, "go\n"); err != nil {
			t.Fatal(err)
		}
	}
	status := h.waitStatus(t, "calls of all processes", func(m *control.MountStatus) bool {
		for _, s := range l {
			if c := callOf(m, s.made); c == nil || c.Command != s.command || c.SinceSent < 0 {
				return false
			}
		}
		return true
	})
	return h, l, status
}

// TestStatusShowsCallsOfStoppedServer checks that status names process, procedure and reason of
// every call that waits for a stopped server, and that the calls complete when the server
// continues.
func TestStatusShowsCallsOfStoppedServer(t *testing.T) {
	h, processes, m := blockProcesses(t, statter, directReader, cachedReader)
	text := nfsrdmad(t, "status", "--control-socket", h.socket, h.mnt).succeeds(t).stdout
	for _, s := range processes {
		c := callOf(&m, s.made)
		if c.Procedure != s.procedure || c.WaitsFor != xprt.WaitReply || c.XID == "" || c.Slot < 0 || c.UID != 0 ||
			c.Age <= 0 || c.SinceSent < 0 || c.SinceSent > c.Age {
			t.Errorf("%s: %+v", s.command, *c)
		}
		line := regexp.MustCompile(fmt.Sprintf(`(?m)^  [0-9.]+s +%s +%s +%d +reply +%d %s uid 0$`, c.XID, s.procedure,
			c.Slot, c.PID, s.command))
		if !line.MatchString(text) {
			t.Errorf("got status %[2]s, want a line that matches %[1]v", line, text)
		}
	}
	if want := fmt.Sprintf("%d pending (reply %d)", len(m.Calls), len(m.Calls)); !strings.Contains(text, want) {
		t.Errorf("got status %[2]s, want %[1]q", want, text)
	}
	for line := range strings.Lines(text) {
		if utf8.RuneCountInString(strings.TrimSuffix(line, "\n")) > columns && !strings.HasPrefix(line, "\txprt:") {
			t.Errorf("got a line wider than %d columns: %q", columns, line)
		}
	}
	for _, s := range processes {
		select {
		case err := <-s.end:
			t.Errorf("%s ended while the server was stopped: %v", s.command, err)
		default:
		}
	}
	h.resume(t)
	for _, s := range processes {
		if err := s.ended(t); err != nil {
			t.Errorf("%s: %v", s.command, err)
		}
	}
	h.waitStatus(t, "end of all calls", func(m *control.MountStatus) bool { return len(m.Calls) == 0 })
}

// TestKillProcessOfStoppedServer kills processes that wait for a stopped server. Their late replies
// must do no harm.
func TestKillProcessOfStoppedServer(t *testing.T) {
	t.Run("late reply is accepted", func(t *testing.T) {
		h := killProcesses(t, statter, cachedReader)
		m := h.waitStatus(t, "idle mount", isIdle)
		if m.Connects != 1 || m.Recvs != m.Sends {
			t.Errorf("got %d connects, %d sends, %d receives; want 1 connect and equal numbers", m.Connects, m.Sends,
				m.Recvs)
		}
		h.checkFiles(t)
	})
	// The key of an interrupted read is invalid. The RDMA Write of the server fails, and that ends
	// the connection.
	t.Run("late data is refused", func(t *testing.T) {
		h := killProcesses(t, directReader)
		m := h.waitStatus(t, "idle second connection",
			func(m *control.MountStatus) bool { return isIdle(m) && m.Connects == 2 })
		lost := func(n control.ConnEvent) bool { return n.Event == "disconnected" && n.Cause != "" }
		if !slices.ContainsFunc(m.History, lost) {
			t.Errorf("got history %+v, want a lost connection with its cause", m.History)
		}
		if m.MRsFailed != m.MRsRecovered+m.MRsRecycled+m.MRsOrphaned {
			t.Errorf("got %d failed MRs, %d recovered, %d recycled, %d orphaned; want the sum", m.MRsFailed,
				m.MRsRecovered,
				m.MRsRecycled, m.MRsOrphaned)
		}
		h.checkFiles(t)
	})
}

// isIdle reports whether no call is pending and no slot is in use.
func isIdle(m *control.MountStatus) bool { return len(m.Calls) == 0 && m.SlotsInUse == 0 }

// killProcesses kills processes that wait for a stopped server. It checks that status still shows
// their calls, because the server still counts them, and continues the server.
func killProcesses(t *testing.T, kinds ...callKind) *pausableMount {
	t.Helper()
	h, processes, before := blockProcesses(t, kinds...)
	for _, s := range processes {
		_ = s.cmd.Process.Kill()
	}
	for _, s := range processes {
		_ = s.ended(t)
		if ws := s.cmd.ProcessState.Sys().(syscall.WaitStatus); !ws.Signaled() || ws.Signal() != syscall.SIGKILL {
			t.Errorf("%s: %v", s.command, s.cmd.ProcessState)
		}
	}
	h.waitStatus(t, "late replies", func(m *control.MountStatus) bool {
		return !slices.ContainsFunc(processes, func(s *blockedProcess) bool {
			c := callOf(m, func(c *control.PendingCall) bool { return c.XID == callOf(&before, s.made).XID })
			return s.interruptible && (c == nil || c.WaitsFor != xprt.WaitLate || c.Owner != control.OwnerGone ||
				c.Procedure != s.procedure)
		})
	})
	text := nfsrdmad(t, "status", "--control-socket", h.socket, h.mnt).succeeds(t).stdout
	for _, s := range processes {
		line := regexp.MustCompile(`(?m)^  [0-9.]+s +0x[0-9a-f]+ +` + s.procedure +
			` +\d+ +late reply +\(caller exited\)$`)
		if s.interruptible && !line.MatchString(text) {
			t.Errorf("got status %[2]s, want a line that matches %[1]v", line, text)
		}
	}
	h.resume(t)
	return h
}

// checkFiles checks that the mount serves all files.
func (h *pausableMount) checkFiles(t *testing.T) {
	t.Helper()
	for name, size := range blockedFiles {
		if b, err := os.ReadFile(filepath.Join(h.mnt, name)); err != nil || !bytes.Equal(b, noise(name, size)) {
			t.Errorf("read %s: got %d bytes, %v; want the content of the server", name, len(b), err)
		}
	}
}
