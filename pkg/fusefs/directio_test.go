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

// TestReadNothing reads at the end of a file, where the kernel asks although there is nothing: each
// read gives its buffer back.
func TestReadNothing(t *testing.T) {
	m := startExport(t).mount(t, mountConfig{})
	for name, flags := range map[string]int{"direct": unix.O_DIRECT, "append": unix.O_APPEND} {
		t.Run(name, func(t *testing.T) {
			fd, err := unix.Open(m.path(name), unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC|flags, 0o644)
			must(t, err)
			defer unix.Close(fd)
			for range 3 {
				n, err := unix.Pread(fd, make([]byte, 4096), 0)
				if n != 0 || err != nil {
					t.Fatalf("%d octets, %v", n, err)
				}
				if out := m.fs.buffers.Out(); out != 0 {
					t.Fatalf("%d buffers are out", out)
				}
			}
		})
	}
}

// TestReadlinkMemory: a server may write the path of a symbolic link to the client's memory, which
// must be such as devices reach: the pool's.
func TestReadlinkMemory(t *testing.T) {
	m, s := startExport(t).mountScripted(t, mountConfig{})
	must(t, os.Symlink("somewhere", m.path("link")))
	var asked atomic.Bool
	s.on(func(_ context.Context, call *sunrpc.Message, pass func() error) error {
		asked.Store(true)
		if m.fs.buffers.Out() != 1 || len(call.ResultData) != nfs3.MaxPath {
			t.Errorf("%d octets of room, %d buffers are out", len(call.ResultData), m.fs.buffers.Out())
		}
		return pass()
	}, nfs3.ProcReadLink)
	if to, err := os.Readlink(m.path("link")); to != "somewhere" || err != nil || !asked.Load() {
		t.Errorf("%q, %v, asked: %v", to, err, asked.Load())
	}
}
