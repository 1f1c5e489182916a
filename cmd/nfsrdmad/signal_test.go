package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/test/kit/systemd"
)

// TestClosedTerminal checks that SIGHUP unmounts in order, that nohup(1) keeps the mount, and that
// a closed log does not end the process.
func TestClosedTerminal(t *testing.T) {
	t.Run("daemon", func(t *testing.T) {
		w := newTestEnv(t)
		w.mount(t, w.mkdir(t, "mnt")).succeeds(t)
		_ = w.daemon.Process.Signal(syscall.SIGHUP)
		w.stop(t, w.daemon)
	})
	t.Run("foreground", func(t *testing.T) {
		w := newTestEnv(t)
		cmd := w.foreground(t)
		_ = cmd.Process.Signal(syscall.SIGHUP)
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
		if mounts, _ := os.ReadFile("/proc/self/mountinfo"); strings.Contains(string(mounts), w.dir) {
			t.Error("a mount still exists after the process exited")
		}
	})
	t.Run("nohup", func(t *testing.T) {
		w := newTestEnv(t)
		dir := w.mkdir(t, "mnt")
		inner := program(t, "nfsrdmad", "mount", "--control-socket", w.socket, "--foreground", "127.0.0.1:/", dir,
			"-o", w.opts(w.server.RDMAAddr))
		cmd := exec.Command("sh", append([]string{"-c", `trap "" HUP; exec "$0" "$@"`, inner.Path},
			inner.Args[1:]...)...)
		cmd.Env = inner.Env
		w.startForeground(t, cmd, dir)
		_ = cmd.Process.Signal(syscall.SIGHUP)
		// enough for a process that does not ignore SIGHUP to end
		time.Sleep(200 * time.Millisecond)
		if b, err := os.ReadFile(filepath.Join(dir, "hello")); err != nil || string(b) != "world" {
			t.Errorf("read after SIGHUP: got %q, %v", b, err)
		}
		_ = cmd.Process.Signal(syscall.SIGTERM)
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	})
	t.Run("closed log", func(t *testing.T) {
		w := newTestEnv(t)
		dir := w.mkdir(t, "mnt")
		cmd := program(t, "nfsrdmad", "mount", "--control-socket", w.socket, "--foreground", "--log-level", "info",
			"127.0.0.1:/", dir, "-o", w.opts(w.server.RDMAAddr))
		r, stderr, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		cmd.Stderr = stderr
		r.Close() // every write of the log fails with EPIPE
		w.startForeground(t, cmd, dir)
		stderr.Close()
		_ = cmd.Process.Signal(syscall.SIGTERM)
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	})
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

// TestNotifiesSystemd checks the notifications READY and STOPPING. STOPPING must extend the stop
// timeout of the unit when shutdown_timeout is longer.
func TestNotifiesSystemd(t *testing.T) {
	m := systemd.StartManager(t, 0)
	socket := filepath.Join(t.TempDir(), "s")
	cmd := program(t, "nfsrdmad", "daemon", "--control-socket", socket, "--metrics-listen", "", "--shutdown-timeout",
		"100s")
	cmd.Env = append(cmd.Env, m.Env()...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Process.Kill()
	if s := m.Message(limit); !strings.Contains(s, "\nREADY=1\n") {
		t.Errorf("got notification %q", s)
	}
	nfsrdmad(t, "list", "--control-socket", socket).succeeds(t)
	_ = cmd.Process.Signal(syscall.SIGTERM)
	s := m.Message(limit)
	var usec int
	if _, value, found := strings.Cut(s, "\nEXTEND_TIMEOUT_USEC="); found {
		usec, _ = strconv.Atoi(value[:strings.IndexByte(value, '\n')])
	}
	if d := time.Duration(usec) * time.Microsecond; !strings.Contains(s, "\nSTOPPING=1\n") || d <= 100*time.Second ||
		d > 200*time.Second {
		t.Errorf("got notification %q", s)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

// TestFeedsWatchdog checks that the daemon notifies the watchdog of systemd again and again.
func TestFeedsWatchdog(t *testing.T) {
	t.Parallel()
	m := systemd.StartManager(t, 0)
	socket := filepath.Join(t.TempDir(), "s")
	cmd := program(t, "nfsrdmad", "daemon", "--control-socket", socket, "--metrics-listen", "")
	cmd.Env = append(append(cmd.Env, m.Env()...), "WATCHDOG_USEC=1000000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Process.Kill()
	for range 3 {
		awaitMessage(t, m, "\nWATCHDOG=1\n")
	}
	_ = cmd.Process.Signal(syscall.SIGTERM)
	awaitMessage(t, m, "\nSTOPPING=1\n")
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

// foreground starts a foreground mount.
func (w *testEnv) foreground(t *testing.T) *exec.Cmd {
	t.Helper()
	dir := w.mkdir(t, "mnt")
	cmd := program(t, "nfsrdmad", "mount", "--control-socket", w.socket, "--foreground", "127.0.0.1:/", dir, "-o",
		w.opts(w.server.RDMAAddr))
	w.startForeground(t, cmd, dir)
	return cmd
}

// startForeground starts cmd and waits until it has mounted at dir.
func (w *testEnv) startForeground(t *testing.T, cmd *exec.Cmd, dir string) {
	t.Helper()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if cmd.ProcessState == nil {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
		_ = syscall.Unmount(dir, syscall.MNT_DETACH)
	})
	for deadline := time.Now().Add(limit); ; time.Sleep(20 * time.Millisecond) {
		if _, err := os.Stat(filepath.Join(dir, "hello")); err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("the mount does not appear")
		}
	}
}
