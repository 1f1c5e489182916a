package nlm_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nlm"
)

// waitAs starts requests that wait, each of another owner, and returns when they wait.
func waitAs(t *testing.T, c *nlm.Client, first uint64, n int, l nlm.Lock) (results chan error) {
	t.Helper()
	results = make(chan error, n)
	for i := range n {
		l.Owner = nlm.Owner{Kind: nlm.Posix, ID: first + uint64(i)}
		go func() { results <- c.Lock(t.Context(), cred, fh, l, true) }()
		synctest.Wait() // in order
	}
	return results
}

// TestReleaseWakesWhoCanLock changes the locks of a file for which many requests wait, and counts
// those that look whether they can get their lock.
func TestReleaseWakesWhoCanLock(t *testing.T) {
	bubble(t, func(t *testing.T, s *lockServer) {
		const n = 20
		c := s.client(nil)
		mustLock(t, c, exclusive(alice, 0, 9))
		mustLock(t, c, exclusive(alice, 100, 109))
		writers := waitAs(t, c, 1000, n, exclusive(alice, 0, 0))
		readers := waitAs(t, c, 2000, n, shared(alice, 105, 109))
		last := waitAs(t, c, 3000, 1, exclusive(alice, 105, 120))
		wantWakes := func(what string, want uint64, do func()) {
			t.Helper()
			before := c.Attempts()
			do()
			synctest.Wait()
			if got := c.Attempts() - before; got != want {
				t.Errorf("%s: got %d attempts, want %d", what, got, want)
			}
		}
		wantWakes("lock of another range", 1, func() { mustLock(t, c, exclusive(bob, 200, 200)) })
		wantWakes("unlock of another range", 0, func() { mustUnlock(t, c, bob, 200, 200) })
		wantWakes("unlock of a part for which none waits", 0, func() { mustUnlock(t, c, alice, 1, 9) })
		wantWakes("unlock for exclusive requests", 1, func() { mustUnlock(t, c, alice, 0, 0) })
		wantResult(t, writers, nil)
		wantWakes("next unlock", 1, func() { release(t, c, nlm.Owner{Kind: nlm.Posix, ID: 1000}) })
		wantResult(t, writers, nil)
		wantWakes("downgrade", n+1, func() { mustLock(t, c, shared(alice, 100, 109)) })
		for range n {
			wantResult(t, readers, nil)
		}
		for i := range uint64(n) {
			wantWakes("unlock of one of several shared locks", 0, func() {
				release(t, c, nlm.Owner{Kind: nlm.Posix, ID: 2000 + i})
			})
		}
		wantWakes("last unlock", 1, func() { release(t, c, alice) })
		wantResult(t, last, nil)
		for i := range uint64(n - 1) {
			release(t, c, nlm.Owner{Kind: nlm.Posix, ID: 1001 + i})
			synctest.Wait()
		}
	})
}

// TestReleaseLeavesRoomForOthers releases a lock for which many requests with different ranges wait.
// All can be granted, but the server gets the request of another program before most of theirs.
func TestReleaseLeavesRoomForOthers(t *testing.T) {
	bubble(t, func(t *testing.T, s *lockServer) {
		const n = 50
		c := s.client(nil)
		mustLock(t, c, exclusive(alice, 0, n))
		results := make(chan error, n)
		for i := range uint64(n) {
			l := exclusive(nlm.Owner{Kind: nlm.Posix, ID: 1000 + i}, i, i)
			go func() { results <- c.Lock(t.Context(), cred, fh, l, true) }()
		}
		synctest.Wait()
		before := s.count(nlm.ProcLock)
		began, proceed := s.hold(nlm.ProcLock, false)
		release(t, c, alice)
		<-began
		other, cancel := goLock(t, c, exclusive(bob, 1000, 1000), false)
		defer cancel()
		synctest.Wait()
		proceed()
		wantResult(t, other, nil)
		for range n {
			wantResult(t, results, nil)
		}
		for i, x := range s.received(nlm.ProcLock)[before:] {
			if start, _ := x.args.Region.Range(); start == 1000 && i > 3 {
				t.Errorf("the server got %d requests before that of the other program", i)
			}
		}
	})
}

