package integration

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"syscall"
	"testing"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

// TestServeVerifierAfterRestart sees another write verifier from every new server process.
func TestServeVerifierAfterRestart(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	served := mounts.OpenTempDir(t)
	writeFiles(t, served, map[string]string{"f": "0123456789"})
	s := mounts.ServeDir(t, served, "--no-root-squash")
	seen := map[nfs3.Verifier]bool{}
	for range 3 {
		for range 2 {
			c := mustDial(t, s)
			w, err := c.writeAndCommit("f")
			if err != nil {
				t.Fatal(err)
			}
			seen[w] = true
		}
		s.Restart(t, syscall.SIGTERM, nil)
	}
	if len(seen) != 3 {
		t.Errorf("got %d verifiers from 3 processes: %x", len(seen), slices.Collect(maps.Keys(seen)))
	}
}

// writeAndCommit writes UNSTABLE, and returns the verifier that WRITE and COMMIT agree on.
func (c *rawClient) writeAndCommit(name string) (nfs3.Verifier, error) {
	fh := c.mustLookup(name)
	var w nfs3.WriteResult
	if err := c.Write(c.ctx, credential(0, 0), fh, 0, []byte("new"), nfs3.Unstable, &w); err != nil {
		return w.Verf, err
	}
	var cm nfs3.CommitResult
	if err := c.Commit(c.ctx, credential(0, 0), fh, 0, 0, &cm); err != nil {
		return w.Verf, err
	}
	if cm.Verf != w.Verf {
		return w.Verf, fmt.Errorf("verifier of COMMIT is %x, of WRITE %x", cm.Verf, w.Verf)
	}
	return w.Verf, nil
}

// TestServeRestartReplaysWrites kills a server, whose disk then loses what is not committed. The
// client must write it again. After fsync(2) the data survives the next power failure.
func TestServeRestartReplaysWrites(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	f := newLostFile(t, 0)
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	for i, when := range []string{"fsync", "fsync and a power failure"} {
		if i > 0 {
			f.fail()
		}
		if got, err := os.ReadFile(f.behind); err != nil || !bytes.Equal(got, f.want) {
			t.Errorf("file on the server after %s: got %d bytes, %v, want the %d bytes that were written", when,
				len(got), err, len(f.want))
		}
	}
}

// A watchedDisk is a file system that passes everything to a directory. It records which objects
// changed without a later fsync, and lets fsyncs fail.
type watchedDisk struct {
	fuse.RawFileSystem
	state struct {
		sync.Mutex
		fail  bool
		syncs int
		dirty map[uint64]string // node ID to the last change
	}
}

// newWatchedDisk mounts a watchedDisk until the test ends. The test must not use the mount point
// itself, because it serves it.
func newWatchedDisk(t *testing.T, behind string) (*watchedDisk, string) {
	t.Helper()
	root, err := fs.NewLoopbackRoot(behind)
	if err != nil {
		t.Fatal(err)
	}
	d := &watchedDisk{RawFileSystem: fs.NewNodeFS(root, &fs.Options{})}
	d.state.dirty = map[uint64]string{}
	dir := mounts.OpenTempDir(t)
	srv, err := fuse.NewServer(d, dir, &fuse.MountOptions{AllowOther: true, DirectMountStrict: true, FsName: "watched"})
	if err != nil {
		t.Fatal(err)
	}
	go srv.Serve()
	if err := srv.WaitMount(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := srv.Unmount(); err != nil {
			t.Error(err)
			_ = syscall.Unmount(dir, syscall.MNT_DETACH)
		}
		srv.Wait()
	})
	return d, dir
}

func (d *watchedDisk) setFail(fail bool) {
	d.state.Lock()
	defer d.state.Unlock()
	d.state.fail = fail
}

// unsynced returns the changes that no fsync followed, and forgets them.
func (d *watchedDisk) unsynced() []string {
	d.state.Lock()
	defer d.state.Unlock()
	list := slices.Sorted(maps.Values(d.state.dirty))
	clear(d.state.dirty)
	return list
}

