package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
	"github.com/nfsrdmad/nfsrdmad/test/kit/systemd"
)

// foreground returns a command that mounts the server of w at dir in the foreground.
func (w *testEnv) foreground(t *testing.T, dir string, flags ...string) *exec.Cmd {
	t.Helper()
	return program(t, "nfsrdmad", append([]string{"mount", "--control-socket", w.socket, "--foreground", "127.0.0.1:/",
		dir, "-o", w.opts(w.server.RDMAAddr)}, flags...)...)
}

// startForeground starts cmd and waits until it has mounted at dir.
func startForeground(t *testing.T, cmd *exec.Cmd, dir string) {
	t.Helper()
	kit.Must(t, cmd.Start())
	t.Cleanup(func() {
		if cmd.ProcessState == nil {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
		_ = syscall.Unmount(dir, syscall.MNT_DETACH)
	})
	kit.Eventually(t, "mount", func() bool {
		_, err := os.Stat(filepath.Join(dir, "hello"))
		return err == nil
	})
}

// endForeground sends sig to a foreground mount. It must exit without an error and without a mount.
func endForeground(t *testing.T, cmd *exec.Cmd, dir string, sig syscall.Signal) {
	t.Helper()
	_ = cmd.Process.Signal(sig)
	if err := cmd.Wait(); err != nil || mounts.IsMountPoint(dir) {
		t.Errorf("after %v: got %v, mounted: %v", sig, err, mounts.IsMountPoint(dir))
	}
}

// TestClosedTerminal checks that SIGHUP unmounts in order, that nohup(1) keeps the mount, and that
// a closed log does not end the process.
func TestClosedTerminal(t *testing.T) {
	w := newTestEnv(t)
	dir := w.mkdir(t, "mnt")
	cmd := w.foreground(t, dir, "--output", "json")
	var out bytes.Buffer
	cmd.Stdout = &out
	startForeground(t, cmd, dir)
	endForeground(t, cmd, dir, syscall.SIGHUP)
	var printed control.MountInfo
	if err := json.Unmarshal(out.Bytes(), &printed); err != nil || printed.Dir != dir ||
		printed.State != control.StateMounted {
		t.Errorf("output: got %s, want the mount as JSON", &out)
	}

	inner := w.foreground(t, dir)
	cmd = exec.Command("sh", append([]string{"-c", `trap "" HUP; exec "$0" "$@"`, inner.Path}, inner.Args[1:]...)...)
	cmd.Env = inner.Env
	startForeground(t, cmd, dir)
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", cmd.Process.Pid))
	kit.Must(t, err)
	_, mask, _ := strings.Cut(string(status), "\nSigIgn:\t")
	if ignored, err := strconv.ParseUint(mask[:16], 16, 64); err != nil || ignored&(1<<(syscall.SIGHUP-1)) == 0 {
		t.Errorf("ignored signals below nohup: got %#x, %v; want SIGHUP", ignored, err)
	}
	endForeground(t, cmd, dir, syscall.SIGTERM)

	cmd = w.foreground(t, dir, "--log-level", "info")
	r, stderr, err := os.Pipe()
	kit.Must(t, err)
	cmd.Stderr = stderr
	r.Close() // every write of the log fails with EPIPE
	startForeground(t, cmd, dir)
	stderr.Close()
	endForeground(t, cmd, dir, syscall.SIGINT)

	w.mount(t, dir).succeeds(t)
	_ = w.daemon.Process.Signal(syscall.SIGHUP)
	w.stop(t, w.daemon)
}

// TestKillDuringForegroundMount kills a foreground mount at random moments. The process must exit
// and leave at most a mount that can be unmounted. A process that waited for a reply from its own
// file system would stay as a zombie.
func TestKillDuringForegroundMount(t *testing.T) {
	w := newTestEnv(t)
	dir := w.mkdir(t, "mnt")
	begin := time.Now()
	w.mount(t, dir).succeeds(t)
	typical := time.Since(begin)
	w.run(t, "umount", dir).succeeds(t)
	for range 10 {
		cmd := w.foreground(t, dir)
		kit.Must(t, cmd.Start())
		time.Sleep(typical/2 + rand.N(typical)) // any moment will do
		_ = cmd.Process.Kill()
		gone := make(chan error, 1)
		go func() { gone <- cmd.Wait() }()
		select {
		case <-gone:
		case <-time.After(limit):
			t.Errorf("process %d still exists after SIGKILL", cmd.Process.Pid)
			_ = unix.Unmount(dir, unix.MNT_FORCE) // ends the wait
			<-gone
		}
		for unix.Unmount(dir, unix.MNT_DETACH) == nil {
		}
	}
}

// awaitMessage waits for a notification that contains text.
func awaitMessage(t *testing.T, m *systemd.Manager, text string) string {
	t.Helper()
	for end := time.Now().Add(limit); ; {
		s := m.Message(limit)
		if strings.Contains(s, text) {
			return s
		}
		if time.Now().After(end) {
			t.Fatalf("no notification with %q; the last one is %q", text, s)
		}
	}
}

// TestNotifiesSystemd checks the notifications READY, WATCHDOG and STOPPING. STOPPING must extend
// the stop timeout of the unit when shutdown_timeout is longer.
func TestNotifiesSystemd(t *testing.T) {
	m := systemd.StartManager(t, 0)
	socket := filepath.Join(t.TempDir(), "s")
	cmd := program(t, "nfsrdmad", "daemon", "--control-socket", socket, "--metrics-listen", "", "--shutdown-timeout",
		"100s")
	cmd.Env = append(append(cmd.Env, m.Env()...), "WATCHDOG_USEC=200000")
	kit.Must(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	awaitMessage(t, m, "\nREADY=1\n")
	nfsrdmad(t, "list", "--control-socket", socket).succeeds(t)
	for range 2 {
		awaitMessage(t, m, "\nWATCHDOG=1\n")
	}
	_ = cmd.Process.Signal(syscall.SIGTERM)
	s := awaitMessage(t, m, "\nSTOPPING=1\n")
	var usec int
	if _, value, found := strings.Cut(s, "\nEXTEND_TIMEOUT_USEC="); found {
		usec, _ = strconv.Atoi(value[:strings.IndexByte(value, '\n')])
	}
	if d := time.Duration(usec) * time.Microsecond; d <= 100*time.Second || d > 200*time.Second {
		t.Errorf("got notification %q", s)
	}
	kit.Must(t, cmd.Wait())
}
