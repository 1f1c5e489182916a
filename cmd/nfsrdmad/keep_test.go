package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
	"github.com/nfsrdmad/nfsrdmad/test/kit/systemd"
)

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
	kit.Eventually(t, "free descriptor", func() bool { // close(2) may still wait
		_, err := unix.FcntlInt(fd, unix.F_GETFD, 0)
		return err != nil
	})
	return closed
}

// TestStopCommand stops a daemon with and without its mounts. The request must return when the
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
			kit.Must(t, control.NewClient(w.socket).Stop(t.Context(), control.StopRequest{KeepMounts: keep}))
			var exited unix.Siginfo
			if err := unix.Waitid(unix.P_PID, w.daemon.Process.Pid, &exited, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT,
				nil); err != nil || exited.Signo == 0 {
				t.Errorf("the request returned before the daemon exited: %v", err)
			}
			if err := w.daemon.Wait(); err != nil {
				t.Errorf("daemon: %v: %s", err, w.log)
			}
			for _, suffix := range []string{"", ".lock"} {
				if _, err := os.Lstat(w.socket + suffix); err == nil {
					t.Errorf("%s exists after the daemon exited", w.socket+suffix)
				}
			}
			if mounts.IsMountPoint(dir) != keep {
				t.Errorf("mounted after the stop: got %v, want %v", !keep, keep)
			}
			w.wantOnServer(t, "file", data)
			closed := closeInBackground(t, f)
			w.startDaemon(t)
			<-closed
			if keep {
				w.checkMount(t, dir)
			}
		})
	}
}

// TestStopCommandErrors runs the stop command with daemons that cannot keep their mounts: one with
// --keep-mounts=false, and one whose holder cannot start.
func TestStopCommandErrors(t *testing.T) {
	w := newTestEnv(t)
	w.stop(t, w.daemon)
	kit.Eventually(t, "end of the holder", func() bool {
		_, err := os.Lstat(w.socket + ".fds")
		return err != nil
	})
	kit.Must(t, os.Remove(w.socket+".fds.lock")) // which each start of a holder creates
	w.startDaemonWith(t, "--metrics-listen", "", "--keep-mounts=false")
	if _, err := os.Lstat(w.socket + ".fds.lock"); err == nil {
		t.Error("a daemon with --keep-mounts=false has started a holder")
	}
	dir := w.mkdir(t, "mnt")
	w.mount(t, dir).succeeds(t)
	w.run(t, "stop", "--keep-mounts").fails(t, control.ExitSystem, "keep_mounts is false", "stop without --keep-mounts")
	w.checkMount(t, dir)
	w.run(t, "stop").succeeds(t)
	if err := w.daemon.Wait(); err != nil || mounts.IsMountPoint(dir) {
		t.Errorf("after the stop: got %v, want exit code 0 and no mount", err)
	}

	kit.Must(t, os.WriteFile(w.socket+".fds", nil, 0o600))
	w.startDaemon(t)
	w.mount(t, dir).succeeds(t)
	w.checkMount(t, dir)
	w.run(t, "stop", "--keep-mounts").fails(t, control.ExitSystem, "cannot keep its mounts", w.socket+".fds")
	wantText(t, "list", w.run(t, "list").succeeds(t).stdout, "1 mount would end with the daemon")
	w.stop(t, w.daemon)
	if !strings.Contains(w.log.String(), "mounts end with the daemon") {
		t.Errorf("got log %s, want a warning", w.log)
	}
}

