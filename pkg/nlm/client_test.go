package nlm_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/nlmd"
	"github.com/nfsrdmad/nfsrdmad/internal/rpctcp"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nlm"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// A lockServer is a lock service on a TCP port whose table can be replaced.
type lockServer struct {
	t    *testing.T
	l    net.Listener
	all  sync.WaitGroup
	dir  string
	mu   sync.Mutex // guards the fields below
	nlmd *nlmd.Server
	// answer, if not nil, may reply to a call instead of nlmd, or drop the connection (nil, true).
	answer func(h *sunrpc.CallHeader, args []byte) (reply []byte, handled bool)
	hangUp bool // close the connection after the next reply to LOCK
	// parallel executes the calls of a connection at the same time, as NFS-Ganesha does
	parallel bool
	conns    map[net.Conn]struct{}
	calls    []call
}

// A call is a call that the server received.
type call struct {
	proc   nlm.Proc
	cookie string
}

func startLockServer(t *testing.T) *lockServer {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &lockServer{t: t, l: l, dir: t.TempDir(), conns: make(map[net.Conn]struct{})}
	s.restart(time.Hour)
	s.all.Go(func() { s.accept(l) })
	t.Cleanup(func() {
		s.l.Close()
		s.dropConnections()
		s.all.Wait()
	})
	return s
}

func (s *lockServer) accept(l net.Listener) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
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
}

// restart forgets all locks and begins a grace period if there were any.
func (s *lockServer) restart(grace time.Duration) {
	s.mu.Lock()
	s.nlmd = nlmd.New(nlmd.Config{Check: func(*sunrpc.CallHeader, *nfs3.FH) nlm.Stat { return nlm.Granted },
		StateFile: filepath.Join(s.dir, "state"), Grace: grace})
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
	peer := conn.RemoteAddr().(*net.TCPAddr).AddrPort().Addr()
	var writer sync.Mutex
	for {
		message, err := rpctcp.ReadRecord(conn, nil, nlm.MaxMessage)
		if err != nil {
			return
		}
		h, args, err := sunrpc.ParseCall(message)
		if err != nil {
			s.t.Errorf("parse call: %v", err)
			return
		}
		var a nlm.Args
		if h.Proc != 0 {
			_ = nlm.ParseArgs(nlm.Proc(h.Proc), args, &a)
		}
		s.mu.Lock()
		s.calls = append(s.calls, call{nlm.Proc(h.Proc), string(a.Cookie)})
		answer, server, parallel := s.answer, s.nlmd, s.parallel
		hangUp := s.hangUp && nlm.Proc(h.Proc) == nlm.ProcLock
		s.hangUp = s.hangUp && !hangUp
		s.mu.Unlock()
		if parallel {
			s.all.Go(func() {
				answer(&h, args)
				reply := server.ServeNLM(peer, &h, args, nil)
				writer.Lock()
				defer writer.Unlock()
				_ = rpctcp.WriteRecord(conn, reply)
			})
			continue
		}
		if answer != nil {
			if reply, handled := answer(&h, args); handled {
				if reply == nil || rpctcp.WriteRecord(conn, reply) != nil {
					return
				}
				continue
			}
		}
		if rpctcp.WriteRecord(conn, server.ServeNLM(peer, &h, args, nil)) != nil || hangUp {
			return
		}
	}
}

func (s *lockServer) setAnswer(answer func(h *sunrpc.CallHeader, args []byte) ([]byte, bool)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answer = answer
}

func (s *lockServer) count(proc nlm.Proc) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, c := range s.calls {
		if c.proc == proc {
			n++
		}
	}
	return n
}

func (s *lockServer) locks() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.nlmd.Locks()
}

func (s *lockServer) client(change func(*nlm.Config)) *nlm.Client {
	cfg := nlm.Config{Host: "127.0.0.1", Port: s.l.Addr().(*net.TCPAddr).Port, Caller: "test"}
	if change != nil {
		change(&cfg)
	}
	c := nlm.New(cfg)
	c.Quick()
	s.t.Cleanup(c.Close)
	return c
}

// journalingClient returns a client with a journal in dir.
func (s *lockServer) journalingClient(dir string) *nlm.Client {
	service := nlm.NewService(nlm.ServiceConfig{StateDir: dir})
	s.t.Cleanup(service.Close)
	return s.client(func(cfg *nlm.Config) { cfg.Service = service })
}

var (
	cred  = sunrpc.AppendAuthNone(nil)
	fh, _ = nfs3.NewFH([]byte("file"))
	alice = nlm.Owner{Kind: nlm.Posix, ID: 1}
	bob   = nlm.Owner{Kind: nlm.Posix, ID: 2}
	whole = uint64(1<<63 - 1)
)

func exclusive(id nlm.Owner, start, end uint64) nlm.Lock {
	return nlm.Lock{Start: start, End: end, Exclusive: true, Owner: id, PID: uint32(id.ID)}
}

