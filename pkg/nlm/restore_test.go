package nlm_test

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/slotfile"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nlm"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
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
	if err != nil {
		t.Fatal(err)
	}
	d, err := f.Descriptor()
	if err != nil {
		t.Fatal(err)
	}
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

// client returns a client with the State in the file.
func (k *keptFile) client(change func(*nlm.Config)) *nlm.Client {
	k.t.Helper()
	if k.f == nil {
		k.f = openKept(k.t, k.d, k.specs)
	}
	k.state = nlm.NewState(k.f)
	cfg := nlm.Config{Host: "127.0.0.1", Port: k.s.l.Addr().(*net.TCPAddr).Port, Caller: "test", State: k.state}
	cfg.Quick()
	if change != nil {
		change(&cfg)
	}
	c := nlm.New(cfg)
	k.t.Cleanup(c.Detach)
	return c
}

// openKept opens the file. It retries while the kernel releases the lock of a killed process.
func openKept(tb testing.TB, d *os.File, specs []slotfile.TableSpec) *slotfile.File {
	tb.Helper()
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		f, err := slotfile.Open(d, 1, specs)
		if errors.Is(err, slotfile.ErrLocked) && time.Now().Before(deadline) {
			continue
		}
		if err != nil {
			tb.Fatal(err)
		}
		return f
	}
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

