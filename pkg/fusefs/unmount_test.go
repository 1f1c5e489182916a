package fusefs

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

	"github.com/moby/sys/mountinfo"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
)

// abortOutside ends the mount's connection as an administrator does.
func abortOutside(t *testing.T, m *testMount) {
	t.Helper()
	fusectl := t.TempDir()
	must(t, unix.Mount("fusectl", fusectl, "fusectl", 0, ""))
	defer unix.Unmount(fusectl, unix.MNT_DETACH)
	must(t, os.WriteFile(filepath.Join(fusectl, fmt.Sprint(m.srv.dev.minor), "abort"), []byte("1"), 0))
}

// mountLines are the lines of the mount table that name the mount point.
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

func (m *testMount) waitGone(t *testing.T) {
	t.Helper()
	gone := make(chan struct{})
	go func() { m.srv.Wait(); close(gone) }()
	select {
	case <-gone:
	case <-time.After(testTimeout):
		t.Fatal("the mount goes on")
	}
}

// TestAbortedOutside sees that no stale mount point stays behind a connection that someone else
// ended, whoever unmounts, and whether or not the server answers.
func TestAbortedOutside(t *testing.T) {
	e := startExport(t)
	must(t, os.WriteFile(filepath.Join(e.dir, "file"), []byte("x"), 0o644))
	for name, end := range map[string]func(*testMount) error{
		"nobody":  func(m *testMount) error { return nil },
		"Unmount": func(m *testMount) error { return m.srv.Unmount() },
		"lazy":    func(m *testMount) error { return m.srv.UnmountLazy() },
		"force":   func(m *testMount) error { return m.srv.ForceUnmount() },
	} {
		t.Run(name, func(t *testing.T) {
			over := make(chan struct{})
			d := &delaying{waiting: make(chan struct{}, 1), over: over}
			m := e.mount(t, mountConfig{wrap: func(c nfs3.Caller) nfs3.Caller { d.Caller = c; return d }})
			t.Cleanup(func() { close(over) }) // before the mount's own clean-up
			if len(mountLines(t, m)) != 1 {
				t.Fatal("not mounted: the test tests nothing")
			}
			d.on.Store(true)
			f, err := os.Open(m.path("file"))
			must(t, err)
			defer f.Close()
			read := make(chan error, 1)
			go func() {
				_, err := f.Read(make([]byte, 1))
				read <- err
			}()
			<-d.waiting // a request waits for the server while the connection ends
			abortOutside(t, m)
			if err := <-read; err == nil {
				t.Error("the read succeeded")
			}
			if err := end(m); err != nil {
				t.Error(err)
			}
			m.waitGone(t)
			if lines := mountLines(t, m); len(lines) != 0 {
				t.Errorf("still mounted: %s", lines)
			}
			// the directory below can be used again
			must(t, os.WriteFile(filepath.Join(m.dir, "below"), nil, 0o600))
			must(t, m.srv.Unmount())
		})
	}
}

// TestDetachedOutside sees that an unmount after someone else's umount -l spares who still has a
// file open, unless forced.
func TestDetachedOutside(t *testing.T) {
	e := startExport(t)
	m := e.mount(t, mountConfig{})
	f, err := os.Create(m.path("file"))
	must(t, err)
	must(t, unix.Unmount(m.dir, unix.MNT_DETACH))
	if err := m.srv.Unmount(); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("unmount: %v, want EBUSY", err)
	}
	_, err = f.Write([]byte("data"))
	must(t, err)
	must(t, f.Close())
	m.waitGone(t)
	must(t, m.srv.Unmount())
	wantContent(t, filepath.Join(e.dir, "file"), []byte("data"))

	m = e.mount(t, mountConfig{})
	f, err = os.Create(m.path("file"))
	must(t, err)
	defer f.Close()
	must(t, unix.Unmount(m.dir, unix.MNT_DETACH))
	must(t, m.srv.ForceUnmount())
}

// TestCovered mounts something else on the mount point, which no unmount of ours may take away.
func TestCovered(t *testing.T) {
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
	must(t, os.WriteFile(m.path("of the other"), nil, 0o600))
	for name, unmount := range map[string]func() error{"Unmount": m.srv.Unmount, "UnmountLazy": m.srv.UnmountLazy} {
		if err := unmount(); !errors.Is(err, syscall.EBUSY) {
			t.Errorf("%s below another mount: %v, want EBUSY", name, err)
		}
	}
	abortOutside(t, m)
	m.waitGone(t)
	if err := m.srv.ForceUnmount(); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("ForceUnmount below another mount: %v, want EBUSY", err)
	}
	if _, err := os.Stat(m.path("of the other")); err != nil {
		t.Errorf("the other file system is gone: %v", err)
	}
	uncover()
	must(t, m.srv.Unmount())
	if lines := mountLines(t, m); len(lines) != 0 {
		t.Errorf("still mounted: %s", lines)
	}
	// Gone, and something else in its place: nothing of ours, so nothing to unmount.
	must(t, unix.Mount("tmpfs", m.dir, "tmpfs", 0, ""))
	covered = true
	must(t, m.srv.Unmount())
	must(t, m.srv.ForceUnmount())
	if lines := mountLines(t, m); len(lines) != 1 {
		t.Errorf("the mount table has %s", lines)
	}
}

func TestIsMount(t *testing.T) {
	const table = `22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
90 22 0:77 / /mnt/with\040blank\134and\011more rw,nosuid - fuse.nfsrdma host:/x rw
91 90 0:78 /sub /mnt/plain rw - fuse.nfsrdma host:/x rw
`
	for _, c := range []struct {
		name, dir string
		dev       device
		want      bool
	}{
		{"escaped", "/mnt/with blank\\and\tmore", device{0, 77}, true},
		{"plain", "/mnt/plain", device{0, 78}, true},
		{"other device there", "/mnt/plain", device{0, 77}, false},
		{"prefix of the number", "/mnt/plain", device{0, 7}, false},
		{"below", "/mnt", device{0, 78}, false},
		{"same number and place, other type", "/", device{8, 1}, false},
	} {
		mounts, err := mountinfo.GetMountsFromReader(strings.NewReader(table), isMount(c.dir, c.dev))
		if got := len(mounts) > 0; err != nil || got != c.want {
			t.Errorf("%s: got %v and error %v, want %v", c.name, got, err, c.want)
		}
	}
}
