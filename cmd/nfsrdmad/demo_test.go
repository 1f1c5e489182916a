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

// TestInterruptedDemoCleansUp sends a signal in each phase of the demo. The demo must print one
// line, exit with the code of an interrupt, and leave neither mounts nor files.
func TestInterruptedDemoCleansUp(t *testing.T) {
	kit.NeedsFUSE(t)
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		for _, phase := range []string{"server ", "mounted ", "copy in ", "remount ", "read back "} {
			t.Run(sig.String()+" at "+strings.TrimSpace(phase), func(t *testing.T) {
				// t.TempDir is too long for a path of a Unix socket.
				tmp, err := os.MkdirTemp("", "demo")
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { os.RemoveAll(tmp) })
				cmd := program(t, "nfsrdmad", "demo", "--files", "40")
				cmd.Env = append(cmd.Env, "TMPDIR="+tmp)
				stdout, err := cmd.StdoutPipe()
				if err != nil {
					t.Fatal(err)
				}
				var errOut strings.Builder
				cmd.Stderr = &errOut
				if err := cmd.Start(); err != nil {
					t.Fatal(err)
				}
				sent := false
				for lines := bufio.NewScanner(stdout); lines.Scan(); {
					if !sent && strings.HasPrefix(lines.Text(), phase) {
						sent = true
						_ = cmd.Process.Signal(sig)
					}
				}
				_ = cmd.Wait()
				outcome{cmd.ProcessState.ExitCode(), "", errOut.String()}.fails(t, control.ExitInterrupted,
					"interrupted")
				if left, err := os.ReadDir(tmp); err != nil || len(left) != 0 {
					t.Errorf("got files %v, %v; want none", left, err)
				}
				if mounts, err := os.ReadFile("/proc/self/mountinfo"); err != nil ||
					strings.Contains(string(mounts), tmp) {
					t.Errorf("a mount still exists, %v", err)
				}
			})
		}
	}
}