// TestLostHolder kills the holder, and a file at the path of its socket prevents the start of
// another one. The daemon must say so, refuse to stop with --keep-mounts, and serve the mount
// further. Without the file, it must keep the mount.
func TestLostHolder(t *testing.T) {
	w := newTestEnv(t)
	w.stop(t, w.daemon)
	metrics := kit.FreePort(t).String()
	w.startDaemonWith(t, "--metrics-listen", metrics)
	dir, socket := w.mkdir(t, "mnt"), w.socket+".fds"
	w.mount(t, dir).succeeds(t)
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	if l := w.list(t); l[0].NotKept != "" {
		t.Errorf("mount with a holder: got reason %q, want none", l[0].NotKept)
	}
	holder := mounts.HolderOf(t, w.socket)
	kit.Must(t, os.Remove(socket))
	kit.Must(t, os.WriteFile(socket, nil, 0o600))
	kit.Must(t, unix.Kill(holder, unix.SIGKILL))
	kit.Eventually(t, "attempt to start a holder", func() bool {
		return strings.Contains(w.list(t)[0].NotKept, "is not a socket; remove the file")
	})
	w.run(t, "stop", "--keep-mounts").fails(t, control.ExitSystem, "serves them further", "start holder "+socket,
		"is not a socket; remove the file", "try again, or stop without --keep-mounts")
	w.checkMount(t, dir)
	wantText(t, "list", w.run(t, "list").succeeds(t).stdout, "1 mount would end with the daemon", socket)
	wantText(t, "status", w.run(t, "status").succeeds(t).stdout, "not kept: replace holder "+socket)
	wantText(t, "doctor", w.run(t, "doctor").stdout, "1 of them would end with the daemon: replace holder "+socket)
	if n := scrape(t, metrics)["nfsrdmad_mounts_not_kept"]; n != 1 {
		t.Errorf("mounts that are not kept: got %v, want 1", n)
	}
	kit.Must(t, os.Remove(socket))
	kit.Eventually(t, "another holder", func() bool { return w.list(t)[0].NotKept == "" })
	if m := scrape(t, metrics); m["nfsrdmad_mounts_not_kept"] != 0 || m["nfsrdmad_holder_restarts_total"] != 1 {
		t.Errorf("got %v mounts that are not kept after %v restarts of the holder, want 0 after 1",
			m["nfsrdmad_mounts_not_kept"], m["nfsrdmad_holder_restarts_total"])
	}
	w.run(t, "stop", "--keep-mounts").succeeds(t)
	_ = w.daemon.Wait()
	for _, text := range []string{"descriptors are not kept", "descriptors are kept again"} {
		if !strings.Contains(w.log.String(), text) {
			t.Errorf("got log %s, want %q", w.log, text)
		}
	}
	w.startDaemon(t)
	w.checkMount(t, dir)
}

// TestSIGTERMOfService sends SIGTERM to a service with a descriptor store. Only when systemd
// restarts the unit and has places for all descriptors of a mount, the mount stays.
func TestSIGTERMOfService(t *testing.T) {
	for _, c := range []struct {
		job    string
		places int
		keeps  bool
	}{{"restart", 10, true}, {"stop", 10, false}, {"restart", 3, false}} {
		t.Run(fmt.Sprintf("%s-%d", c.job, c.places), func(t *testing.T) {
			w := newTestEnv(t)
			w.stop(t, w.daemon)
			m, unit := systemd.StartManager(t, c.places), &systemd.Unit{}
			cmd := program(t, "nfsrdmad", "daemon", "--control-socket", w.socket, "--metrics-listen", "", "--state-dir",
				w.dir)
			cmd.Env = append(append(cmd.Env, m.Env()...), fmt.Sprintf("FDSTORE=%d", c.places),
				"DBUS_SYSTEM_BUS_ADDRESS=unix:path="+systemd.StartBus(t, unit))
			log := &bytes.Buffer{}
			cmd.Stderr = log
			kit.Must(t, cmd.Start())
			t.Cleanup(func() { _ = cmd.Process.Kill() })
			awaitMessage(t, m, "\nREADY=1\n")
			unit.Set(cmd.Process.Pid, c.job)
			dir := w.mkdir(t, "mnt")
			w.mount(t, dir).succeeds(t)
			t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
			if got := w.list(t)[0].NotKept; strings.Contains(got, "store is full") != (c.places == 3) {
				t.Errorf("mount with %d places: got reason %q", c.places, got)
			}
			w.run(t, "stop", "--keep-mounts").fails(t, control.ExitUsage, "systemctl restart")
			_ = cmd.Process.Signal(syscall.SIGTERM)
			if err := cmd.Wait(); err != nil {
				t.Errorf("daemon: %v: %s", err, log)
			}
			if got := mounts.IsMountPoint(dir); got != c.keeps || !strings.Contains(log.String(), "job="+c.job) {
				t.Errorf("mounted after SIGTERM: got %v, want %v: %s", got, c.keeps, log)
			}
		})
	}
}
