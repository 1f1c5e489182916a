package nlm_test

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/server/nlmd"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm/nlmwire"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc/rpctcp"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// A lockServer is a lock service whose table can be replaced. It executes the calls of a connection
// at the same time, as NFS-Ganesha does.
type lockServer struct {
	t   *testing.T
	l   net.Listener // nil: connections are pipes
	all sync.WaitGroup
	dir string

	mu     sync.Mutex // guards the fields below
	nlmd   *nlmd.Server
	answer func(*call) reply // nil for none
	hangUp bool              // close the connection after the next reply to LOCK
	refuse int               // pipes that are refused
	conns  map[net.Conn]struct{}
	calls  []*call
}

// A call is a call that the server received.
type call struct {
	sunrpc.CallHeader
	proc nlmwire.Proc
	args nlmwire.Args
	raw  []byte // of args
}

// A reply is what a test replies to a call: the service replies to pass, and drop closes the
// connection.
type reply []byte

var pass, drop reply = nil, reply{}

func (c *call) stat(stat nlmwire.Stat) reply {
	return nlmwire.AppendRes(c.accepted(sunrpc.Success), c.proc, &nlmwire.Res{Stat: stat})
}

func (c *call) accepted(stat sunrpc.AcceptStat) reply {
	return sunrpc.AppendAcceptedReply(nil, c.XID, stat)
}

// startLockServer starts a server with a TCP port.
func startLockServer(t *testing.T) *lockServer {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	kit.Must(t, err)
	return start(t, l)
}

// bubble runs a test whose clients reach the server through pipes. Its clock advances while all
// goroutines wait.
func bubble(t *testing.T, test func(*testing.T, *lockServer)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { test(t, start(t, nil)) })
}

func start(t *testing.T, l net.Listener) *lockServer {
	t.Helper()
	s := &lockServer{t: t, l: l, dir: t.TempDir(), conns: make(map[net.Conn]struct{})}
	s.restart(time.Hour)
	if l != nil {
		s.all.Go(s.accept)
	}
	t.Cleanup(func() {
		if l != nil {
			l.Close()
		}
		s.dropConnections()
		s.all.Wait()
	})
	return s
}

func (s *lockServer) accept() {
	for {
		conn, err := s.l.Accept()
		if err != nil {
			return
		}
		s.add(conn)
	}
}

func (s *lockServer) dial(context.Context, string) (net.Conn, error) {
	s.mu.Lock()
	refuse := s.refuse > 0
	if refuse {
		s.refuse--
	}
	s.mu.Unlock()
	if refuse {
		return nil, syscall.ECONNREFUSED
	}
	client, server := net.Pipe()
	s.add(server)
	return client, nil
}

func (s *lockServer) add(conn net.Conn) {
	s.mu.Lock()
	s.conns[conn] = struct{}{}
	s.mu.Unlock()
	s.all.Go(func() {
		s.serve(conn)
		s.mu.Lock()
		delete(s.conns, conn)
		s.mu.Unlock()
	})
}

// restart forgets all locks and begins a grace period if there were any. With grace 0 the server
// does not know that there were any.
func (s *lockServer) restart(grace time.Duration) {
	state := filepath.Join(s.dir, "state")
	if grace == 0 {
		kit.Must(s.t, os.Remove(state))
	}
	s.mu.Lock()
	s.nlmd = nlmd.New(nlmd.Config{Check: func(*sunrpc.CallHeader, *nfs3.FH) nlmwire.Stat { return nlmwire.Granted },
		StateFile: state, Grace: grace})
	s.mu.Unlock()
	s.dropConnections()
}

func (s *lockServer) dropConnections() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for conn := range s.conns {
		conn.Close()
	}
}

func (s *lockServer) serve(conn net.Conn) {
	defer conn.Close()
	var writer sync.Mutex
	for {
		message, err := rpctcp.ReadRecord(conn, nil, nlmwire.MaxMessage)
		if err != nil {
			return
		}
		c := &call{}
		if c.CallHeader, c.raw, err = sunrpc.ParseCall(message); err != nil {
			s.t.Errorf("parse call: %v", err)
			return
		}
		if c.proc = nlmwire.Proc(c.Proc); c.proc != nlmwire.ProcNull {
			_ = nlmwire.ParseArgs(c.proc, c.raw, &c.args)
		}
		s.mu.Lock()
		s.calls = append(s.calls, c)
		answer := s.answer
		hangUp := s.hangUp && c.proc == nlmwire.ProcLock
		s.hangUp = s.hangUp && !hangUp
		s.mu.Unlock()
		s.all.Go(func() {
			b := pass
			if answer != nil {
				b = answer(c)
			}
			if b == nil {
				b = s.execute(c)
			}
			writer.Lock()
			defer writer.Unlock()
			if len(b) == 0 || rpctcp.WriteRecord(conn, b) != nil || hangUp {
				conn.Close()
			}
		})
	}
}

