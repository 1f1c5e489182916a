package nlm_test

import (
	"bytes"
	"context"
	"net"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nlm"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// stop closes the port. start opens it again.
func (s *lockServer) stop() (start func()) {
	s.l.Close()
	s.dropConnections()
	s.all.Wait()
	return func() {
		l, err := net.Listen("tcp", s.l.Addr().String())
		if err != nil {
			s.t.Fatal(err)
		}
		s.l = l
		s.t.Cleanup(func() { l.Close() })
		s.all.Go(func() { s.accept(l) })
	}
}

// TestRestoredClientWaitsForService restores locks while the server, which restarts, refuses
// connections.
func TestRestoredClientWaitsForService(t *testing.T) {
	s := startLockServer(t)
	k := newKeptFile(t, s, nlm.StateTables())
	c := k.client(nil)
	mustLock(t, c, exclusive(alice, 0, 9))
	c.Detach()
	start := s.stop()
	s.restart(time.Hour)
	c = k.restart(c, nil)
	time.Sleep(20 * time.Millisecond)
	start()
	c.WaitRestored()
	if n := c.Counters.Reclaimed.Load(); n != 1 || s.locks() != 1 {
		t.Errorf("got %d locks reclaimed, %d at the server; want 1, 1", n, s.locks())
	}
	wantTable(t, c, exclusive(alice, 0, 9))
}

// unregister makes the server reply that it has no lock service.
func (s *lockServer) unregister() {
	s.setAnswer(func(h *sunrpc.CallHeader, _ []byte) ([]byte, bool) {
		return sunrpc.AppendAcceptedReply(nil, h.XID, sunrpc.ProgUnavail), nlm.Proc(h.Proc) != nlm.ProcNull
	})
}

// TestUnsettledRequestKeepsIdentity interrupts a LOCK while the lock service is missing, in this
// process or before the next one. The server releases the lock when the service is back. A later
// lock of the owner has the identity that its record has.
func TestUnsettledRequestKeepsIdentity(t *testing.T) {
	for _, restart := range []bool{false, true} {
		s := startLockServer(t)
		k := newKeptFile(t, s, nlm.StateTables())
		c := k.client(nil)
		executed, reply := s.holdReply(nlm.ProcLock)
		ctx, cancel := context.WithCancel(t.Context())
		result := make(chan error)
		go func() { result <- c.Lock(ctx, cred, fh, exclusive(alice, 0, 9), false) }()
		<-executed
		if restart {
			c.Detach()
		}
		s.unregister()
		cancel()
		<-result
		reply()
		if restart {
			c = k.restart(c, nil)
			c.WaitRestored()
		}
		time.Sleep(50 * time.Millisecond)
		s.setAnswer(nil)
		mustLock(t, c, exclusive(alice, 20, 29))
		waitFor(t, "the release", func() bool {
			_, _, requests := k.state.Records()
			return requests == 0 && s.locks() == 1
		})
		svid, oh := c.Identity(alice)
		c = k.restart(c, nil)
		c.WaitRestored()
		wantTable(t, c, exclusive(alice, 20, 29))
		if gotSVID, gotOH := c.Identity(alice); gotSVID != svid || !bytes.Equal(gotOH, oh) {
			t.Errorf("identity of alice: got %d %x, want %d %x", gotSVID, gotOH, svid, oh)
		}
	}
}

// TestUnlockOfLostLockReachesServer loses a lock that the server still has.
func TestUnlockOfLostLockReachesServer(t *testing.T) {
	for _, closes := range []bool{false, true} {
		s := startLockServer(t)
		k := newKeptFile(t, s, nlm.StateTables())
		c := k.client(nil)
		mustLock(t, c, exclusive(alice, 0, 9))
		s.setAnswer(func(h *sunrpc.CallHeader, _ []byte) ([]byte, bool) {
			return nlm.AppendRes(sunrpc.AppendAcceptedReply(nil, h.XID, sunrpc.Success), nlm.ProcLock,
				&nlm.Res{Stat: nlm.DeniedNoLocks}), nlm.Proc(h.Proc) == nlm.ProcLock
		})
		c.Restarted("test")
		waitFor(t, "the loss", func() bool { return c.Lost(fh, alice) })
		s.setAnswer(nil)
		if closes {
			c.Close()
		} else {
			mustUnlock(t, c, alice, 0, whole)
		}
		if n := s.locks(); n != 0 {
			t.Errorf("locks at the server: got %d, want none", n)
		}
		k.wantRecords(0, 0)
	}
}
