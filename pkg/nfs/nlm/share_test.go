package nlm_test

import (
	"errors"
	"strings"
	"syscall"
	"testing"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm/nlmwire"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// as returns the credential of a user.
func as(uid uint32) []byte { return sunrpc.AppendAuthSys(nil, &sunrpc.AuthSys{UID: uid}) }

// TestUserCannotTakeAllLocks sets locks as one user of a mount until the client refuses, and
// unlocks parts of them. Other users still get locks, also after a restart of the daemon.
func TestUserCannotTakeAllLocks(t *testing.T) {
	const limit = 32
	s := startLockServer(t)
	k := newKeptFile(t, s, nlm.StateTables())
	var log strings.Builder
	small := func(cfg *nlm.Config) {
		cfg.Small(limit, limit)
		cfg.Logger = hclog.New(&hclog.LoggerOptions{Output: &log})
	}
	c := k.client(small)
	lock := func(uid uint32, at uint64) error {
		id := nlm.Owner{Kind: nlm.Posix, ID: uint64(uid)}
		return c.Lock(t.Context(), as(uid), fh, exclusive(id, at, at+9), false)
	}
	next := uint64(0)
	fill := func(uid uint32) (n int) {
		var err error
		for n = 0; n <= limit; n++ {
			if next += 20; lock(uid, next) != nil {
				err = lock(uid, next)
				break
			}
		}
		if err != syscall.ENOLCK {
			t.Errorf("uid %d at its limit: got error %v, want %v", uid, err, syscall.ENOLCK)
		}
		return n
	}
	first := nlm.Owner{Kind: nlm.Posix, ID: 1001}
	if n := fill(1001); n != limit/2 {
		t.Errorf("first user: got %d locks, want %d", n, limit/2)
	}
	if err := c.Unlock(t.Context(), as(1001), fh, first, 25, 25); err != syscall.ENOLCK {
		t.Errorf("unlock of the middle at the limit: got error %v, want %v", err, syscall.ENOLCK)
	}
	if n := s.count(nlmwire.ProcUnlock); n != 0 {
		t.Errorf("UNLOCK calls: got %d, want none", n)
	}
	c = k.restart(c, small)
	c.WaitRestored()
	if err := lock(1001, 10000); err != syscall.ENOLCK {
		t.Errorf("first user after a restart: got error %v, want %v", err, syscall.ENOLCK)
	}
	if n := fill(1002); n != limit/2-limit/16 {
		t.Errorf("second user: got %d locks, want %d", n, limit/2-limit/16)
	}
	if n := fill(0); n != limit/16 {
		t.Errorf("root: got %d locks, want %d", n, limit/16)
	}
	// The locks of a process count to one user, also after a change of the user of the process.
	kit.Must(t, c.Unlock(t.Context(), as(1003), fh, first, 0, whole))
	kit.Must(t, lock(1003, 10000))
	if n := strings.Count(log.String(), "no room in a table"); n != 2 || !strings.Contains(log.String(), "uid=1001") {
		t.Errorf("got %d warnings, want one for each process; log:\n%s", n, &log)
	}
}

// TestWaitingRequestsOfUserAreLimited waits with more requests of one user than may wait: for a lock
// of the mount, and for one of another client. Requests of other users still wait.
func TestWaitingRequestsOfUserAreLimited(t *testing.T) {
	const limit = 32
	for _, local := range []bool{true, false} {
		bubble(t, func(t *testing.T, s *lockServer) {
			c := s.client(func(cfg *nlm.Config) { cfg.Small(1000, limit) })
			holder := c
			if !local {
				holder = s.client(nil)
			}
			mustLock(t, holder, exclusive(alice, 0, 0))
			results := make(chan error, 2*limit)
			wait := func(uid uint32, n int) {
				for i := range n {
					id := nlm.Owner{Kind: nlm.Posix, ID: uint64(uid)*1000 + uint64(i)}
					go func() { results <- c.Lock(t.Context(), as(uid), fh, exclusive(id, 0, 0), true) }()
				}
			}
			wait(1001, limit/2)
			wantPending(t, c, limit/2)
			wait(1001, 1)
			wantResult(t, results, syscall.ENOLCK)
			wait(1002, 1)
			wantPending(t, c, limit/2+1)
			if n := c.Counters.Held.Load(); !local && n != 0 {
				t.Errorf("locks held: got %d, want 0", n)
			}
			release(t, holder, alice)
			for range limit/2 + 1 {
				if err := <-results; err != nil {
					t.Errorf("waiting request: %v", err)
				}
				held, _ := c.Table(fh)
				release(t, c, held[0].Owner)
			}
			wait(1001, 1)
			wantResult(t, results, nil)
		})
	}
}

// TestRefusedUnlockKeepsLock unlocks the middle of a lock at a server that has no room for the
// parts.
func TestRefusedUnlockKeepsLock(t *testing.T) {
	s := startLockServer(t)
	k := newKeptFile(t, s, nlm.StateTables())
	c := k.client(nil)
	mustLock(t, c, exclusive(alice, 0, 9))
	s.answerStat(nlmwire.ProcUnlock, nlmwire.DeniedNoLocks)
	if err := c.Unlock(t.Context(), cred, fh, alice, 5, 5); !errors.Is(err, syscall.ENOLCK) {
		t.Errorf("got error %v, want %v", err, syscall.ENOLCK)
	}
	wantTable(t, c, exclusive(alice, 0, 9))
	k.wantRecords(1, 1)
	s.setAnswer(nil)
	release(t, c, alice)
	k.wantRecords(0, 0)
}