func (s *lockServer) execute(c *call) reply {
	s.mu.Lock()
	server := s.nlmd
	s.mu.Unlock()
	return server.ServeNLM(netip.MustParseAddr("127.0.0.1"), &c.CallHeader, c.raw, nil)
}

func (s *lockServer) setAnswer(answer func(*call) reply) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answer = answer
}

// answerStat makes the server reply to the calls of a procedure with stat.
func (s *lockServer) answerStat(proc nlmwire.Proc, stat nlmwire.Stat) {
	s.setAnswer(func(c *call) reply {
		if c.proc == proc {
			return c.stat(stat)
		}
		return pass
	})
}

// received returns the calls of a procedure.
func (s *lockServer) received(proc nlmwire.Proc) (calls []*call) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.calls {
		if c.proc == proc {
			calls = append(calls, c)
		}
	}
	return calls
}

func (s *lockServer) count(proc nlmwire.Proc) int { return len(s.received(proc)) }

func (s *lockServer) locks() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.nlmd.Locks()
}

// hold makes the server hold the next call of proc, and then execute it. With executed set it
// executes the call first, and holds the reply. began is closed when it holds.
func (s *lockServer) hold(proc nlmwire.Proc, executed bool) (began chan struct{}, proceed func()) {
	began, ended := make(chan struct{}), make(chan struct{})
	proceed = sync.OnceFunc(func() { close(ended) })
	s.t.Cleanup(proceed)
	var once sync.Once
	s.setAnswer(func(c *call) (b reply) {
		if c.proc == proc {
			once.Do(func() {
				if executed {
					b = s.execute(c)
				}
				close(began)
				<-ended
			})
		}
		return b
	})
	return began, proceed
}

func (s *lockServer) config() nlm.Config {
	cfg := nlm.Config{Host: "127.0.0.1", Caller: "test"}
	if s.l == nil {
		cfg.Quick(s.dial)
		cfg.Port = 1
		return cfg
	}
	cfg.Quick(nil)
	cfg.Port = s.l.Addr().(*net.TCPAddr).Port
	return cfg
}

func (s *lockServer) client(change func(*nlm.Config)) *nlm.Client {
	cfg := s.config()
	if change != nil {
		change(&cfg)
	}
	c := nlm.New(cfg)
	s.t.Cleanup(c.Close)
	return c
}

// recordedClient returns a client whose owners are recorded in dir.
func (s *lockServer) recordedClient(dir string) *nlm.Client {
	service := nlm.NewService(nlm.ServiceConfig{StateDir: dir})
	s.t.Cleanup(service.Close)
	return s.client(func(cfg *nlm.Config) { cfg.Service = service })
}

// ownersIn returns the files of owners in dir, with their content.
func ownersIn(t *testing.T, dir string) map[string]string {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(dir, "locks-1-*"))
	kit.Must(t, err)
	files := make(map[string]string)
	for _, path := range paths {
		if b, err := os.ReadFile(path); err == nil { // not removed meanwhile
			files[path] = string(b)
		}
	}
	return files
}

var (
	cred  = sunrpc.AppendAuthNone(nil)
	fh, _ = nfs3.NewFH([]byte("file"))
	alice = nlm.Owner{Kind: nlm.Posix, ID: 1}
	bob   = nlm.Owner{Kind: nlm.Posix, ID: 2}
	whole = uint64(1<<63 - 1)
)

func exclusive(id nlm.Owner, start, end uint64) nlm.Lock {
	return nlm.Lock{Start: start, End: end, Exclusive: true, Owner: id, PID: uint32(id.ID), Open: id.ID}
}

func shared(id nlm.Owner, start, end uint64) nlm.Lock {
	return nlm.Lock{Start: start, End: end, Owner: id, Open: id.ID}
}

