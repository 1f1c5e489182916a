package nlm_test

import (
	"context"
	"errors"
	"runtime"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm/nlmwire"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

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
	mustUnlock(t, a, alice, 5, 9)
	mustLock(t, b, exclusive(alice, 5, 9))
	wantLock(t, b, exclusive(alice, 4, 4), syscall.EAGAIN)
	if n := a.Counters.Held.Load(); n != 1 {
		t.Errorf("locks held: got %d, want 1", n)
	}
}

// TestConflictsOnOneMount makes requests that conflict on one mount: they need no server. A request
// that closes a circle of waiting owners fails.
func TestConflictsOnOneMount(t *testing.T) {
	s := startLockServer(t)
	c := s.client(nil)
	carol := nlm.Owner{Kind: nlm.Posix, ID: 3}
	for i, id := range []nlm.Owner{alice, bob, carol} {
		mustLock(t, c, exclusive(id, uint64(i), uint64(i)))
	}
	wantLock(t, c, exclusive(bob, 0, 0), syscall.EAGAIN)
	if _, held, err := c.Test(t.Context(), cred, fh, exclusive(bob, 0, 0)); !held || err != nil {
		t.Errorf("Test: got %v, error %v", held, err)
	}
	first, cancel1 := goLock(t, c, exclusive(alice, 1, 1), true)
	second, cancel2 := goLock(t, c, exclusive(bob, 2, 2), true)
	defer cancel1()
	defer cancel2()
	wantPending(t, c, 2)
	third, cancel3 := goLock(t, c, exclusive(carol, 0, 0), true)
	defer cancel3()
	wantResult(t, third, syscall.EDEADLK)
	if n := s.count(nlmwire.ProcLock) + s.count(nlmwire.ProcTest); n != 3 {
		t.Errorf("calls: got %d, want 3", n)
	}
	release(t, c, carol)
	wantResult(t, second, nil)
	release(t, c, bob)
	wantResult(t, first, nil)
}

func TestCanceledRequestLeavesNoLock(t *testing.T) {
	s := startLockServer(t)
	a, b := s.client(nil), s.client(nil)
	mustLock(t, a, exclusive(alice, 0, 9))
	mustLock(t, b, shared(bob, 100, 109))
	result, cancel := goLock(t, b, exclusive(bob, 0, 109), true)
	kit.Eventually(t, "poll", func() bool { return s.count(nlmwire.ProcLock) > 3 })
	cancel()
	wantResult(t, result, syscall.EINTR)
	kit.Eventually(t, "unlock", func() bool {
		return s.count(nlmwire.ProcCancel) == 1 && s.count(nlmwire.ProcUnlock) == 1
	})
	mustLock(t, b, exclusive(alice, 50, 99)) // settled
	release(t, a, alice)
	mustLock(t, a, exclusive(alice, 0, 49))
	mustLock(t, a, shared(alice, 100, 109)) // b's lock is shared as before
	wantLock(t, a, exclusive(alice, 100, 100), syscall.EAGAIN)
}

// TestLateLockIsReleased interrupts a LOCK that the server executes late. The calls that restore
// the shared lock of before must not overtake it.
func TestLateLockIsReleased(t *testing.T) {
	for _, wait := range []bool{false, true} {
		bubble(t, func(t *testing.T, s *lockServer) {
			c, other := s.client(nil), s.client(nil)
			mustLock(t, c, shared(alice, 0, 4))
			began, proceed := s.hold(nlmwire.ProcLock, false)
			result, cancel := goLock(t, c, exclusive(alice, 0, 9), wait)
			<-began
			cancel()
			wantResult(t, result, syscall.EINTR)
			synctest.Wait()
			proceed()
			synctest.Wait()
			mustLock(t, other, exclusive(alice, 5, 9))
			mustLock(t, other, shared(alice, 0, 4))
			wantLock(t, other, exclusive(alice, 0, 4), syscall.EAGAIN)
		})
	}
}

