package nlm_test

import (
	"bytes"
	"encoding/json"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/nlm"
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

// TestRegistrationOfSilentServiceStays registers a lock service that accepts connections but does
// not reply. Only a closed port shows that a service has ended.
func TestRegistrationOfSilentServiceStays(t *testing.T) {
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
	defer func() {
		l.Close()
		<-done
	}()
	mapper, port := startPortMapper(t)
	key := [3]uint32{nlm.Program, nlm.Version, 6}
	mapper.mu.Lock()
	mapper.maps[key] = uint32(l.Addr().(*net.TCPAddr).Port)
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

// TestOnePeerCannotTakeAllConnections opens connections from many loopback addresses, which every
// local user has. A server must still be able to connect.
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
// during a write.
func TestJournalAfterIncompleteLine(t *testing.T) {
	s := startLockServer(t)
	dir := t.TempDir()
	path := filepath.Join(dir, "held-locks")
	if err := os.WriteFile(path, []byte(`{"host":"127.0.0.1","fh":"incompl`), 0o600); err != nil {
		t.Fatal(err)
	}
	service := nlm.NewService(nlm.ServiceConfig{StateDir: dir})
	t.Cleanup(service.Close)
	c := s.client(func(cfg *nlm.Config) { cfg.Service = service })
	mustLock(t, c, exclusive(alice, 0, 9))
	journal, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	lines := bytes.Split(bytes.TrimSpace(journal), []byte("\n"))
	if last := lines[len(lines)-1]; !json.Valid(last) {
		t.Errorf("last line of the journal: got %s, want the owner of the lock", last)
	}
}