func shared(id nlm.Owner, start, end uint64) nlm.Lock {
	return nlm.Lock{Start: start, End: end, Owner: id}
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

// waitFor waits until ok returns true.
func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within a minute", what)
		}
	}
}

// waiting starts a request that waits. cancel ends it.
func waiting(t *testing.T, c *nlm.Client, l nlm.Lock) (result chan error, cancel context.CancelFunc) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	result = make(chan error, 1)
	go func() { result <- c.Lock(ctx, cred, fh, l, true) }()
	return result, cancel
}

func TestClientsExcludeEachOther(t *testing.T) {
	s := startLockServer(t)
	a, b := s.client(nil), s.client(nil)
	mustLock(t, a, exclusive(alice, 0, 9))
	wantLock(t, b, shared(alice, 9, 9), syscall.EAGAIN)
	mustLock(t, b, exclusive(alice, 10, whole))
	h, held, err := b.Test(t.Context(), cred, fh, shared(bob, 0, 5))
	if err != nil || !held || h.Start != 0 || h.End != 9 || !h.Exclusive {
		t.Errorf("Test: got %+v, %v, error %v", h, held, err)
	}
	if err := a.Unlock(t.Context(), cred, fh, alice, 5, 9); err != nil {
		t.Fatal(err)
	}
	mustLock(t, b, exclusive(alice, 5, 9))
	wantLock(t, b, exclusive(alice, 4, 4), syscall.EAGAIN)
	if n := a.Counters.Held.Load(); n != 1 {
		t.Errorf("locks held: got %d, want 1", n)
	}
}

// TestLocalConflictsNeedNoServer counts the calls of requests that conflict on one mount.
func TestLocalConflictsNeedNoServer(t *testing.T) {
	s := startLockServer(t)
	c := s.client(nil)
	mustLock(t, c, exclusive(alice, 0, 9))
	wantLock(t, c, exclusive(bob, 5, 5), syscall.EAGAIN)
	if _, held, err := c.Test(t.Context(), cred, fh, exclusive(bob, 5, 5)); !held || err != nil {
		t.Errorf("Test: got %v, error %v", held, err)
	}
	result, cancel := waiting(t, c, exclusive(bob, 5, 5))
	defer cancel()
	if n := s.count(nlm.ProcLock) + s.count(nlm.ProcTest); n != 1 {
		t.Errorf("calls: got %d, want 1", n)
	}
	if err := c.ReleaseOwner(t.Context(), cred, fh, alice); err != nil {
		t.Fatal(err)
	}
	if err := <-result; err != nil {
		t.Errorf("waiting lock: %v", err)
	}
}

func TestWaitingRequestPolls(t *testing.T) {
	s := startLockServer(t)
	a, b := s.client(nil), s.client(nil)
	mustLock(t, a, exclusive(alice, 0, 9))
	result, cancel := waiting(t, b, exclusive(bob, 0, 0))
	defer cancel()
	waitFor(t, "polls", func() bool { return s.count(nlm.ProcLock) > 3 })
	if err := a.ReleaseOwner(t.Context(), cred, fh, alice); err != nil {
		t.Fatal(err)
	}
	if err := <-result; err != nil || b.Counters.Polls.Load() != 1 {
		t.Errorf("got error %v, %d locks granted by polls; want 1", err, b.Counters.Polls.Load())
	}
}

func TestCanceledRequestLeavesNoLock(t *testing.T) {
	s := startLockServer(t)
	a, b := s.client(nil), s.client(nil)
	mustLock(t, a, exclusive(alice, 0, 9))
	mustLock(t, b, shared(bob, 100, 109))
	result, cancel := waiting(t, b, exclusive(bob, 0, 109))
	waitFor(t, "a poll", func() bool { return s.count(nlm.ProcLock) > 3 })
	cancel()
	if err := <-result; !errors.Is(err, syscall.EINTR) {
		t.Errorf("got error %v, want EINTR", err)
	}
	waitFor(t, "unlocks", func() bool { return s.count(nlm.ProcCancel) == 1 && s.count(nlm.ProcUnlock) == 1 })
	mustLock(t, b, exclusive(alice, 50, 99)) // settled
	if err := a.ReleaseOwner(t.Context(), cred, fh, alice); err != nil {
		t.Fatal(err)
	}
	mustLock(t, a, exclusive(alice, 0, 49))
	mustLock(t, a, shared(alice, 100, 109)) // b's lock is shared as before
	wantLock(t, a, exclusive(alice, 100, 100), syscall.EAGAIN)
}