func mustUnlock(t *testing.T, c *nlm.Client, id nlm.Owner, start, end uint64) {
	t.Helper()
	if err := c.Unlock(t.Context(), cred, fh, id, start, end); err != nil {
		t.Fatalf("Unlock(%v, %d, %d): %v", id, start, end, err)
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
	if err := c.ReleaseOwner(t.Context(), cred, fh, flock); err != nil {
		t.Fatal(err)
	}
	want, _ := c.Table(fh)
	svid, oh := c.Identity(alice)
	k.wantRecords(2, 5)
	unlocks := s.count(nlm.ProcUnlock)
	c = k.restart(c, func(cfg *nlm.Config) { cfg.Caller = "renamed" })
	wantTable(t, c, want...)
	c.WaitRestored()
	wantTable(t, c, want...)
	k.wantRecords(2, 5)
	if n := s.locks(); n != 5 || s.count(nlm.ProcUnlock) != unlocks {
		t.Errorf("server: got %d locks, %d calls of UNLOCK; want 5, %d", n, s.count(nlm.ProcUnlock), unlocks)
	}
	if gotSVID, gotOH := c.Identity(alice); gotSVID != svid || !bytes.Equal(gotOH, oh) {
		t.Errorf("identity of alice: got %d %x, want %d %x", gotSVID, gotOH, svid, oh)
	}
	if n := c.Counters.Held.Load(); n != 5 {
		t.Errorf("locks held: got %d, want 5", n)
	}
	mustLock(t, c, shared(alice, 0, 49)) // the restored owner
	wantLock(t, s.client(nil), exclusive(bob, 55, 55), syscall.EAGAIN)
	for _, id := range []nlm.Owner{alice, bob} {
		if err := c.ReleaseOwner(t.Context(), cred, fh, id); err != nil {
			t.Fatal(err)
		}
	}
	k.wantRecords(0, 0)
	if n := s.locks(); n != 0 || c.InUse(fh) {
		t.Errorf("after the release: got %d locks at the server, in use %v", n, c.InUse(fh))
	}
}

// TestRestoredClientReclaims restarts the server while no client runs. Without the reclaim another
// client gets the lock after the grace period.
func TestRestoredClientReclaims(t *testing.T) {
	s := startLockServer(t)
	k := newKeptFile(t, s, nlm.StateTables())
	c := k.client(nil)
	mustLock(t, c, exclusive(alice, 0, 9))
	c.Detach()
	s.restart(time.Hour)
	c = k.restart(c, nil)
	c.WaitRestored()
	if n := c.Counters.Reclaimed.Load(); n != 1 || s.locks() != 1 {
		t.Errorf("got %d locks reclaimed, %d at the server; want 1, 1", n, s.locks())
	}
	wantTable(t, c, exclusive(alice, 0, 9))
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
	if err := os.Remove(filepath.Join(s.dir, "state")); err != nil { // no grace period
		t.Fatal(err)
	}
	s.restart(time.Hour)
	mustLock(t, s.client(nil), exclusive(bob, 5, 5))
	for range 2 {
		c = k.restart(c, nil)
		c.WaitRestored()
		held, lost := c.Table(fh)
		if len(held) != 1 || len(lost) != 1 || lost[0].End != 9 || !c.Lost(fh, alice) {
			t.Errorf("got locks %+v, lost %+v, %v", held, lost, c.Lost(fh, alice))
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
	if err := c.ReleaseOwner(t.Context(), cred, fh, alice); err != nil || c.Lost(fh, alice) {
		t.Errorf("after the release: error %v, lost %v", err, c.Lost(fh, alice))
	}
	k.wantRecords(0, 0)
}

// holdReply makes the server execute the next call of proc and not reply. executed is closed then.
func (s *lockServer) holdReply(proc nlm.Proc) (executed chan struct{}, reply func()) {
	executed, proceed := make(chan struct{}), make(chan struct{})
	var once sync.Once
	s.setAnswer(func(h *sunrpc.CallHeader, args []byte) ([]byte, bool) {
		if nlm.Proc(h.Proc) != proc {
			return nil, false
		}
		mine := false
		once.Do(func() { mine = true })
		if !mine {
			return nil, false
		}
		peer := s.l.Addr().(*net.TCPAddr).AddrPort().Addr()
		b := s.nlmd.ServeNLM(peer, h, args, nil)
		close(executed)
		<-proceed
		return b, true
	})
	reply = sync.OnceFunc(func() { close(proceed) })
	s.t.Cleanup(reply)
	return executed, reply
}

// TestInterruptedLockIsSettled detaches a client whose LOCK the server has executed. The program
// was not told, so the server must have what the program had before.
func TestInterruptedLockIsSettled(t *testing.T) {
	for _, wait := range []bool{false, true} {
		s := startLockServer(t)
		k := newKeptFile(t, s, nlm.StateTables())
		c := k.client(nil)
		mustLock(t, c, shared(alice, 0, 4))
		executed, reply := s.holdReply(nlm.ProcLock)
		result := make(chan error, 1)
		go func() { result <- c.Lock(context.Background(), cred, fh, exclusive(alice, 0, 9), wait) }()
		<-executed
		calls := s.count(nlm.ProcUnlock) + s.count(nlm.ProcCancel)
		c.Detach()
		if err := <-result; err != syscall.EINTR {
			t.Errorf("detached Lock: got error %v, want %v", err, syscall.EINTR)
		}
		k.wantRecords(1, 2)
		if n := s.count(nlm.ProcUnlock) + s.count(nlm.ProcCancel); n != calls {
			t.Errorf("Detach: got %d calls, want none", n-calls)
		}
		reply()
		s.setAnswer(nil)
		c = k.restart(c, nil)
		c.WaitRestored()
		wantTable(t, c, shared(alice, 0, 4))
		k.wantRecords(1, 1)
		other := s.client(nil)
		mustLock(t, other, shared(bob, 0, 4))
		mustLock(t, other, exclusive(bob, 5, 9))
		if n := s.count(nlm.ProcCancel); (n == 1) != wait {
			t.Errorf("wait %v: got %d calls of CANCEL", wait, n)
		}
	}
}

// TestInterruptedLockIsRepeated repeats the request, as the kernel does. The other client waits for
// the lock all the time.
func TestInterruptedLockIsRepeated(t *testing.T) {
	s := startLockServer(t)
	k := newKeptFile(t, s, nlm.StateTables())
	c := k.client(nil)
	executed, reply := s.holdReply(nlm.ProcLock)
	result := make(chan error, 1)
	go func() { result <- c.Lock(context.Background(), cred, fh, exclusive(alice, 0, 9), true) }()
	<-executed
	c.Detach()
	<-result
	reply()
	s.setAnswer(nil)
	c = k.restart(c, nil)
	if err := c.Lock(t.Context(), cred, fh, exclusive(alice, 0, 9), true); err != nil {
		t.Fatal(err)
	}
	c.WaitRestored()
	wantTable(t, c, exclusive(alice, 0, 9))
	wantLock(t, s.client(nil), shared(bob, 0, 0), syscall.EAGAIN)
	k.wantRecords(1, 1)
}

// TestInterruptedUnlockKeepsRest detaches a client whose UNLOCK the server has executed. Another
// client then gets the range. The owner keeps the rest of its lock.
func TestInterruptedUnlockKeepsRest(t *testing.T) {
	s := startLockServer(t)
	k := newKeptFile(t, s, nlm.StateTables())
	c := k.client(nil)
	mustLock(t, c, exclusive(alice, 0, 30))
	executed, reply := s.holdReply(nlm.ProcUnlock)
	result := make(chan error, 1)
	go func() { result <- c.Unlock(context.Background(), cred, fh, alice, 10, 20) }()
	<-executed
	c.Detach()
	if err := <-result; err != syscall.EINTR {
		t.Errorf("detached Unlock: got error %v, want %v", err, syscall.EINTR)
	}
	reply()
	s.setAnswer(nil)
	mustLock(t, s.client(nil), exclusive(bob, 15, 16))
	c = k.restart(c, nil)
	c.WaitRestored()
	wantTable(t, c, exclusive(alice, 0, 9), exclusive(alice, 21, 30))
	mustUnlock(t, c, alice, 10, 20) // repeated
	k.wantRecords(1, 2)
}

// TestInterruptedDowngradeLosesOnlyItsRange detaches a client whose downgrade the server has
// executed, and another client gets a shared lock.
func TestInterruptedDowngradeLosesOnlyItsRange(t *testing.T) {
	s := startLockServer(t)
	k := newKeptFile(t, s, nlm.StateTables())
	c := k.client(nil)
	mustLock(t, c, exclusive(alice, 0, 30))
	executed, reply := s.holdReply(nlm.ProcLock)
	go func() { _ = c.Lock(context.Background(), cred, fh, shared(alice, 10, 20), false) }()
	<-executed
	c.Detach()
	reply()
	s.setAnswer(nil)
	mustLock(t, s.client(nil), shared(bob, 15, 16))
	c = k.restart(c, nil)
	c.WaitRestored()
	held, lost := c.Table(fh)
	if len(held) != 2 || held[0].End != 9 || held[1].Start != 21 || len(lost) != 1 {
		t.Errorf("got locks %+v, lost %+v; want 10 to 20 lost", held, lost)
	}
}

// TestDetachedClientEndsWaits detaches a client with requests that wait for a local lock and for a
// lock at the server.
func TestDetachedClientEndsWaits(t *testing.T) {
	s := startLockServer(t)
	k := newKeptFile(t, s, nlm.StateTables())
	c := k.client(func(cfg *nlm.Config) { cfg.Quick() })
	c.Patient()
	mustLock(t, s.client(nil), exclusive(bob, 100, 100))
	mustLock(t, c, exclusive(alice, 0, 9))
	local, cancel := waiting(t, c, shared(bob, 0, 0))
	defer cancel()
	remote, cancel := waiting(t, c, shared(bob, 100, 100))
	defer cancel()
	waitFor(t, "two waiting requests", func() bool { return c.Counters.Pending.Load() == 2 })
	c.Detach()
	for _, result := range []chan error{local, remote} {
		if err := <-result; err != syscall.EINTR {
			t.Errorf("got error %v, want %v", err, syscall.EINTR)
		}
	}
	if err := c.Unlock(t.Context(), cred, fh, alice, 0, 9); err != syscall.EINTR {
		t.Errorf("Unlock after Detach: got error %v, want %v", err, syscall.EINTR)
	}
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
	c = k.restart(c, nil)
	asked := 0
	c.ReleaseStale(func(h nfs3.FH, id nlm.Owner) bool {
		asked++
		return h == fh && id == alice
	})
	c.ReleaseStale(func(nfs3.FH, nlm.Owner) bool { return false }) // only once
	waitFor(t, "the release", func() bool { return s.locks() == 1 && c.Counters.Held.Load() == 1 })
	wantTable(t, c, exclusive(alice, 0, 9))
	if asked != 2 {
		t.Errorf("known: got %d calls, want 2", asked)
	}
	k.wantRecords(1, 1)
}

// TestFullStateIsENOLCK locks more ranges than the State has room for.
func TestFullStateIsENOLCK(t *testing.T) {
	s := startLockServer(t)
	specs := nlm.StateTables()
	specs[2].MaxSlots = 4
	k := newKeptFile(t, s, specs)
	c := k.client(nil)
	for i := range uint64(4) {
		mustLock(t, c, exclusive(alice, 100*i, 100*i+50))
	}
	locks := s.count(nlm.ProcLock)
	wantLock(t, c, exclusive(alice, 1000, 1000), syscall.ENOLCK)
	if err := c.Unlock(t.Context(), cred, fh, alice, 10, 20); err != syscall.ENOLCK {
		t.Errorf("unlock the middle: got error %v, want %v", err, syscall.ENOLCK)
	}
	if n := s.count(nlm.ProcLock); n != locks || s.count(nlm.ProcUnlock) != 0 {
		t.Errorf("calls: got %d of LOCK, %d of UNLOCK; want none", n-locks, s.count(nlm.ProcUnlock))
	}
	mustUnlock(t, c, alice, 0, 20)
	mustUnlock(t, c, alice, 100, 150)
	c = k.restart(c, nil)
	c.WaitRestored()
	wantTable(t, c, exclusive(alice, 21, 50), exclusive(alice, 200, 250), exclusive(alice, 300, 350))
	k.wantRecords(1, 3)
	mustLock(t, c, exclusive(alice, 1000, 1000))
	if err := c.ReleaseOwner(t.Context(), cred, fh, alice); err != nil || s.locks() != 0 {
		t.Errorf("release: error %v, %d locks left", err, s.locks())
	}
	k.wantRecords(0, 0)
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
	result, cancel := waiting(t, c, exclusive(alice, 0, 0))
	waitFor(t, "the record of the request", func() bool { _, _, n := k.state.Records(); return n == 1 })
	cancel()
	if err := <-result; err != syscall.EINTR {
		t.Errorf("got error %v, want %v", err, syscall.EINTR)
	}
	waitFor(t, "the end of the request", func() bool { o, r, _ := k.state.Records(); return o+r == 0 })
	k2 := newKeptFile(t, s, nlm.StateTables())
	c2 := k2.client(func(cfg *nlm.Config) { cfg.Port = 1 }) // no service
	wantLock(t, c2, exclusive(alice, 0, 0), syscall.ENOLCK)
	k2.wantRecords(0, 0)
}

// TestJournalKeepsRestoredLocks restarts a daemon with two mounts, of which one is not restored,
// while an UNLOCK of the other one is in flight.
func TestJournalKeepsRestoredLocks(t *testing.T) {
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
	c.ReleaseStale(func(nfs3.FH, nlm.Owner) bool { return false }) // nothing is restored
	journal := filepath.Join(dir, "held-locks")
	before, err := os.ReadFile(journal)
	if err != nil {
		t.Fatal(err)
	}
	// The UNLOCK of bob is not complete.
	executed, reply := s.holdReply(nlm.ProcUnlock)
	go func() { _ = c.Unlock(context.Background(), cred, fh, bob, 0, whole) }()
	<-executed
	c.Detach()
	gone.Detach()
	service.Close()
	reply()
	s.setAnswer(nil)
	after, err := os.ReadFile(journal)
	if err != nil || !bytes.Equal(after, before) {
		t.Errorf("journal: error %v, got\n%s\nwant\n%s", err, after, before)
	}

	service = nlm.NewService(nlm.ServiceConfig{StateDir: dir, Restore: true})
	c = k.restart(c, use)
	c.WaitRestored()
	wantTable(t, c, exclusive(alice, 0, 9))
	if n := s.locks(); n != 2 { // those of alice and of the other mount
		t.Errorf("locks before Restored: got %d, want 2", n)
	}
	service.Restored()
	waitFor(t, "the release", func() bool { return s.locks() == 1 })
	wantLock(t, s.client(nil), shared(bob, 0, 0), syscall.EAGAIN)
	if err := c.ReleaseOwner(t.Context(), cred, fh, alice); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "three released owners in the journal", func() bool {
		b, err := os.ReadFile(journal)
		return err == nil && bytes.Count(b, []byte(`"released":true`)) == 3
	})
	c.Detach()
	service.Close()
	if _, err := os.Stat(journal); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("journal: got error %v, want %v", err, os.ErrNotExist)
	}
}

// TestOwnerOfJournalOnlyIsReleased has a journal with an owner of the restored client that the
// State does not have. The client itself releases it: the program may lock the file again at any
// time.
func TestOwnerOfJournalOnlyIsReleased(t *testing.T) {
	s := startLockServer(t)
	dir := t.TempDir()
	k := newKeptFile(t, s, nlm.StateTables())
	service := nlm.NewService(nlm.ServiceConfig{StateDir: dir})
	c := k.client(func(cfg *nlm.Config) { cfg.Service = service })
	mustLock(t, c, exclusive(alice, 0, 9))
	journal := filepath.Join(dir, "held-locks")
	held, err := os.ReadFile(journal)
	if err != nil {
		t.Fatal(err)
	}
	mustUnlock(t, c, alice, 0, 9)
	c.Detach()
	service.Close()
	if err := os.WriteFile(journal, held, 0o600); err != nil {
		t.Fatal(err)
	}
	service = nlm.NewService(nlm.ServiceConfig{StateDir: dir, Restore: true})
	t.Cleanup(service.Close)
	unlocks := s.count(nlm.ProcUnlock)
	c = k.restart(c, func(cfg *nlm.Config) { cfg.Service = service })
	c.WaitRestored()
	if n := s.count(nlm.ProcUnlock) - unlocks; n != 1 {
		t.Errorf("calls of UNLOCK: got %d, want 1", n)
	}
	if b, err := os.ReadFile(journal); err != nil || !bytes.Contains(b, []byte(`"released":true`)) {
		t.Errorf("journal: error %v, got %s", err, b)
	}
}
