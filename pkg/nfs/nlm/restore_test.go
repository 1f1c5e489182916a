package nlm_test

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/keep/slotfile"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm/nlmwire"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// A keptFile is a file with a State that outlives clients.
type keptFile struct {
	t *testing.T
	s *lockServer
	d *os.File
	f *slotfile.File // open, or nil

	specs []slotfile.TableSpec
	state *nlm.State // of the last client
}

func newKeptFile(t *testing.T, s *lockServer, specs []slotfile.TableSpec) *keptFile {
	t.Helper()
	f, err := slotfile.Create("nlm", 1, specs)
	kit.Must(t, err)
	d, err := f.Descriptor()
	kit.Must(t, err)
	k := &keptFile{t: t, s: s, d: d, f: f, specs: specs}
	t.Cleanup(func() {
		k.close()
		d.Close()
	})
	return k
}

func (k *keptFile) close() {
	if k.f != nil {
		if err := k.f.Close(); err != nil {
			k.t.Error(err)
		}
	}
	k.f = nil
}

// client returns a client with the State in the file. It waits while the kernel releases the lock
// of a killed process.
func (k *keptFile) client(change func(*nlm.Config)) *nlm.Client {
	k.t.Helper()
	if k.f == nil {
		kit.Eventually(k.t, "lock of the file", func() bool {
			var err error
			if k.f, err = slotfile.Open(k.d, 1, k.specs); err != nil && !errors.Is(err, slotfile.ErrLocked) {
				k.t.Fatal(err)
			}
			return err == nil
		})
	}
	k.state = nlm.NewState(k.f)
	cfg := k.s.config()
	cfg.State = k.state
	if change != nil {
		change(&cfg)
	}
	c := nlm.New(cfg)
	k.t.Cleanup(c.Detach)
	return c
}

// restart detaches c, and returns the client of the next process.
func (k *keptFile) restart(c *nlm.Client, change func(*nlm.Config)) *nlm.Client {
	k.t.Helper()
	c.Detach()
	k.close()
	return k.client(change)
}

func (k *keptFile) wantRecords(wantOwners, wantRanges int) {
	k.t.Helper()
	if owners, ranges, _ := k.state.Records(); owners != wantOwners || ranges != wantRanges {
		k.t.Errorf("records: got %d owners, %d ranges; want %d, %d", owners, ranges, wantOwners, wantRanges)
	}
}

func wantTable(t *testing.T, c *nlm.Client, want ...nlm.Lock) {
	t.Helper()
	if held, lost := c.Table(fh); !slices.Equal(held, want) || len(lost) != 0 {
		t.Errorf("got locks %+v, lost %+v; want %+v", held, lost, want)
	}
}

func TestLocksSurviveRestart(t *testing.T) {
	s := startLockServer(t)
	k := newKeptFile(t, s, slices.Concat([]slotfile.TableSpec{{Name: "nodes", RecordBytes: 8, MaxSlots: 9}},
		nlm.StateTables()))
	c := k.client(nil)
	flock := nlm.Owner{Kind: nlm.Flock, ID: 1}
	mustLock(t, c, exclusive(alice, 0, 99))
	mustLock(t, c, shared(alice, 20, 29))
	mustUnlock(t, c, alice, 50, 59)
	mustLock(t, c, exclusive(bob, 55, 56))
	mustLock(t, c, exclusive(bob, 57, 58))
	mustLock(t, c, exclusive(flock, 1000, whole))
	mustLock(t, c, exclusive(flock, 200, 300))
	release(t, c, flock)
	want, _ := c.Table(fh)
	svid, oh := c.Identity(alice)
	k.wantRecords(2, 5)
	unlocks := s.count(nlmwire.ProcUnlock)
	c = k.restart(c, func(cfg *nlm.Config) { cfg.Caller = "renamed" })
	wantTable(t, c, want...)
	c.WaitRestored()
	wantTable(t, c, want...)
	k.wantRecords(2, 5)
	if n := s.locks(); n != 5 || s.count(nlmwire.ProcUnlock) != unlocks {
		t.Errorf("server: got %d locks, %d calls of UNLOCK; want 5, %d", n, s.count(nlmwire.ProcUnlock), unlocks)
	}
	if gotSVID, gotOH := c.Identity(alice); gotSVID != svid || !bytes.Equal(gotOH, oh) {
		t.Errorf("identity of alice: got %d %x, want %d %x", gotSVID, gotOH, svid, oh)
	}
	if n := c.Counters.Held.Load(); n != 5 {
		t.Errorf("locks held: got %d, want 5", n)
	}
	mustLock(t, c, shared(alice, 0, 49)) // the restored owner
	wantLock(t, s.client(nil), exclusive(bob, 55, 55), syscall.EAGAIN)
	release(t, c, alice)
	release(t, c, bob)
	k.wantRecords(0, 0)
	if n := s.locks(); n != 0 || c.InUse(fh) {
		t.Errorf("after the release: got %d locks at the server, in use %v", n, c.InUse(fh))
	}
}

