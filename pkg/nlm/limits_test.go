package nlm_test

import (
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