// TestLateGrantIsReleased loses the reply that grants a lock to a request that is canceled. The
// owner keeps the shared lock that it had.
func TestLateGrantIsReleased(t *testing.T) {
	s := startLockServer(t)
	c, other := s.client(nil), s.client(nil)
	mustLock(t, c, shared(alice, 0, 4))
	reached, proceed := make(chan struct{}), make(chan struct{})
	reach := sync.OnceFunc(func() { close(reached) }) // the other client also sends LOCK
	s.setAnswer(func(h *sunrpc.CallHeader, _ []byte) ([]byte, bool) {
		if nlm.Proc(h.Proc) == nlm.ProcLock {
			reach()
			<-proceed
			s.setAnswer(nil)
		}
		return nil, false
	})
	result, cancel := waiting(t, c, exclusive(alice, 0, 9))
	<-reached
	cancel()
	if err := <-result; !errors.Is(err, syscall.EINTR) {
		t.Errorf("got error %v, want EINTR", err)
	}
	close(proceed)
	waitFor(t, "the release", func() bool {
		return other.Lock(t.Context(), cred, fh, exclusive(alice, 5, 9), false) == nil
	})
	mustLock(t, other, shared(alice, 0, 4))
	wantLock(t, other, exclusive(alice, 0, 4), syscall.EAGAIN)
}

// delayFirst makes a server execute calls in parallel and delay the first call of one procedure.
// began is closed when that call arrives, and the test closes proceed.
func (s *lockServer) delayFirst(proc nlm.Proc) (began, proceed chan struct{}) {
	began, proceed = make(chan struct{}), make(chan struct{})
	var first atomic.Bool
	s.setAnswer(func(h *sunrpc.CallHeader, _ []byte) ([]byte, bool) {
		if nlm.Proc(h.Proc) == proc && first.CompareAndSwap(false, true) {
			close(began)
			<-proceed
		}
		return nil, false
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	s.parallel = true
	return began, proceed
}

// TestLateLockIsReleased interrupts a LOCK that the server executes late. The UNLOCK that follows
// must not overtake it.
func TestLateLockIsReleased(t *testing.T) {
	s := startLockServer(t)
	c := s.client(nil)
	began, proceed := s.delayFirst(nlm.ProcLock)
	ctx, cancel := context.WithCancel(t.Context())
	result := make(chan error, 1)
	go func() { result <- c.Lock(ctx, cred, fh, exclusive(alice, 0, 9), false) }()
	<-began
	cancel()
	if err := <-result; !errors.Is(err, syscall.EINTR) {
		t.Errorf("got error %v, want EINTR", err)
	}
	time.Sleep(overtakeTime)
	close(proceed)
	time.Sleep(overtakeTime)
	waitFor(t, "the release", func() bool { return s.count(nlm.ProcUnlock) == 1 && s.locks() == 0 && !c.InUse(fh) })
}

// TestLateUnlockKeepsNewLock interrupts an UNLOCK that the server executes late. It must not
// release the lock that the owner sets next.
func TestLateUnlockKeepsNewLock(t *testing.T) {
	s := startLockServer(t)
	c := s.client(nil)
	mustLock(t, c, exclusive(alice, 0, 9))
	s.dropConnections() // the next connection is parallel
	began, proceed := s.delayFirst(nlm.ProcUnlock)
	ctx, cancel := context.WithCancel(t.Context())
	result := make(chan error, 1)
	go func() { result <- c.Unlock(ctx, cred, fh, alice, 0, 9) }()
	<-began
	cancel()
	if err := <-result; !errors.Is(err, syscall.EINTR) {
		t.Errorf("got error %v, want EINTR", err)
	}
	locked := make(chan error, 1)
	go func() { locked <- c.Lock(t.Context(), cred, fh, exclusive(alice, 0, 9), false) }()
	time.Sleep(overtakeTime)
	close(proceed)
	if err := <-locked; err != nil {
		t.Fatal(err)
	}
	time.Sleep(overtakeTime)
	if n := s.locks(); n != 1 {
		t.Errorf("locks at the server: got %d, want 1", n)
	}
}

// TestQueuedUnlockKeepsNewLock interrupts an UNLOCK that waits for another call about the file. It
// must not release the lock that the owner sets next.
func TestQueuedUnlockKeepsNewLock(t *testing.T) {
	s := startLockServer(t)
	c := s.client(nil)
	mustLock(t, c, exclusive(alice, 0, 9))
	s.dropConnections() // the next connection is parallel
	began, proceed := s.delayFirst(nlm.ProcTest)
	tested := make(chan error, 1)
	go func() {
		_, _, err := c.Test(t.Context(), cred, fh, exclusive(alice, 50, 59))
		tested <- err
	}()
	<-began
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1)) // the work in the background starts late
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.Unlock(ctx, cred, fh, alice, 0, 9); !errors.Is(err, syscall.EINTR) {
		t.Errorf("got error %v, want EINTR", err)
	}
	time.AfterFunc(overtakeTime, func() { close(proceed) })
	mustLock(t, c, exclusive(alice, 0, 9))
	if err := <-tested; err != nil {
		t.Error(err)
	}
	time.Sleep(overtakeTime)
	held, _ := c.Table(fh)
	if n := s.locks(); n != 1 || len(held) != 1 {
		t.Errorf("got %d locks at the server and %d in the table, want 1 and 1", n, len(held))
	}
}

