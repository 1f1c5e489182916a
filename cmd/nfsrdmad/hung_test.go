package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/daemon"
)

// A pausable is a "serve" process that can be made to hang with everything open.
type pausable struct {
	cmd       *exec.Cmd
	rdma, tcp string
}

func (p *pausable) pause()  { _ = p.cmd.Process.Signal(syscall.SIGSTOP) }
func (p *pausable) resume() { _ = p.cmd.Process.Signal(syscall.SIGCONT) }

// servePausable starts one. It is resumed before the daemons of the test end.
func servePausable(t *testing.T, args ...string) *pausable {
	t.Helper()
	cmd := program(t, "nfsrdmad", append([]string{"serve", "--rdma-listen", "127.0.0.1:0"}, args...)...)
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := &pausable{cmd: cmd}
	t.Cleanup(func() {
		p.resume()
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
		if err := os.WriteFile(filepath.Join(w.dir, "export", name), make([]byte, size), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	h := &hung{world: w, pausable: servePausable(t, filepath.Join(w.dir, "export")), mnt: w.mkdir(t, "hung")}
	opts := fmt.Sprintf("port=%s,mountport=%s,%s", portOf(t, h.rdma), portOf(t, h.tcp), options)
	nfsrdmad(t, "mount", "--control-socket", w.socket, "127.0.0.1:/", h.mnt, "-o", opts).succeeds(t)
	t.Cleanup(func() {
		nfsrdmad(t, "umount", "--control-socket", w.socket, "--force", h.mnt).succeeds(t)
		h.resume()
	})
	return h
}

func (h *hung) status(t *testing.T) daemon.MountStatus {
	t.Helper()
	var l []daemon.MountStatus
	out := nfsrdmad(t, "status", "--control-socket", h.socket, "--output", "json", h.mnt).succeeds(t).stdout
	if err := json.Unmarshal([]byte(out), &l); err != nil || len(l) != 1 {
		t.Fatalf("%v: %s", err, out)
	}
	return l[0]
}

// until asks for the status until ok is content with it.
func (h *hung) until(t *testing.T, what string, ok func(*daemon.MountStatus) bool) daemon.MountStatus {
	t.Helper()
	for deadline := time.Now().Add(limit); ; time.Sleep(20 * time.Millisecond) {
		s := h.status(t)
		if ok(&s) {
			return s
		}
		if time.Now().After(deadline) {
			t.Fatalf("no %s: calls %+v, story %+v", what, s.Calls, s.Story)
		}
	}
}

func callOf(s *daemon.MountStatus, is func(*daemon.WaitingCall) bool) *daemon.WaitingCall {
	for i := range s.Calls {
		if is(&s.Calls[i]) {
			return &s.Calls[i]
		}
	}
	return nil
}

// The daemon's own question is shown as such, and the connection's story tells of its loss and of the next connection.
func TestStatusTellsTheStory(t *testing.T) {
	h := newHung(t, "keepalive=2,nconnect=2", nil)
	h.pause()
	h.until(t, "liveness call", func(s *daemon.MountStatus) bool {
		return callOf(s, func(c *daemon.WaitingCall) bool { return c.Owner == daemon.OwnerLiveness && c.Procedure == "NULL" }) != nil
	})
	h.until(t, "loss of both connections", func(s *daemon.MountStatus) bool {
		lost := map[int]bool{}
		for _, n := range s.Story {
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
	h.resume()
	s := h.until(t, "connections", func(s *daemon.MountStatus) bool {
		now := map[int]string{}
		for _, n := range s.Story {
			now[n.Connection] = n.Event
		}
		return now[0] == "connected" && now[1] == "connected"
	})
	for i := 1; i < len(s.Story); i++ {
		if s.Story[i].Time.Before(s.Story[i-1].Time) {
			t.Errorf("the story is not in order: %+v", s.Story)
		}
	}
}
