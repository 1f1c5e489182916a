package vfs

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
)

// TestRejectedDataLeavesCache checks that reads and stat return the server's data after the server
// has rejected a WRITE or COMMIT, and that each open file reports the error once.
func TestRejectedDataLeavesCache(t *testing.T) {
	e := startOwnExport(t)
	old := randomBytes(1, 100_000)
	for _, c := range []struct {
		name string
		proc nfs3.Proc
		st   nfs.Status
		want syscall.Errno
		off  int64
	}{
		{"EDQUOT inside", nfs3.ProcWrite, nfs.ErrDQuot, syscall.EDQUOT, 4096},
		{"ENOSPC at the end", nfs3.ProcWrite, nfs.ErrNoSpc, syscall.ENOSPC, 100_000},
		{"EIO beyond the end", nfs3.ProcWrite, nfs.ErrIO, syscall.EIO, 1 << 20},
		{"EIO of COMMIT", nfs3.ProcCommit, nfs.ErrIO, syscall.EIO, 4096},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, s := e.mountScripted(t, mountConfig{opts: Options{WSize: 16 << 10}})
			serverPath := filepath.Join(e.dir, "file")
			must(t, os.WriteFile(serverPath, old, 0o644))
			f, err := os.OpenFile(m.path("file"), os.O_RDWR, 0)
			must(t, err)
			defer f.Close()
			wantRead(t, f, old) // fills the page cache
			s.on(times(100, status(c.st)), c.proc)
			_, err = f.WriteAt(randomBytes(2, 40_000), c.off)
			must(t, err)
			if err := f.Sync(); !errors.Is(err, c.want) {
				t.Errorf("fsync: got %v, want %v", err, c.want)
			}
			if err := f.Sync(); err != nil {
				t.Errorf("second fsync: got %v, want no error", err)
			}
			s.on(nil, c.proc)
			onServer, err := os.ReadFile(serverPath)
			must(t, err)
			st, err := f.Stat()
			must(t, err)
			if st.Size() != int64(len(onServer)) {
				t.Errorf("file size: got %d, want %d", st.Size(), len(onServer))
			}
			wantRead(t, f, onServer)
		})
	}
}

// wantRead reads an open file from its start to its end.
func wantRead(t *testing.T, f *os.File, want []byte) {
	t.Helper()
	got, err := io.ReadAll(io.NewSectionReader(f, 0, 1<<40))
	must(t, err)
	if string(got) != string(want) {
		t.Errorf("content of %s: got %d bytes that differ from the server's %d bytes", f.Name(), len(got), len(want))
	}
}

// TestAppendAfterRejectedWrite checks that O_APPEND continues at the end of the accepted data after
// the server has rejected data beyond it, also while accepted data is not on the server yet.
func TestAppendAfterRejectedWrite(t *testing.T) {
	e := startOwnExport(t)
	m, s := e.mountScripted(t, mountConfig{})
	must(t, os.WriteFile(m.path("file"), []byte("start"), 0o644))
	f, err := os.OpenFile(m.path("file"), os.O_WRONLY, 0)
	must(t, err)
	defer f.Close()
	appending, err := os.OpenFile(m.path("file"), os.O_WRONLY|os.O_APPEND, 0)
	must(t, err)
	defer appending.Close()
	s.on(times(1, status(nfs.ErrNoSpc)), nfs3.ProcWrite)
	_, err = f.WriteAt([]byte("rejected"), 1<<20)
	must(t, err)
	_, err = f.WriteAt([]byte("S"), 0) // does not continue the data above, which is sent now
	must(t, err)
	if !eventually(func() bool { return m.fs.Counters.WriteErrors.Load() == 1 }) {
		t.Error("rejected extents: want 1")
	}
	if _, err := appending.WriteString("lost"); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("append: got %v, want ENOSPC", err)
	}
	_, err = appending.WriteString(" end")
	must(t, err)
	must(t, appending.Sync())
	wantContent(t, filepath.Join(e.dir, "file"), []byte("Start end"))
}

// TestRejectedWritesDuringReads reads and writes the same pages while the server rejects WRITEs.
// The kernel holds the locks of these pages during the requests, and the pool has few buffers. No
// request may wait for the notification that drops the pages.
func TestRejectedWritesDuringReads(t *testing.T) {
	const rounds = 100
	e := startOwnExport(t)
	must(t, os.WriteFile(filepath.Join(e.dir, "file"), make([]byte, 1<<20), 0o666))
	m, s := e.mountScripted(t, mountConfig{buffers: 2, bufSize: 64 << 10, opts: Options{WSize: 16 << 10}})
	s.on(status(nfs.ErrNoSpc), nfs3.ProcWrite)
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			f, err := os.OpenFile(m.path("file"), os.O_RDWR, 0)
			if err != nil {
				t.Error(err)
				return
			}
			defer f.Close()
			buf := make([]byte, 128<<10)
			for n := range rounds {
				off := int64((n*7 + i) % 8 << 16)
				if i%2 == 0 {
					_, _ = f.WriteAt(buf, off)
				} else if _, err := f.ReadAt(buf, off); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if n := m.fs.Counters.WriteErrors.Load(); n == 0 {
		t.Error("rejected extents: got 0, want some")
	}
	s.on(nil, nfs3.ProcWrite)
	must(t, os.WriteFile(m.path("file"), []byte("new"), 0o666))
	wantContent(t, filepath.Join(e.dir, "file"), []byte("new"))
}