func (d *watchedDisk) changed(what string, status fuse.Status, nodes ...uint64) fuse.Status {
	d.state.Lock()
	defer d.state.Unlock()
	for _, n := range nodes {
		if status == fuse.OK {
			d.state.dirty[n] = what
		}
	}
	return status
}

func (d *watchedDisk) synced(node uint64) fuse.Status {
	d.state.Lock()
	defer d.state.Unlock()
	d.state.syncs++
	if d.state.fail {
		return fuse.EIO
	}
	delete(d.state.dirty, node)
	return fuse.OK
}

func (d *watchedDisk) Fsync(_ <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	return d.synced(in.NodeId)
}
func (d *watchedDisk) FsyncDir(_ <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	return d.synced(in.NodeId)
}

func (d *watchedDisk) Create(c <-chan struct{}, in *fuse.CreateIn, name string, out *fuse.CreateOut) fuse.Status {
	return d.changed("create "+name, d.RawFileSystem.Create(c, in, name, out), in.NodeId)
}

func (d *watchedDisk) Mkdir(c <-chan struct{}, in *fuse.MkdirIn, name string, out *fuse.EntryOut) fuse.Status {
	return d.changed("mkdir "+name, d.RawFileSystem.Mkdir(c, in, name, out), in.NodeId)
}

func (d *watchedDisk) Mknod(c <-chan struct{}, in *fuse.MknodIn, name string, out *fuse.EntryOut) fuse.Status {
	return d.changed("mknod "+name, d.RawFileSystem.Mknod(c, in, name, out), in.NodeId)
}

func (d *watchedDisk) Symlink(c <-chan struct{}, h *fuse.InHeader, to, name string, out *fuse.EntryOut) fuse.Status {
	return d.changed("symlink "+name, d.RawFileSystem.Symlink(c, h, to, name, out), h.NodeId)
}

func (d *watchedDisk) Link(c <-chan struct{}, in *fuse.LinkIn, name string, out *fuse.EntryOut) fuse.Status {
	return d.changed("link "+name, d.RawFileSystem.Link(c, in, name, out), in.NodeId)
}

func (d *watchedDisk) Unlink(c <-chan struct{}, h *fuse.InHeader, name string) fuse.Status {
	return d.changed("unlink "+name, d.RawFileSystem.Unlink(c, h, name), h.NodeId)
}

func (d *watchedDisk) Rmdir(c <-chan struct{}, h *fuse.InHeader, name string) fuse.Status {
	return d.changed("rmdir "+name, d.RawFileSystem.Rmdir(c, h, name), h.NodeId)
}

func (d *watchedDisk) Rename(c <-chan struct{}, in *fuse.RenameIn, from, to string) fuse.Status {
	return d.changed("rename "+from, d.RawFileSystem.Rename(c, in, from, to), in.NodeId, in.Newdir)
}

func (d *watchedDisk) SetAttr(c <-chan struct{}, in *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	return d.changed("setattr", d.RawFileSystem.SetAttr(c, in, out), in.NodeId)
}