// overtakeTime is enough for a call that wrongly overtakes another one.
const overtakeTime = 100 * time.Millisecond

func TestDeadlockOnOneMount(t *testing.T) {
	s := startLockServer(t)
	c := s.client(nil)
	carol := nlm.Owner{Kind: nlm.Posix, ID: 3}
	for i, id := range []nlm.Owner{alice, bob, carol} {
		mustLock(t, c, exclusive(id, uint64(i), uint64(i)))
	}
	first, cancel1 := waiting(t, c, exclusive(alice, 1, 1))
	second, cancel2 := waiting(t, c, exclusive(bob, 2, 2))
	defer cancel1()
	defer cancel2()
	waitFor(t, "two waiting requests", func() bool { return c.Counters.Pending.Load() == 2 })
	if err := c.Lock(t.Context(), cred, fh, exclusive(carol, 0, 0), true); !errors.Is(err, syscall.EDEADLK) {
		t.Errorf("got error %v, want EDEADLK", err)
	}
	for _, id := range []nlm.Owner{carol, bob} {
		_ = c.ReleaseOwner(t.Context(), cred, fh, id)
	}
	if err := <-second; err != nil {
		t.Errorf("second lock: %v", err)
	}
	_ = c.ReleaseOwner(t.Context(), cred, fh, bob)
	if err := <-first; err != nil {
		t.Errorf("first lock: %v", err)
	}
}

func TestStatusBecomesErrno(t *testing.T) {
	s := startLockServer(t)
	c := s.client(nil)
	for stat, want := range map[nlm.Stat]syscall.Errno{nlm.Denied: syscall.EAGAIN, nlm.DeniedNoLocks: syscall.ENOLCK,
		nlm.Deadlock: syscall.EDEADLK, nlm.ReadOnly: syscall.EROFS, nlm.StaleFH: syscall.ESTALE,
		nlm.TooBig: syscall.EFBIG, nlm.Failed: syscall.ENOLCK} {
		s.setAnswer(func(h *sunrpc.CallHeader, _ []byte) ([]byte, bool) {
			reply := sunrpc.AppendAcceptedReply(nil, h.XID, sunrpc.Success)
			return nlm.AppendRes(reply, nlm.ProcLock, &nlm.Res{Stat: stat}), nlm.Proc(h.Proc) == nlm.ProcLock
		})
		wantLock(t, c, exclusive(alice, 0, 9), want)
	}
}

func TestMissingServiceIsENOLCK(t *testing.T) {
	s := startLockServer(t)
	for _, stat := range []sunrpc.AcceptStat{sunrpc.ProgUnavail, sunrpc.ProcUnavail, sunrpc.GarbageArgs} {
		s.setAnswer(func(h *sunrpc.CallHeader, _ []byte) ([]byte, bool) {
			return sunrpc.AppendAcceptedReply(nil, h.XID, stat), true
		})
		c := s.client(nil)
		wantLock(t, c, exclusive(alice, 0, 9), syscall.ENOLCK)
		if c.Reason() == "" || c.Counters.NoService.Load() != 1 {
			t.Errorf("%v: got reason %q, %d errors", stat, c.Reason(), c.Counters.NoService.Load())
		}
	}
	port := s.l.Addr().(*net.TCPAddr).Port
	s.l.Close()
	c := s.client(func(cfg *nlm.Config) { cfg.Port = port })
	wantLock(t, c, exclusive(alice, 0, 9), syscall.ENOLCK)
}

// TestLostConnectionKeepsCookie drops the connection instead of a reply.
func TestLostConnectionKeepsCookie(t *testing.T) {
	s := startLockServer(t)
	c := s.client(nil)
	var drops atomic.Int32
	s.setAnswer(func(h *sunrpc.CallHeader, _ []byte) ([]byte, bool) {
		return nil, nlm.Proc(h.Proc) == nlm.ProcLock && drops.Add(1) <= 2
	})
	mustLock(t, c, exclusive(alice, 0, 9))
	s.mu.Lock()
	defer s.mu.Unlock()
	cookies := make(map[string]int)
	for _, call := range s.calls {
		if call.proc == nlm.ProcLock {
			cookies[call.cookie]++
		}
	}
	if len(cookies) != 1 {
		t.Errorf("cookies of the call: got %v, want one", cookies)
	}
}

func TestSoftMountGivesUp(t *testing.T) {
	s := startLockServer(t)
	c := s.client(func(cfg *nlm.Config) { cfg.GiveUp, cfg.GiveUpErr = 50*time.Millisecond, syscall.ETIMEDOUT })
	s.setAnswer(func(*sunrpc.CallHeader, []byte) ([]byte, bool) { return nil, true })
	wantLock(t, c, exclusive(alice, 0, 9), syscall.ETIMEDOUT)
}

