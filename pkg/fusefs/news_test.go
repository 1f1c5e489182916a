package fusefs

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
)

// TestChangesTellAttributes: after a change of ours the kernel asks for attributes that came with
// the reply; the server is not asked again, unless somebody wants its word.
func TestChangesTellAttributes(t *testing.T) {
	m, s := startExport(t).mountScripted(t, mountConfig{})
	dir := subdir(t, m)
	const files = 10
	name := func(i int) string { return filepath.Join(dir, fmt.Sprint(i)) }
	// calls are those that do makes.
	calls := func(do func()) (counts [nfs3.NumProcs]int) {
		for p := range counts {
			counts[p] = -s.count(nfs3.Proc(p))
		}
		do()
		for p := range counts {
			counts[p] += s.count(nfs3.Proc(p))
		}
		return counts
	}
	got := calls(func() {
		for i := range files {
			f, err := os.Create(name(i))
			must(t, err)
			must(t, f.Close())
		}
	})
	if got[nfs3.ProcCreate] != files || got[nfs3.ProcLookup] != files || got[nfs3.ProcGetAttr] > 1 {
		t.Errorf("%d files were made with %d CREATEs, %d LOOKUPs and %d GETATTRs", files, got[nfs3.ProcCreate],
			got[nfs3.ProcLookup], got[nfs3.ProcGetAttr])
	}
	before := stat(t, dir)
	got = calls(func() {
		for i := range files {
			must(t, unix.Unlink(name(i)))
		}
	})
	if got[nfs3.ProcRemove] != files || got[nfs3.ProcGetAttr] > 1 {
		t.Errorf("%d files were removed with %d REMOVEs and %d GETATTRs", files, got[nfs3.ProcRemove],
			got[nfs3.ProcGetAttr])
	}
	if after := stat(t, dir); after.Mtim == before.Mtim {
		t.Error("a directory's mtime stayed, although names were removed")
	}
	got = calls(func() {
		var st unix.Statx_t
		must(t, unix.Statx(unix.AT_FDCWD, dir, unix.AT_STATX_FORCE_SYNC, unix.STATX_BASIC_STATS, &st))
	})
	if got[nfs3.ProcGetAttr] != 1 {
		t.Errorf("statx with AT_STATX_FORCE_SYNC made %d GETATTRs", got[nfs3.ProcGetAttr])
	}
}

// TestNewsOfOthers: what a removal or a rename changes besides the directory is asked for.
func TestNewsOfOthers(t *testing.T) {
	e := startExport(t)
	m, s := e.mountScripted(t, mountConfig{})
	dir := subdir(t, m)
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	must(t, os.WriteFile(a, []byte("a"), 0o644))
	must(t, os.Link(a, b))
	f, err := os.OpenFile(a, os.O_RDWR, 0)
	must(t, err)
	defer f.Close()
	_, err = f.WriteAt([]byte("more"), 0)
	must(t, err)
	must(t, f.Sync()) // the kernel does not have the attributes of this reply
	must(t, os.Remove(b))
	if st := stat(t, a); st.Nlink != 1 || st.Size != 4 {
		t.Errorf("after the removal of its other name a file has %d links and %d octets", st.Nlink, st.Size)
	}

	sub, moved := filepath.Join(dir, "sub"), filepath.Join(dir, "moved")
	must(t, os.Mkdir(sub, 0o755))
	must(t, os.WriteFile(filepath.Join(sub, "x"), nil, 0o644)) // nor these
	before := s.count(nfs3.ProcGetAttr)
	must(t, os.Rename(sub, moved))
	st := stat(t, moved)
	if s.count(nfs3.ProcGetAttr) == before {
		t.Error("after a rename nobody asked for the directory's attributes")
	}
	var there unix.Stat_t
	must(t, unix.Stat(filepath.Join(e.dir, filepath.Base(dir), "moved"), &there))
	if st.Ctim != there.Ctim {
		t.Errorf("a renamed directory has ctime %v, on the server %v", st.Ctim, there.Ctim)
	}
}

func stat(t *testing.T, path string) (st unix.Stat_t) {
	t.Helper()
	must(t, unix.Stat(path, &st))
	return st
}
