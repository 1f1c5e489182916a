package nfsd

import (
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"golang.org/x/sys/unix"
)

// The descriptor of a created file belongs to the created file, also when its name is replaced at
// the same time.
func TestCreateWhileNameIsReplaced(t *testing.T) {
	c := start(t, nil)
	var stop atomic.Bool
	var renamer sync.WaitGroup
	defer renamer.Wait()
	defer stop.Store(true)
	renamer.Go(func() {
		for !stop.Load() {
			if os.WriteFile(c.path("g"), nil, 0o644) == nil {
				_ = os.Rename(c.path("g"), c.path("f"))
			}
		}
	})
	for range 3000 {
		_ = os.Remove(c.path("f"))
		var res nfs3.CreateResult
		if c.Create(c.Ctx, root, c.Root, "f", &nfs3.CreateHow{Mode: nfs3.Guarded}, &res) != nil {
			continue
		}
		o := c.s.objects.get(&res.FH)
		if o == nil {
			continue
		}
		var st unix.Stat_t
		if o.open.rw >= 0 && unix.Fstat(o.open.rw, &st) == nil && st.Ino != o.key.ino {
			t.Errorf("inode of the descriptor: got %d, want %d", st.Ino, o.key.ino)
		}
		c.s.objects.release(o)
		if t.Failed() {
			return
		}
	}
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
	for c.stat("f").Size != 4 {
		time.Sleep(time.Millisecond)
	}
	calls.Go(func() {
		how := nfs3.CreateHow{Mode: nfs3.Unchecked, Attr: nfs3.SetAttr{HasSize: true}}
		if err := c.Create(c.Ctx, root, c.Root, "f", &how, new(nfs3.CreateResult)); err != nil {
			t.Error(err)
		}
	})
	for c.stat("f").Size != 0 {
		time.Sleep(time.Millisecond)
	}
	block.Store(nil)
	close(ch)
	calls.Wait()
	if w.Wcc.HasBefore {
		t.Errorf("attributes before WRITE: got size %d, want none", w.Wcc.Before.Size)
	}
}

// CREATE of a file that others create and remove at the same time never says that there is no file.
func TestCreateWhileFileIsRemoved(t *testing.T) {
	c := start(t, nil)
	var stop atomic.Bool
	var other sync.WaitGroup
	defer other.Wait()
	defer stop.Store(true)
	other.Go(func() {
		for !stop.Load() {
			if f, err := os.Create(c.path("f")); err == nil {
				f.Close()
			}
			_ = os.Remove(c.path("f"))
		}
	})
	for range 20000 {
		err := c.Create(c.Ctx, root, c.Root, "f", &nfs3.CreateHow{Mode: nfs3.Unchecked}, new(nfs3.CreateResult))
		if nfs3.Errno(err) == unix.ENOENT {
			t.Fatalf("CREATE: got %v, want success", err)
		}
	}
}