// TestRestoredClientReclaims restarts the server while no client runs. It first refuses
// connections. Without the reclaim another client gets the lock after the grace period.
func TestRestoredClientReclaims(t *testing.T) {
	bubble(t, func(t *testing.T, s *lockServer) {
		k := newKeptFile(t, s, nlm.StateTables())
		c := k.client(nil)
		mustLock(t, c, exclusive(alice, 0, 9))
		c.Detach()
		s.restart(time.Hour)
		s.refuse = 3
		c = k.restart(c, nil)
		c.WaitRestored()
		if n := c.Counters.Reclaimed.Load(); n != 1 || s.locks() != 1 {
			t.Errorf("got %d locks reclaimed, %d at the server; want 1, 1", n, s.locks())
		}
		wantTable(t, c, exclusive(alice, 0, 9))
	})
}

// TestLostLockSurvivesRestart loses a lock to another client. The next process knows that it is
// lost, until the owner unlocks.
func TestLostLockSurvivesRestart(t *testing.T) {
	s := startLockServer(t)
	k := newKeptFile(t, s, nlm.StateTables())
	c := k.client(nil)
	mustLock(t, c, exclusive(alice, 0, 9))
	mustLock(t, c, shared(alice, 20, 29))
	c.Detach()
	s.restart(0)
	mustLock(t, s.client(nil), exclusive(bob, 5, 5))
	for range 2 {
		c = k.restart(c, nil)
		c.WaitRestored()
		held, lost := c.Table(fh)
		if len(held) != 1 || len(lost) != 1 || lost[0].End != 9 || !c.Lost(fh, alice.ID) {
			t.Errorf("got locks %+v, lost %+v, %v", held, lost, c.Lost(fh, alice.ID))
		}
		wantLock(t, c, exclusive(alice, 40, 40), syscall.EIO)
		k.wantRecords(1, 2)
	}
	c.Detach()
	if err := c.Unlock(t.Context(), cred, fh, alice, 0, 9); err != syscall.EINTR { // needs no server
		t.Errorf("Unlock of a lost lock after Detach: got error %v, want %v", err, syscall.EINTR)
	}
	c = k.restart(c, nil)
	k.wantRecords(1, 2)
	if release(t, c, alice); c.Lost(fh, alice.ID) {
		t.Error("the lock is lost after the release")
	}
	k.wantRecords(0, 0)
}

// interrupt detaches a client whose request the server has executed.
func (k *keptFile) interrupt(c *nlm.Client, proc nlmwire.Proc, request func(context.Context) error) {
	k.t.Helper()
	executed, proceed := k.s.hold(proc, true)
	result := make(chan error, 1)
	go func() { result <- request(context.Background()) }()
	<-executed
	calls := k.s.count(nlmwire.ProcUnlock) + k.s.count(nlmwire.ProcCancel)
	c.Detach()
	wantResult(k.t, result, syscall.EINTR)
	if n := k.s.count(nlmwire.ProcUnlock) + k.s.count(nlmwire.ProcCancel); n != calls {
		k.t.Errorf("Detach: got %d calls, want none", n-calls)
	}
	proceed()
	k.s.setAnswer(nil)
}

