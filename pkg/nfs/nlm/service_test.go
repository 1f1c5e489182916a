package nlm_test

import (
	"bytes"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm/nlmwire"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc/rpctcp"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

var serverAddr = netip.MustParseAddrPort("127.0.0.1:2049")

// grantedCall returns a GRANTED or GRANTED_MSG call for a LOCK that the server received.
func grantedCall(proc nlmwire.Proc, a nlmwire.Args) []byte {
	a.Cookie = []byte{9, 9}
	call := sunrpc.AppendCall(nil, 77, nlmwire.Program, nlmwire.Version, uint32(proc), cred)
	return nlmwire.AppendArgs(call, proc, &a)
}

// wantGranted makes a GRANTED call.
func wantGranted(t *testing.T, service *nlm.Service, from netip.AddrPort, a nlmwire.Args, want nlmwire.Stat) {
	t.Helper()
	_, results, err := sunrpc.ParseReply(service.Handle(from, grantedCall(nlmwire.ProcGranted, a)))
	var res nlmwire.Res
	if err != nil || nlmwire.ParseRes(nlmwire.ProcGranted, results, &res) != nil || string(res.Cookie) != "\x09\x09" {
		t.Errorf("reply to GRANTED: %+v, error %v", res, err)
	}
	if res.Stat != want {
		t.Errorf("GRANTED from %v, %+v: got %v, want %v", from, a.Region, res.Stat, want)
	}
}

func TestGrantedCallback(t *testing.T) {
	mapper := startPortMapper(t)
	t.Cleanup(func() {
		if _, n := mapper.get(0, 0); n != 0 {
			t.Errorf("registrations after Close: got %d, want none", n)
		}
	})
	service := startService(t, mapper)
	s := startLockServer(t)
	a, b := s.client(nil), s.client(func(cfg *nlm.Config) { cfg.Service = service })
	b.Patient()
	service.WaitReady()
	if port, n := mapper.get(nlmwire.Program, nlmwire.Version); !service.Active() || port == 0 || n != 4 {
		t.Fatalf("service: active %v, port %d, %d registrations; want 4", service.Active(), port, n)
	}
	mustLock(t, a, exclusive(alice, 0, 9))
	result, cancel := goLock(t, b, exclusive(bob, 0, 0), true)
	defer cancel()
	wantPending(t, b, 1)
	granted := s.received(nlmwire.ProcLock)[1].args

	wrongRange, wrongOwner := granted, granted
	wrongRange.Region.Length = 2
	wrongOwner.Region.SVID++
	wantGranted(t, service, netip.MustParseAddrPort("192.0.2.1:2049"), granted, nlmwire.Denied)
	wantGranted(t, service, serverAddr, wrongRange, nlmwire.Denied)
	wantGranted(t, service, serverAddr, wrongOwner, nlmwire.Denied)
	wantGranted(t, service, serverAddr, granted, nlmwire.Granted) // forged
	kit.Eventually(t, "question to the server", func() bool { return s.count(nlmwire.ProcLock) > 2 })
	wantPending(t, b, 1)
	release(t, a, alice)
	service.Handle(serverAddr, grantedCall(nlmwire.ProcGrantedMsg, granted))
	wantResult(t, result, nil)
	if n := b.Counters.Callbacks.Load(); n != 1 {
		t.Errorf("locks granted by callbacks: got %d, want 1", n)
	}
	kit.Eventually(t, "GRANTED_RES", func() bool { return s.count(nlmwire.ProcGrantedRes) == 1 })
	wantGranted(t, service, serverAddr, granted, nlmwire.Granted) // after a poll took the lock
}

// TestLateCallbackKeepsRestOfLock delivers GRANTED after a poll took the lock and its owner
// unlocked a part. A server releases the whole range if the client refuses.
func TestLateCallbackKeepsRestOfLock(t *testing.T) {
	service := startService(t, startPortMapper(t))
	s := startLockServer(t)
	c, other := s.client(func(cfg *nlm.Config) { cfg.Service = service }), s.client(nil)
	mustLock(t, c, exclusive(bob, 0, 9))
	mustUnlock(t, c, bob, 4, 5)
	queued := s.received(nlmwire.ProcLock)[0]
	s.execute(queued) // the server grants the queued request, too
	wantLock(t, other, exclusive(alice, 4, 5), syscall.EAGAIN)
	wantGranted(t, service, serverAddr, queued.args, nlmwire.Granted)
	kit.Eventually(t, "release of the rest", func() bool { return s.count(nlmwire.ProcUnlock) == 2 })
	mustLock(t, other, exclusive(alice, 4, 5))
	wantLock(t, other, exclusive(alice, 3, 3), syscall.EAGAIN)
	wantLock(t, other, exclusive(alice, 6, 6), syscall.EAGAIN)
}

// notify delivers SM_NOTIFY from an address.
func notify(t *testing.T, service *nlm.Service, from string, state uint32) {
	t.Helper()
	call := sunrpc.AppendCall(nil, 1, nlmwire.NSMProgram, nlmwire.NSMVersion, 6, cred)
	if service.Handle(netip.MustParseAddrPort(from), nlm.AppendNotify(call, "server", state)) == nil {
		t.Error("no reply to SM_NOTIFY")
	}
}

func TestNoticeOfRestart(t *testing.T) {
	service := startService(t, startPortMapper(t))
	s := startLockServer(t)
	c := s.client(func(cfg *nlm.Config) { cfg.Service = service })
	service.WaitReady()
	mustLock(t, c, exclusive(alice, 0, 9))
	s.dropConnections()
	kit.Eventually(t, "check of the lock", func() bool { return s.count(nlmwire.ProcLock) >= 3 })
	notify(t, service, "127.0.0.1:4000", 3) // not from root
	notify(t, service, "192.0.2.1:700", 3)  // not the server
	before := s.count(nlmwire.ProcLock)
	c.Restarted("test") // the client handles this reason after the notices
	kit.Eventually(t, "check of the lock", func() bool {
		return s.count(nlmwire.ProcLock) >= before+2 || c.Counters.Lost.Load() > 0
	})
	if c.Counters.Lost.Load() != 0 {
		t.Error("a foreign notice counted")
	}
	notify(t, service, "127.0.0.1:700", 5) // the server does not let the client reclaim
	kit.Eventually(t, "lost lock", func() bool { return c.Lost(fh, alice.ID) })
}

// TestNoticeWithoutRestartKeepsLocks delivers notices while the lock connection shows that the
// server has not restarted: a forged one, and a late one after the client has reclaimed its locks.
func TestNoticeWithoutRestartKeepsLocks(t *testing.T) {
	service := startService(t, startPortMapper(t))
	s := startLockServer(t)
	c := s.client(func(cfg *nlm.Config) { cfg.Service = service })
	service.WaitReady()
	mustLock(t, c, exclusive(alice, 0, 9))
	keeps := func(state uint32) {
		t.Helper()
		var asked atomic.Bool
		s.setAnswer(func(c *call) reply {
			switch {
			case c.proc != nlmwire.ProcLock:
				return pass
			case c.args.Reclaim: // no grace period
				return c.stat(nlmwire.DeniedGracePeriod)
			}
			asked.Store(true)
			return c.stat(nlmwire.Granted)
		})
		notify(t, service, "127.0.0.1:700", state)
		kit.Eventually(t, "check of the lock", func() bool { return asked.Load() || c.Counters.Lost.Load() > 0 })
		if c.Counters.Lost.Load() != 0 {
			t.Error("the lock was lost")
		}
		s.setAnswer(nil)
	}
	keeps(3)
	s.restart(time.Hour)
	kit.Eventually(t, "reclaim", func() bool { return c.Counters.Reclaimed.Load() == 1 })
	keeps(5)
}

// A statusMonitor is the status monitor of a server. It replies to SM_STAT.
type statusMonitor struct{ state atomic.Uint32 }

func startStatusMonitor(t *testing.T, m *portMapper) *statusMonitor {
	t.Helper()
	monitor := &statusMonitor{}
	port := listen(t, func(conn net.Conn) {
		if message, err := rpctcp.ReadRecord(conn, nil, nlmwire.MaxMessage); err == nil {
			h, _, _ := sunrpc.ParseCall(message)
			reply := sunrpc.AppendUint32(sunrpc.AppendAcceptedReply(nil, h.XID, sunrpc.Success), 0)
			_ = rpctcp.WriteRecord(conn, sunrpc.AppendUint32(reply, monitor.state.Load()))
		}
	})
	m.set(nlmwire.NSMProgram, nlmwire.NSMVersion, uint32(port))
	return monitor
}

// TestForgedNoticeKeepsLocks delivers a forged notice after the end of an idle connection. The state
// number in it is that of the server, which anyone can ask for. Then the server restarts.
func TestForgedNoticeKeepsLocks(t *testing.T) {
	service, mapper := startService(t, startPortMapper(t)), startPortMapper(t)
	monitor := startStatusMonitor(t, mapper)
	monitor.state.Store(3)
	s := startLockServer(t)
	c := s.client(func(cfg *nlm.Config) {
		cfg.Service = service
		cfg.SetServerMapper(mapper.port)
	})
	service.WaitReady()
	mustLock(t, c, exclusive(alice, 0, 9))
	kit.Eventually(t, "state number", c.KnowsState)
	s.dropConnections()
	kit.Eventually(t, "check of the lock", func() bool { return s.count(nlmwire.ProcLock) >= 3 })
	notify(t, service, "127.0.0.1:700", 3)
	kit.Eventually(t, "check of the lock", func() bool {
		return s.count(nlmwire.ProcLock) >= 5 || c.Counters.Lost.Load() > 0
	})
	if c.Counters.Lost.Load() != 0 {
		t.Fatal("the lock was lost after a forged notice")
	}
	monitor.state.Store(5)
	notify(t, service, "127.0.0.1:700", 5)
	kit.Eventually(t, "lost lock", func() bool { return c.Lost(fh, alice.ID) })
}

// TestServiceWithoutPortMapper checks that a host without a port mapper polls.
func TestServiceWithoutPortMapper(t *testing.T) {
	service := startService(t, &portMapper{port: int(kit.ClosedPort(t).Port())})
	s := startLockServer(t)
	c := s.client(func(cfg *nlm.Config) { cfg.Service = service })
	service.WaitReady()
	if status := service.Status(); service.Active() ||
		!strings.HasPrefix(status, "polling: port mapper of this host: ") ||
		!strings.Contains(status, "start rpcbind") {
		t.Errorf("status: got active %v, %q; want why servers cannot call", service.Active(), status)
	}
	mustLock(t, c, exclusive(alice, 0, 9))
}

// TestOtherLockServiceStays has a host with another lock service, which accepts connections and
// does not reply: only a closed port shows that a service has ended. Servers must not queue
// requests, because that service would refuse their callbacks, and the server would then release
// the lock.
func TestOtherLockServiceStays(t *testing.T) {
	mapper := startPortMapper(t)
	mapper.set(nlmwire.Program, nlmwire.Version, uint32(listen(t, func(net.Conn) {})))
	service := startService(t, mapper)
	s := startLockServer(t)
	a, b := s.client(nil), s.client(func(c *nlm.Config) { c.Service = service })
	service.WaitReady()
	if status := service.Status(); !strings.Contains(status, "another lock service") {
		t.Errorf("status: got %q, want why servers cannot call", status)
	}
	if port, n := mapper.get(nlmwire.Program, nlmwire.Version); n != 1 || port == 0 {
		t.Errorf("registrations: got port %d, %d registrations; want that of the other service", port, n)
	}
	mustLock(t, a, exclusive(alice, 0, 9))
	result, cancel := goLock(t, b, exclusive(bob, 0, 0), true)
	defer cancel()
	kit.Eventually(t, "polls", func() bool { return s.count(nlmwire.ProcLock) > 3 })
	release(t, a, alice)
	wantResult(t, result, nil)
	if n := b.Counters.Polls.Load(); n != 1 {
		t.Errorf("locks granted by polls: got %d, want 1", n)
	}
	for _, c := range s.received(nlmwire.ProcLock) {
		if c.args.Block {
			t.Error("LOCK lets the server queue the request")
		}
	}
}

// TestDeadStatusMonitorIsReplaced registers a status monitor that has ended, such as the one of a
// killed daemon. The service must receive the notices itself.
func TestDeadStatusMonitorIsReplaced(t *testing.T) {
	mapper := startPortMapper(t)
	mapper.set(nlmwire.NSMProgram, nlmwire.NSMVersion, uint32(kit.ClosedPort(t).Port()))
	service := startService(t, mapper)
	startLockServer(t).client(func(c *nlm.Config) { c.Service = service })
	service.WaitReady()
	own, _ := mapper.get(nlmwire.Program, nlmwire.Version)
	if monitor, _ := mapper.get(nlmwire.NSMProgram, nlmwire.NSMVersion); own == 0 || monitor != own {
		t.Errorf("port of the status monitor: got %d, want %d of the service", monitor, own)
	}
	if status := service.Status(); !strings.HasPrefix(status, "callbacks and notices of restarts at") {
		t.Errorf("status: got %q, want callbacks and notices", status)
	}
}

// TestOnePeerCannotTakeAllConnections opens connections from many loopback addresses, which every
// local user can use. The servers, one of which has an address with a zone, must still be able to
// connect.
func TestOnePeerCannotTakeAllConnections(t *testing.T) {
	service := nlm.NewService(nlm.ServiceConfig{})
	t.Cleanup(service.Close)
	s := startLockServer(t)
	servers := []string{"192.0.2.1", "fe80::1%eth0"}
	for _, host := range servers {
		s.client(func(c *nlm.Config) { c.Host, c.Service = host, service })
	}
	admitted := func(peer netip.Addr) bool {
		conn, other := net.Pipe()
		t.Cleanup(func() { other.Close() })
		return service.Admit(conn, peer)
	}
	n := 0
	for i := range byte(100) {
		if admitted(netip.AddrFrom4([4]byte{127, 0, 0, i + 1})) {
			n++
		}
	}
	for _, host := range servers {
		if n == 0 || !admitted(netip.MustParseAddr(host)) {
			t.Errorf("%d connections of local users admitted, and then none of %s", n, host)
		}
	}
	if admitted(netip.MustParseAddr("192.0.2.2")) {
		t.Error("connection of a foreign host admitted")
	}
}

// TestKilledDaemonLeavesNoLocks ends a process with two mounts, of which one was closed while the
// server did not answer. The server also denies the first two attempts of the next process.
func TestKilledDaemonLeavesNoLocks(t *testing.T) {
	s := startLockServer(t)
	cfg := nlm.ServiceConfig{StateDir: t.TempDir()}
	cfg.SetRetry(time.Millisecond)
	service := nlm.NewService(cfg)
	use := func(cfg *nlm.Config) { cfg.Service = service }
	c, closed := s.client(use), s.client(use)
	mustLock(t, c, exclusive(alice, 0, 9))
	mustLock(t, c, shared(bob, 20, 29))
	release(t, c, bob)
	mustLock(t, closed, exclusive(nlm.Owner{Kind: nlm.Flock, ID: 3}, 40, 40))
	s.answerStat(nlmwire.ProcUnlock, nlmwire.DeniedGracePeriod)
	closed.CloseWithin(time.Millisecond)
	c.Detach()
	service.Close()
	if n := s.locks(); n != 2 {
		t.Fatalf("locks before the restart: got %d, want 2", n)
	}
	unlocks := s.count(nlmwire.ProcUnlock)
	s.setAnswer(func(c *call) reply {
		if c.proc == nlmwire.ProcUnlock && s.count(nlmwire.ProcUnlock) <= unlocks+2 {
			return c.stat(nlmwire.DeniedGracePeriod)
		}
		return pass
	})
	service = nlm.NewService(cfg)
	kit.Eventually(t, "release", func() bool { return len(ownersIn(t, cfg.StateDir)) == 0 })
	service.Close()
	if n, calls := s.locks(), s.count(nlmwire.ProcUnlock)-unlocks; n != 0 || calls != 4 { // not of bob
		t.Errorf("got %d locks, %d calls of UNLOCK; want 0, 4", n, calls)
	}
}

// TestForeignOwnersAreIgnored starts a service with files and records that no service writes. They
// stay, with a warning, and do not exclude the others.
func TestForeignOwnersAreIgnored(t *testing.T) {
	s := startLockServer(t)
	dir := t.TempDir()
	c := s.recordedClient(dir)
	mustLock(t, c, exclusive(alice, 0, 9))
	mustLock(t, c, exclusive(bob, 20, 29))
	valid := ownersIn(t, dir)
	killed := t.TempDir()
	write := func(name, content string) {
		kit.Must(t, os.WriteFile(filepath.Join(killed, name), []byte(content), 0o600))
	}
	for _, content := range valid {
		write("locks-1-damaged", content[:nlm.OwnersHead]+strings.Repeat("x", 100)+content[nlm.OwnersHead+100:])
		write("locks-1-magic", "x"+content[1:])
		write("locks-1-short", content[:100])
		write("locks-1-host", strings.ReplaceAll(content, "127.0.0.1", "server.xx"))
		write("locks-1-large", content)
		kit.Must(t, os.Truncate(filepath.Join(killed, "locks-1-large"), 1<<30))
		write("other", content)
		write("locks-1-empty", "") // removed
	}
	kit.Must(t, os.Mkdir(filepath.Join(killed, "locks-1-dir"), 0o700))
	kit.Must(t, os.Symlink("other", filepath.Join(killed, "locks-1-link")))
	kit.Must(t, syscall.Mkfifo(filepath.Join(killed, "locks-1-fifo"), 0o600))
	var log bytes.Buffer
	var mu sync.Mutex // of log
	service := nlm.NewService(nlm.ServiceConfig{StateDir: killed,
		Logger: hclog.New(&hclog.LoggerOptions{Output: &log, Mutex: &mu})})
	t.Cleanup(service.Close)
	kit.Eventually(t, "eight warnings", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return strings.Count(log.String(), "locks may stay at a server") == 8
	})
	if n := s.count(nlmwire.ProcUnlock); n != 1 || s.locks() != 1 {
		t.Errorf("got %d calls of UNLOCK, %d locks; want 1, 1", n, s.locks())
	}
	names, err := os.ReadDir(killed)
	if err != nil || len(names) != 8 {
		t.Errorf("got %v, error %v; want all files without the damaged and the empty one", names, err)
	}
}

// TestStateDirHasOneService starts a second service with a state directory. It must not release the
// locks of the first one.
func TestStateDirHasOneService(t *testing.T) {
	s := startLockServer(t)
	dir := t.TempDir()
	c := s.recordedClient(dir)
	mustLock(t, c, exclusive(alice, 0, 9))
	var log bytes.Buffer
	service := nlm.NewService(nlm.ServiceConfig{StateDir: dir,
		Logger: hclog.New(&hclog.LoggerOptions{Output: &log})})
	service.Close()
	if !strings.Contains(log.String(), "in use by another process") {
		t.Errorf("log: got %q", &log)
	}
	if n := s.locks(); n != 1 {
		t.Errorf("got %d locks, want 1", n)
	}
}
