package main

import (
	"bufio"
	"bytes"
	"encoding/json"
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

// pauseLimit bounds a pause: whatever goes wrong meanwhile, no process waits longer for the server.
const pauseLimit = limit

// A pausable is a "serve" process that can be made to hang with everything open.
//
// A process that has files of its mount open must not start another one during a pause, and the
// test itself should have none at all: execve(2) closes files, which asks the server, and whoever
// looks at that process in /proc waits with it.
type pausable struct {
	cmd       *exec.Cmd
	rdma, tcp string
	watchdog  *time.Timer // set during a pause
}

// pause returns when no thread of the server runs any more.
func (p *pausable) pause(t *testing.T) {
	t.Helper()
	var ws syscall.WaitStatus
	p.watchdog = time.AfterFunc(pauseLimit, func() { _ = p.cmd.Process.Signal(syscall.SIGCONT) })
	_ = p.cmd.Process.Signal(syscall.SIGSTOP)
	if _, err := syscall.Wait4(p.cmd.Process.Pid, &ws, syscall.WUNTRACED, nil); err != nil || !ws.Stopped() {
		t.Fatalf("the server does not stop: %v, status %#x", err, ws)
	}
}

// resume ends a pause, if there is one: what was seen in it was seen of a server that hangs.
func (p *pausable) resume(t *testing.T) {
	t.Helper()
	_ = p.cmd.Process.Signal(syscall.SIGCONT)
	if p.watchdog != nil && !p.watchdog.Stop() {
		t.Errorf("the pause took longer than %v", pauseLimit)
	}
	p.watchdog = nil
}

// servePausable starts one. It is resumed before the daemons of the test end.
func servePausable(t *testing.T, args ...string) *pausable {
	t.Helper()
	cmd := program(t, "nfsrdmad", append([]string{"serve", "--rdma-listen", "127.0.0.1:0"}, args...)...)
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	// it does not hang longer than the test lives
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGCONT}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := &pausable{cmd: cmd}
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
		t.Fatalf("serve says %q, %v", line, err)
	}
	p.rdma, p.tcp = m[1], m[2]
	return p
}

// A hung is a mount of a server that can be paused.
type hung struct {
	*world
	*pausable
	mnt string
}

