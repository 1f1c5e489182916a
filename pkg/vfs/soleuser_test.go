package vfs

import (
	"path/filepath"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
)

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
		before := m.fs.Counters.Ops[kernel.OpLookup].Load()
		const stats = 10
		for range stats {
			must(t, bob.stat(t, m.path("dir/file")))
		}
		want := uint64(0)
		if !shared {
			want = 2 * stats // for each component of the path
		}
		if n := m.fs.Counters.Ops[kernel.OpLookup].Load() - before; n != want {
			t.Errorf("shared names %v: got %d lookups, want %d", shared, n, want)
		}
	}
}
