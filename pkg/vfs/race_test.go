package vfs

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// rememberReplies returns an answer to ACCESS or GETATTR that repeats the first reply for each
// handle. A server with this behavior accepts the handle of a removed file, or its clock stands
// still.
func rememberReplies() answer {
	var mu sync.Mutex
	replies := make(map[string][]byte)
	return func(_ context.Context, m *sunrpc.Message, pass func() error) error {
		mu.Lock()
		defer mu.Unlock()
		if old := replies[string(m.Args)]; old != nil {
			m.Result = append(m.Result[:0], old...)
			return nil
		}
		err := pass()
		replies[string(m.Args)] = bytes.Clone(m.Result)
		return err
	}
}

// TestOpenDuringSlowRemove opens a file of another user while the server takes long to remove one,
// or to rename a file over one, in a private directory.
func TestOpenDuringSlowRemove(t *testing.T) {
	e := startOwnExport(t)
	openExport(t, e)
	putDir(t, filepath.Join(e.dir, "private"), bob, 0o700)
	putFile(t, filepath.Join(e.dir, "other"), "", alice, 0o600)
	for _, c := range []struct {
		name     string
		executed bool // the server has removed the name, and frees the file
		remove   func(m *testMount) error
	}{
		{"REMOVE", false, func(m *testMount) error { return os.Remove(m.path("private/victim")) }},
		{"executed REMOVE", true, func(m *testMount) error { return os.Remove(m.path("private/victim")) }},
		{"RENAME", false, func(m *testMount) error {
			return os.Rename(m.path("private/new"), m.path("private/victim"))
		}},
		{"executed RENAME", true, func(m *testMount) error {
			return os.Rename(m.path("private/new"), m.path("private/victim"))
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, s := e.mountScripted(t, mountConfig{})
			m.severalUsers()
			for _, file := range []string{"victim", "new"} {
				putFile(t, filepath.Join(e.dir, "private", file), "", bob, 0o600)
			}
			slow, proceed := make(chan struct{}), make(chan struct{})
			s.on(func(_ context.Context, _ *sunrpc.Message, pass func() error) error {
				if c.executed {
					must(t, pass())
				}
				close(slow)
				<-proceed
				if c.executed {
					return nil
				}
				return pass()
			}, nfs3.ProcRemove, nfs3.ProcRename)
			removed := make(chan error, 1)
			go func() { removed <- bob.do(t, func() error { return c.remove(m) }) }()
			<-slow
			must(t, alice.open(t, m.path("other"), os.O_RDONLY, 0)) // hangs if it waits for the removal
			close(proceed)
			must(t, <-removed)
		})
	}
}

// TestOpenWaitsForExecutedRemoval begins the open of a file after the server has removed or
// replaced the file and before the reply arrives. The open must not use the removed file.
func TestOpenWaitsForExecutedRemoval(t *testing.T) {
	e := startExport(t)
	for _, c := range []struct {
		name   string
		remove func(m *testMount) error
	}{
		{"unlink", func(m *testMount) error { return os.Remove(m.path("victim")) }},
		{"rename", func(m *testMount) error { return os.Rename(m.path("new"), m.path("victim")) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, s := e.mountScripted(t, mountConfig{})
			for _, file := range []string{"victim", "new"} {
				must(t, os.WriteFile(m.path(file), nil, 0o644))
			}
			ino := m.inodeOf(t, "victim")
			m.awaitClosed(t)
			executed, proceed := make(chan struct{}), make(chan struct{})
			s.on(func(_ context.Context, _ *sunrpc.Message, pass func() error) error {
				err := pass()
				close(executed)
				<-proceed
				return err
			}, nfs3.ProcRemove, nfs3.ProcRename)
			removed := make(chan error, 1)
			go func() { removed <- c.remove(m) }()
			<-executed
			asked := make(chan struct{}, 4)
			s.on(func(_ context.Context, _ *sunrpc.Message, pass func() error) error {
				err := pass()
				select {
				case asked <- struct{}{}:
				default:
				}
				return err
			}, nfs3.ProcLookup)
			found := make(chan bool, 1)
			go func() {
				gone, err := m.fs.pin(&request{Request: new(kernel.Request), cred: m.fs.creds.encode(0, 0, nil)}, ino)
				found <- gone && err == nil
				m.fs.unpin(ino)
			}()
			<-asked // the open has asked the server which object is removed
			close(proceed)
			must(t, <-removed)
			if !<-found {
				t.Error("an open after the removal uses the removed file")
			}
		})
	}
}

// inodeOf returns the inode of a file.
func (m *testMount) inodeOf(t *testing.T, name string) *inode {
	t.Helper()
	st, err := os.Stat(m.path(name))
	must(t, err)
	m.fs.inodes.mu.Lock()
	defer m.fs.inodes.mu.Unlock()
	for _, ino := range m.fs.inodes.byID {
		if a, _ := ino.attr.Attr(); a.FileID == inodeNumber(st) {
			return ino
		}
	}
	t.Fatalf("no inode for %s", name)
	return nil
}

// lookupFile looks up a name as a thread that does not exist, until the test ends. It returns the
// header of a request of this thread about the node.
func (m *testMount) lookupFile(t *testing.T, dir uint64, name string) fuse.InHeader {
	t.Helper()
	caller := fuse.Caller{Pid: 1 << 30} // no thread has this number
	var out fuse.EntryOut
	if st := call(m.fs, kernel.OpLookup, fuse.InHeader{NodeId: dir, Caller: caller}, name+"\x00", &out); !st.Ok() {
		t.Fatal(st)
	}
	t.Cleanup(func() { m.fs.Forget(out.NodeId, 1) })
	return fuse.InHeader{NodeId: out.NodeId, Caller: caller}
}

