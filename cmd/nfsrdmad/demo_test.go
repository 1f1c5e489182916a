package main

import (
	"bufio"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// TestInterruptedDemoCleansUp sends SIGTERM during the copy. The demo must print one line, exit
// with the code of an interrupt, and leave neither mounts nor files. internal/demo has the other
// phases.
func TestInterruptedDemoCleansUp(t *testing.T) {
	kit.NeedsFUSE(t)
	// t.TempDir is too long for a path of a Unix socket.
	tmp, err := os.MkdirTemp("", "demo")
	kit.Must(t, err)
	t.Cleanup(func() { os.RemoveAll(tmp) })
	cmd := program(t, "nfsrdmad", "demo", "--files", "40")
	cmd.Env = append(cmd.Env, "TMPDIR="+tmp)
	stdout, err := cmd.StdoutPipe()
	kit.Must(t, err)
	var errOut strings.Builder
	cmd.Stderr = &errOut
	kit.Must(t, cmd.Start())
	sent := false
	for lines := bufio.NewScanner(stdout); lines.Scan(); {
		if !sent && strings.HasPrefix(lines.Text(), "copy in ") {
			sent = true
			_ = cmd.Process.Signal(syscall.SIGTERM)
		}
	}
	_ = cmd.Wait()
	outcome{cmd.ProcessState.ExitCode(), "", errOut.String()}.fails(t, control.ExitInterrupted, "interrupted")
	if left, err := os.ReadDir(tmp); err != nil || len(left) != 0 {
		t.Errorf("got files %v, %v; want none", left, err)
	}
	if mounts, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(mounts), tmp) {
		t.Errorf("a mount still exists, %v", err)
	}
	nfsrdmad(t, "demo", "--timeout", "1ns").fails(t, 32, "not done after 1ns", "--timeout")
}
