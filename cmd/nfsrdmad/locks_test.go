package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestLocksOfTwoDaemons locks a file on the mounts of two daemons. Then it kills one daemon, whose
// mounts end with it, and the next one releases the lock.
func TestLocksOfTwoDaemons(t *testing.T) {
	w := newTestEnv(t)
	dir := t.TempDir()
	other := &testEnv{dir: dir, socket: filepath.Join(dir, "s"), log: &bytes.Buffer{}, server: w.server,
		tcpPort: w.tcpPort}
	other.startDaemonWith(t, "--metrics-listen", "", "--keep-mounts=false")
	mine, yours := w.mkdir(t, "mnt"), other.mkdir(t, "mnt")
	w.mount(t, mine).succeeds(t)
	other.mount(t, yours).succeeds(t)
	lock := func(dir string) (*os.File, error) {
		f, err := os.OpenFile(filepath.Join(dir, "hello"), os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return f, unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}
	held, err := lock(yours)
	if err != nil {
		t.Fatal(err)
	}
	f, err := lock(mine)
	if !errors.Is(err, unix.EAGAIN) {
		t.Errorf("lock on the other mount: got error %v, want EAGAIN", err)
	}
	status := nfsrdmad(t, "status", "--control-socket", other.socket).succeeds(t).stdout
	if !strings.Contains(status, "1 held") {
		t.Errorf("status: got %s, want 1 held lock", status)
	}

	_ = other.daemon.Process.Kill()
	_ = other.daemon.Wait()
	held.Close()
	if err := unix.Unmount(yours, unix.MNT_DETACH); err != nil {
		t.Error(err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("lock of a killed daemon: got error %v, want EAGAIN", err)
	}
	other.startDaemonWith(t, "--metrics-listen", "", "--keep-mounts=false")
	for deadline := time.Now().Add(limit); ; time.Sleep(20 * time.Millisecond) {
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the next daemon did not release the lock: %s", other.log)
		}
	}
}

// TestStatusNamesMissingLockService mounts with the port of a service that is not NLM. The doctor
// command finds the reason before a program requests a lock.
func TestStatusNamesMissingLockService(t *testing.T) {
	w := newTestEnv(t)
	dir := w.mkdir(t, "mnt")
	w.mountWith(t, dir, "nlmport=1")
	wantText(t, "doctor", nfsrdmad(t, "doctor", "--control-socket", w.socket).succeeds(t).stdout,
		"warning mount-locks", "no NLM service", "127.0.0.1:1: connect", "start lockd on the server")
	f, err := os.Open(filepath.Join(dir, "hello"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB); !errors.Is(err, unix.ENOLCK) {
		t.Errorf("flock: got error %v, want ENOLCK", err)
	}
	status := nfsrdmad(t, "status", "--control-socket", w.socket).succeeds(t).stdout
	wantText(t, "status", status, "no NLM service", "mount with nolock")
	f.Close()
	w.stop(t, w.daemon) // the log is complete then
	if !strings.Contains(w.log.String(), "ENOLCK") {
		t.Errorf("log: got %s, want a line about ENOLCK", w.log)
	}
}

// wantText checks that wrapped output contains all parts.
func wantText(t *testing.T, what, output string, parts ...string) {
	t.Helper()
	text := strings.Join(strings.Fields(output), " ")
	for _, part := range parts {
		if !strings.Contains(text, part) {
			t.Errorf("%s: got %s, want %q", what, text, part)
		}
	}
}

// TestDoctorChecksLocks runs the doctor command with a mount whose server has a lock service, and
// with a mount whose locks are local.
func TestDoctorChecksLocks(t *testing.T) {
	w := newTestEnv(t)
	dir, local := w.mkdir(t, "mnt"), w.mkdir(t, "local")
	w.mount(t, dir).succeeds(t)
	w.mountWith(t, local, "nolock")
	wantText(t, "doctor", nfsrdmad(t, "doctor", "--control-socket", w.socket).succeeds(t).stdout,
		"ok mount-locks", dir+": the lock service of the server replies; ", local+": all local")
}
