package vfs

import (
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"
)

// TestSecondUserWaitsForKernelNames checks that lookups wait once, when a second user comes.
func TestSecondUserWaitsForKernelNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s soleUser
		r := &request{done: make(chan struct{})}
		admit := func(uid uint32, want time.Duration) {
			t.Helper()
			start := time.Now()
			if err := s.admit(r, uid); err != nil || time.Since(start) != want {
				t.Errorf("lookup of uid %d: got %v after %v, want success after %v", uid, err, time.Since(start), want)
			}
		}
		admit(0, 0)
		admit(0, 0)
		if !s.alone() {
			t.Error("after lookups of one user: got several users")
		}
		go func() {
			time.Sleep(soleEndTime / 2)
			admit(7, soleEndTime/2)
		}()
		admit(1000, soleEndTime)
		if s.alone() {
			t.Error("after lookups of two users: got one user")
		}
		for _, uid := range []uint32{0, 1000, 2000} {
			admit(uid, 0)
		}
	})
}

// TestSharedNamesStayInKernel checks that the kernel keeps names for several users with SharedNames
// and asks for each name without this option.
func TestSharedNamesStayInKernel(t *testing.T) {
	for _, shared := range []bool{true, false} {
		e := startOwnExport(t)
		openExport(t, e)
		putDir(t, filepath.Join(e.dir, "dir"), alice, 0o755)
		putFile(t, filepath.Join(e.dir, "dir", "file"), "x", alice, 0o644)
		m := e.mount(t, mountConfig{opts: Options{SharedNames: shared}}).severalUsers()
		must(t, alice.stat(t, m.path("dir/file")))
		must(t, bob.stat(t, m.path("dir/file")))
		before := m.fs.Counters.Ops[OpLookup].Load()
		const stats = 10
		for range stats {
			must(t, bob.stat(t, m.path("dir/file")))
		}
		want := uint64(0)
		if !shared {
			want = 2 * stats // for each component of the path
		}
		if n := m.fs.Counters.Ops[OpLookup].Load() - before; n != want {
			t.Errorf("shared names %v: got %d lookups, want %d", shared, n, want)
		}
	}
}
