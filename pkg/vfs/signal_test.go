package vfs

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
)

// pause makes the server answer no call until resume is called or the test ends. A call that waits
// sends a value to asked.
func (s *scripted) pause(t *testing.T) (asked <-chan struct{}, resume func()) {
	t.Helper()
	over := make(chan struct{})
	block, asked := blockUntil(over)
	resume = func() {
		s.on(nil, allProcs()...)
		select {
		case <-over:
		default:
			close(over)
		}
	}
	t.Cleanup(resume)
	s.on(block, allProcs()...)
	return asked, resume
}

// TestSignalEndsBlockedCall sends signals to processes that wait for a server that does not answer.
// Each process ends, other calls are not disturbed, and the mount works after the server answers
// again. Package xprt tests how the call ends.
func TestSignalEndsBlockedCall(t *testing.T) {
	e := startOwnExport(t)
	// noac: no call is answered from a cache.
	m, s := e.mountScripted(t, mountConfig{buffers: 6, opts: Options{NoAC: true}})
	want := randomBytes(8, 300_000)
	must(t, os.WriteFile(filepath.Join(e.dir, "file"), want, 0o644))
	must(t, os.Mkdir(filepath.Join(e.dir, "dir"), 0o755))
	must(t, os.Symlink("file", filepath.Join(e.dir, "link")))
	held, err := os.Open(m.path("file"))
	must(t, err)
	defer held.Close()
	for _, c := range []struct {
		name string
		sig  syscall.Signal
		args []string
	}{
		{"open", syscall.SIGKILL, []string{"cat", m.path("file")}},
		{"stat", syscall.SIGINT, []string{"stat", m.path("file")}},
		{"readlink", syscall.SIGTERM, []string{"readlink", m.path("link")}},
		{"readdir", syscall.SIGKILL, []string{"ls", "-f", m.path("dir")}},
		{"create", syscall.SIGTERM, []string{"touch", m.path("new")}},
		{"unlink", syscall.SIGINT, []string{"unlink", m.path("nothing")}},
		{"chmod", syscall.SIGKILL, []string{"chmod", "600", m.path("file")}},
		{"read", syscall.SIGINT, []string{"cat"}}, // reads standard input, which is already open
	} {
		t.Run(c.name+" "+c.sig.String(), func(t *testing.T) {
			cmd := exec.Command(c.args[0], c.args[1:]...)
			cmd.Stdin = held
			asked, resume := s.pause(t)
			defer resume()
			killBlocked(t, c.sig, asked, cmd)
		})
	}
	wantContent(t, m.path("file"), want)
	must(t, os.WriteFile(m.path("after"), want, 0o644))
	wantContent(t, filepath.Join(e.dir, "after"), want)
	wantRead(t, held, want)
}

// TestSignalKeepsEarlierWrites sends signals to processes that wait in write(2), fsync(2) or
// close(2). Data that they wrote before reaches the server after it answers again.
func TestSignalKeepsEarlierWrites(t *testing.T) {
	e := startOwnExport(t)
	m, s := e.mountScripted(t, mountConfig{buffers: 6})
	for name, script := range map[string]string{
		"write": "exec head -c 64M /dev/zero", // more than the buffers hold
		"fsync": "exec dd if=/dev/zero bs=50k count=3 conv=fsync,notrunc status=none",
		"close": "head -c 153600 /dev/zero; exec >&-; sleep 1000",
	} {
		t.Run(name, func(t *testing.T) {
			f, err := os.Create(m.path(name))
			must(t, err)
			defer f.Close()
			cmd := exec.Command("sh", "-c", script)
			cmd.Stdout = f
			asked, resume := s.pause(t)
			killBlocked(t, syscall.SIGKILL, asked, cmd)
			resume()
			must(t, f.Sync())
			got, err := os.ReadFile(filepath.Join(e.dir, name))
			must(t, err)
			if len(got) < 150<<10 || len(bytes.Trim(got, "\x00")) != 0 {
				t.Errorf("file on the server: got %d bytes, want at least 153600 zero bytes", len(got))
			}
			if st, err := f.Stat(); err != nil || st.Size() != int64(len(got)) {
				t.Errorf("file size: server has %d bytes, mount has %d (%v)", len(got), st.Size(), err)
			}
		})
	}
}
