package vfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
)

// abortConnection ends the mount's connection through the control file system, as an administrator
// does.
func abortConnection(t *testing.T, m *testMount) {
	t.Helper()
	fusectl := t.TempDir()
	must(t, unix.Mount("fusectl", fusectl, "fusectl", 0, ""))
	defer unix.Unmount(fusectl, unix.MNT_DETACH)
	must(t, os.WriteFile(filepath.Join(fusectl, fmt.Sprint(m.srv.mount.Device().Minor), "abort"), []byte("1"), 0))
}

// mountLines returns the lines of the mount table that name the mount point.
func mountLines(t *testing.T, m *testMount) []string {
	t.Helper()
	table, err := os.ReadFile("/proc/self/mountinfo")
	must(t, err)
	var lines []string
	for line := range strings.Lines(string(table)) {
		if strings.Contains(line, m.dir+" ") {
			lines = append(lines, line)
		}
	}
	return lines
}

func (m *testMount) waitEnded(t *testing.T) {
	t.Helper()
	gone := make(chan struct{})
	go func() { m.srv.Wait(); close(gone) }()
	select {
	case <-gone:
	case <-time.After(testTimeout):
		t.Fatal("the mount did not end")
	}
}

// TestExternalAbortUnmounts checks that the mount point is unmounted after an external abort of the
// connection, with each way to unmount, while the server does not answer.
func TestExternalAbortUnmounts(t *testing.T) {
	e := startExport(t)
	must(t, os.WriteFile(filepath.Join(e.dir, "file"), []byte("x"), 0o644))
	for name, end := range map[string]func(*testMount) error{
		"none":    func(m *testMount) error { return nil },
		"Unmount": func(m *testMount) error { return m.srv.Unmount() },
		"lazy":    func(m *testMount) error { return m.srv.UnmountLazy() },
		"force":   func(m *testMount) error { return m.srv.ForceUnmount() },
	} {
		t.Run(name, func(t *testing.T) {
			over := make(chan struct{})
			m, s := e.mountScripted(t, mountConfig{})
			t.Cleanup(func() { close(over) }) // runs before the unmount
			if len(mountLines(t, m)) != 1 {
				t.Fatal("mount table: got no entry for the mount, want one")
			}
			block, blocked := blockUntil(over)
			s.on(block, nfs3.ProcRead)
			f, err := os.Open(m.path("file"))
			must(t, err)
			defer f.Close()
			read := make(chan error, 1)
			go func() {
				_, err := f.Read(make([]byte, 1))
				read <- err
			}()
			<-blocked // a request waits for the server while the connection ends
			abortConnection(t, m)
			if err := <-read; err == nil {
				t.Error("read after abort: got success, want an error")
			}
			if err := end(m); err != nil {
				t.Error(err)
			}
			m.waitEnded(t)
			if lines := mountLines(t, m); len(lines) != 0 {
				t.Errorf("mount table after abort: got %s, want no entry", lines)
			}
			// The directory below the mount is usable again.
			must(t, os.WriteFile(filepath.Join(m.dir, "below"), nil, 0o600))
			must(t, m.srv.Unmount())
		})
	}
}

// TestUnmountAfterExternalDetach checks that Unmount returns EBUSY after another program's umount
// -l while a file is open. ForceUnmount succeeds.
func TestUnmountAfterExternalDetach(t *testing.T) {
	t.Parallel()
	e := startExport(t)
	m := e.mount(t, mountConfig{})
	f, err := os.Create(m.path("file"))
	must(t, err)
	must(t, unix.Unmount(m.dir, unix.MNT_DETACH))
	if err := m.srv.Unmount(); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("unmount: got %v, want EBUSY", err)
	}
	_, err = f.Write([]byte("data"))
	must(t, err)
	must(t, f.Close())
	m.waitEnded(t)
	must(t, m.srv.Unmount())
	wantContent(t, filepath.Join(e.dir, "file"), []byte("data"))

	m = e.mount(t, mountConfig{})
	f, err = os.Create(m.path("file"))
	must(t, err)
	defer f.Close()
	must(t, unix.Unmount(m.dir, unix.MNT_DETACH))
	must(t, m.srv.ForceUnmount())
}

// TestUnmountKeepsOtherMount mounts a tmpfs over the mount point. No unmount may remove the tmpfs.
func TestUnmountKeepsOtherMount(t *testing.T) {
	e := startExport(t)
	m := e.mount(t, mountConfig{})
	must(t, unix.Mount("tmpfs", m.dir, "tmpfs", 0, ""))
	covered := true
	uncover := func() {
		if covered {
			covered = false
			must(t, unix.Unmount(m.dir, 0))
		}
	}
	defer uncover()
	must(t, os.WriteFile(m.path("other file"), nil, 0o600))
	for name, unmount := range map[string]func() error{"Unmount": m.srv.Unmount, "UnmountLazy": m.srv.UnmountLazy} {
		if err := unmount(); !errors.Is(err, syscall.EBUSY) {
			t.Errorf("%s below another mount: got %v, want EBUSY", name, err)
		}
	}
	abortConnection(t, m)
	m.waitEnded(t)
	if err := m.srv.ForceUnmount(); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("ForceUnmount below another mount: got %v, want EBUSY", err)
	}
	if _, err := os.Stat(m.path("other file")); err != nil {
		t.Errorf("file of the other mount: %v", err)
	}
	uncover()
	must(t, m.srv.Unmount())
	if lines := mountLines(t, m); len(lines) != 0 {
		t.Errorf("mount table after unmount: got %s, want no entry", lines)
	}
	// The mount has ended and a tmpfs is mounted in its place: Unmount and ForceUnmount keep the
	// tmpfs.
	must(t, unix.Mount("tmpfs", m.dir, "tmpfs", 0, ""))
	covered = true
	must(t, m.srv.Unmount())
	must(t, m.srv.ForceUnmount())
	if lines := mountLines(t, m); len(lines) != 1 {
		t.Errorf("mount table: got %s, want one entry", lines)
	}
}
