package nfsd

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// tries calls TryServe only. status is that of the reply.
func tries(s *Server, proc nfs3.Proc, args []byte) (status nfs3.Status, ok bool) {
	msg := append(sunrpc.AppendCall(nil, 1, nfs3.Program, nfs3.Version, uint32(proc), root), args...)
	reply, ok := s.TryServe(peer, msg, nil)
	if !ok {
		return 0, false
	}
	_, results, err := sunrpc.ParseReply(reply)
	if err != nil || len(results) < 4 {
		return nfs3.ErrServerFault, true
	}
	d := sunrpc.NewDecoder(results)
	return nfs3.Status(d.Uint32()), true
}

func lookupArgs(dir nfs3.FH, name string) []byte {
	return sunrpc.AppendString(nfs3.AppendFH(nil, &dir), name)
}

// TestTryLookup looks up names that the kernel has cached, and one that it has not.
func TestTryLookup(t *testing.T) {
	kit.NeedsRoot(t) // to open files by handle
	c := start(t, nil)
	if c.s.paths != nil {
		t.Fatal("the file system of the temporary directory has no file handles")
	}
	c.s.inMemory = false // also where the temporary directory is a tmpfs
	c.MustCreate(root, c.Root, "file", 0o644)
	for _, x := range []struct {
		name   string
		status nfs3.Status
		ok     bool
	}{
		{"file", nfs3.OK, true},
		{".", nfs3.OK, true},
		{"..", nfs3.OK, true}, // the root itself
		{"never looked up", 0, false},
	} {
		if status, ok := tries(c.s, nfs3.ProcLookup, lookupArgs(c.Root, x.name)); status != x.status || ok != x.ok {
			t.Errorf("LOOKUP of %q: got %v, %v, want %v, %v", x.name, status, ok, x.status, x.ok)
		}
	}
}

// TestTryInMemory makes calls about files in memory that no call has used before.
func TestTryInMemory(t *testing.T) {
	kit.NeedsRoot(t)
	dir := t.TempDir()
	if err := unix.Mount("none", dir, "tmpfs", 0, ""); err != nil {
		t.Fatal("mount a tmpfs:", err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	if err := os.WriteFile(filepath.Join(dir, "file"), []byte("text"), 0o644); err != nil {
		t.Fatal(err)
	}
	c := start(t, func(cfg *Config) { cfg.Dir = dir })
	file := c.MustLookup(c.Root, "file").FH
	read := sunrpc.AppendUint32(sunrpc.AppendUint64(nfs3.AppendFH(nil, &file), 0), 100)
	for _, x := range []struct {
		proc   nfs3.Proc
		args   []byte
		status nfs3.Status
		ok     bool
	}{
		{nfs3.ProcRead, read, nfs3.OK, true},
		{nfs3.ProcLookup, lookupArgs(c.Root, "file"), nfs3.OK, true},
		{nfs3.ProcLookup, lookupArgs(c.Root, "missing"), nfs3.ErrNoEnt, true},
		{nfs3.ProcFSStat, nfs3.AppendFH(nil, &c.Root), nfs3.OK, true},
		{nfs3.ProcReadLink, nfs3.AppendFH(nil, &file), nfs3.ErrInval, true},
		{nfs3.ProcRemove, lookupArgs(c.Root, "file"), 0, false},
	} {
		if status, ok := tries(c.s, x.proc, x.args); status != x.status || ok != x.ok {
			t.Errorf("%v: got %v, %v, want %v, %v", x.proc, status, ok, x.status, x.ok)
		}
	}
}
