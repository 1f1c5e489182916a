package vfs

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
)

// TestReplyAttributesAvoidGetattr checks that the kernel gets the attributes from the reply to a
// change, without a GETATTR. A second stat with AT_STATX_FORCE_SYNC sends a GETATTR.
func TestReplyAttributesAvoidGetattr(t *testing.T) {
	m, s := startExport(t).mountScripted(t, mountConfig{})
	dir := subdir(t, m)
	const files = 10
	name := func(i int) string { return filepath.Join(dir, fmt.Sprint(i)) }
	// calls returns the number of calls per procedure that do makes.
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
	// A LOOKUP of the directory itself may precede: the server's reply to MKDIR need not show
	// that no other client changed the parent.
	if got[nfs3.ProcCreate] != files || got[nfs3.ProcLookup] > files+1 || got[nfs3.ProcGetAttr] > 1 {
		t.Errorf("create %d files: got %d CREATEs, %d LOOKUPs and %d GETATTRs, want at most 1 GETATTR", files,
			got[nfs3.ProcCreate],
			got[nfs3.ProcLookup], got[nfs3.ProcGetAttr])
	}
	other := subdir(t, m)
	got = calls(func() {
		for i := range files {
			must(t, os.Rename(name(i), filepath.Join(other, fmt.Sprint(i))))
			must(t, os.Rename(filepath.Join(other, fmt.Sprint(i)), name(i)))
		}
	})
	if got[nfs3.ProcRename] != 2*files || got[nfs3.ProcGetAttr] > 2 {
		t.Errorf("rename %d files twice: got %d RENAMEs and %d GETATTRs, want at most 2 GETATTRs", files,
			got[nfs3.ProcRename], got[nfs3.ProcGetAttr])
	}
	before := stat(t, dir)
	got = calls(func() {
		for i := range files {
			must(t, unix.Unlink(name(i)))
		}
	})
	if got[nfs3.ProcRemove] != files || got[nfs3.ProcGetAttr] > 1 {
		t.Errorf("remove %d files: got %d REMOVEs and %d GETATTRs, want at most 1 GETATTR", files, got[nfs3.ProcRemove],
			got[nfs3.ProcGetAttr])
	}
	if after := stat(t, dir); after.Mtim == before.Mtim {
		t.Error("directory mtime after removals: got the old mtime, want a new one")
	}
	got = calls(func() {
		var st unix.Statx_t
		must(t, unix.Statx(unix.AT_FDCWD, dir, unix.AT_STATX_FORCE_SYNC, unix.STATX_BASIC_STATS, &st))
	})
	if got[nfs3.ProcGetAttr] != 1 {
		t.Errorf("GETATTRs of statx with AT_STATX_FORCE_SYNC: got %d, want 1", got[nfs3.ProcGetAttr])
	}
}

// TestRemoveAndRenameRefetchAttributes checks that attributes are refetched when a removal or
// rename changes an object whose attributes its reply does not contain.
func TestRemoveAndRenameRefetchAttributes(t *testing.T) {
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
		t.Errorf("after removal of the second name: got %d links and %d bytes, want 1 and 4", st.Nlink, st.Size)
	}

	sub, moved := filepath.Join(dir, "sub"), filepath.Join(dir, "moved")
	must(t, os.Mkdir(sub, 0o755))
	must(t, os.WriteFile(filepath.Join(sub, "y"), nil, 0o644))
	must(t, os.Rename(filepath.Join(sub, "y"), filepath.Join(sub, "x"))) // nor the attributes of this reply
	must(t, os.Rename(sub, moved))
	before := s.count(nfs3.ProcGetAttr) + s.count(nfs3.ProcLookup)
	st := stat(t, moved)
	if s.count(nfs3.ProcGetAttr)+s.count(nfs3.ProcLookup) == before {
		t.Error("GETATTR and LOOKUP calls after the rename: got 0, want at least 1")
	}
	var there unix.Stat_t
	must(t, unix.Stat(filepath.Join(e.dir, filepath.Base(dir), "moved"), &there))
	if st.Ctim != there.Ctim {
		t.Errorf("ctime of renamed directory: got %v, want %v", st.Ctim, there.Ctim)
	}
}

func stat(t *testing.T, path string) (st unix.Stat_t) {
	t.Helper()
	must(t, unix.Stat(path, &st))
	return st
}