// TestInterruptedLockIsSettled interrupts a LOCK. The program was not told, so the server must have
// what the program had before.
func TestInterruptedLockIsSettled(t *testing.T) {
	for _, wait := range []bool{false, true} {
		s := startLockServer(t)
		k := newKeptFile(t, s, nlm.StateTables())
		c := k.client(nil)
		mustLock(t, c, shared(alice, 0, 4))
		k.interrupt(c, nlmwire.ProcLock, func(ctx context.Context) error {
			return c.Lock(ctx, cred, fh, exclusive(alice, 0, 9), wait)
		})
		k.wantRecords(1, 2)
		c = k.restart(c, nil)
		c.WaitRestored()
		wantTable(t, c, shared(alice, 0, 4))
		k.wantRecords(1, 1)
		other := s.client(nil)
		mustLock(t, other, shared(bob, 0, 4))
		mustLock(t, other, exclusive(bob, 5, 9))
		if n := s.count(nlmwire.ProcCancel); (n == 1) != wait {
			t.Errorf("wait %v: got %d calls of CANCEL", wait, n)
		}
	}
}

// TestInterruptedLockIsRepeated repeats the request, as the kernel does.
func TestInterruptedLockIsRepeated(t *testing.T) {
	s := startLockServer(t)
	k := newKeptFile(t, s, nlm.StateTables())
	c := k.client(nil)
	lock := func(ctx context.Context) error { return c.Lock(ctx, cred, fh, exclusive(alice, 0, 9), true) }
	k.interrupt(c, nlmwire.ProcLock, lock)
	c = k.restart(c, nil)
	kit.Must(t, lock(t.Context()))
	c.WaitRestored()
	wantTable(t, c, exclusive(alice, 0, 9))
	wantLock(t, s.client(nil), shared(bob, 0, 0), syscall.EAGAIN)
	k.wantRecords(1, 1)
}

// TestInterruptedChangeKeepsRest interrupts an UNLOCK and a downgrade. Another client then gets the
// range. The owner keeps the rest of its lock.
func TestInterruptedChangeKeepsRest(t *testing.T) {
	s := startLockServer(t)
	k := newKeptFile(t, s, nlm.StateTables())
	c := k.client(nil)
	mustLock(t, c, exclusive(alice, 0, 30))
	k.interrupt(c, nlmwire.ProcUnlock, func(ctx context.Context) error {
		return c.Unlock(ctx, cred, fh, alice, 10, 20)
	})
	other := s.client(nil)
	mustLock(t, other, exclusive(bob, 15, 16))
	c = k.restart(c, nil)
	c.WaitRestored()
	wantTable(t, c, exclusive(alice, 0, 9), exclusive(alice, 21, 30))
	mustUnlock(t, c, alice, 10, 20) // repeated
	k.wantRecords(1, 2)

	k.interrupt(c, nlmwire.ProcLock, func(ctx context.Context) error {
		return c.Lock(ctx, cred, fh, shared(alice, 25, 26), false)
	})
	mustLock(t, other, shared(bob, 26, 26))
	c = k.restart(c, nil)
	c.WaitRestored()
	held, lost := c.Table(fh)
	if len(held) != 3 || held[1].End != 24 || held[2].Start != 27 || len(lost) != 1 {
		t.Errorf("got locks %+v, lost %+v; want 25 to 26 lost", held, lost)
	}
}

// TestDetachedClientEndsWaits detaches a client with requests that wait for a local lock and for a
// lock at the server.
func TestDetachedClientEndsWaits(t *testing.T) {
	s := startLockServer(t)
	c := newKeptFile(t, s, nlm.StateTables()).client(nil)
	c.Patient()
	mustLock(t, s.client(nil), exclusive(bob, 100, 100))
	mustLock(t, c, exclusive(alice, 0, 9))
	local, cancel := goLock(t, c, shared(bob, 0, 0), true)
	defer cancel()
	remote, cancel := goLock(t, c, shared(bob, 100, 100), true)
	defer cancel()
	wantPending(t, c, 2)
	c.Detach()
	wantResult(t, local, syscall.EINTR)
	wantResult(t, remote, syscall.EINTR)
	if n := s.locks(); n != 2 {
		t.Errorf("locks at the server: got %d, want 2", n)
	}
}