// newHung mounts a server with the files given, by name and size in octets.
func newHung(t *testing.T, options string, files map[string]int) *hung {
	t.Helper()
	w := newWorld(t)
	for name, size := range files {
		if err := os.WriteFile(filepath.Join(w.dir, "export", name), noise(name, size), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	h := &hung{world: w, pausable: servePausable(t, filepath.Join(w.dir, "export")), mnt: w.mkdir(t, "hung")}
	opts := fmt.Sprintf("port=%s,mountport=%s,%s", portOf(t, h.rdma), portOf(t, h.tcp), options)
	nfsrdmad(t, "mount", "--control-socket", w.socket, "127.0.0.1:/", h.mnt, "-o", opts).succeeds(t)
	t.Cleanup(func() {
		nfsrdmad(t, "umount", "--control-socket", w.socket, "--force", h.mnt).succeeds(t)
		h.resume(t)
	})
	return h
}

func (h *hung) status(t *testing.T) control.MountStatus {
	t.Helper()
	var l []control.MountStatus
	out := nfsrdmad(t, "status", "--control-socket", h.socket, "--output", "json", h.mnt).succeeds(t).stdout
	if err := json.Unmarshal([]byte(out), &l); err != nil || len(l) != 1 {
		t.Fatalf("%v: %s", err, out)
	}
	return l[0]
}

// until asks for the status until ok is content with it, not as long as a pause may last.
func (h *hung) until(t *testing.T, what string, ok func(*control.MountStatus) bool) control.MountStatus {
	t.Helper()
	for deadline := time.Now().Add(pauseLimit / 2); ; time.Sleep(20 * time.Millisecond) {
		s := h.status(t)
		if ok(&s) {
			return s
		}
		if time.Now().After(deadline) {
			t.Fatalf("no %s: calls %+v, story %+v", what, s.Calls, s.History)
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

// The daemon's own question is shown as such, and the connection's story tells of its loss and of
// the next connection.
func TestStatusTellsTheStory(t *testing.T) {
	h := newHung(t, "keepalive=2,nconnect=2", nil)
	h.pause(t)
	h.until(t, "liveness call", func(s *control.MountStatus) bool {
		return callOf(s, func(c *control.PendingCall) bool {
			return c.Owner == control.OwnerLiveness &&
				c.Procedure == "NULL"
		}) != nil
	})
	h.until(t, "loss of both connections", func(s *control.MountStatus) bool {
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
		t.Errorf("story: %s", out)
	}
	h.resume(t)
	s := h.until(t, "connections", func(s *control.MountStatus) bool {
		now := map[int]string{}
		for _, n := range s.History {
			now[n.Connection] = n.Event
		}
		return now[0] == "connected" && now[1] == "connected"
	})
	for i := 1; i < len(s.History); i++ {
		if s.History[i].Time.Before(s.History[i-1].Time) {
			t.Errorf("the story is not in order: %+v", s.History)
		}
	}
}

// A kind of sleeper: its script gets the mount point as $0, opens what it reads, says "ready", and
// makes its call after a line.
type kind struct {
	script             string
	command, procedure string // as status is to name them
	// the process waits for its very own call, and gives it up when it ends
	late bool
}

// What sleepers ask for, and their sizes in octets.
var sleepersFiles = map[string]int{"fresh": 1, "direct": 200_000, "cached": 200_000}

var (
	statter      = kind{`echo ready; read go; exec stat "$0/fresh"`, "stat", "LOOKUP", true}
	directReader = kind{`exec 3<"$0/direct"; echo ready; read go; exec dd iflag=direct bs=64k count=1 status=none <&3`, "dd", "READ", true}
	// the kernel reads for whoever comes
	cachedReader = kind{`exec 3<"$0/cached"; echo ready; read go; exec cat <&3`, "cat", "READ", false}
)

// A sleeper is a process that makes one call of a mount when it is told to.
type sleeper struct {
	kind
	cmd  *exec.Cmd
	wake io.WriteCloser
	end  <-chan error
}

func (h *hung) sleeper(t *testing.T, k kind) *sleeper {
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
	s := &sleeper{k, cmd, wake, end}
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
func (s *sleeper) ended(t *testing.T) error {
	t.Helper()
	select {
	case err := <-s.end:
		return err
	case <-time.After(pauseLimit / 2):
		t.Fatalf("%s does not end", s.command)
		return nil
	}
}

func (s *sleeper) is(c *control.PendingCall) bool {
	return c.Owner == control.OwnerProcess && int(c.PID) == s.cmd.Process.Pid
}

// newSleepers mounts a server, has processes make their calls while it hangs, and waits until
// status knows of all of them.
func newSleepers(t *testing.T, kinds ...kind) (*hung, []*sleeper, control.MountStatus) {
	t.Helper()
	h := newHung(t, "keepalive=0,timeo=6000,actimeo=600", sleepersFiles)
	var l []*sleeper
	for _, k := range kinds {
		l = append(l, h.sleeper(t, k))
	}
	// so that nobody asks for attributes first
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
	status := h.until(t, "calls of all", func(m *control.MountStatus) bool {
		for _, s := range l {
			if c := callOf(m, s.is); c == nil || c.Command != s.command {
				return false
			}
		}
		return true
	})
	return h, l, status
}

// What hangs with the server is named with process, procedure and reason, and goes on with the
// server.
func TestStatusOfAHungServer(t *testing.T) {
	h, sleepers, m := newSleepers(t, statter, directReader, cachedReader)
	text := nfsrdmad(t, "status", "--control-socket", h.socket, h.mnt).succeeds(t).stdout
	for _, s := range sleepers {
		c := callOf(&m, s.is)
		if c.Procedure != s.procedure || c.WaitsFor != xprt.WaitReply || c.XID == "" || c.Slot < 0 || c.UID != 0 ||
			c.Age <= 0 || c.SinceSent < 0 || c.SinceSent > c.Age {
			t.Errorf("%s: %+v", s.command, *c)
		}
		line := regexp.MustCompile(fmt.Sprintf(`(?m)^  [0-9.]+s +%s +%s +%d +reply +%d %s uid 0$`, c.XID, s.procedure,
			c.Slot, c.PID, s.command))
		if !line.MatchString(text) {
			t.Errorf("no line %v: %s", line, text)
		}
	}
	if want := fmt.Sprintf("%d waiting (reply %d)", len(m.Calls), len(m.Calls)); !strings.Contains(text, want) {
		t.Errorf("no %q: %s", want, text)
	}
	for line := range strings.Lines(text) {
		if utf8.RuneCountInString(strings.TrimSuffix(line, "\n")) > columns && !strings.HasPrefix(line, "\txprt:") {
			t.Errorf("wider than %d columns: %q", columns, line)
		}
	}
	for _, s := range sleepers {
		select {
		case err := <-s.end:
			t.Errorf("%s did not wait for the server: %v", s.command, err)
		default:
		}
	}
	h.resume(t)
	for _, s := range sleepers {
		if err := s.ended(t); err != nil {
			t.Errorf("%s: %v", s.command, err)
		}
	}
	h.until(t, "rest", func(m *control.MountStatus) bool { return len(m.Calls) == 0 })
}

// A process that waits for a hung server can be killed. The reply comes late then, and harms
// nobody.
func TestKilledWhileTheServerHangs(t *testing.T) {
	t.Run("reply taken", func(t *testing.T) {
		h := killSleepers(t, statter, cachedReader)
		m := h.until(t, "rest", atRest)
		if m.Connects != 1 || m.Recvs != m.Sends {
			t.Errorf("%d connects, %d sends, %d receives", m.Connects, m.Sends, m.Recvs)
		}
		h.reads(t)
	})
	// The memory of a read that was given up is another's by now: the server's data for it are
	// refused, which ends the connection.
	t.Run("data refused", func(t *testing.T) {
		h := killSleepers(t, directReader)
		m := h.until(t, "rest on another connection", func(m *control.MountStatus) bool {
			return atRest(m) &&
				m.Connects == 2
		})
		if i := slices.IndexFunc(m.History, func(n control.ConnEvent) bool {
			return n.Event == "disconnected" &&
				n.Cause != ""
		}); i < 0 {
			t.Errorf("story: %+v", m.History)
		}
		if m.MRsFailed != m.MRsRecovered+m.MRsRecycled+m.MRsOrphaned {
			t.Errorf("%d MRs hurt, recovered %d, recycled %d, orphaned %d", m.MRsFailed, m.MRsRecovered,
				m.MRsRecycled, m.MRsOrphaned)
		}
		h.reads(t)
	})
}

func atRest(m *control.MountStatus) bool { return len(m.Calls) == 0 && m.SlotsInUse == 0 }

// killSleepers has processes of these kinds killed while the server hangs, sees that the server's
// view of their calls is kept, and resumes it.
func killSleepers(t *testing.T, kinds ...kind) *hung {
	t.Helper()
	h, sleepers, before := newSleepers(t, kinds...)
	for _, s := range sleepers {
		_ = s.cmd.Process.Kill()
	}
	for _, s := range sleepers {
		_ = s.ended(t)
		if ws := s.cmd.ProcessState.Sys().(syscall.WaitStatus); !ws.Signaled() || ws.Signal() != syscall.SIGKILL {
			t.Errorf("%s: %v", s.command, s.cmd.ProcessState)
		}
	}
	h.until(t, "late replies", func(m *control.MountStatus) bool {
		return !slices.ContainsFunc(sleepers, func(s *sleeper) bool {
			c := callOf(m, func(c *control.PendingCall) bool { return c.XID == callOf(&before, s.is).XID })
			return s.late && (c == nil || c.WaitsFor != xprt.WaitLate || c.Owner != control.OwnerGone ||
				c.Procedure != s.procedure)
		})
	})
	text := nfsrdmad(t, "status", "--control-socket", h.socket, h.mnt).succeeds(t).stdout
	for _, s := range sleepers {
		line := regexp.MustCompile(`(?m)^  [0-9.]+s +0x[0-9a-f]+ +` + s.procedure +
			` +\d+ +late reply +\(caller has gone\)$`)
		if s.late && !line.MatchString(text) {
			t.Errorf("no line %v: %s", line, text)
		}
	}
	h.resume(t)
	return h
}

// reads checks that the mount goes on.
func (h *hung) reads(t *testing.T) {
	t.Helper()
	for name, size := range sleepersFiles {
		if b, err := os.ReadFile(filepath.Join(h.mnt, name)); err != nil || !bytes.Equal(b, noise(name, size)) {
			t.Errorf("%s: %d octets, %v", name, len(b), err)
		}
	}
}
