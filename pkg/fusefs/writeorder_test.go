package fusefs

import (
	"context"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// TestWriteRepliesOutOfOrder has two WRITEs under way. The server makes the file longer with the
// second one that it works on, whose reply comes first; the other reply tells of a shorter file.
func TestWriteRepliesOutOfOrder(t *testing.T) {
	const low, high, far = 100, 200, 1 << 20
	m, s := startExport(t).mountScripted(t, mountConfig{})
	f, err := os.Create(m.path("file"))
	must(t, err)
	defer f.Close()
	lowDone := make(chan struct{}) // the server has done the WRITE to the beginning
	s.on(func(_ context.Context, call *sunrpc.Message, pass func() error) error {
		if len(call.ArgData) != low {
			<-lowDone
			return pass()
		}
		err := pass()
		ino := m.theFile()
		close(lowDone)
		for end := time.Now().Add(testTimeout); time.Now().Before(end); time.Sleep(time.Millisecond) {
			ino.mu.Lock()
			pending := ino.pending
			ino.mu.Unlock()
			if pending == 1 {
				return err
			}
		}
		t.Error("the other reply was not taken in")
		return err
	}, nfs3.ProcWrite)
	for _, w := range []struct {
		n   int
		off int64
	}{{high, far}, {low, 0}} {
		if _, err := unix.Pwrite(int(f.Fd()), make([]byte, w.n), w.off); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		st, err := f.Stat()
		must(t, err)
		if st.Size() != far+high {
			t.Errorf("the file has %d octets, want %d", st.Size(), far+high)
		}
		must(t, f.Sync())
	}
}

// TestWriteThenChange: what was written is stable before the file is another's, or its mode another
// one: the server may refuse a later COMMIT.
func TestWriteThenChange(t *testing.T) {
	m, s := startExport(t).mountScripted(t, mountConfig{})
	for name, change := range map[string]func(*os.File) error{
		"chown": func(f *os.File) error { return f.Chown(1, -1) },
		"chgrp": func(f *os.File) error { return f.Chown(-1, 1) },
		"chmod": func(f *os.File) error { return f.Chmod(0o400) },
	} {
		t.Run(name, func(t *testing.T) {
			f, err := os.Create(m.path(name))
			must(t, err)
			if _, err := f.Write([]byte("data")); err != nil {
				t.Fatal(err)
			}
			var asked atomic.Bool
			s.on(func(_ context.Context, _ *sunrpc.Message, pass func() error) error {
				asked.Store(true)
				w := &m.theFile().wb
				w.mu.Lock()
				defer w.mu.Unlock()
				if !w.clean() {
					t.Error("there is data that is not stable")
				}
				return pass()
			}, nfs3.ProcSetAttr)
			must(t, change(f))
			s.on(nil, nfs3.ProcSetAttr)
			must(t, f.Close())
			for end := time.Now().Add(testTimeout); m.theFile() != nil && time.Now().Before(end); {
				time.Sleep(time.Millisecond)
			}
			if !asked.Load() {
				t.Error("the server was not asked for the change")
			}
			wantContent(t, m.path(name), []byte("data"))
		})
	}
}

// theFile is the only file that is open on the mount.
func (m *testMount) theFile() *inode {
	m.fs.handles.Lock()
	defer m.fs.handles.Unlock()
	for _, h := range m.fs.handles.files {
		return h.ino
	}
	return nil
}
