package vfs

import (
	"context"
	"os"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// TestReorderedWriteRepliesKeepSize has two WRITEs in flight. The server executes the WRITE at
// offset 0 first but answers it last. The last reply contains a smaller file size than the first
// one.
func TestReorderedWriteRepliesKeepSize(t *testing.T) {
	const low, high, far = 100, 200, 1 << 20
	m, s := startExport(t).mountScripted(t, mountConfig{})
	f, err := os.Create(m.path("file"))
	must(t, err)
	defer f.Close()
	lowDone := make(chan struct{}) // closed when the server has executed the WRITE at offset 0
	s.on(func(_ context.Context, call *sunrpc.Message, pass func() error) error {
		if len(call.ArgData) != low {
			<-lowDone
			return pass()
		}
		err := pass()
		ino := m.openInode()
		close(lowDone)
		if !eventually(func() bool {
			return ino.attr.PendingWrites() == 1
		}) {
			t.Error("the other WRITE's reply was not processed")
		}
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
			t.Errorf("file size: got %d, want %d", st.Size(), far+high)
		}
		must(t, f.Sync())
	}
}

// TestSetattrCommitsWritesFirst checks that written data is stable before a chown or chmod, because
// the server may refuse a later COMMIT.
func TestSetattrCommitsWritesFirst(t *testing.T) {
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
				if !m.openInode().data.Load().Clean() {
					t.Error("SETATTR was sent before the data was stable")
				}
				return pass()
			}, nfs3.ProcSetAttr)
			must(t, change(f))
			s.on(nil, nfs3.ProcSetAttr)
			must(t, f.Close())
			eventually(func() bool { return m.openInode() == nil })
			if !asked.Load() {
				t.Error("SETATTR was not sent")
			}
			wantContent(t, m.path(name), []byte("data"))
		})
	}
}

// openInode returns the inode of the only open file, or nil.
func (m *testMount) openInode() *inode {
	m.fs.handles.Lock()
	defer m.fs.handles.Unlock()
	for _, h := range m.fs.handles.files {
		return h.ino
	}
	return nil
}