func TestReleaseStale(t *testing.T) {
	s := startLockServer(t)
	k := newKeptFile(t, s, nlm.StateTables())
	c := k.client(nil)
	mustLock(t, c, exclusive(alice, 0, 9))
	mustLock(t, c, exclusive(bob, 20, 29))
	mustLock(t, c, exclusive(bob, 40, 49))
	mustLock(t, c, through(3, exclusive(alice, 10, 14))) // not merged with the first one
	c = k.restart(c, nil)
	asked := 0
	c.ReleaseStale(func(h nfs3.FH, open uint64) bool {
		asked++
		return h == fh && open == alice.ID
	})
	c.ReleaseStale(func(nfs3.FH, uint64) bool { return false }) // only once
	kit.Eventually(t, "release", func() bool { return s.locks() == 1 && c.Counters.Held.Load() == 1 })
	wantTable(t, c, exclusive(alice, 0, 9))
	if asked != 3 {
		t.Errorf("isOpen: got %d calls, want 3", asked)
	}
	k.wantRecords(1, 1)
}

// TestFullStateIsENOLCK locks more ranges than the State has room for.
func TestFullStateIsENOLCK(t *testing.T) {
	s := startLockServer(t)
	specs := nlm.StateTables()
	specs[2].MaxSlots = 5 // a request needs two
	k := newKeptFile(t, s, specs)
	c := k.client(nil)
	for i := range uint64(4) {
		mustLock(t, c, exclusive(alice, 100*i, 100*i+50))
	}
	locks := s.count(nlmwire.ProcLock)
	wantLock(t, c, exclusive(alice, 1000, 1000), syscall.ENOLCK)
	if err := c.Unlock(t.Context(), cred, fh, alice, 10, 20); err != syscall.ENOLCK {
		t.Errorf("unlock the middle: got error %v, want %v", err, syscall.ENOLCK)
	}
	if n := s.count(nlmwire.ProcLock); n != locks || s.count(nlmwire.ProcUnlock) != 0 {
		t.Errorf("calls: got %d of LOCK, %d of UNLOCK; want none", n-locks, s.count(nlmwire.ProcUnlock))
	}
	mustUnlock(t, c, alice, 0, 20)
	mustUnlock(t, c, alice, 100, 150)
	c = k.restart(c, nil)
	c.WaitRestored()
	wantTable(t, c, exclusive(alice, 21, 50), exclusive(alice, 200, 250), exclusive(alice, 300, 350))
	k.wantRecords(1, 3)
	mustLock(t, c, exclusive(alice, 1000, 1000))
	if release(t, c, alice); s.locks() != 0 {
		t.Errorf("release: %d locks left", s.locks())
	}
	if err := c.Lock(t.Context(), make([]byte, 500), fh, exclusive(alice, 0, 0), false); err != syscall.ENOLCK {
		t.Errorf("large credential: got error %v, want %v", err, syscall.ENOLCK)
	}
	k.wantRecords(0, 0)
}

// TestRefusedRequestsLeaveNoRecord makes requests that fail.
func TestRefusedRequestsLeaveNoRecord(t *testing.T) {
	s := startLockServer(t)
	k := newKeptFile(t, s, nlm.StateTables())
	c := k.client(nil)
	mustLock(t, s.client(nil), exclusive(bob, 0, 9))
	wantLock(t, c, exclusive(alice, 0, 0), syscall.EAGAIN)
	k.wantRecords(0, 0)
	result, cancel := goLock(t, c, exclusive(alice, 0, 0), true)
	kit.Eventually(t, "record of the request", func() bool { _, _, n := k.state.Records(); return n == 1 })
	cancel()
	wantResult(t, result, syscall.EINTR)
	kit.Eventually(t, "end of the request", func() bool { o, r, _ := k.state.Records(); return o+r == 0 })
	k2 := newKeptFile(t, s, nlm.StateTables())
	c2 := k2.client(func(cfg *nlm.Config) { cfg.Port = int(kit.ClosedPort(t).Port()) })
	wantLock(t, c2, exclusive(alice, 0, 0), syscall.ENOLCK)
	k2.wantRecords(0, 0)
}