// TestSoftMountWaitsForLock waits on a soft mount longer than the server may take for a reply: for
// a lock of another mount, and for one of the same mount.
func TestSoftMountWaitsForLock(t *testing.T) {
	s := startLockServer(t)
	const giveUp = time.Second
	other := s.client(nil)
	soft := s.client(func(cfg *nlm.Config) { cfg.GiveUp, cfg.GiveUpErr = giveUp, syscall.ETIMEDOUT })
	mustLock(t, other, exclusive(alice, 0, 0))
	mustLock(t, soft, exclusive(alice, 1, 1))
	var results []chan error
	for at := range uint64(2) {
		result, cancel := waiting(t, soft, exclusive(bob, at, at))
		defer cancel()
		results = append(results, result)
	}
	time.Sleep(giveUp + giveUp/2)
	for i, holder := range []*nlm.Client{other, soft} {
		if err := holder.ReleaseOwner(t.Context(), cred, fh, alice); err != nil {
			t.Error(err)
		}
		if err := <-results[i]; err != nil {
			t.Errorf("waiting lock %d: %v", i, err)
		}
	}
}

func TestReclaimAfterRestart(t *testing.T) {
	s := startLockServer(t)
	a, b := s.client(nil), s.client(nil)
	mustLock(t, a, exclusive(alice, 0, 9))
	mustLock(t, a, shared(bob, 20, 29))
	s.restart(time.Hour)
	waitFor(t, "reclaims", func() bool { return a.Counters.Reclaimed.Load() == 2 && s.locks() == 2 })
	// During the grace period a new lock waits.
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := b.Lock(ctx, cred, fh, exclusive(alice, 100, 100), false); !errors.Is(err, syscall.EINTR) {
		t.Errorf("new lock: got error %v, want EINTR", err)
	}
	if a.Lost(fh, alice) || a.Counters.Lost.Load() != 0 {
		t.Error("a lock was lost")
	}
}

func TestStolenLockIsLost(t *testing.T) {
	s := startLockServer(t)
	lost := make(chan nlm.Owner, 4)
	a := s.client(func(cfg *nlm.Config) { cfg.Lost = func(_ nfs3.FH, id nlm.Owner) { lost <- id } })
	mustLock(t, a, exclusive(alice, 0, 9))
	mustLock(t, a, exclusive(bob, 20, 29))
	s.setAnswer(func(*sunrpc.CallHeader, []byte) ([]byte, bool) { return nil, true }) // no way to the server
	s.restart(time.Nanosecond)
	thief := nlmd.New(nlmd.Config{Check: func(*sunrpc.CallHeader, *nfs3.FH) nlm.Stat { return nlm.Granted }})
	var args nlm.Args
	args.Exclusive, args.Region.FH, args.Region.Caller = true, fh.Bytes(), "thief"
	args.Region.SetRange(5, 5)
	h := sunrpc.CallHeader{Prog: nlm.Program, Vers: nlm.Version, Proc: uint32(nlm.ProcLock)}
	thief.ServeNLM(netip.MustParseAddr("192.0.2.1"), &h, nlm.AppendArgs(nil, nlm.ProcLock, &args), nil)
	s.mu.Lock()
	s.nlmd, s.answer = thief, nil
	s.mu.Unlock()
	if id := <-lost; id != alice {
		t.Errorf("lost lock: got owner %+v, want %+v", id, alice)
	}
	waitFor(t, "the other lock", func() bool { return s.locks() == 2 })
	if !a.Lost(fh, alice) || a.Lost(fh, bob) {
		t.Errorf("Lost: got %v and %v, want true and false", a.Lost(fh, alice), a.Lost(fh, bob))
	}
	wantLock(t, a, exclusive(alice, 100, 100), syscall.EIO)
	if err := a.Unlock(t.Context(), cred, fh, alice, 0, 9); err != nil || a.Lost(fh, alice) {
		t.Errorf("after unlock: error %v, lost %v", err, a.Lost(fh, alice))
	}
	mustLock(t, a, exclusive(alice, 100, 100))
	wantLock(t, a, exclusive(alice, 5, 5), syscall.EAGAIN)
}

// TestLostConnectionKeepsLocks drops the connection to a server that has not restarted.
func TestLostConnectionKeepsLocks(t *testing.T) {
	s := startLockServer(t)
	c := s.client(nil)
	mustLock(t, c, exclusive(alice, 0, 9))
	before := s.count(nlm.ProcLock)
	s.dropConnections()
	waitFor(t, "a reclaim and a lock", func() bool { return s.count(nlm.ProcLock) == before+2 })
	waitFor(t, "no change", func() bool { return s.locks() == 1 && c.Counters.Held.Load() == 1 })
	if c.Counters.Lost.Load() != 0 || c.Counters.Reclaimed.Load() != 0 {
		t.Errorf("got %d lost and %d reclaimed locks, want none", c.Counters.Lost.Load(), c.Counters.Reclaimed.Load())
	}
}

