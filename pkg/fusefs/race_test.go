package fusefs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// readWhole uses a descriptor as a program does that just opened a file: what it opened must stay
// usable.
func readWhole(fd int) ([]byte, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("fstat: %w", err)
	}
	buf := make([]byte, st.Size+1)
	n, err := unix.Read(fd, buf)
	if err != nil {
		return nil, fmt.Errorf("read: %w", err)
	}
	return buf[:n], nil
}

// TestOpenRemoveRace opens a file while the same mount replaces it and removes it, in turns. An
// open succeeds, or finds no file when there may be none; what was opened is one of the versions,
// whole.
func TestOpenRemoveRace(t *testing.T) {
	const rounds, openers = 200, 3
	e := startExport(t)
	for _, c := range []struct {
		name   string
		remove bool // the name is missing at times
		opts   Options
	}{{"rename", false, Options{}}, {"unlink", true, Options{}}, {"rename, no attribute cache", false,
		Options{NoAC: true}}} {
		t.Run(c.name, func(t *testing.T) {
			m := e.mount(t, mountConfig{opts: c.opts})
			dir := subdir(t, m)
			path, tmp := filepath.Join(dir, "file"), filepath.Join(dir, "tmp")
			version := func(i int) []byte { return bytes.Repeat([]byte{byte('a' + i%26)}, 100) }
			must(t, os.WriteFile(path, version(0), 0o644))
			over := make(chan struct{})
			var opened, missing, keptOpen int
			var mu sync.Mutex
			var wg sync.WaitGroup
			for range openers {
				wg.Go(func() {
					for {
						select {
						case <-over:
							return
						default:
						}
						fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
						mu.Lock()
						if err == nil {
							opened++
						} else if err == syscall.ENOENT && c.remove {
							missing++
						} else {
							t.Errorf("open: %v", err)
						}
						mu.Unlock()
						if err != nil {
							continue
						}
						got, err := readWhole(fd)
						if err != nil || len(got) != 100 || !bytes.Equal(got, bytes.Repeat(got[:1], 100)) {
							t.Errorf("an open file became unusable: %q, %v", got, err)
						}
						_ = unix.Close(fd)
					}
				})
			}
			for i := range rounds {
				must(t, os.WriteFile(tmp, version(i), 0o644))
				if c.remove {
					must(t, os.Remove(path))
				}
				must(t, os.Rename(tmp, path))
			}
			close(over)
			wg.Wait()
			keptOpen = int(m.fs.Counters.SillyRenames.Load())
			t.Logf("%d opens, %d found no file, %d files hidden while open, %d found stale", opened, missing,
				keptOpen, m.fs.Counters.Stale.Load())
			if opened == 0 || keptOpen == 0 {
				t.Error("nothing raced: the test tests nothing")
			}
		})
	}
}

