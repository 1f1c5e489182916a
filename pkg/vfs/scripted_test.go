package vfs

import (
	"context"
	"encoding/binary"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// An answer handles one call of a scripted server. pass sends the call to the real server.
type answer func(ctx context.Context, m *sunrpc.Message, pass func() error) error

// scripted handles some procedures in place of the real server.
type scripted struct {
	nfs3.Caller
	mu      sync.Mutex
	answers map[nfs3.Proc]answer
	calls   map[nfs3.Proc]int

	aclCalls int // of NFSACL, which all go to the real server
}

// mountScripted mounts the export through a scripted server, which passes all calls at first.
func (e *export) mountScripted(t *testing.T, cfg mountConfig) (*testMount, *scripted) {
	t.Helper()
	s := &scripted{answers: make(map[nfs3.Proc]answer), calls: make(map[nfs3.Proc]int)}
	cfg.wrap = func(c nfs3.Caller) nfs3.Caller { s.Caller = c; return s }
	return e.mount(t, cfg), s
}

// on sets the answer to some procedures. A nil answer passes the calls to the real server.
func (s *scripted) on(a answer, procs ...nfs3.Proc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range procs {
		s.answers[p] = a
	}
}

// count returns the number of calls of a procedure so far.
func (s *scripted) count(p nfs3.Proc) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls[p]
}

// aclCount returns the number of NFSACL calls so far.
func (s *scripted) aclCount() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.aclCalls
}

func (s *scripted) Call(ctx context.Context, m *sunrpc.Message) error {
	if m.Prog != nfs3.Program {
		s.mu.Lock()
		s.aclCalls++
		s.mu.Unlock()
		return s.Caller.Call(ctx, m)
	}
	p := nfs3.Proc(m.Proc)
	s.mu.Lock()
	a := s.answers[p]
	s.calls[p]++
	s.mu.Unlock()
	pass := func() error { return s.Caller.Call(ctx, m) }
	if a == nil {
		return pass()
	}
	return a(ctx, m, pass)
}

// allProcs returns all NFSv3 procedures.
func allProcs() (all []nfs3.Proc) {
	for p := range nfs3.Proc(nfs3.NumProcs) {
		all = append(all, p)
	}
	return all
}

// status returns an answer with status s and without attributes.
func status(s nfs.Status) answer {
	return func(_ context.Context, m *sunrpc.Message, _ func() error) error {
		m.Result = append(sunrpc.AppendUint32(m.Result[:0], uint32(s)), make([]byte, 16)...)
		return nil
	}
}

// times returns an answer that uses a for the first n calls and passes later calls.
func times(n int, a answer) answer {
	var mu sync.Mutex
	return func(ctx context.Context, m *sunrpc.Message, pass func() error) error {
		mu.Lock()
		n--
		left := n
		mu.Unlock()
		if left < 0 {
			return pass()
		}
		return a(ctx, m, pass)
	}
}

// hang blocks until the call is canceled.
func hang(ctx context.Context, _ *sunrpc.Message, _ func() error) error {
	<-ctx.Done()
	return ctx.Err()
}

// blockUntil returns an answer that blocks until the call is canceled or over is closed, and a
// channel that receives a value when a call blocks.
func blockUntil(over <-chan struct{}) (a answer, blocked <-chan struct{}) {
	waiting := make(chan struct{}, 1)
	return func(ctx context.Context, _ *sunrpc.Message, pass func() error) error {
		select {
		case waiting <- struct{}{}:
		default:
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-over:
			return pass()
		}
	}, waiting
}

// dirCookie returns the cookie in the arguments of READDIR or READDIRPLUS. The cookie stands
// between the handle and the verifier (RFC 1813 §3.3.16, §3.3.17).
func dirCookie(m *sunrpc.Message) uint64 {
	at := 4 + int(binary.BigEndian.Uint32(m.Args))
	at += (4 - at%4) % 4
	return binary.BigEndian.Uint64(m.Args[at:])
}

type scriptedEntry struct {
	name   string
	cookie uint64
}

// setDirResult sets the result of READDIR, or of READDIRPLUS without attributes and handles.
func setDirResult(m *sunrpc.Message, eof bool, entries ...scriptedEntry) {
	b := sunrpc.AppendUint32(m.Result[:0], uint32(nfs.OK))
	b = sunrpc.AppendBool(b, false)
	b = append(b, make([]byte, nfs3.CookieVerfSize)...)
	for _, e := range entries {
		b = sunrpc.AppendBool(b, true)
		b = sunrpc.AppendUint64(b, 100+e.cookie)
		b = sunrpc.AppendString(b, e.name)
		b = sunrpc.AppendUint64(b, e.cookie)
		if nfs3.Proc(m.Proc) == nfs3.ProcReadDirPlus {
			b = sunrpc.AppendBool(sunrpc.AppendBool(b, false), false)
		}
	}
	m.Result = sunrpc.AppendBool(sunrpc.AppendBool(b, false), eof)
}

// killBlocked starts a program that blocks on the mount and waits for blocked. killBlocked then
// sends sig to the program's process group, as a terminal does, and checks that the program ends
// although the server does not answer.
func killBlocked(t *testing.T, sig syscall.Signal, blocked <-chan struct{}, cmd *exec.Cmd) {
	t.Helper()
	name := filepath.Base(cmd.Path)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	must(t, cmd.Start())
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case <-blocked:
	case err := <-ended:
		t.Fatalf("%s ended before it blocked: %v", name, err)
	case <-time.After(testTimeout):
		t.Fatalf("%s made no call to the server", name)
	}
	must(t, syscall.Kill(-cmd.Process.Pid, sig))
	select {
	case err := <-ended:
		if err == nil {
			t.Errorf("%s after %v: got success, want failure", name, sig)
		}
	case <-time.After(testTimeout):
		t.Fatalf("%s did not end after %v", name, sig)
	}
}
