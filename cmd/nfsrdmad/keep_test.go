package main

import (
	"bytes"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/fdstore"
	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/daemon"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/systemd"
)

func isMounted(t *testing.T, dir string) bool {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Contains(string(mounts), " "+dir+" ")
}

// closeInBackground closes a file on a mount without a daemon, which returns when a daemon
// continues the mount. Before that, this process must start no process with the file open: the exec
// of the process would close its copy and wait for the daemon, while this process waits for the
// exec.
func closeInBackground(t *testing.T, f *os.File) (closed chan struct{}) {
	t.Helper()
	fd := f.Fd()
	closed = make(chan struct{})
	go func() {
		defer close(closed)
		_ = f.Close()
	}()
	for deadline := time.Now().Add(limit); ; time.Sleep(time.Millisecond) {
		if _, err := unix.FcntlInt(fd, unix.F_GETFD, 0); err != nil {
			return closed // the number is free; close(2) may wait
		}
		if time.Now().After(deadline) {
			t.Fatal("close(2) does not release the descriptor")
		}
	}
}

// TestStopCommand stops a daemon with and without its mounts. The command must return when the
// process has exited and the socket is free. The written data must be on the server.
func TestStopCommand(t *testing.T) {
	data := kit.RandomBytes(1, 1<<20+5)
	for name, keep := range map[string]bool{"unmount": false, "keep mounts": true} {
		t.Run(name, func(t *testing.T) {
			w := newTestEnv(t)
			dir := w.mkdir(t, "mnt")
			w.mountWith(t, dir, "dirty_expire=0")
			t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
			f := writeDirty(t, filepath.Join(dir, "file"), data)
			if err := control.NewClient(w.socket).Stop(t.Context(), control.StopRequest{KeepMounts: keep}); err != nil {
				t.Fatal(err)
			}
			var exited unix.Siginfo
			if err := unix.Waitid(unix.P_PID, w.daemon.Process.Pid, &exited, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT,
				nil); err != nil || exited.Signo == 0 {
				t.Errorf("the command returned before the daemon exited: %v", err)
			}
			if err := w.daemon.Wait(); err != nil {
				t.Errorf("daemon: %v: %s", err, w.log)
			}
			for _, suffix := range []string{"", ".lock"} {
				if _, err := os.Lstat(w.socket + suffix); err == nil {
					t.Errorf("%s exists after the daemon exited", w.socket+suffix)
				}
			}
			if isMounted(t, dir) != keep {
				t.Errorf("mounted after the stop: got %v, want %v", !keep, keep)
			}
			w.wantOnServer(t, "file", data)
			closed := closeInBackground(t, f)
			w.startDaemon(t)
			select {
			case <-closed:
			case <-time.After(limit):
				t.Error("close(2) does not return although a daemon runs")
			}
			if keep {
				w.checkMount(t, dir)
			}
		})
	}
}

// TestStopCommandErrors runs the stop command without a daemon, and with a daemon that cannot keep
// its mounts.
func TestStopCommandErrors(t *testing.T) {
	w := newTestEnv(t)
	w.stop(t, w.daemon)
	nfsrdmad(t, "stop", "--control-socket", w.socket).fails(t, control.ExitSystem, w.socket, "not running")
	for deadline := time.Now().Add(limit); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		if _, err := os.Lstat(w.socket + ".fds"); err != nil {
			break // the holder of the first daemon has ended
		}
	}
	if err := os.Remove(w.socket + ".fds.lock"); err != nil { // which each start of a holder creates
		t.Fatal(err)
	}
	w.startDaemonWith(t, "--metrics-listen", "", "--keep-mounts=false")
	if _, err := os.Lstat(w.socket + ".fds.lock"); err == nil {
		t.Error("a daemon with --keep-mounts=false has started a holder")
	}
	dir := w.mkdir(t, "mnt")
	w.mount(t, dir).succeeds(t)
	nfsrdmad(t, "stop", "--keep-mounts", "--control-socket", w.socket).fails(t, control.ExitSystem,
		"keep_mounts is false", "stop without --keep-mounts")
	w.checkMount(t, dir)
	nfsrdmad(t, "stop", "--control-socket", w.socket).succeeds(t)
	if err := w.daemon.Wait(); err != nil || isMounted(t, dir) {
		t.Errorf("after the stop: got %v, mounted %v; want exit code 0 and no mount", err, isMounted(t, dir))
	}
}

