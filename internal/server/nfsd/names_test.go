package nfsd

import (
	"os"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// The handle of a created file belongs to the created file, also when its name is replaced at the
// same time. CREATE of a file that others remove at the same time never says that there is no file.
func TestCreateWhileNameChanges(t *testing.T) {
	disturb := func(string) {}
	c := start(t, func(cfg *Config) { cfg.between = func(name string) { disturb(name) } })
	var ino uint64
	disturb = func(name string) {
		ino = c.stat(name).Ino
		c.OK(os.Rename(c.path(name), c.path("moved")))
		c.OK(os.WriteFile(c.path(name), nil, 0o644))
	}
	var res nfs3.CreateResult
	c.OK(c.Create(c.Ctx, root, c.Root, "f", &nfs3.CreateHow{Mode: nfs3.Guarded}, &res))
	if o := c.s.objects.get(&res.FH); o == nil || o.key.ino != ino {
		t.Errorf("object of the created file: got %+v, want inode %d", o, ino)
	} else {
		var st unix.Stat_t
		c.OK(unix.Fstat(o.open.rw, &st))
		if st.Ino != ino {
			t.Errorf("inode of the descriptor: got %d, want %d", st.Ino, ino)
		}
		c.s.objects.release(o)
	}
	disturb = func(name string) {
		disturb = func(string) {}
		c.OK(os.Remove(c.path(name)))
	}
	c.OK(c.Create(c.Ctx, root, c.Root, "f", &nfs3.CreateHow{Mode: nfs3.Unchecked}, &res))
}

// A client repeats a call that ends with NFS3ERR_JUKEBOX forever.
func TestMountPointIsNotRemoved(t *testing.T) {
	kit.NeedsRoot(t)
	c := start(t, nil)
	c.mkdir(root, c.Root, "m", 0o755)
	if err := unix.Mount("none", c.path("m"), "tmpfs", 0, ""); err != nil {
		t.Fatalf("mount: %v", err)
	}
	defer unix.Unmount(c.path("m"), unix.MNT_DETACH)
	c.Want(c.Rmdir(c.Ctx, root, c.Root, "m", new(nfs3.WccData)), unix.EACCES)
	c.Want(c.Rename(c.Ctx, root, c.Root, "m", c.Root, "n", new(nfs3.RenameResult)), unix.EACCES)
}

// CREATE UNCHECKED truncates an existing file, which a concurrent WRITE must not hide from its
// client with attributes from before.
func TestCreateTruncatesDuringWrite(t *testing.T) {
	var block atomic.Pointer[chan struct{}]
	c := start(t, func(cfg *Config) {
		cfg.fsync = func(fd int) error {
			if ch := block.Load(); ch != nil {
				<-*ch
			}
			return nil
		}
	})
	fh := c.MustCreate(root, c.Root, "f", 0o644)
	ch := make(chan struct{})
	block.Store(&ch)
	var w nfs3.WriteResult
	var calls sync.WaitGroup
	calls.Go(func() {
		if err := c.Write(c.Ctx, root, fh, 0, []byte("data"), nfs3.FileSync, &w); err != nil {
			t.Error(err)
		}
	})
	kit.Eventually(t, "data", func() bool { return c.stat("f").Size == 4 })
	calls.Go(func() {
		how := nfs3.CreateHow{Mode: nfs3.Unchecked, Attr: nfs3.SetAttr{HasSize: true}}
		if err := c.Create(c.Ctx, root, c.Root, "f", &how, new(nfs3.CreateResult)); err != nil {
			t.Error(err)
		}
	})
	kit.Eventually(t, "truncation", func() bool { return c.stat("f").Size == 0 })
	block.Store(nil)
	close(ch)
	calls.Wait()
	if w.Change.HasBefore {
		t.Errorf("attributes before WRITE: got size %d, want none", w.Change.Before.Size)
	}
}