// TestLateUnlockKeepsNewLock interrupts an UNLOCK that the server executes late. It must not
// release the lock that the owner sets next.
func TestLateUnlockKeepsNewLock(t *testing.T) {
	bubble(t, func(t *testing.T, s *lockServer) {
		c := s.client(nil)
		mustLock(t, c, exclusive(alice, 0, 9))
		began, proceed := s.hold(nlmwire.ProcUnlock, false)
		ctx, cancel := context.WithCancel(t.Context())
		unlocked := make(chan error, 1)
		go func() { unlocked <- c.Unlock(ctx, cred, fh, alice, 0, 9) }()
		<-began
		cancel()
		wantResult(t, unlocked, syscall.EINTR)
		locked, cancel := goLock(t, c, exclusive(alice, 0, 9), false)
		defer cancel()
		synctest.Wait()
		proceed()
		wantResult(t, locked, nil)
		synctest.Wait()
		if n := s.locks(); n != 1 {
			t.Errorf("locks at the server: got %d, want 1", n)
		}
	})
}

// TestQueuedUnlockKeepsNewLock interrupts an UNLOCK that waits for another call about the file. It
// must not release the lock that the owner sets next.
func TestQueuedUnlockKeepsNewLock(t *testing.T) {
	bubble(t, func(t *testing.T, s *lockServer) {
		c := s.client(nil)
		mustLock(t, c, exclusive(alice, 0, 9))
		began, proceed := s.hold(nlmwire.ProcTest, false)
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
		time.AfterFunc(time.Second, proceed)
		mustLock(t, c, exclusive(alice, 0, 9))
		wantResult(t, tested, nil)
		synctest.Wait()
		held, _ := c.Table(fh)
		if n := s.locks(); n != 1 || len(held) != 1 {
			t.Errorf("got %d locks at the server and %d in the table, want 1 and 1", n, len(held))
		}
	})
}

// TestReleaseOpenKeepsOtherLocks ends an open file whose owner has locked through another one since.
// The end must release what was last set through the ended open file, and nothing else.
func TestReleaseOpenKeepsOtherLocks(t *testing.T) {
	s := startLockServer(t)
	a, b := s.client(nil), s.client(nil)
	mustLock(t, a, through(1, exclusive(alice, 0, 9)))
	mustLock(t, a, through(1, shared(alice, 40, 49)))
	mustLock(t, a, through(1, shared(bob, 40, 49)))
	mustLock(t, a, through(2, exclusive(alice, 5, 14)))
	mustLock(t, a, through(2, shared(alice, 45, 54)))
	kit.Must(t, a.ReleaseOpen(t.Context(), fh, 1))
	wantTable(t, a, through(2, exclusive(alice, 5, 14)), through(2, shared(alice, 45, 54)))
	mustLock(t, b, exclusive(bob, 0, 4))
	mustLock(t, b, exclusive(bob, 40, 44))
	wantLock(t, b, exclusive(bob, 5, 5), syscall.EAGAIN)
	wantLock(t, b, exclusive(bob, 45, 45), syscall.EAGAIN)
	kit.Must(t, a.ReleaseOpen(t.Context(), fh, 2))
	mustLock(t, b, exclusive(bob, 0, 100))
	if n := a.Counters.Held.Load(); n != 0 || a.InUse(fh) {
		t.Errorf("after the release: got %d locks, in use %v", n, a.InUse(fh))
	}
}