// TestConnectionLostDuringGrantIsNoticed closes each connection right after the reply that grants a
// lock. The client must notice that the server may have restarted, also when the client learns of
// the end of the connection before it has recorded the lock.
func TestConnectionLostDuringGrantIsNoticed(t *testing.T) {
	s := startLockServer(t)
	for i := range uint64(50) {
		c, before := s.client(nil), s.count(nlm.ProcLock)
		s.mu.Lock()
		s.hangUp = true
		s.mu.Unlock()
		mustLock(t, c, exclusive(alice, i, i))
		waitFor(t, "a reclaim", func() bool { return s.count(nlm.ProcLock) > before+1 })
	}
}

// portMapper is a port mapper with the registrations of one test.
type portMapper struct {
	mu   sync.Mutex
	maps map[[3]uint32]uint32
}

func startPortMapper(t *testing.T) (*portMapper, int) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	m := &portMapper{maps: make(map[[3]uint32]uint32)}
	var all sync.WaitGroup
	all.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() { m.serve(conn) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		all.Wait()
	})
	return m, l.Addr().(*net.TCPAddr).Port
}

func (m *portMapper) serve(conn net.Conn) {
	defer conn.Close()
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

func (m *portMapper) len() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.maps)
}

func startService(t *testing.T) (*nlm.Service, *portMapper) {
	t.Helper()
	m, port := startPortMapper(t)
	cfg := nlm.ServiceConfig{Listen: "127.0.0.1:0"}
	cfg.SetPortmap(port)
	s := nlm.NewService(cfg)
	t.Cleanup(func() {
		s.Close()
		if m.len() != 0 {
			t.Errorf("registrations after Close: %v", m.maps)
		}
	})
	return s, m
}

// grantedCall returns a GRANTED or GRANTED_MSG call for the last LOCK that the server received.
func grantedCall(proc nlm.Proc, lock *nlm.Args) []byte {
	a := *lock
	a.Cookie = []byte{9, 9}
	return nlm.AppendArgs(sunrpc.AppendCall(nil, 77, nlm.Program, nlm.Version, uint32(proc), cred), proc, &a)
}

// grantedStat makes a GRANTED call and returns the status of the reply.
func grantedStat(t *testing.T, service *nlm.Service, from netip.AddrPort, a *nlm.Args) nlm.Stat {
	t.Helper()
	_, results, err := sunrpc.ParseReply(service.Handle(from, grantedCall(nlm.ProcGranted, a)))
	var res nlm.Res
	if err != nil || nlm.ParseRes(nlm.ProcGranted, results, &res) != nil || string(res.Cookie) != "\x09\x09" {
		t.Errorf("reply to GRANTED: %+v, error %v", res, err)
	}
	return res.Stat
}

func TestGrantedCallback(t *testing.T) {
	service, mapper := startService(t)
	s := startLockServer(t)
	a, b := s.client(nil), s.client(func(cfg *nlm.Config) { cfg.Service = service })
	b.Patient()
	service.WaitReady()
	if !service.Active() || mapper.len() != 4 {
		t.Fatalf("service: active %v, %d registrations; want 4", service.Active(), mapper.len())
	}
	mustLock(t, a, exclusive(alice, 0, 9))
	var last nlm.Args
	s.setAnswer(func(h *sunrpc.CallHeader, args []byte) ([]byte, bool) {
		if nlm.Proc(h.Proc) == nlm.ProcLock {
			s.mu.Lock()
			_ = nlm.ParseArgs(nlm.ProcLock, args, &last)
			s.mu.Unlock()
		}
		return nil, false
	})
	result, cancel := waiting(t, b, exclusive(bob, 0, 0))
	defer cancel()
	waitFor(t, "a pending lock", func() bool { return b.Counters.Pending.Load() == 1 })
	s.mu.Lock()
	granted := last
	s.mu.Unlock()

	server, other := netip.MustParseAddrPort("127.0.0.1:2049"), netip.MustParseAddrPort("192.0.2.1:2049")
	stat := func(from netip.AddrPort, a *nlm.Args) nlm.Stat { return grantedStat(t, service, from, a) }
	wrongRange, wrongOwner := granted, granted
	wrongRange.Region.Length = 2
	wrongOwner.Region.SVID++
	for name, got := range map[string]nlm.Stat{"another address": stat(other, &granted),
		"another range": stat(server, &wrongRange), "another owner": stat(server, &wrongOwner)} {
		if got != nlm.Denied {
			t.Errorf("GRANTED with %s: got %v, want %v", name, got, nlm.Denied)
		}
	}
	calls := s.count(nlm.ProcLock)
	if got := stat(server, &granted); got != nlm.Granted {
		t.Errorf("forged GRANTED: got %v", got)
	}
	waitFor(t, "a question to the server", func() bool { return s.count(nlm.ProcLock) > calls })
	waitFor(t, "a pending lock", func() bool { return b.Counters.Pending.Load() == 1 })
	if err := a.ReleaseOwner(t.Context(), cred, fh, alice); err != nil {
		t.Fatal(err)
	}
	service.Handle(server, grantedCall(nlm.ProcGrantedMsg, &granted))
	if err := <-result; err != nil || b.Counters.Callbacks.Load() != 1 {
		t.Errorf("got error %v, %d locks granted by callbacks; want 1", err, b.Counters.Callbacks.Load())
	}
	waitFor(t, "GRANTED_RES", func() bool { return s.count(nlm.ProcGrantedRes) == 1 })
	if got := stat(server, &granted); got != nlm.Granted {
		t.Errorf("GRANTED for a lock that a poll took: got %v, want %v", got, nlm.Granted)
	}
}

