// Package memnfs is an nfs.Server that keeps in memory how many bytes were written, for tests of the
// file system without a network. It answers READ, WRITE and COMMIT. A test sets what goes wrong.
package memnfs

import (
	"bytes"
	"context"
	"sync"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
)

// A Call is a kind of call.
type Call int

// Kinds of calls.
const (
	None Call = iota
	Read
	Write
	Commit
)

// A Server answers calls. Its methods are safe for concurrent use. Each READ returns one byte and the
// end of the file.
type Server struct {
	nfs.Server // nil: other calls panic

	Space int  // bytes that fit; 0 is no limit
	Hangs bool // calls wait for the end of their context

	mu               sync.Mutex
	busy             Call // of the file whose handle is "busy"
	stable, unstable int
	writes           int
}

// SetBusy makes the server answer NFS3ERR_JUKEBOX to one kind of call for the handle "busy".
func (s *Server) SetBusy(c Call) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.busy = c
}

// Stable returns the number of bytes that are on stable storage.
func (s *Server) Stable() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stable
}

// Writes returns the number of WRITE calls.
func (s *Server) Writes() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.writes
}

// begin returns the error with which a call ends, or nil.
func (s *Server) begin(ctx context.Context, c Call, h nfs.Handle) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c == Write {
		s.writes++
	}
	if s.Hangs {
		s.mu.Unlock()
		<-ctx.Done()
		s.mu.Lock()
		return ctx.Err()
	}
	if c == s.busy && bytes.Equal(h.Bytes(), []byte("busy")) {
		return &nfs.Error{Status: nfs.ErrJukebox}
	}
	return nil
}

// Read implements nfs.Server.
func (s *Server) Read(ctx context.Context, _ []byte, h nfs.Handle, _ nfs.OpenState, _ uint64,
	_ [][]byte) (nfs.ReadResult, error) {
	return nfs.ReadResult{N: 1, EOF: true}, s.begin(ctx, Read, h)
}

// Write implements nfs.Server.
func (s *Server) Write(ctx context.Context, _ []byte, h nfs.Handle, _ nfs.OpenState, _ uint64, data []byte,
	stable nfs.Stability) (res nfs.WriteResult, err error) {
	if err := s.begin(ctx, Write, h); err != nil {
		return res, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.Space > 0 && s.stable+s.unstable+len(data) > s.Space {
		return res, &nfs.Error{Status: nfs.ErrNoSpc}
	}
	if stable == nfs.Unstable {
		s.unstable += len(data)
	} else {
		s.stable += len(data)
	}
	return nfs.WriteResult{Count: uint32(len(data)), Committed: stable}, nil
}

// Commit implements nfs.Server.
func (s *Server) Commit(ctx context.Context, _ []byte, h nfs.Handle, _ uint64, _ uint32) (res nfs.CommitResult,
	err error) {
	if err := s.begin(ctx, Commit, h); err != nil {
		return res, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stable, s.unstable = s.stable+s.unstable, 0
	return res, nil
}
