package fusefs

import (
	"context"
	"encoding/binary"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// An answer is what a scripted server does with one call; pass has the real server do it.
type answer func(ctx context.Context, m *sunrpc.Message, pass func() error) error

// scripted stands before a server and answers some of the procedures in its place.
type scripted struct {
	nfs3.Caller
	mu      sync.Mutex
	answers map[nfs3.Proc]answer
	calls   map[nfs3.Proc]int
}

// mountScripted mounts the export behind a scripted server that does nothing yet.
func (e *export) mountScripted(t *testing.T, cfg mountConfig) (*testMount, *scripted) {
	t.Helper()
	s := &scripted{answers: make(map[nfs3.Proc]answer), calls: make(map[nfs3.Proc]int)}
	cfg.wrap = func(c nfs3.Caller) nfs3.Caller { s.Caller = c; return s }
	return e.mount(t, cfg), s
}

// on sets the answer to some procedures; nil has the real server answer again.
func (s *scripted) on(a answer, procs ...nfs3.Proc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range procs {
		s.answers[p] = a
	}
}

// count is the number of calls of a procedure so far.
func (s *scripted) count(p nfs3.Proc) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls[p]
}

func (s *scripted) Call(ctx context.Context, m *sunrpc.Message) error {
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

// allProcs are the procedures of a mount in use.
func allProcs() (all []nfs3.Proc) {
	for p := range nfs3.Proc(nfs3.NumProcs) {
		all = append(all, p)
	}
	return all
}

// status is a result that consists of a status, and of no attributes where those of the procedure
// follow.
func status(s nfs3.Status) answer {
	return func(_ context.Context, m *sunrpc.Message, _ func() error) error {
		m.Result = append(sunrpc.AppendUint32(m.Result[:0], uint32(s)), make([]byte, 16)...)
		return nil
	}
}

// times answers a so often, then passes.
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

// hang waits until the call is given up.
func hang(ctx context.Context, _ *sunrpc.Message, _ func() error) error {
	<-ctx.Done()
	return ctx.Err()
}

// Where the cookie of READDIR and READDIRPLUS stands in their arguments: behind the handle, before
// the verifier (RFC 1813 §3.3.16, §3.3.17).
func dirCookie(m *sunrpc.Message) uint64 {
	at := 4 + int(binary.BigEndian.Uint32(m.Args))
	at += (4 - at%4) % 4
	return binary.BigEndian.Uint64(m.Args[at:])
}

type scriptedEntry struct {
	name   string
	cookie uint64
}

// putDir is the result of READDIR, or of READDIRPLUS without attributes and handles.
func putDir(m *sunrpc.Message, eof bool, entries ...scriptedEntry) {
	b := sunrpc.AppendUint32(m.Result[:0], uint32(nfs3.OK))
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

// killed starts a program that must block on the mount, waits for blocked, signals the program and
// its children as a terminal does, and sees it end while the server is as silent as before.
func killed(t *testing.T, sig syscall.Signal, blocked <-chan struct{}, cmd *exec.Cmd) {
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
		t.Fatalf("%s never called the server", name)
	}
	must(t, syscall.Kill(-cmd.Process.Pid, sig))
	select {
	case err := <-ended:
		if err == nil {
			t.Errorf("%s succeeded", name)
		}
	case <-time.After(testTimeout):
		t.Fatalf("%s does not end on %v", name, sig)
	}
}