// TestDaemonUsesHolder checks that a daemon uses the holder beside its control socket, which the
// daemon has started from its own program, and that a second process with the holder is an error of
// the start.
func TestDaemonUsesHolder(t *testing.T) {
	w := newTestEnv(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cfg := fdstore.Config{Socket: w.socket + ".fds", Command: []string{self, daemon.HolderCommand}}
	if s, err := fdstore.Holder(cfg); !errors.Is(err, fdstore.ErrBusy) {
		t.Errorf("open of the holder of a daemon: got %v and error %v, want %v", s, err, fdstore.ErrBusy)
	}
	w.stop(t, w.daemon)
	s, err := fdstore.Holder(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	args := []string{"daemon", "--control-socket", w.socket, "--metrics-listen", "", "--state-dir", w.dir}
	o := nfsrdmad(t, args...)
	if o.code != control.ExitSystem || !strings.Contains(o.stderr, "another daemon uses the descriptor store") {
		t.Errorf("start with a holder in use: got exit code %d and %q", o.code, o.stderr)
	}
	if _, err := os.Lstat(w.socket); err == nil {
		t.Error("the daemon left its control socket")
	}
}

// TestDaemonWithoutStore checks that a daemon whose holder cannot start serves mounts and warns.
func TestDaemonWithoutStore(t *testing.T) {
	w := newTestEnv(t)
	w.stop(t, w.daemon)
	_ = os.Remove(w.socket + ".fds")
	if err := os.WriteFile(w.socket+".fds", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	w.startDaemon(t)
	dir := w.mkdir(t, "mnt")
	w.mount(t, dir).succeeds(t)
	w.checkMount(t, dir)
	nfsrdmad(t, "stop", "--keep-mounts", "--control-socket", w.socket).fails(t, control.ExitSystem,
		"cannot keep its mounts", w.socket+".fds")
	w.stop(t, w.daemon)
	if !strings.Contains(w.log.String(), "mounts end with the daemon") {
		t.Errorf("got log %s, want a warning", w.log)
	}
}

// TestSIGTERMOfService sends SIGTERM to a service with a descriptor store. Only when systemd
// restarts the unit, the mounts stay.
func TestSIGTERMOfService(t *testing.T) {
	kit.NeedsFUSE(t)
	for name, tt := range map[string]struct {
		job   string
		bus   string
		keeps bool
		log   string
	}{
		"restart":       {"restart", "systemd", true, "mounts stay"},
		"stop":          {"stop", "systemd", false, "job=stop"},
		"kill":          {"", "systemd", false, "stop of the unit"},
		"without D-Bus": {"restart", "none", false, "does not tell whether it restarts the unit"},
		"no answer":     {"stop", "silent", true, "systemd does not answer whether it restarts the unit"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newTestEnv(t)
			w.stop(t, w.daemon)
			m, unit, address := systemd.StartManager(t, 10), &systemd.Unit{}, filepath.Join(w.dir, "no-bus")
			switch tt.bus {
			case "systemd":
				address = systemd.StartBus(t, unit)
			case "silent":
				l, err := net.Listen("unix", address) // accepts connections in its backlog only
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
			}
			cmd := program(t, "nfsrdmad", "daemon", "--control-socket", w.socket, "--metrics-listen", "", "--state-dir",
				w.dir)
			cmd.Env = append(append(cmd.Env, m.Env()...), "DBUS_SYSTEM_BUS_ADDRESS=unix:path="+address, "FDSTORE=10")
			log := &bytes.Buffer{}
			cmd.Stderr = log
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = cmd.Process.Kill() })
			if s := m.Message(limit); !strings.Contains(s, "\nREADY=1\n") {
				t.Fatalf("got notification %q, want READY", s)
			}
			unit.Set(cmd.Process.Pid, tt.job)
			dir := w.mkdir(t, "mnt")
			w.mount(t, dir).succeeds(t)
			t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
			nfsrdmad(t, "stop", "--keep-mounts", "--control-socket", w.socket).fails(t, control.ExitUsage,
				"systemctl restart")
			_ = cmd.Process.Signal(syscall.SIGTERM)
			if err := cmd.Wait(); err != nil {
				t.Errorf("daemon: %v: %s", err, log)
			}
			if got := isMounted(t, dir); got != tt.keeps {
				t.Errorf("mounted after SIGTERM: got %v, want %v: %s", got, tt.keeps, log)
			}
			if !strings.Contains(log.String(), tt.log) {
				t.Errorf("got log %s, want %q", log, tt.log)
			}
		})
	}
}

func TestKeepMountsFlag(t *testing.T) {
	for _, flag := range []string{"--keep-mounts=no", "--keep-mounts="} {
		nfsrdmad(t, "daemon", flag).fails(t, control.ExitUsage, "keep-mounts", "must be true or false")
	}
}
