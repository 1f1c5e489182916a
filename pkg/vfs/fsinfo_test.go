package vfs

import (
	"context"
	"encoding/binary"
	"os"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// A limitedServer changes the FSINFO replies of a server: small READs and WRITEs, as on a Linux
// server with little memory, and a maximum file size.
type limitedServer struct {
	nfs3.Caller
	block uint32
	file  uint64 // maximum file size in bytes; 0 means the server's own limit

	mu      sync.Mutex
	largest int // bytes of the largest READ or WRITE
}

// Offsets in the results of FSINFO, after the directory's attributes (RFC 1813 §3.3.19).
const (
	fsInfoReadMax  = 4 + 4 + 84
	fsInfoWriteMax = fsInfoReadMax + 12
	fsInfoMaxFile  = fsInfoWriteMax + 12 + 4
)

func (s *limitedServer) Call(ctx context.Context, m *sunrpc.Message) error {
	s.mu.Lock()
	s.largest = max(s.largest, len(m.ArgData), len(m.ResultData))
	s.mu.Unlock()
	err := s.Caller.Call(ctx, m)
	if err == nil && nfs3.Proc(m.Proc) == nfs3.ProcFSInfo {
		binary.BigEndian.PutUint32(m.Result[fsInfoReadMax:], s.block)
		binary.BigEndian.PutUint32(m.Result[fsInfoWriteMax:], s.block)
		if s.file != 0 {
			binary.BigEndian.PutUint64(m.Result[fsInfoMaxFile:], s.file)
		}
	}
	return err
}

// TestFSInfoBoundsRequestSize checks that no READ or WRITE exceeds the limits of FSINFO.
func TestFSInfoBoundsRequestSize(t *testing.T) {
	const block = 64 << 10
	e := startOwnExport(t)
	want := randomBytes(1, 1<<20+5)
	small := func() (*limitedServer, mountConfig) {
		s := &limitedServer{block: block}
		return s, mountConfig{wrap: func(c nfs3.Caller) nfs3.Caller { s.Caller = c; return s }}
	}
	writes, cfg := small()
	must(t, os.WriteFile(e.mount(t, cfg).path("file"), want, 0o600))
	reads, cfg := small()
	wantContent(t, e.mount(t, cfg).path("file"), want)
	for _, s := range []*limitedServer{writes, reads} {
		s.mu.Lock()
		if s.largest != block {
			t.Errorf("largest READ or WRITE: got %d bytes, want %d", s.largest, block)
		}
		s.mu.Unlock()
	}
}

// TestFSInfoBoundsFileSize checks that a write or truncation beyond the server's maximum file size
// fails at once.
func TestFSInfoBoundsFileSize(t *testing.T) {
	const largest = 1<<32 + 10
	e := startOwnExport(t)
	s := &limitedServer{block: 64 << 10, file: largest}
	m := e.mount(t, mountConfig{wrap: func(c nfs3.Caller) nfs3.Caller { s.Caller = c; return s }})
	for name, flags := range map[string]int{"buffered": 0, "direct": unix.O_DIRECT, "append": unix.O_APPEND} {
		t.Run(name, func(t *testing.T) {
			path := m.path(name)
			fd, err := unix.Open(path, unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC|flags, 0o644)
			must(t, err)
			defer unix.Close(fd)
			must(t, unix.Ftruncate(fd, largest-5))
			if n, err := unix.Pwrite(fd, []byte("123456789"), largest-5); n != 5 || err != nil {
				t.Errorf("write across the maximum file size: got %d bytes, %v, want 5 bytes", n, err)
			}
			if n, err := unix.Pwrite(fd, []byte("1"), largest); err != unix.EFBIG {
				t.Errorf("write at the maximum file size: got %d bytes, %v, want EFBIG", n, err)
			}
			if n, err := unix.Pwrite(fd, nil, largest); n != 0 || err != nil {
				t.Errorf("empty write at the maximum file size: got %d bytes, %v, want 0 bytes", n, err)
			}
			if err := unix.Ftruncate(fd, largest+1); err != unix.EFBIG {
				t.Errorf("ftruncate: got %v, want EFBIG", err)
			}
			if err := unix.Truncate(path, largest+1); err != unix.EFBIG {
				t.Errorf("truncate: got %v, want EFBIG", err)
			}
			must(t, unix.Fsync(fd))
			if st, err := os.Stat(path); err != nil || st.Size() != largest {
				t.Errorf("file size: got %d bytes, %v, want %d", st.Size(), err, int64(largest))
			}
		})
	}
}