// TestLateCallbackKeepsRestOfLock delivers GRANTED after a poll took the lock and its owner
// unlocked a part. A server releases the whole range if the client refuses.
func TestLateCallbackKeepsRestOfLock(t *testing.T) {
	service, _ := startService(t)
	s := startLockServer(t)
	c, other := s.client(func(cfg *nlm.Config) { cfg.Service = service }), s.client(nil)
	var granted []byte // arguments of LOCK
	s.setAnswer(func(h *sunrpc.CallHeader, args []byte) ([]byte, bool) {
		if nlm.Proc(h.Proc) == nlm.ProcLock {
			s.mu.Lock()
			granted = args
			s.mu.Unlock()
		}
		return nil, false
	})
	mustLock(t, c, exclusive(bob, 0, 9))
	s.setAnswer(nil)
	if err := c.Unlock(t.Context(), cred, fh, bob, 4, 5); err != nil {
		t.Fatal(err)
	}
	s.mu.Lock() // the server grants the queued request, too
	h := sunrpc.CallHeader{Prog: nlm.Program, Vers: nlm.Version, Proc: uint32(nlm.ProcLock)}
	s.nlmd.ServeNLM(netip.MustParseAddr("127.0.0.1"), &h, granted, nil)
	var lock nlm.Args
	_ = nlm.ParseArgs(nlm.ProcLock, granted, &lock)
	s.mu.Unlock()
	wantLock(t, other, exclusive(alice, 4, 5), syscall.EAGAIN)
	if got := grantedStat(t, service, netip.MustParseAddrPort("127.0.0.1:2049"), &lock); got != nlm.Granted {
		t.Errorf("late GRANTED: got %v, want %v", got, nlm.Granted)
	}
	waitFor(t, "the release of the rest", func() bool { return s.count(nlm.ProcUnlock) == 2 })
	mustLock(t, other, exclusive(alice, 4, 5))
	wantLock(t, other, exclusive(alice, 3, 3), syscall.EAGAIN)
	wantLock(t, other, exclusive(alice, 6, 6), syscall.EAGAIN)
}

// notify delivers SM_NOTIFY from an address.
func notify(t *testing.T, service *nlm.Service, from string, state uint32) {
	t.Helper()
	call := sunrpc.AppendCall(nil, 1, nlmd.ProgramNSM, nlmd.VersionNSM, 6, cred)
	if service.Handle(netip.MustParseAddrPort(from), nlm.AppendNotify(call, "server", state)) == nil {
		t.Error("no reply to SM_NOTIFY")
	}
}

func TestNoticeOfRestart(t *testing.T) {
	service, _ := startService(t)
	s := startLockServer(t)
	c := s.client(func(cfg *nlm.Config) { cfg.Service = service })
	service.WaitReady()
	mustLock(t, c, exclusive(alice, 0, 9))
	s.dropConnections()
	waitFor(t, "a check of the lock", func() bool { return s.count(nlm.ProcLock) >= 3 })
	notify(t, service, "127.0.0.1:4000", 3) // not from root
	notify(t, service, "192.0.2.1:700", 3)  // not the server
	before := s.count(nlm.ProcLock)
	c.Restarted("test") // the client handles this reason after the notices
	waitFor(t, "a check of the lock", func() bool {
		return s.count(nlm.ProcLock) >= before+2 || c.Counters.Lost.Load() > 0
	})
	if c.Counters.Lost.Load() != 0 {
		t.Error("a foreign notice counted")
	}
	notify(t, service, "127.0.0.1:700", 5) // the server does not let the client reclaim
	waitFor(t, "the lost lock", func() bool { return c.Lost(fh, alice) })
}

