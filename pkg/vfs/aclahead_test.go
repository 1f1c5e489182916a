package vfs

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfsacl"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/acl"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/name"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// heldSetAttr holds SETATTRs back until released.
type heldSetAttr struct {
	nfs3.Caller
	held, release chan struct{}
}

func (h *heldSetAttr) Call(ctx context.Context, m *sunrpc.Message) error {
	if m.Prog == nfs3.Program && m.Proc == uint32(nfs3.ProcSetAttr) {
		h.held <- struct{}{}
		<-h.release
	}
	return h.Caller.Call(ctx, m)
}

// TestModeChangeDropsACL checks that an ACL that the server returns just before a SETATTR is not
// used after it.
func TestModeChangeDropsACL(t *testing.T) {
	kit.NeedsPrograms(t, "setfacl")
	t.Parallel()
	e := startOwnExport(t)
	must(t, os.WriteFile(filepath.Join(e.dir, "f"), nil, 0o644))
	run(t, e.dir, "setfacl", "-m", "u:1234:rwx", "f")
	h := &heldSetAttr{held: make(chan struct{}), release: make(chan struct{})}
	m := e.mount(t, mountConfig{wrap: func(c nfs3.Caller) nfs3.Caller {
		h.Caller = c
		return h
	}})
	get := func() string {
		t.Helper()
		b := make([]byte, 1024)
		n, err := unix.Lgetxattr(m.path("f"), nfsacl.XattrAccess, b)
		must(t, err)
		return string(b[:n])
	}
	changed := make(chan error)
	go func() { changed <- os.Chmod(m.path("f"), 0o600) }()
	<-h.held
	before := get()
	close(h.release)
	must(t, <-changed)
	after := get()
	b := make([]byte, 1024)
	n, err := unix.Lgetxattr(filepath.Join(e.dir, "f"), nfsacl.XattrAccess, b)
	must(t, err)
	if want := string(b[:n]); after != want || before == want {
		t.Errorf("got the ACL %x, before %x; want %x on the server, and another one before", after, before, want)
	}
}

// TestACLsAreFetchedAhead checks that ls -l causes several GETACLs at a time for the files that
// follow, that a program that needs no ACLs causes none, and that calls ahead end with the FS.
func TestACLsAreFetchedAhead(t *testing.T) {
	e := startOwnExport(t)
	createNames(t, filepath.Join(e.dir, "d"), 600)
	asked := make(chan struct{}, 600)
	ahead := make(chan context.Context, 600)
	m := e.mount(t, mountConfig{wrap: func(c nfs3.Caller) nfs3.Caller {
		return callerFunc(func(ctx context.Context, m *sunrpc.Message) error {
			if m.Prog != nfsacl.Program || m.Proc != nfsacl.ProcGetACL {
				return c.Call(ctx, m)
			}
			if _, ok := ctx.(*request); ok { // a program waits
				asked <- struct{}{}
				return c.Call(ctx, m)
			}
			ahead <- ctx
			<-ctx.Done()
			return ctx.Err()
		})
	}})
	list := func(f func(paths []string)) {
		dir, err := os.Open(m.path("d"))
		must(t, err)
		defer dir.Close()
		for err == nil {
			var names []string
			names, err = dir.Readdirnames(100)
			f(names)
		}
	}
	list(func([]string) {})
	if len(asked)+len(ahead) > 0 {
		t.Errorf("list without ACLs: got %d GETACLs, want none", len(asked)+len(ahead))
	}
	list(func(names []string) {
		for _, name := range names[:min(len(names), name.ACLsStart)] {
			if _, err := unix.Lgetxattr(m.path("d/"+name), nfsacl.XattrAccess, nil); err != unix.ENODATA {
				t.Fatalf("getxattr %s: got %v, want ENODATA", name, err)
			}
		}
	})
	var calls []context.Context
	for range acl.AheadCalls {
		calls = append(calls, <-ahead)
	}
	m.unmount(t)
	m.fs.Close(t.Context())
	for _, ctx := range calls {
		if context.Cause(ctx) != context.Canceled {
			t.Errorf("end of a call ahead: got %v, want that the end of the FS cancels it", context.Cause(ctx))
		}
	}
}
