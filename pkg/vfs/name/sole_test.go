package name

import (
	"testing"
	"testing/synctest"
	"time"
)

// TestSecondUserWaitsForKernelNames checks that lookups wait once, when a second user comes.
func TestSecondUserWaitsForKernelNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s SoleUser
		admit := func(uid uint32, want time.Duration) {
			t.Helper()
			start := time.Now()
			if ok := s.Admit(uid, nil); !ok || time.Since(start) != want {
				t.Errorf("lookup of uid %d: got %v after %v, want true after %v", uid, ok, time.Since(start), want)
			}
		}
		admit(0, 0)
		admit(0, 0)
		if !s.Alone() {
			t.Error("after lookups of one user: got several users")
		}
		go func() {
			time.Sleep(SoleEndTime / 2)
			admit(7, SoleEndTime/2)
		}()
		admit(1000, SoleEndTime)
		if s.Alone() {
			t.Error("after lookups of two users: got one user")
		}
		for _, uid := range []uint32{0, 1000, 2000} {
			admit(uid, 0)
		}
	})
}
