package fusefs

import (
	"context"
	"encoding/binary"
	"os"
	"sync"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// A smallServer stands before a server and has FSINFO offer small READs and WRITEs, as a Linux server with little memory does.
type smallServer struct {
	nfs3.Caller
	block uint32

	mu   sync.Mutex
	most int // octets of the largest READ or WRITE, guarded by mu
}

// Offsets in the results of FSINFO behind the directory's attributes (RFC 1813 §3.3.19).
const (
	fsInfoReadMax  = 4 + 4 + 84
	fsInfoWriteMax = fsInfoReadMax + 12
)

func (s *smallServer) Call(ctx context.Context, m *sunrpc.Message) error {
	s.mu.Lock()
	s.most = max(s.most, len(m.ArgData), len(m.ResultData))
	s.mu.Unlock()
	err := s.Caller.Call(ctx, m)
	if err == nil && nfs3.Proc(m.Proc) == nfs3.ProcFSInfo {
		binary.BigEndian.PutUint32(m.Result[fsInfoReadMax:], s.block)
		binary.BigEndian.PutUint32(m.Result[fsInfoWriteMax:], s.block)
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