// TestUnsettledRequestKeepsIdentity interrupts a LOCK while the lock service is missing, in this
// process or before the next one. The server releases the lock when the service is back. A later
// lock of the owner has the identity that its record has.
func TestUnsettledRequestKeepsIdentity(t *testing.T) {
	for _, restart := range []bool{false, true} {
		bubble(t, func(t *testing.T, s *lockServer) {
			k := newKeptFile(t, s, nlm.StateTables())
			c := k.client(nil)
			executed, proceed := s.hold(nlmwire.ProcLock, true)
			result, cancel := goLock(t, c, exclusive(alice, 0, 9), false)
			<-executed
			if restart {
				c.Detach()
			}
			s.setAnswer(func(c *call) reply {
				if c.proc == nlmwire.ProcNull {
					return pass
				}
				return c.accepted(sunrpc.ProgUnavail)
			})
			cancel()
			wantResult(t, result, syscall.EINTR)
			proceed()
			if restart {
				c = k.restart(c, nil)
				c.WaitRestored()
			}
			time.Sleep(time.Second)
			s.setAnswer(nil)
			mustLock(t, c, exclusive(alice, 20, 29))
			kit.Eventually(t, "release", func() bool {
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
		})
	}
}

// TestUnlockOfLostLockReachesServer loses a lock that the server still has.
func TestUnlockOfLostLockReachesServer(t *testing.T) {
	for _, closes := range []bool{false, true} {
		s := startLockServer(t)
		k := newKeptFile(t, s, nlm.StateTables())
		c := k.client(nil)
		mustLock(t, c, exclusive(alice, 0, 9))
		s.answerStat(nlmwire.ProcLock, nlmwire.DeniedNoLocks)
		c.Restarted("test")
		kit.Eventually(t, "lost lock", func() bool { return c.Lost(fh, alice.ID) })
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

// TestOtherLocksOfKilledDaemonAreReleased restarts a daemon with two mounts, of which one is not
// restored, while an UNLOCK of the other one is in flight.
func TestOtherLocksOfKilledDaemonAreReleased(t *testing.T) {
	s := startLockServer(t)
	dir := t.TempDir()
	k := newKeptFile(t, s, nlm.StateTables())
	service := nlm.NewService(nlm.ServiceConfig{StateDir: dir, Restore: true})
	service.Restored()
	use := func(cfg *nlm.Config) { cfg.Service = service }
	c, gone := k.client(use), s.client(use)
	mustLock(t, gone, exclusive(bob, 500, 509))
	mustLock(t, c, exclusive(alice, 0, 9))
	mustLock(t, c, exclusive(bob, 20, 29))
	before := ownersIn(t, dir)
	k.interrupt(c, nlmwire.ProcUnlock, func(ctx context.Context) error {
		return c.Unlock(ctx, cred, fh, bob, 0, whole)
	})
	gone.Detach()
	service.Close()
	if after := ownersIn(t, dir); !maps.Equal(after, before) || len(after) != 2 {
		t.Errorf("owners: got\n%q\nwant\n%q", after, before)
	}

	service = nlm.NewService(nlm.ServiceConfig{StateDir: dir, Restore: true})
	c = k.restart(c, use)
	c.WaitRestored()
	wantTable(t, c, exclusive(alice, 0, 9))
	if n := s.locks(); n != 2 { // those of alice and of the other mount
		t.Errorf("locks before Restored: got %d, want 2", n)
	}
	service.Restored()
	kit.Eventually(t, "release", func() bool { return len(ownersIn(t, dir)) == 1 })
	wantLock(t, s.client(nil), shared(bob, 0, 0), syscall.EAGAIN)
	if n := s.locks(); n != 1 {
		t.Errorf("locks after Restored: got %d, want 1", n)
	}
	release(t, c, alice)
	c.Close()
	service.Close()
	if n := len(ownersIn(t, dir)); n != 0 {
		t.Errorf("files after Close: got %d, want none", n)
	}
}

// TestGivenUpMountIsReleased ends a client that restores locks, as a forced unmount does before the
// server answers. The state directory is another one.
func TestGivenUpMountIsReleased(t *testing.T) {
	s := startLockServer(t)
	k := newKeptFile(t, s, nlm.StateTables())
	service := nlm.NewService(nlm.ServiceConfig{StateDir: t.TempDir(), Restore: true})
	use := func(cfg *nlm.Config) { cfg.Service = service }
	c := k.client(use)
	mustLock(t, c, exclusive(alice, 0, 9))
	c.Detach()
	service.Close()
	service = nlm.NewService(nlm.ServiceConfig{StateDir: t.TempDir(), Restore: true})
	t.Cleanup(service.Close)
	k.restart(c, use).Detach()
	service.Restored()
	kit.Eventually(t, "release", func() bool { return s.locks() == 0 })
}