// TestOpenWaitsTwice sends both attempts of an open. Each waits for a removal that may be of the
// file. The first attempt returns ESTALE, so that the kernel repeats the lookup. The second is the
// last one, and the file still exists, so it must succeed.
func TestOpenWaitsTwice(t *testing.T) {
	m := startExport(t).mount(t, mountConfig{})
	must(t, os.WriteFile(m.path("file"), []byte("text"), 0o644))
	m.awaitClosed(t)
	lookup := func() fuse.InHeader { return m.lookupFile(t, fuse.FUSE_ROOT_ID, "file") }
	file := lookup()
	var out fuse.OpenOut
	if st := openAfterRemoval(t, m.fs, file, &out); st != fuse.Status(syscall.ESTALE) {
		t.Fatalf("first attempt: got %v, want ESTALE", st)
	}
	file = lookup()
	if st := openAfterRemoval(t, m.fs, file, &out); !st.Ok() {
		t.Fatalf("second attempt: got %v, want OK", st)
	}
	call(m.fs, kernel.OpRelease, fuse.ReleaseIn{InHeader: file, Fh: out.Fh}, "", none)
}

// TestOpenAfterStaleGetAttr replaces a file before the GETATTR with which open(2) checks the
// rights, and again before the OPEN of its second attempt. The second attempt must succeed.
func TestOpenAfterStaleGetAttr(t *testing.T) {
	e := startOwnExport(t)
	m := e.mount(t, mountConfig{opts: Options{NoAC: true, AcDirMax: 1}})
	write := func(path string) { must(t, os.WriteFile(path, nil, 0o644)) }
	write(m.path("file"))
	write(m.path("new"))
	m.awaitClosed(t)
	lookup := func() fuse.InHeader { return m.lookupFile(t, fuse.FUSE_ROOT_ID, "file") }
	old := lookup()
	write(filepath.Join(e.dir, "other"))
	must(t, os.Rename(filepath.Join(e.dir, "other"), filepath.Join(e.dir, "file")))
	if st := call(m.fs, kernel.OpGetAttr, fuse.GetAttrIn{InHeader: old}, "", none); st != fuse.Status(syscall.ESTALE) {
		t.Fatalf("GETATTR of a replaced file: got %v, want ESTALE", st)
	}
	file := lookup()
	must(t, os.Rename(m.path("new"), m.path("file")))
	var out fuse.OpenOut
	if st := call(m.fs, kernel.OpOpen, fuse.OpenIn{InHeader: file}, "", &out); !st.Ok() {
		t.Fatalf("second attempt: got %v, want OK", st)
	}
	call(m.fs, kernel.OpRelease, fuse.ReleaseIn{InHeader: file, Fh: out.Fh}, "", none)
}

// TestStaleStatKeepsNoName stats a file that was replaced on the server. The kernel repeats the
// LOOKUP, and the new file is then pinned for an open that never comes. The removal of the file and
// of its directory must succeed nevertheless.
func TestStaleStatKeepsNoName(t *testing.T) {
	e := startOwnExport(t)
	m := e.mount(t, mountConfig{opts: Options{NoAC: true, AcDirMax: 1}})
	must(t, os.Mkdir(m.path("dir"), 0o755))
	must(t, os.WriteFile(m.path("dir/file"), nil, 0o644))
	m.awaitClosed(t)
	dir := m.lookupFile(t, fuse.FUSE_ROOT_ID, "dir")
	file := m.lookupFile(t, dir.NodeId, "file")
	must(t, os.WriteFile(filepath.Join(e.dir, "new"), nil, 0o644))
	must(t, os.Rename(filepath.Join(e.dir, "new"), filepath.Join(e.dir, "dir/file")))
	if st := call(m.fs, kernel.OpGetAttr, fuse.GetAttrIn{InHeader: file}, "", none); st != fuse.Status(syscall.ESTALE) {
		t.Fatalf("GETATTR of a replaced file: got %v, want ESTALE", st)
	}
	m.lookupFile(t, dir.NodeId, "file")
	must(t, os.Remove(m.path("dir/file")))
	must(t, os.Remove(m.path("dir")))
}

// openAfterRemoval opens a file while a removal is in flight, and ends the removal when the open
// waits for it.
func openAfterRemoval(t *testing.T, fs *FS, file fuse.InHeader, out *fuse.OpenOut) fuse.Status {
	t.Helper()
	table := &fs.inodes
	removal := &unresolvedRemoval{cred: fs.creds.encode(0, 0, nil), dir: table.get(fuse.FUSE_ROOT_ID), name: "file"}
	table.findOrBeginUnresolved(nfs.Handle{}, removal)
	table.mu.Lock()
	table.removalDone = nil // set again by an open that waits
	table.mu.Unlock()
	opened := make(chan fuse.Status, 1)
	go func() { opened <- call(fs, kernel.OpOpen, fuse.OpenIn{InHeader: file}, "", out) }()
	waits := eventually(func() bool {
		table.mu.Lock()
		defer table.mu.Unlock()
		return table.removalDone != nil
	})
	table.endUnresolved(removal)
	if !waits {
		t.Error("open does not wait for the removal")
	}
	return <-opened
}
