package nlm_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm/nlmwire"
	"github.com/nfsrdmad/nfsrdmad/test/kit/lockrace"
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
		before := s.count(nlmwire.ProcLock)
		began, proceed := s.hold(nlmwire.ProcLock, false)
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
		for i, x := range s.received(nlmwire.ProcLock)[before:] {
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
				case x.proc == nlmwire.ProcUnlock:
					<-unlock
				case x.proc == nlmwire.ProcLock && x.args.Region.Offset == 0:
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

// A waitRun makes random requests for one file.
type waitRun struct {
	t        *testing.T
	rnd      *rand.Rand
	c, other *nlm.Client
	waiting  []waitRequest
}

// A waitRequest is a request that has not ended.
type waitRequest struct {
	l      nlm.Lock
	cancel context.CancelFunc
	result chan error
}

func excludes(a, b nlm.Lock) bool {
	return a.Owner != b.Owner && (a.Exclusive || b.Exclusive) && a.Start <= b.End && b.Start <= a.End
}

// step starts a request, or ends one that waits.
func (r *waitRun) step() {
	const owners, span = 12, 10
	id := nlm.Owner{Kind: nlm.OwnerKind(1 + r.rnd.IntN(2)), ID: r.rnd.Uint64N(owners)}
	a := r.rnd.Uint64N(span)
	l := nlm.Lock{Start: a, End: a + r.rnd.Uint64N(span-a), Exclusive: r.rnd.IntN(2) == 0, Owner: id}
	ctx := r.t.Context()
	switch n := r.rnd.IntN(10); {
	case n < 2:
		go func() { _ = r.c.Unlock(ctx, cred, fh, id, l.Start, l.End) }()
	case n < 4:
		go func() { _ = r.c.ReleaseOwner(ctx, cred, fh, id) }()
	case n == 4: // locks of another client exclude requests, too
		go func() {
			_ = r.other.Lock(ctx, cred, fh, l, false)
			_ = r.other.ReleaseOwner(ctx, cred, fh, id)
		}()
	case n == 5: // comes between the others
		go func() { _ = r.c.Lock(ctx, cred, fh, l, false) }()
	case n == 6 && len(r.waiting) > 0:
		r.waiting[r.rnd.IntN(len(r.waiting))].cancel()
	default:
		result, cancel := goLock(r.t, r.c, l, true)
		r.waiting = append(r.waiting, waitRequest{l, cancel, result})
	}
}

// check compares the requests that wait with the locks.
func (r *waitRun) check() {
	r.waiting = slices.DeleteFunc(r.waiting, func(x waitRequest) bool {
		select {
		case err := <-x.result:
			if err != nil && !errors.Is(err, syscall.EDEADLK) && !errors.Is(err, syscall.EINTR) {
				r.t.Fatal(err)
			}
			return true
		default:
			return false
		}
	})
	held, _ := r.c.Table(fh)
	for i, x := range held {
		if slices.ContainsFunc(held[:i], func(h nlm.Lock) bool { return excludes(h, x) }) {
			r.t.Fatalf("conflict of locks %+v", held)
		}
	}
	for _, x := range r.waiting {
		if !slices.ContainsFunc(held, func(h nlm.Lock) bool { return excludes(h, x.l) }) {
			r.t.Fatalf("%+v waits; locks %+v", x.l, held)
		}
	}
}

// TestNoRequestSleepsWithoutCause makes random requests that wait, and cancels some, while others
// are in progress. Whenever all goroutines wait, a lock of another owner must exclude each request.
// At the end the server must have the locks of the client.
func TestNoRequestSleepsWithoutCause(t *testing.T) {
	const steps = 100
	for seed := range lockrace.Rounds(t, 16) {
		bubble(t, func(t *testing.T, s *lockServer) {
			r := &waitRun{t: t, rnd: rand.New(rand.NewPCG(uint64(seed), 1)), c: s.client(nil), other: s.client(nil)}
			s.setAnswer(func(c *call) reply {
				time.Sleep(time.Duration(c.args.Region.Offset%4) * time.Millisecond)
				return pass
			})
			for range steps {
				for range 1 + r.rnd.IntN(12) {
					r.step()
					time.Sleep(time.Duration(r.rnd.IntN(3)) * time.Millisecond)
				}
				time.Sleep(time.Second) // polls
				synctest.Wait()
				if r.check(); len(r.waiting) > 20 {
					for _, x := range r.waiting[:15] {
						x.cancel()
					}
				}
			}
			for _, x := range r.waiting {
				x.cancel()
				<-x.result
			}
			time.Sleep(time.Second)
			synctest.Wait()
			if n := r.c.Counters.Held.Load(); int64(s.locks()) != n {
				t.Errorf("seed %d: got %d locks at the server, %d in the client", seed, s.locks(), n)
			}
		})
	}
}
