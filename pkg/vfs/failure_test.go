package vfs

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/data"
)

func inodeNumber(st os.FileInfo) uint64 { return st.Sys().(*syscall.Stat_t).Ino }

// failures records the calls of Options.Failed.
type failures struct {
	mu      sync.Mutex
	reasons []string
	stacks  []string
}

func (f *failures) add(reason string, stack []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.reasons, f.stacks = append(f.reasons, reason), append(f.stacks, string(stack))
}

// panics is an answer that panics.
func panics(context.Context, *sunrpc.Message, func() error) error { panic("test panic") }

// TestPanicFailsMountOnly checks that a panic ends one mount in order: all requests return EIO, an
// unmount works, and another mount is not affected.
func TestPanicFailsMountOnly(t *testing.T) {
	t.Parallel()
	e := startOwnExport(t)
	for _, c := range []struct {
		name string
		// panics in the mount; f is open and has data in an extent
		do func(t *testing.T, m *testMount, s *scripted, f *os.File)
	}{
		{"in a request", func(t *testing.T, m *testMount, s *scripted, _ *os.File) {
			s.on(panics, nfs3.ProcMkdir)
			if err := os.Mkdir(m.path("dir"), 0o755); !errors.Is(err, syscall.EIO) {
				t.Errorf("mkdir: got %v, want EIO", err)
			}
		}},
		{"with locks", func(t *testing.T, m *testMount, s *scripted, f *os.File) {
			s.on(times(1, status(nfs.ErrNoSpc)), nfs3.ProcWrite) // the report of the loss panics
			if err := f.Sync(); err == nil {
				t.Error("fsync: got success, want an error")
			}
		}},
		{"in a sender", func(t *testing.T, m *testMount, s *scripted, f *os.File) {
			s.on(times(1, panics), nfs3.ProcWrite)
			if err := f.Sync(); !errors.Is(err, syscall.EIO) {
				t.Errorf("fsync: got %v, want EIO", err)
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var failed failures
			other := e.mount(t, mountConfig{})
			m, s := e.mountScripted(t, mountConfig{opts: Options{Failed: failed.add,
				Lost: func(l data.Loss) {
					if l.Err != nil { // the server rejected data
						panic("test panic")
					}
				}}})
			if m.fs.Failure() != "" {
				t.Errorf("failure of a new mount: got %q, want none", m.fs.Failure())
			}
			f, err := os.Create(m.path("file"))
			must(t, err)
			defer f.Close()
			_, err = f.Write(make([]byte, 100))
			must(t, err)
			c.do(t, m, s, f)
			for name, call := range map[string]func() error{
				"stat":  func() error { _, err := os.Stat(m.path("other")); return err },
				"fstat": func() error { _, err := f.Stat(); return err },
				"write": func() error { _, err := f.Write([]byte("x")); return err },
				"fsync": f.Sync,
			} {
				if err := call(); !errors.Is(err, syscall.EIO) && !(name == "fstat" && err == nil) {
					t.Errorf("%s after the panic: got %v, want EIO", name, err)
				}
			}
			_ = f.Close()
			if !strings.HasPrefix(m.fs.Failure(), "panic: ") || m.fs.Counters.Panics.Load() != 1 {
				t.Errorf("failure: got %q and %d panics, want a panic", m.fs.Failure(), m.fs.Counters.Panics.Load())
			}
			failed.mu.Lock()
			if len(failed.stacks) != 1 || !strings.Contains(failed.stacks[0], "pkg/vfs.") {
				t.Errorf("reports of the panic: got %d with stacks %v, want 1 with a stack", len(failed.reasons),
					failed.stacks)
			}
			failed.mu.Unlock()
			must(t, os.WriteFile(other.path("other"), []byte("works"), 0o644))
			wantContent(t, filepath.Join(e.dir, "other"), []byte("works"))
			must(t, os.Remove(other.path("other")))
		})
	}
}

// TestPanicWritesOtherFiles checks that the data of files that did not panic is written after a
// panic.
func TestPanicWritesOtherFiles(t *testing.T) {
	e := startOwnExport(t)
	m, s := e.mountScripted(t, mountConfig{})
	f, err := os.Create(m.path("file"))
	must(t, err)
	defer f.Close()
	_, err = f.WriteString("dirty data")
	must(t, err)
	s.on(panics, nfs3.ProcMkdir)
	if err := os.Mkdir(m.path("dir"), 0o755); !errors.Is(err, syscall.EIO) {
		t.Errorf("mkdir: got %v, want EIO", err)
	}
	<-m.fs.aborted // the end of the flush
	wantContent(t, filepath.Join(e.dir, "file"), []byte("dirty data"))
}
