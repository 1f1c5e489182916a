package vfs

import (
	"context"
	"math"
	"os"
	"syscall"
	"testing"
	"testing/synctest"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/data"
	"github.com/nfsrdmad/nfsrdmad/test/kit/memnfs"
)

// bareFS returns an FS without a mount. The test ends it with Close.
func bareFS(s nfs.Server, pool *membuf.Pool, opts Options) *FS {
	_ = opts.setDefaults()
	opts.WSize = pool.Size()
	fs := &FS{server: s, opts: opts, buffers: pool, aborted: make(chan struct{}), closed: make(chan struct{})}
	fs.busy.Retries = &fs.Counters.JukeboxRetries
	fs.setCaches()
	fs.setData()
	return fs
}

// openFile returns an open file of a bare FS.
func openFile(id uint64) *fileHandle {
	return &fileHandle{ino: &inode{id: id}, cred: []byte{0}, writable: true}
}

// writeTo writes n bytes at off as a program does. It returns the number of bytes taken.
func writeTo(fs *FS, h *fileHandle, off uint64, n int) int {
	taken, _ := fs.written(h.ino).Write(context.Background(), &data.Writer{Cred: h.cred}, off,
		data.Pieces{make([]byte, n)}, n)
	return taken
}

// testPool returns a pool for a synctest bubble.
func testPool(t *testing.T, buffers int) *membuf.Pool {
	pool := membuf.NewPool(MinIOSize, buffers)
	t.Cleanup(pool.Close)
	return pool
}

// TestPagesReportErrorOfAnyPart writes more than one WRITE carries, and the server accepts only the
// first WRITE. The FS keeps no data, because its pool has a single buffer. A program gets the
// number of accepted bytes. The kernel ignores this number when it writes pages, so it must get the
// error.
func TestPagesReportErrorOfAnyPart(t *testing.T) {
	for _, c := range []struct {
		name  string
		flags uint32
		n     uint32
		want  fuse.Status
	}{
		{"write of a program", 0, MinIOSize, fuse.OK},
		{"pages of a mapping", fuse.WRITE_CACHE, 0, fuse.Status(syscall.ENOSPC)},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				fs := bareFS(&memnfs.Server{Space: MinIOSize}, testPool(t, 1), Options{})
				fs.maxFileSize = math.MaxInt64
				fs.handles.files = map[uint64]*fileHandle{1: openFile(2)}
				var out fuse.WriteOut
				status := call(fs, kernel.OpWrite, fuse.WriteIn{Fh: 1, WriteFlags: c.flags, Size: 2 * MinIOSize},
					string(make([]byte, 2*MinIOSize)), &out)
				if out.Size != c.n || status != c.want {
					t.Errorf("got %d bytes, %v, want %d, %v", out.Size, status, c.n, c.want)
				}
				fs.Close(t.Context())
			})
		})
	}
}

// TestWriteThroughKeepsPages checks that data that this mount wrote without keeping it is read from
// the kernel's pages.
func TestWriteThroughKeepsPages(t *testing.T) {
	m, s := startOwnExport(t).mountScripted(t, mountConfig{buffers: 1, bufSize: 64 << 10})
	keepsPages(t, func(i int) int {
		before, throughs := s.count(nfs3.ProcRead), m.fs.Counters.WriteThroughs.Load()
		data := randomBytes(uint64(i), 256<<10) // whole pages
		must(t, os.WriteFile(m.path("file"), data, 0o644))
		if m.fs.Counters.WriteThroughs.Load() == throughs {
			t.Error("writes without keeping data: got 0, want at least 1")
		}
		wantContent(t, m.path("file"), data)
		return s.count(nfs3.ProcRead) - before
	})
}
