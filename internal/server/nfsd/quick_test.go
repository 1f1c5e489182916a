package nfsd

import (
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
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