// TestOpenBesideSlowRemove removes a file that takes the server long. Who opens another one is not
// held up; who opens that one gets it whole or not at all.
func TestOpenBesideSlowRemove(t *testing.T) {
	e := startExport(t)
	for _, name := range []string{"unlink", "rename"} {
		t.Run(name, func(t *testing.T) {
			m, s := e.mountScripted(t, mountConfig{})
			for _, file := range []string{"victim", "other", "new"} {
				must(t, os.WriteFile(m.path(file), []byte(file), 0o644))
			}
			for range 100 { // until the kernel has let go of what was open
				if m.fs.inodes.openFiles() == 0 {
					break
				}
				time.Sleep(20 * time.Millisecond)
			}
			// This server lets a removed file be opened for as long as it remembers the file.
			var mu sync.Mutex
			remembered := make(map[string][]byte)
			s.on(func(_ context.Context, m *sunrpc.Message, pass func() error) error {
				mu.Lock()
				defer mu.Unlock()
				if old := remembered[string(m.Args)]; old != nil {
					m.Result = append(m.Result[:0], old...)
					return nil
				}
				err := pass()
				remembered[string(m.Args)] = append([]byte(nil), m.Result...)
				return err
			}, nfs3.ProcAccess)
			if got, err := os.ReadFile(m.path("victim")); string(got) != "victim" {
				t.Fatalf("%q, %v", got, err)
			}
			for range 100 {
				if m.fs.inodes.openFiles() == 0 {
					break
				}
				time.Sleep(20 * time.Millisecond)
			}
			slow, proceed := make(chan struct{}), make(chan struct{})
			s.on(func(_ context.Context, _ *sunrpc.Message, pass func() error) error {
				close(slow)
				<-proceed
				return pass()
			}, nfs3.ProcRemove, nfs3.ProcRename)
			removed := make(chan error, 1)
			go func() {
				if name == "unlink" {
					removed <- os.Remove(m.path("victim"))
				} else {
					removed <- os.Rename(m.path("new"), m.path("victim"))
				}
			}()
			<-slow
			otherOpened := make(chan error, 1)
			go func() {
				f, err := os.Open(m.path("other"))
				if err == nil {
					f.Close()
				}
				otherOpened <- err
			}()
			select {
			case err := <-otherOpened:
				must(t, err)
			case <-time.After(testTimeout):
				t.Error("an open of another file waits")
			}
			// The kernel looks names up beside a removal only while it has them in its cache; this
			// one it has.
			victimOpened := make(chan error, 1)
			go func() {
				got, err := os.ReadFile(m.path("victim"))
				if err == nil && string(got) != "new" {
					err = fmt.Errorf("the file reads %q", got)
				}
				victimOpened <- err
			}()
			// long enough for it to have asked the server what is removed
			time.Sleep(5 * unresolvedTimeout)
			s.on(nil, nfs3.ProcRemove, nfs3.ProcRename)
			close(proceed)
			must(t, <-removed)
			if err := <-victimOpened; name == "unlink" && !errors.Is(err, syscall.ENOENT) || name == "rename" &&
				err != nil {
				t.Errorf("the file that was removed: %v", err)
			}
		})
	}
}

// TestAppendTogether appends through several open files of one mount at a time: no line is lost or
// torn.
func TestAppendTogether(t *testing.T) {
	const writers, lines = 4, 100
	e := startExport(t)
	m := e.mount(t, mountConfig{})
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			f, err := os.OpenFile(m.path("log"), os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o644)
			if err != nil {
				t.Error(err)
				return
			}
			defer f.Close()
			for i := range lines {
				if _, err := fmt.Fprintf(f, "writer %d line %d\n", w, i); err != nil {
					t.Error(err)
				}
				if i%17 == 0 {
					_ = f.Sync()
				}
			}
		})
	}
	wg.Wait()
	got, err := os.ReadFile(filepath.Join(e.dir, "log"))
	must(t, err)
	next := make(map[int]int)
	for line := range strings.Lines(string(got)) {
		var w, i int
		if _, err := fmt.Sscanf(line, "writer %d line %d\n", &w, &i); err != nil || next[w] != i {
			t.Fatalf("line %q: %v, want line %d of its writer", line, err, next[w])
		}
		next[w]++
	}
	for w := range writers {
		if next[w] != lines {
			t.Errorf("writer %d has %d lines, want %d", w, next[w], lines)
		}
	}
}

// TestForget sees the node table shrink to what the kernel still knows.
func TestForget(t *testing.T) {
	const files = 200
	e := startExport(t)
	want := plantNames(t, filepath.Join(e.dir, "d"), files)
	m := e.mount(t, mountConfig{})
	for range 3 {
		wantNames(t, m.path("d"), want)
		for _, name := range want {
			_, err := os.Lstat(m.path("d/" + name))
			must(t, err)
		}
	}
	if n := m.fs.Inodes(); n < files {
		t.Fatalf("%d nodes: the test tests nothing", n)
	}
	var st unix.Stat_t
	must(t, unix.Stat(m.path("d"), &st))
	m.fs.inodes.mu.Lock()
	var dir uint64
	for id, ino := range m.fs.inodes.byID {
		ino.mu.Lock()
		if ino.attr.FileID == st.Ino {
			dir = id
		}
		ino.mu.Unlock()
	}
	m.fs.inodes.mu.Unlock()
	for _, name := range want {
		m.fs.server.Load().EntryNotify(dir, name)
	}
	for range 100 {
		if m.fs.Inodes() <= 3 {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Errorf("%d nodes are left", m.fs.Inodes())
}