// TestNoticeWithoutRestartKeepsLocks delivers notices while the lock connection shows that the
// server has not restarted: a forged one, and a late one after the client has reclaimed its locks.
func TestNoticeWithoutRestartKeepsLocks(t *testing.T) {
	service, _ := startService(t)
	s := startLockServer(t)
	c := s.client(func(cfg *nlm.Config) { cfg.Service = service })
	service.WaitReady()
	mustLock(t, c, exclusive(alice, 0, 9))
	keeps := func(state uint32) {
		t.Helper()
		var asked atomic.Bool
		s.setAnswer(func(h *sunrpc.CallHeader, args []byte) ([]byte, bool) {
			var a nlm.Args
			if nlm.Proc(h.Proc) != nlm.ProcLock || nlm.ParseArgs(nlm.ProcLock, args, &a) != nil {
				return nil, false
			}
			stat := nlm.Granted
			if a.Reclaim { // no grace period
				stat = nlm.DeniedGracePeriod
			}
			asked.Store(!a.Reclaim)
			return nlm.AppendRes(sunrpc.AppendAcceptedReply(nil, h.XID, sunrpc.Success), nlm.ProcLock,
				&nlm.Res{Stat: stat}), true
		})
		notify(t, service, "127.0.0.1:700", state)
		waitFor(t, "a check of the lock", func() bool { return asked.Load() || c.Counters.Lost.Load() > 0 })
		if c.Counters.Lost.Load() != 0 {
			t.Error("the lock was lost")
		}
		s.setAnswer(nil)
	}
	keeps(3)
	s.restart(time.Hour)
	waitFor(t, "the reclaim", func() bool { return c.Counters.Reclaimed.Load() == 1 })
	keeps(5)
}

// TestServiceWithoutPortMapper checks that a host without a port mapper polls.
func TestServiceWithoutPortMapper(t *testing.T) {
	cfg := nlm.ServiceConfig{Listen: "127.0.0.1:0"}
	cfg.SetPortmap(int(kit.ClosedPort(t).Port()))
	service := nlm.NewService(cfg)
	t.Cleanup(service.Close)
	s := startLockServer(t)
	c := s.client(func(cfg *nlm.Config) { cfg.Service = service })
	service.WaitReady()
	if service.Active() {
		t.Error("the service is active")
	}
	if status := service.Status(); !strings.HasPrefix(status, "polling: port mapper of this host: ") ||
		!strings.Contains(status, "start rpcbind") {
		t.Errorf("status: got %q, want why servers cannot call", status)
	}
	mustLock(t, c, exclusive(alice, 0, 9))
}

// TestKilledDaemonLeavesNoLocks keeps the journal of a service that is not closed in order, and
// starts another service with it.
func TestKilledDaemonLeavesNoLocks(t *testing.T) {
	s := startLockServer(t)
	dir := t.TempDir()
	c := s.journalingClient(dir)
	mustLock(t, c, exclusive(alice, 0, 9))
	mustLock(t, c, shared(bob, 20, 29))
	mustLock(t, c, exclusive(nlm.Owner{Kind: nlm.Flock, ID: 3}, 40, 40))
	if err := c.ReleaseOwner(t.Context(), cred, fh, bob); err != nil {
		t.Fatal(err)
	}
	journal, err := os.ReadFile(filepath.Join(dir, "held-locks"))
	if err != nil {
		t.Fatal(err)
	}
	killed := t.TempDir()
	journal = append(journal, `{"host":"127.0.0.1","fh":"incompl`...)
	if err := os.WriteFile(filepath.Join(killed, "held-locks"), journal, 0o600); err != nil {
		t.Fatal(err)
	}
	if n := s.locks(); n != 2 {
		t.Fatalf("locks before the restart: got %d, want 2", n)
	}
	second := nlm.NewService(nlm.ServiceConfig{StateDir: killed})
	waitFor(t, "the release", func() bool {
		now, err := os.ReadFile(filepath.Join(killed, "held-locks"))
		return err == nil && bytes.Count(now, []byte(`"released":true`)) == 3 // bob's is the first one
	})
	second.Close()
	if n := s.locks(); n != 0 {
		t.Errorf("locks after the release: got %d, want none", n)
	}
	if _, err := os.Stat(filepath.Join(killed, "held-locks")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("journal after the release: got error %v, want %v", err, os.ErrNotExist)
	}
}

// TestJournalStaysShort locks and unlocks often.
func TestJournalStaysShort(t *testing.T) {
	s := startLockServer(t)
	dir := t.TempDir()
	c := s.journalingClient(dir)
	for i := range 2000 {
		mustLock(t, c, exclusive(alice, 0, uint64(i)))
		if err := c.ReleaseOwner(t.Context(), cred, fh, alice); err != nil {
			t.Fatal(err)
		}
	}
	info, err := os.Stat(filepath.Join(dir, "held-locks"))
	if err != nil || info.Size() > 512<<10 {
		t.Errorf("journal: got %+v, error %v; want at most 512 KiB", info, err)
	}
}
