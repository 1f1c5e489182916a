package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
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
		kit.Must(t, err)
		t.Cleanup(func() { f.Close() })
		return f, unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}
	held, err := lock(yours)
	kit.Must(t, err)
	f, err := lock(mine)
	if !errors.Is(err, unix.EAGAIN) {
		t.Errorf("lock on the other mount: got error %v, want EAGAIN", err)
	}
	wantText(t, "status", other.run(t, "status").succeeds(t).stdout, "1 held")

	other.kill()
	held.Close()
	kit.Must(t, unix.Unmount(yours, unix.MNT_DETACH))
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("lock of a killed daemon: got error %v, want EAGAIN", err)
	}
	other.startDaemonWith(t, "--metrics-listen", "", "--keep-mounts=false")
	kit.Eventually(t, "release of the lock by the next daemon", func() bool {
		return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil
	})
}
