package nlm_test

import (
	"testing"
	"testing/synctest"

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
