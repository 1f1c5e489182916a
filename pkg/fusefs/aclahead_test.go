package fusefs

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3/nfsacl"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// getACLs counts GETACLs, and makes each take some time.
type getACLs struct {
	nfs3.Caller
	mu       sync.Mutex
	calls    int
	ahead    int // calls that no program asked for
	inFlight int
	most     int           // of inFlight
	hung     chan struct{} // if not nil, calls ahead send a value and wait until their context ends
}

func (g *getACLs) Call(ctx context.Context, m *sunrpc.Message) error {
	if m.Prog != nfsacl.Program || m.Proc != nfsacl.ProcGetACL {
		return g.Caller.Call(ctx, m)
	}
	g.mu.Lock()
	g.calls++
	g.inFlight++
	g.most = max(g.most, g.inFlight)
	_, asked := ctx.(*request)
	if !asked {
		g.ahead++
	}
	g.mu.Unlock()
	defer func() {
		g.mu.Lock()
		g.inFlight--
		g.mu.Unlock()
	}()
	if !asked && g.hung != nil {
		g.hung <- struct{}{}
		<-ctx.Done()
		return ctx.Err()
	}
	time.Sleep(2 * time.Millisecond)
	return g.Caller.Call(ctx, m)
}

// list lists a directory as ls -l does, and calls f for each part with the paths of its files.
func list(t *testing.T, dir string, f func(paths []string)) (files int) {
	t.Helper()
	d, err := os.Open(dir)
	must(t, err)
	defer d.Close()
	for err == nil {
		var names []string
		names, err = d.Readdirnames(100)
		for i := range names {
			names[i] = filepath.Join(dir, names[i])
		}
		f(names)
		files += len(names)
	}
	if err != io.EOF {
		t.Fatal(err)
	}
	return files
}

func askACLs(t *testing.T, paths []string) {
	t.Helper()
	for _, p := range paths {
		if _, err := unix.Lgetxattr(p, nfsacl.XattrAccess, nil); err != unix.ENODATA {
			t.Fatalf("getxattr %s: got %v, want ENODATA", p, err)
		}
	}
}

// TestACLsAreFetchedAhead checks that ls -l causes one GETACL for each file, several at a time, and
// that a program that needs no ACLs causes none.
func TestACLsAreFetchedAhead(t *testing.T) {
	t.Parallel()
	const files = 1500
	e := startOwnExport(t)
	createNames(t, filepath.Join(e.dir, "d"), files)
	var g *getACLs
	m := e.mount(t, mountConfig{wrap: func(c nfs3.Caller) nfs3.Caller {
		g = &getACLs{Caller: c}
		return g
	}})
	list(t, m.path("d"), func([]string) {})
	g.mu.Lock()
	if g.calls > 0 {
		t.Errorf("list without ACLs: got %d GETACLs, want none", g.calls)
	}
	g.mu.Unlock()
	if n := list(t, m.path("d"), func(paths []string) { askACLs(t, paths) }); n != files {
		t.Fatalf("list: got %d files, want %d", n, files)
	}
	m.fs.work.Wait()
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.calls < files || g.calls > files+files/50 { // a reply is not kept if the node changes meanwhile
		t.Errorf("got %d GETACLs, want one for each of %d files", g.calls, files)
	}
	if g.ahead < files/2 {
		t.Errorf("got %d GETACLs ahead of the program, want most of %d", g.ahead, files)
	}
	if g.most < aclAheadCalls || g.most > aclAheadCalls+1 {
		t.Errorf("got %d GETACLs at a time, want %d ahead and one for the program", g.most, aclAheadCalls)
	}
}

// TestACLsAheadEndWithFS checks that calls ahead do not delay the end of a mount whose server does
// not answer.
func TestACLsAheadEndWithFS(t *testing.T) {
	t.Parallel()
	e := startOwnExport(t)
	createNames(t, filepath.Join(e.dir, "d"), 1500)
	var g *getACLs
	m := e.mount(t, mountConfig{wrap: func(c nfs3.Caller) nfs3.Caller {
		g = &getACLs{Caller: c, hung: make(chan struct{}, aclAheadCalls)}
		return g
	}})
	asked := false
	list(t, m.path("d"), func(paths []string) {
		if !asked {
			askACLs(t, paths[:aclAheadStart])
			asked = true
		}
	})
	select {
	case <-g.hung:
	case <-time.After(testTimeout):
		t.Fatal("no ACL is fetched ahead")
	}
	m.unmount(t)
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	begin := time.Now()
	m.fs.Close(ctx)
	if d := time.Since(begin); d > aclAheadTimeout/2 {
		t.Errorf("the end of the FS took %v", d)
	}
}

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
