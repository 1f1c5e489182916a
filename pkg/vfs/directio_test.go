package vfs

import (
	"context"
	"os"
	"sync/atomic"
	"testing"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// TestReadlinkUsesPoolBuffer checks that a READLINK reply goes to a pool buffer. A server may write
// the path with RDMA, and devices reach only the pool's memory.
func TestReadlinkUsesPoolBuffer(t *testing.T) {
	m, s := startExport(t).mountScripted(t, mountConfig{})
	must(t, os.Symlink("somewhere", m.path("link")))
	var asked atomic.Bool
	s.on(func(_ context.Context, call *sunrpc.Message, pass func() error) error {
		asked.Store(true)
		if m.fs.buffers.Out() != 1 || len(call.ResultData) != nfs.MaxPath {
			t.Errorf("READLINK: got %d bytes for the path and %d buffers in use, want %d and 1", len(call.ResultData),
				m.fs.buffers.Out(), nfs.MaxPath)
		}
		return pass()
	}, nfs3.ProcReadLink)
	if to, err := os.Readlink(m.path("link")); to != "somewhere" || err != nil || !asked.Load() {
		t.Errorf("readlink: got %q, %v (READLINK sent: %v), want %q", to, err, asked.Load(), "somewhere")
	}
}

// TestDirectWriteDropsPages writes past the page cache, and reads the file through another open
// file that has its pages in the cache. The test makes the requests of the write itself, because
// most kernels drop the pages at some time during a write.
func TestDirectWriteDropsPages(t *testing.T) {
	m := startOwnExport(t).mount(t, mountConfig{})
	for _, c := range []struct {
		name  string
		flags uint32
		want  string
	}{{"direct", unix.O_DIRECT, "new"}, {"append", unix.O_APPEND, "oldnew"}} {
		t.Run(c.name, func(t *testing.T) {
			must(t, os.WriteFile(m.path(c.name), []byte("old"), 0o644))
			f, _ := openAndRead(t, m.path(c.name), 3)
			file := fuse.InHeader{NodeId: m.inodeOf(t, c.name).id, Caller: fuse.Caller{Pid: uint32(os.Getpid())}}
			flags := unix.O_WRONLY | c.flags
			var out fuse.OpenOut
			if st := call(m.fs, kernel.OpOpen, fuse.OpenIn{InHeader: file, Flags: flags}, "", &out); !st.Ok() {
				t.Fatal(st)
			}
			defer call(m.fs, kernel.OpRelease, fuse.ReleaseIn{InHeader: file, Fh: out.Fh}, "", none)
			in := fuse.WriteIn{InHeader: file, Fh: out.Fh, Flags: flags, Size: 3}
			var written fuse.WriteOut
			if st := call(m.fs, kernel.OpWrite, in, "new", &written); written.Size != 3 || !st.Ok() {
				t.Fatalf("write: got %d, %v, want 3", written.Size, st)
			}
			got := ""
			if !eventually(func() bool {
				buf := make([]byte, 100)
				n, _ := f.ReadAt(buf, 0)
				got = string(buf[:n])
				return got == c.want || c.flags == unix.O_APPEND // only O_DIRECT does not wait
			}) || got != c.want {
				t.Errorf("read through another open file: got %q, want %q", got, c.want)
			}
		})
	}
}
