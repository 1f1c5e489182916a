package nlm_test

import (
	"bytes"
	"encoding/json"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/nlmd"
	"github.com/nfsrdmad/nfsrdmad/pkg/nlm"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// TestUnlockCannotExceedLockLimit unlocks parts of locks when the mount has as many locks as it may
// have.
func TestUnlockCannotExceedLockLimit(t *testing.T) {
	s := startLockServer(t)
	c := s.client(nil)
	mustLock(t, c, exclusive(alice, 0, 99))
	c.Counters.Held.Store(nlm.MaxLocks)
	if err := c.Unlock(t.Context(), cred, fh, alice, 50, 50); err != syscall.ENOLCK {
		t.Errorf("unlock the middle: got error %v, want %v", err, syscall.ENOLCK)
	}
	if n := s.count(nlm.ProcUnlock); n != 0 {
		t.Errorf("UNLOCK calls: got %d, want none", n)
	}
	if err := c.Unlock(t.Context(), cred, fh, alice, 50, 99); err != nil {
		t.Errorf("unlock the end: %v", err)
	}
	if err := c.ReleaseOwner(t.Context(), cred, fh, alice); err != nil || s.locks() != 0 {
		t.Errorf("release all: got error %v, %d locks at the server; want none", err, s.locks())
	}
}

// startSilentService accepts connections and does not reply. It returns the port.
func startSilentService(t *testing.T) uint32 {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			conn.Close()
		}
	}()
	t.Cleanup(func() {
		l.Close()
		<-done
	})
	return uint32(l.Addr().(*net.TCPAddr).Port)
}

// TestRegistrationOfSilentServiceStays registers a lock service that accepts connections but does
// not reply. Only a closed port shows that a service has ended.
func TestRegistrationOfSilentServiceStays(t *testing.T) {
	silent := startSilentService(t)
	mapper, port := startPortMapper(t)
	key := [3]uint32{nlm.Program, nlm.Version, 6}
	mapper.mu.Lock()
	mapper.maps[key] = silent
	mapper.mu.Unlock()
	cfg := nlm.ServiceConfig{Listen: "127.0.0.1:0"}
	cfg.SetPortmap(port)
	service := nlm.NewService(cfg)
	t.Cleanup(service.Close)
	startLockServer(t).client(func(c *nlm.Config) { c.Service = service })
	service.WaitReady()
	if status := service.Status(); !strings.Contains(status, "another lock service") {
		t.Errorf("status: got %q, want why servers cannot call", status)
	}
	mapper.mu.Lock()
	defer mapper.mu.Unlock()
	if len(mapper.maps) != 1 || mapper.maps[key] == 0 {
		t.Errorf("registrations: got %v, want only that of the silent service", mapper.maps)
	}
}

// TestDeadStatusMonitorIsReplaced registers a status monitor that has ended, such as the one of a
// killed daemon. The service must receive the notices itself.
func TestDeadStatusMonitorIsReplaced(t *testing.T) {
	service, mapper := startService(t)
	monitor := [3]uint32{nlmd.ProgramNSM, nlmd.VersionNSM, 6}
	mapper.mu.Lock()
	mapper.maps[monitor] = uint32(kit.ClosedPort(t).Port())
	mapper.mu.Unlock()
	startLockServer(t).client(func(c *nlm.Config) { c.Service = service })
	service.WaitReady()
	mapper.mu.Lock()
	defer mapper.mu.Unlock()
	if own := mapper.maps[[3]uint32{nlm.Program, nlm.Version, 6}]; own == 0 || mapper.maps[monitor] != own {
		t.Errorf("port of the status monitor: got %d, want %d of the service", mapper.maps[monitor], own)
	}
	if status := service.Status(); !strings.HasPrefix(status, "callbacks and notices of restarts at") {
		t.Errorf("status: got %q, want callbacks and notices", status)
	}
}

