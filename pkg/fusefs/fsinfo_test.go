package fusefs

import (
	"context"
	"encoding/binary"
	"os"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// A smallServer stands before a server and has FSINFO offer small READs and WRITEs, as a Linux
// server with little memory does.
type smallServer struct {
	nfs3.Caller
	block uint32
	file  uint64 // largest file; 0 is the server's own limit

	mu   sync.Mutex
	most int // octets of the largest READ or WRITE, guarded by mu
}

// Offsets in the results of FSINFO behind the directory's attributes (RFC 1813 §3.3.19).
const (
	fsInfoReadMax  = 4 + 4 + 84
	fsInfoWriteMax = fsInfoReadMax + 12
	fsInfoMaxFile  = fsInfoWriteMax + 12 + 4
)

func (s *smallServer) Call(ctx context.Context, m *sunrpc.Message) error {
	s.mu.Lock()
	s.most = max(s.most, len(m.ArgData), len(m.ResultData))
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

// TestServerLimits: no READ or WRITE is larger than FSINFO offers.
func TestServerLimits(t *testing.T) {
	const block = 64 << 10
	e := startOwnExport(t)
	want := noise(1, 1<<20+5)
	small := func() (*smallServer, mountConfig) {
		s := &smallServer{block: block}
		return s, mountConfig{wrap: func(c nfs3.Caller) nfs3.Caller { s.Caller = c; return s }}
	}
	writes, cfg := small()
	must(t, os.WriteFile(e.mount(t, cfg).path("file"), want, 0o600))
	reads, cfg := small()
	wantContent(t, e.mount(t, cfg).path("file"), want)
	for _, s := range []*smallServer{writes, reads} {
		s.mu.Lock()
		if s.most != block {
			t.Errorf("the largest READ or WRITE has %d octets, want %d", s.most, block)
		}
		s.mu.Unlock()
	}
}

// TestLargestFile: who writes or truncates beyond what the server's files hold hears of it at once.
func TestLargestFile(t *testing.T) {
	const largest = 1<<32 + 10
	e := startOwnExport(t)
	s := &smallServer{block: 64 << 10, file: largest}
	m := e.mount(t, mountConfig{wrap: func(c nfs3.Caller) nfs3.Caller { s.Caller = c; return s }})
	for name, flags := range map[string]int{"buffered": 0, "direct": unix.O_DIRECT, "append": unix.O_APPEND} {
		t.Run(name, func(t *testing.T) {
			path := m.path(name)
			fd, err := unix.Open(path, unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC|flags, 0o644)
			must(t, err)
			defer unix.Close(fd)
			must(t, unix.Ftruncate(fd, largest-5))
			if n, err := unix.Pwrite(fd, []byte("123456789"), largest-5); n != 5 || err != nil {
				t.Errorf("a write across the end of the largest file: %d octets, %v", n, err)
			}
			if n, err := unix.Pwrite(fd, []byte("1"), largest); err != unix.EFBIG {
				t.Errorf("a write behind the largest file: %d octets, %v", n, err)
			}
			if n, err := unix.Pwrite(fd, nil, largest); n != 0 || err != nil {
				t.Errorf("a write of nothing: %d octets, %v", n, err)
			}
			if err := unix.Ftruncate(fd, largest+1); err != unix.EFBIG {
				t.Errorf("ftruncate: %v", err)
			}
			if err := unix.Truncate(path, largest+1); err != unix.EFBIG {
				t.Errorf("truncate: %v", err)
			}
			must(t, unix.Fsync(fd))
			if st, err := os.Stat(path); err != nil || st.Size() != largest {
				t.Errorf("the file has %d octets, %v, want %d", st.Size(), err, int64(largest))
			}
		})
	}
}