// TestReleaseOpenGoesOnInBackground releases the locks of an open file while the server does not
// answer. A later request must not come first.
func TestReleaseOpenGoesOnInBackground(t *testing.T) {
	s := startLockServer(t)
	c := s.client(nil)
	mustLock(t, c, exclusive(alice, 0, 9))
	hold := make(chan struct{})
	s.setAnswer(func(x *call) reply {
		if x.proc == nlmwire.ProcUnlock {
			<-hold
		}
		return pass
	})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.ReleaseOpen(ctx, fh, alice.ID); err != syscall.EINTR {
		t.Errorf("got error %v, want %v", err, syscall.EINTR)
	}
	result, end := goLock(t, c, through(7, exclusive(alice, 0, 9)), false)
	defer end()
	close(hold)
	wantResult(t, result, nil)
	wantTable(t, c, through(7, exclusive(alice, 0, 9)))
	wantLock(t, s.client(nil), exclusive(bob, 0, 0), syscall.EAGAIN)
}

func TestStatusBecomesErrno(t *testing.T) {
	s := startLockServer(t)
	c := s.client(nil)
	for stat, want := range map[nlmwire.Stat]syscall.Errno{nlmwire.Denied: syscall.EAGAIN,
		nlmwire.DeniedNoLocks: syscall.ENOLCK, nlmwire.Deadlock: syscall.EDEADLK, nlmwire.ReadOnly: syscall.EROFS,
		nlmwire.StaleFH: syscall.ESTALE, nlmwire.TooBig: syscall.EFBIG, nlmwire.Failed: syscall.ENOLCK} {
		s.answerStat(nlmwire.ProcLock, stat)
		wantLock(t, c, exclusive(alice, 0, 9), want)
	}
}

func TestMissingServiceIsENOLCK(t *testing.T) {
	s := startLockServer(t)
	for _, stat := range []sunrpc.AcceptStat{sunrpc.ProgUnavail, sunrpc.ProcUnavail, sunrpc.GarbageArgs} {
		s.setAnswer(func(c *call) reply { return c.accepted(stat) })
		c := s.client(nil)
		wantLock(t, c, exclusive(alice, 0, 9), syscall.ENOLCK)
		if c.Reason() == "" || c.Counters.NoService.Load() != 1 {
			t.Errorf("%v: got reason %q, %d errors", stat, c.Reason(), c.Counters.NoService.Load())
		}
	}
	c := s.client(func(cfg *nlm.Config) { cfg.Port = int(kit.ClosedPort(t).Port()) })
	wantLock(t, c, exclusive(alice, 0, 9), syscall.ENOLCK)
}

// TestCallIsSentAgain drops the connection instead of a reply.
func TestCallIsSentAgain(t *testing.T) {
	s := startLockServer(t)
	c := s.client(nil)
	s.setAnswer(func(c *call) reply {
		if c.proc == nlmwire.ProcLock && s.count(nlmwire.ProcLock) <= 2 {
			return drop
		}
		return pass
	})
	mustLock(t, c, exclusive(alice, 0, 9))
}

// TestSoftMountWaitsOnlyForLocks waits on a soft mount longer than the server may take for a reply:
// for a lock of another mount, for one of the same mount, and for a reply.
func TestSoftMountWaitsOnlyForLocks(t *testing.T) {
	bubble(t, func(t *testing.T, s *lockServer) {
		const giveUp = 100 * time.Millisecond
		other := s.client(nil)
		soft := s.client(func(cfg *nlm.Config) { cfg.GiveUp, cfg.GiveUpErr = giveUp, syscall.ETIMEDOUT })
		mustLock(t, other, exclusive(alice, 0, 0))
		mustLock(t, soft, exclusive(alice, 1, 1))
		var results []chan error
		for at := range uint64(2) {
			result, cancel := goLock(t, soft, exclusive(bob, at, at), true)
			defer cancel()
			results = append(results, result)
		}
		time.Sleep(3 * giveUp)
		release(t, other, alice)
		release(t, soft, alice)
		wantResult(t, results[0], nil)
		wantResult(t, results[1], nil)
		s.setAnswer(func(*call) reply { return drop })
		wantLock(t, soft, exclusive(bob, 20, 29), syscall.ETIMEDOUT)
		s.setAnswer(nil)
	})
}