// TestWakeIsPassedOn wakes a request that excludes another one, and that does not get the lock: its
// program gets a signal, or a third program gets a part of the range first. The other request must
// get its lock.
func TestWakeIsPassedOn(t *testing.T) {
	for _, signal := range []bool{true, false} {
		bubble(t, func(t *testing.T, s *lockServer) {
			c := s.client(nil)
			carol := nlm.Owner{Kind: nlm.Posix, ID: 3}
			mustLock(t, c, exclusive(alice, 0, 9))
			first, cancel := goLock(t, c, exclusive(bob, 0, 9), true)
			defer cancel()
			synctest.Wait()
			second := waitAs(t, c, carol.ID, 1, exclusive(carol, 5, 5))
			unlock, lock := make(chan struct{}), make(chan struct{})
			s.setAnswer(func(x *call) reply {
				switch {
				case x.proc == nlm.ProcUnlock:
					<-unlock
				case x.proc == nlm.ProcLock && x.args.Region.Offset == 0:
					<-lock
				}
				return pass
			})
			released := make(chan error, 1)
			go func() { released <- c.ReleaseOwner(t.Context(), cred, fh, alice) }()
			synctest.Wait()
			third := make(chan error, 1) // has the turn next
			go func() { third <- c.Lock(t.Context(), cred, fh, exclusive(alice, 0, 0), false) }()
			synctest.Wait()
			close(unlock)
			wantResult(t, released, nil)
			synctest.Wait()
			if signal {
				cancel()
				wantResult(t, first, syscall.EINTR)
			}
			close(lock)
			wantResult(t, third, nil)
			wantResult(t, second, nil)
			release(t, c, carol)
			if mustUnlock(t, c, alice, 0, 0); !signal {
				wantResult(t, first, nil)
			}
		})
	}
}

// TestNoRequestSleepsWithoutCause makes random requests that wait, and cancels some. Whenever all
// goroutines wait, a lock of another owner must exclude each request, and the server must have the
// locks of the client.
func TestNoRequestSleepsWithoutCause(t *testing.T) {
	const owners, span, steps = 12, 10, 150
	type request struct {
		l      nlm.Lock
		cancel context.CancelFunc
		result chan error
	}
	for seed := range uint64(8) {
		bubble(t, func(t *testing.T, s *lockServer) {
			rnd := rand.New(rand.NewPCG(seed, 1))
			c, other := s.client(nil), s.client(nil)
			var waiting []request
			for step := range steps {
				for range 1 + rnd.IntN(4) {
					id := nlm.Owner{Kind: nlm.OwnerKind(1 + rnd.IntN(2)), ID: rnd.Uint64N(owners)}
					a := rnd.Uint64N(span)
					l := nlm.Lock{Start: a, End: a + rnd.Uint64N(span-a), Exclusive: rnd.IntN(2) == 0, Owner: id}
					switch rnd.IntN(8) {
					case 0, 1:
						_ = c.Unlock(t.Context(), cred, fh, id, l.Start, l.End)
					case 2:
						if len(waiting) > 0 {
							waiting[rnd.IntN(len(waiting))].cancel()
						}
					case 3: // locks of another client exclude requests, too
						_ = other.Lock(t.Context(), cred, fh, l, false)
						_ = other.ReleaseOwner(t.Context(), cred, fh, id)
					case 4:
						_ = c.ReleaseOwner(t.Context(), cred, fh, id)
					default:
						result, cancel := goLock(t, c, l, true)
						waiting = append(waiting, request{l, cancel, result})
					}
				}
				time.Sleep(time.Second) // polls
				if synctest.Wait(); step%10 == 9 {
					for _, x := range waiting[:len(waiting)/2] {
						x.cancel()
					}
					synctest.Wait()
				}
				held, _ := c.Table(fh)
				var still []request
				for _, x := range waiting {
					select {
					case err := <-x.result:
						if err != nil && !errors.Is(err, syscall.EDEADLK) && !errors.Is(err, syscall.EINTR) {
							t.Fatal(err)
						}
					default:
						still = append(still, x)
					}
				}
				waiting = still
				for _, x := range waiting {
					excluded := false
					for _, h := range held {
						excluded = excluded || h.Owner != x.l.Owner && (h.Exclusive || x.l.Exclusive) &&
							h.Start <= x.l.End && x.l.Start <= h.End
					}
					if !excluded {
						t.Fatalf("seed %d, step %d: %+v waits; locks %+v", seed, step, x.l, held)
					}
				}
				for i, a := range held {
					for _, b := range held[:i] {
						if a.Owner != b.Owner && (a.Exclusive || b.Exclusive) && a.Start <= b.End && b.Start <= a.End {
							t.Fatalf("seed %d, step %d: conflict in %+v", seed, step, held)
						}
					}
				}
			}
			for _, x := range waiting {
				x.cancel()
				<-x.result
			}
			synctest.Wait()
			if n := c.Counters.Held.Load(); int64(s.locks()) != n {
				t.Errorf("locks: got %d at the server, %d in the client", s.locks(), n)
			}
		})
	}
}
