package main

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// A terminal that is closed, and a log that nobody reads any more, leave no mount behind that
// nobody serves.
func TestTerminalClosed(t *testing.T) {
	t.Run("daemon", func(t *testing.T) {
		w := newWorld(t)
		w.mount(t, w.mkdir(t, "mnt")).succeeds(t)
		_ = w.daemon.Process.Signal(syscall.SIGHUP)
		w.stop(t, w.daemon) // finds nothing left
	})
	t.Run("foreground", func(t *testing.T) {
		w := newWorld(t)
		cmd := w.foreground(t)
		_ = cmd.Process.Signal(syscall.SIGHUP)
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
		if mounts, _ := os.ReadFile("/proc/self/mountinfo"); strings.Contains(string(mounts), w.dir) {
			t.Error("a mount is left")
		}
	})
	t.Run("nohup", func(t *testing.T) {
		w := newWorld(t)
		dir := w.mkdir(t, "mnt")
		inner := program(t, "nfsrdmad", "mount", "--control-socket", w.socket, "--foreground", "127.0.0.1:/", dir,
			"-o", w.opts(w.server.RDMAAddr))
		cmd := exec.Command("sh", append([]string{"-c", `trap "" HUP; exec "$0" "$@"`, inner.Path},
			inner.Args[1:]...)...)
		cmd.Env = inner.Env
		w.startForeground(t, cmd, dir)
		_ = cmd.Process.Signal(syscall.SIGHUP)
		time.Sleep(200 * time.Millisecond) // an end would take less; a later one fails below, too
		if b, err := os.ReadFile(filepath.Join(dir, "hello")); err != nil || string(b) != "world" {
			t.Errorf("%q, %v", b, err)
		}
		_ = cmd.Process.Signal(syscall.SIGTERM)
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	})
	t.Run("log without reader", func(t *testing.T) {
		w := newWorld(t)
		dir := w.mkdir(t, "mnt")
		cmd := program(t, "nfsrdmad", "mount", "--control-socket", w.socket, "--foreground", "--log-level", "info",
			"127.0.0.1:/", dir, "-o", w.opts(w.server.RDMAAddr))
		r, stderr, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		cmd.Stderr = stderr
		r.Close() // each line of the log is a broken pipe
		w.startForeground(t, cmd, dir)
		stderr.Close()
		_ = cmd.Process.Signal(syscall.SIGTERM)
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	})
}

// systemd hears when mounts can be made, and for how long their end may take: a shutdown timeout
// above the unit's own would be cut short else.
func TestTellsSystemd(t *testing.T) {
	dir := t.TempDir()
	l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(dir, "notify"), Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	hears := func() string {
		t.Helper()
		b := make([]byte, 4096)
		_ = l.SetReadDeadline(time.Now().Add(limit))
		n, err := l.Read(b)
		if err != nil {
			t.Fatal(err)
		}
		return "\n" + string(b[:n]) + "\n"
	}
	socket := filepath.Join(dir, "s")
	cmd := program(t, "nfsrdmad", "daemon", "--control-socket", socket, "--metrics-listen", "", "--shutdown-timeout",
		"100s")
	cmd.Env = append(cmd.Env, "NOTIFY_SOCKET="+filepath.Join(dir, "notify"))
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Process.Kill()
	if s := hears(); !strings.Contains(s, "\nREADY=1\n") {
		t.Errorf("says %q", s)
	}
	nfsrdmad(t, "list", "--control-socket", socket).succeeds(t)
	_ = cmd.Process.Signal(syscall.SIGTERM)
	s := hears()
	var usec int
	if _, value, found := strings.Cut(s, "\nEXTEND_TIMEOUT_USEC="); found {
		usec, _ = strconv.Atoi(value[:strings.IndexByte(value, '\n')])
	}
	if d := time.Duration(usec) * time.Microsecond; !strings.Contains(s, "\nSTOPPING=1\n") || d <= 100*time.Second ||
		d > 200*time.Second {
		t.Errorf("says %q", s)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

// foreground starts a mount in the foreground.
func (w *world) foreground(t *testing.T) *exec.Cmd {
	t.Helper()
	dir := w.mkdir(t, "mnt")
	cmd := program(t, "nfsrdmad", "mount", "--control-socket", w.socket, "--foreground", "127.0.0.1:/", dir, "-o",
		w.opts(w.server.RDMAAddr))
	w.startForeground(t, cmd, dir)
	return cmd
}

// startForeground starts cmd and waits until it has mounted at dir.
func (w *world) startForeground(t *testing.T, cmd *exec.Cmd, dir string) {
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
			t.Fatal("it does not mount")
		}
	}
}