// through returns l, set through another open file.
func through(open uint64, l nlm.Lock) nlm.Lock {
	l.Open = open
	return l
}

func mustLock(t *testing.T, c *nlm.Client, l nlm.Lock) {
	t.Helper()
	if err := c.Lock(t.Context(), cred, fh, l, false); err != nil {
		t.Fatalf("Lock(%+v): %v", l, err)
	}
}

func wantLock(t *testing.T, c *nlm.Client, l nlm.Lock, want error) {
	t.Helper()
	if err := c.Lock(t.Context(), cred, fh, l, false); !errors.Is(err, want) {
		t.Errorf("Lock(%+v): got error %v, want %v", l, err, want)
	}
}

func mustUnlock(t *testing.T, c *nlm.Client, id nlm.Owner, start, end uint64) {
	t.Helper()
	if err := c.Unlock(t.Context(), cred, fh, id, start, end); err != nil {
		t.Fatalf("Unlock(%v, %d, %d): %v", id, start, end, err)
	}
}

func release(t *testing.T, c *nlm.Client, id nlm.Owner) {
	t.Helper()
	kit.Must(t, c.ReleaseOwner(t.Context(), cred, fh, id))
}

// goLock starts a request. cancel ends it.
func goLock(t *testing.T, c *nlm.Client, l nlm.Lock, wait bool) (result chan error, cancel context.CancelFunc) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	result = make(chan error, 1)
	go func() { result <- c.Lock(ctx, cred, fh, l, wait) }()
	return result, cancel
}

func wantResult(t *testing.T, result chan error, want error) {
	t.Helper()
	if err := <-result; !errors.Is(err, want) {
		t.Errorf("got error %v, want %v", err, want)
	}
}

func wantPending(t *testing.T, c *nlm.Client, n int64) {
	t.Helper()
	kit.Eventually(t, "waiting request", func() bool { return c.Counters.Pending.Load() == n })
}

// portMapper is a port mapper with the registrations of one test.
type portMapper struct {
	mu   sync.Mutex
	port int
	maps map[[3]uint32]uint32
}

func startPortMapper(t *testing.T) *portMapper {
	t.Helper()
	m := &portMapper{maps: make(map[[3]uint32]uint32)}
	m.port = listen(t, m.serve)
	return m
}

// listen calls serve for each connection to the port that it returns.
func listen(t *testing.T, serve func(net.Conn)) (port int) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	kit.Must(t, err)
	var all sync.WaitGroup
	all.Go(func() {
		for conn, err := l.Accept(); err == nil; conn, err = l.Accept() {
			all.Go(func() {
				defer conn.Close()
				serve(conn)
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		all.Wait()
	})
	return l.Addr().(*net.TCPAddr).Port
}

func (m *portMapper) serve(conn net.Conn) {
	for {
		message, err := rpctcp.ReadRecord(conn, nil, 4096)
		if err != nil {
			return
		}
		h, args, _ := sunrpc.ParseCall(message)
		d := sunrpc.NewDecoder(args)
		key, port := [3]uint32{d.Uint32(), d.Uint32(), d.Uint32()}, d.Uint32()
		m.mu.Lock()
		result := uint32(1)
		switch h.Proc {
		case 1:
			m.maps[key] = port
		case 2:
			for _, proto := range []uint32{6, 17} {
				delete(m.maps, [3]uint32{key[0], key[1], proto})
			}
		case 3:
			result = m.maps[key]
		}
		m.mu.Unlock()
		reply := sunrpc.AppendAcceptedReply(nil, h.XID, sunrpc.Success)
		if rpctcp.WriteRecord(conn, binary.BigEndian.AppendUint32(reply, result)) != nil {
			return
		}
	}
}

// set registers a TCP port.
func (m *portMapper) set(prog, vers, port uint32) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.maps[[3]uint32{prog, vers, 6}] = port
}

// get returns a registered TCP port, and the number of registrations.
func (m *portMapper) get(prog, vers uint32) (port uint32, n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.maps[[3]uint32{prog, vers, 6}], len(m.maps)
}

// startService returns a service for a host with the port mapper m.
func startService(t *testing.T, m *portMapper) *nlm.Service {
	t.Helper()
	cfg := nlm.ServiceConfig{Listen: "127.0.0.1:0"}
	cfg.SetPortmap(m.port)
	s := nlm.NewService(cfg)
	t.Cleanup(s.Close)
	return s
}
