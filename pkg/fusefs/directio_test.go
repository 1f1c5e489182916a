package fusefs

import (
	"context"
	"os"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// TestReadAtEOFReturnsBuffer reads at the end of a file and checks that each read returns its
// buffer to the pool.
func TestReadAtEOFReturnsBuffer(t *testing.T) {
	m := startExport(t).mount(t, mountConfig{})
	for name, flags := range map[string]int{"direct": unix.O_DIRECT, "append": unix.O_APPEND} {
		t.Run(name, func(t *testing.T) {
			fd, err := unix.Open(m.path(name), unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC|flags, 0o644)
			must(t, err)
			defer unix.Close(fd)
			for range 3 {
				n, err := unix.Pread(fd, make([]byte, 4096), 0)
				if n != 0 || err != nil {
					t.Fatalf("read at end of file: got %d bytes, %v, want 0 bytes and no error", n, err)
				}
				if out := m.fs.buffers.Out(); out != 0 {
					t.Fatalf("buffers in use after read: got %d, want 0", out)
				}
			}
		})
	}
}

// TestReadlinkUsesPoolBuffer checks that a READLINK reply goes to a pool buffer. A server may write
// the path with RDMA, and devices reach only the pool's memory.
func TestReadlinkUsesPoolBuffer(t *testing.T) {
	m, s := startExport(t).mountScripted(t, mountConfig{})
	must(t, os.Symlink("somewhere", m.path("link")))
	var asked atomic.Bool
	s.on(func(_ context.Context, call *sunrpc.Message, pass func() error) error {
		asked.Store(true)
		if m.fs.buffers.Out() != 1 || len(call.ResultData) != nfs3.MaxPath {
			t.Errorf("READLINK: got %d bytes for the path and %d buffers in use, want %d and 1", len(call.ResultData),
				m.fs.buffers.Out(), nfs3.MaxPath)
		}
		return pass()
	}, nfs3.ProcReadLink)
	if to, err := os.Readlink(m.path("link")); to != "somewhere" || err != nil || !asked.Load() {
		t.Errorf("readlink: got %q, %v (READLINK sent: %v), want %q", to, err, asked.Load(), "somewhere")
	}
}