func TestReclaimAfterRestart(t *testing.T) {
	bubble(t, func(t *testing.T, s *lockServer) {
		a, b := s.client(nil), s.client(nil)
		mustLock(t, a, exclusive(alice, 0, 9))
		mustLock(t, a, shared(bob, 20, 29))
		s.restart(time.Second)
		kit.Eventually(t, "reclaim", func() bool { return a.Counters.Reclaimed.Load() == 2 && s.locks() == 2 })
		began := time.Now()
		mustLock(t, b, exclusive(alice, 100, 100))
		if waited := time.Since(began); waited < 900*time.Millisecond {
			t.Errorf("a new lock waited for %v, want the grace period", waited)
		}
		if a.Lost(fh, alice.ID) || a.Counters.Lost.Load() != 0 {
			t.Error("a lock was lost")
		}
	})
}

// TestStolenLockIsLost restarts a server without a grace period, and another client gets the lock.
func TestStolenLockIsLost(t *testing.T) {
	s, thief := startLockServer(t), startLockServer(t)
	lost := make(chan nlm.Owner, 4)
	a := s.client(func(cfg *nlm.Config) { cfg.Lost = func(_ nfs3.FH, id nlm.Owner) { lost <- id } })
	mustLock(t, a, exclusive(alice, 0, 9))
	mustLock(t, a, exclusive(bob, 20, 29))
	mustLock(t, thief.client(nil), exclusive(alice, 5, 5))
	s.mu.Lock()
	s.nlmd = thief.nlmd
	s.mu.Unlock()
	s.dropConnections()
	if id := <-lost; id != alice {
		t.Errorf("lost lock: got owner %+v, want %+v", id, alice)
	}
	kit.Eventually(t, "other lock", func() bool { return s.locks() == 2 })
	if !a.Lost(fh, alice.ID) || a.Lost(fh, bob.ID) {
		t.Errorf("Lost: got %v and %v, want true and false", a.Lost(fh, alice.ID), a.Lost(fh, bob.ID))
	}
	wantLock(t, a, exclusive(alice, 100, 100), syscall.EIO)
	if mustUnlock(t, a, alice, 0, 9); a.Lost(fh, alice.ID) {
		t.Error("the lock is lost after the unlock")
	}
	mustLock(t, a, exclusive(alice, 100, 100))
	wantLock(t, a, exclusive(alice, 5, 5), syscall.EAGAIN)
}

// TestLostConnectionKeepsLocks drops the connection to a server that has not restarted.
func TestLostConnectionKeepsLocks(t *testing.T) {
	s := startLockServer(t)
	c := s.client(nil)
	mustLock(t, c, exclusive(alice, 0, 9))
	s.dropConnections()
	kit.Eventually(t, "reclaim and lock", func() bool { return s.count(nlmwire.ProcLock) == 3 })
	kit.Eventually(t, "lock", func() bool { return s.locks() == 1 && c.Counters.Held.Load() == 1 })
	if c.Counters.Lost.Load() != 0 || c.Counters.Reclaimed.Load() != 0 {
		t.Errorf("got %d lost and %d reclaimed locks, want none", c.Counters.Lost.Load(), c.Counters.Reclaimed.Load())
	}
}

// TestConnectionLostDuringGrantIsNoticed closes each connection right after the reply that grants a
// lock. The client must notice that the server may have restarted, also when the client learns of
// the end of the connection before it has recorded the lock.
func TestConnectionLostDuringGrantIsNoticed(t *testing.T) {
	s := startLockServer(t)
	for i := range uint64(20) {
		c, before := s.client(nil), s.count(nlmwire.ProcLock)
		s.mu.Lock()
		s.hangUp = true
		s.mu.Unlock()
		mustLock(t, c, exclusive(alice, i, i))
		kit.Eventually(t, "reclaim", func() bool { return s.count(nlmwire.ProcLock) > before+1 })
	}
}