// TestServeFailedFsync lets the disk refuse an fsync. The data of every client may be lost, so that
// the write verifier must change for all of them.
func TestServeFailedFsync(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	behind := mounts.OpenTempDir(t)
	writeFiles(t, behind, map[string]string{"a": "", "b": ""})
	disk, dir := newWatchedDisk(t, behind)
	s := mounts.ServeDir(t, dir, "--no-root-squash")
	one, two := mustDial(t, s), mustDial(t, s)
	before, err := one.writeAndCommit("a")
	if err != nil {
		t.Fatal(err)
	}
	cred, fh := credential(0, 0), two.mustLookup("b")
	var w nfs3.WriteResult
	if err := two.Write(two.ctx, cred, fh, 0, []byte("data"), nfs3.Unstable, &w); err != nil || w.Verf != before {
		t.Fatalf("WRITE: got verifier %x, %v, want %x", w.Verf, err, before)
	}
	disk.setFail(true)
	if v, err := one.writeAndCommit("a"); err == nil && v == before {
		t.Error("COMMIT succeeded while fsync failed")
	}
	if err := one.Write(one.ctx, cred, one.mustLookup("a"), 0, []byte("x"), nfs3.FileSync, &w); err == nil {
		t.Error("stable WRITE succeeded while fsync failed")
	}
	disk.setFail(false)
	var cm nfs3.CommitResult
	if err := two.Commit(two.ctx, cred, fh, 0, 0, &cm); err == nil && cm.Verf == before {
		t.Error("write verifier is the same for another client after a failed fsync")
	}
	if after, err := one.writeAndCommit("a"); err != nil || after == before {
		t.Errorf("write verifier after a failed fsync: got %x, %v, want another than before", after, err)
	}
}

// TestServeChangesAreDurable checks, at the reply of each procedure that changes names or
// attributes, that an fsync followed the change.
func TestServeChangesAreDurable(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	behind := mounts.OpenTempDir(t)
	writeFiles(t, behind, map[string]string{"f": "x", "d/f": "y", "e/g": "z"})
	disk, dir := newWatchedDisk(t, behind)
	c := mustDial(t, mounts.ServeDir(t, dir, "--no-root-squash"))
	cred, d, e, f := credential(0, 0), c.mustLookup("d"), c.mustLookup("e"), c.mustLookup("f")
	var wcc nfs3.WccData
	var made nfs3.CreateResult
	var renamed nfs3.RenameResult
	var linked nfs3.LinkResult
	set := &nfs3.SetAttr{HasMode: true, Mode: 0o600}
	create := func(mode nfs3.CreateMode, name string) error {
		how := &nfs3.CreateHow{Mode: mode, Verf: nfs3.Verifier{1, 2}}
		return c.Create(c.ctx, cred, d, name, how, &made)
	}
	disk.unsynced()
	for _, step := range []struct {
		name string
		do   func() error
	}{
		{"CREATE unchecked", func() error { return create(nfs3.Unchecked, "c1") }},
		{"CREATE guarded", func() error { return create(nfs3.Guarded, "c2") }},
		{"CREATE exclusive", func() error { return create(nfs3.Exclusive, "c3") }},
		{"MKDIR", func() error { return c.Mkdir(c.ctx, cred, d, "dir", set, &made) }},
		{"SYMLINK", func() error { return c.Symlink(c.ctx, cred, d, "link", "target", set, &made) }},
		{"MKNOD", func() error { return c.Mknod(c.ctx, cred, d, "fifo", nfs3.NF3FIFO, set, nfs3.Device{}, &made) }},
		{"LINK", func() error { return c.Link(c.ctx, cred, f, d, "hard", &linked) }},
		{"RENAME", func() error { return c.Rename(c.ctx, cred, d, "f", d, "g", &renamed) }},
		{"RENAME to another directory", func() error { return c.Rename(c.ctx, cred, d, "g", e, "h", &renamed) }},
		{"REMOVE", func() error { return c.Remove(c.ctx, cred, e, "h", &wcc) }},
		{"RMDIR", func() error { return c.Rmdir(c.ctx, cred, d, "dir", &wcc) }},
		{"SETATTR mode", func() error { return c.SetAttr(c.ctx, cred, f, set, nil, &wcc) }},
		{"SETATTR size", func() error {
			return c.SetAttr(c.ctx, cred, f, &nfs3.SetAttr{HasSize: true, Size: 9}, nil,
				&wcc)
		}},
	} {
		if err := step.do(); err != nil {
			t.Errorf("%s: %v", step.name, err)
		}
		if left := disk.unsynced(); len(left) != 0 {
			t.Errorf("%s: reply before an fsync of: %v", step.name, left)
		}
	}
}