// TestNoQueueBesideAnotherLockService waits for a lock on a host with another lock service. That
// service would refuse the callback for a queued request, and the server would then release the
// lock.
func TestNoQueueBesideAnotherLockService(t *testing.T) {
	mapper, port := startPortMapper(t)
	silent := startSilentService(t)
	mapper.mu.Lock()
	mapper.maps[[3]uint32{nlm.Program, nlm.Version, 6}] = silent
	mapper.mu.Unlock()
	cfg := nlm.ServiceConfig{}
	cfg.SetPortmap(port)
	service := nlm.NewService(cfg)
	t.Cleanup(service.Close)
	s := startLockServer(t)
	var queued atomic.Int32
	s.setAnswer(func(h *sunrpc.CallHeader, args []byte) ([]byte, bool) {
		var a nlm.Args
		if nlm.Proc(h.Proc) == nlm.ProcLock && nlm.ParseArgs(nlm.ProcLock, args, &a) == nil && a.Block {
			queued.Add(1)
		}
		return nil, false
	})
	a, b := s.client(nil), s.client(func(c *nlm.Config) { c.Service = service })
	mustLock(t, a, exclusive(alice, 0, 9))
	result, cancel := waiting(t, b, exclusive(bob, 0, 0))
	defer cancel()
	waitFor(t, "polls", func() bool { return s.count(nlm.ProcLock) > 3 })
	if err := a.ReleaseOwner(t.Context(), cred, fh, alice); err != nil {
		t.Fatal(err)
	}
	if err := <-result; err != nil {
		t.Errorf("waiting lock: %v", err)
	}
	if n := queued.Load(); n != 0 {
		t.Errorf("LOCK calls that let the server queue the request: got %d, want none", n)
	}
}

// TestOnePeerCannotTakeAllConnections opens connections from many loopback addresses, which every
// local user can use. A server must still be able to connect.
func TestOnePeerCannotTakeAllConnections(t *testing.T) {
	service := nlm.NewService(nlm.ServiceConfig{})
	t.Cleanup(service.Close)
	startLockServer(t).client(func(c *nlm.Config) { c.Host, c.Service = "192.0.2.1", service })
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
	if n == 0 || !admitted(netip.MustParseAddr("192.0.2.1")) {
		t.Errorf("%d connections of local users admitted, and then none of the server", n)
	}
	if admitted(netip.MustParseAddr("192.0.2.2")) {
		t.Error("connection of a foreign host admitted")
	}
}

// TestLinkLocalServerIsKnown mounts from an IPv6 address with a zone.
func TestLinkLocalServerIsKnown(t *testing.T) {
	service := nlm.NewService(nlm.ServiceConfig{})
	t.Cleanup(service.Close)
	startLockServer(t).client(func(c *nlm.Config) { c.Host, c.Service = "fe80::1%eth0", service })
	conn, other := net.Pipe()
	t.Cleanup(func() { other.Close() })
	if !service.Admit(conn, netip.MustParseAddr("fe80::1%eth0")) {
		t.Error("connection of the server refused")
	}
}

// TestJournalAfterIncompleteLine starts a service with the journal of a daemon that was killed
// during a write: in a line, or before its end.
func TestJournalAfterIncompleteLine(t *testing.T) {
	for _, left := range []string{`{"host":"127.0.0.1","fh":"incompl`, `{"host":"127.0.0.1","released":true}`} {
		s := startLockServer(t)
		dir := t.TempDir()
		path := filepath.Join(dir, "held-locks")
		if err := os.WriteFile(path, []byte(left), 0o600); err != nil {
			t.Fatal(err)
		}
		mustLock(t, s.journalingClient(dir), exclusive(alice, 0, 9))
		journal, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		lines := bytes.Split(bytes.TrimSpace(journal), []byte("\n"))
		if last := lines[len(lines)-1]; !json.Valid(last) {
			t.Errorf("last line of the journal after %s: got %s, want the owner of the lock", left, last)
		}
	}
}
