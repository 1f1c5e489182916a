package nfsd

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// Handles of files and directories stay valid when the server starts again, also after renames.
func TestHandlesSurviveRestart(t *testing.T) {
	both(t, func(t *testing.T, change func(*Config)) {
		cfg := Config{Dir: t.TempDir(), StateDir: t.TempDir(), NoRootSquash: true}
		change(&cfg)
		c := restart(t, cfg)
		dir := c.Root
		for _, name := range []string{"a", "b", "c"} {
			dir = c.mkdir(root, dir, name, 0o755)
		}
		file := c.MustCreate(root, dir, "f", 0o644)
		c.write(root, file, "data")
		c.OK(c.Rename(c.Ctx, root, c.Root, "a", c.Root, "moved", new(nfs3.RenameResult)))
		var link nfs3.CreateResult
		c.OK(c.Symlink(c.Ctx, root, dir, "l", "target", &nfs3.SetAttr{}, &link))
		var pipe nfs3.CreateResult
		c.OK(c.Mknod(c.Ctx, root, dir, "p", nfs3.NF3FIFO, &nfs3.SetAttr{}, nfs3.Device{}, &pipe))
		before := c.Root
		c.OK(c.s.Close())

		c = restart(t, cfg)
		defer c.s.Close()
		if c.Root != before {
			t.Errorf("handle of the root: got %v, want %v", c.Root, before)
		}
		if got := c.read(root, file); got != "data" {
			t.Errorf("READ by a handle from before the restart: got %q, want %q", got, "data")
		}
		c.MustCreate(root, dir, "g", 0o644)
		for fh, typ := range map[nfs3.FH]nfs3.FileType{link.FH: nfs3.NF3LNK, pipe.FH: nfs3.NF3FIFO, dir: nfs3.NF3DIR} {
			if a := c.getattr(fh); a.Type != typ {
				t.Errorf("got %v, want %v", a.Type, typ)
			}
		}
		if got := c.MustLookup(dir, "f").FH; got != file {
			t.Errorf("handle by LOOKUP: got %v, want %v", got, file)
		}
		if _, err := os.Lstat(c.path("moved/b/c/g")); err != nil {
			t.Error(err)
		}
	})
}

// A file keeps its handle through renames on the server's host, and as long as it has a link.
func TestHandlesFollowLocalChanges(t *testing.T) {
	both(t, func(t *testing.T, change func(*Config)) {
		c := start(t, change)
		d := c.mkdir(root, c.Root, "d", 0o755)
		f := c.MustCreate(root, d, "f", 0o644)
		c.write(root, f, "data")
		c.s.objects.end() // as after some seconds without use
		c.OK(os.Rename(c.path("d"), c.path("e")))
		c.OK(os.Rename(c.path("e/f"), c.path("g")))
		if got := c.read(root, f); got != "data" {
			t.Errorf("got %q, want %q", got, "data")
		}
		if a := c.getattr(d); a.Type != nfs3.NF3DIR {
			t.Errorf("got %v, want a directory", a.Type)
		}
		for _, names := range [...][2]string{{"g", "i"}, {"i", "j"}, {"j", "g"}} {
			c.s.objects.end()
			c.OK(os.Rename(c.path(names[0]), c.path(names[1])))
			if err := c.GetAttr(c.Ctx, root, f, new(nfs3.Attr)); nfs3.Errno(err) == unix.ESTALE {
				t.Errorf("GETATTR after rename to %s: got %v, want success, or %v", names[1], err, nfs3.ErrJukebox)
			}
		}
		c.OK(os.Link(c.path("g"), c.path("e/h")))
		c.OK(os.Remove(c.path("g")))
		c.s.objects.end()
		c.s.forgetSearches()
		if got := c.read(root, f); got != "data" {
			t.Errorf("got %q, want %q", got, "data")
		}
		c.OK(os.Remove(c.path("e/h")))
		c.Want(c.GetAttr(c.Ctx, root, f, new(nfs3.Attr)), unix.ESTALE)
		c.s.objects.end()
		c.Want(c.GetAttr(c.Ctx, root, f, new(nfs3.Attr)), unix.ESTALE)
	})
}

// forgetSearches allows another search of the export immediately.
func (s *Server) forgetSearches() {
	if s.paths != nil {
		s.paths.walk.next = time.Time{}
	}
}

// No handle that this server did not make for this export is accepted.
func TestForgedHandles(t *testing.T) {
	both(t, func(t *testing.T, change func(*Config)) {
		state := t.TempDir()
		c := start(t, func(cfg *Config) { cfg.StateDir = state; change(cfg) })
		other := start(t, func(cfg *Config) { cfg.StateDir = state; change(cfg) }) // the same key
		outside := other.MustCreate(root, other.Root, "secret", 0o666)
		fh := c.MustCreate(root, c.Root, "f", 0o644)
		flip := func(at int) nfs3.FH {
			b := append([]byte(nil), fh.Bytes()...)
			b[at] ^= 1
			h, err := nfs3.NewFH(b)
			c.OK(err)
			return h
		}
		forged := map[string]nfs3.FH{"of another export": outside, "root of another export": other.Root, "empty": {}}
		for at := range fh.Len() {
			forged["with a changed byte"] = flip(at)
			for name, h := range forged {
				c.Want(c.GetAttr(c.Ctx, root, h, new(nfs3.Attr)), unix.ESTALE)
				if t.Failed() {
					t.Fatalf("a handle %s was accepted (byte %d)", name, at)
				}
			}
		}
	})
}

// A server that cannot keep its key serves, and says so. With another key, all handles are stale.
func TestStateDirUnusable(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	kit.Must(t, os.WriteFile(file, nil, 0o600))
	c := start(t, func(cfg *Config) { cfg.StateDir = filepath.Join(file, "state") })
	fh := c.MustCreate(root, c.Root, "f", 0o644)
	again := restart(t, Config{Dir: c.dir, StateDir: t.TempDir()})
	defer again.s.Close()
	again.Want(again.GetAttr(again.Ctx, root, fh, new(nfs3.Attr)), unix.ESTALE)
	short := t.TempDir()
	c.OK(os.WriteFile(filepath.Join(short, keyFile), []byte("short"), 0o600))
	if _, err := handleKey(short); err == nil || !strings.Contains(err.Error(), "remove the file") {
		t.Errorf("got %v, want an error about the size of the key", err)
	}
}

// A directory that is moved out of the export is stale at once, with everything below it.
func TestDirectoryMovedOut(t *testing.T) {
	both(t, func(t *testing.T, change func(*Config)) {
		c := start(t, change)
		d := c.mkdir(root, c.Root, "d", 0o755)
		sub := c.mkdir(root, d, "sub", 0o755)
		outside := filepath.Join(t.TempDir(), "d")
		c.OK(os.Rename(c.path("d"), outside))
		for _, fh := range []nfs3.FH{d, sub} { // while the server has them open
			c.Want(c.GetAttr(c.Ctx, root, fh, new(nfs3.Attr)), unix.ESTALE)
			c.Want(c.Lookup(c.Ctx, root, fh, "..", new(nfs3.LookupResult)), unix.ESTALE)
		}
		c.s.objects.end()
		var look nfs3.LookupResult
		for _, fh := range []nfs3.FH{d, sub} {
			c.Want(c.GetAttr(c.Ctx, root, fh, new(nfs3.Attr)), unix.ESTALE)
			c.Want(c.Lookup(c.Ctx, root, fh, "sub", &look), unix.ESTALE)
		}
	})
}

// A file that is moved out of the export stays reachable by its handle, as the package comment says.
// Without handles of the kernel, it is stale when the server has closed it.
func TestFileMovedOut(t *testing.T) {
	both(t, func(t *testing.T, change func(*Config)) {
		c := start(t, change)
		f := c.MustCreate(root, c.Root, "f", 0o644)
		c.write(root, f, "data")
		c.OK(os.Rename(c.path("f"), filepath.Join(t.TempDir(), "f")))
		if got := c.read(root, f); got != "data" {
			t.Errorf("got %q, want %q", got, "data")
		}
		c.s.objects.end()
		if c.s.paths != nil {
			c.Want(c.GetAttr(c.Ctx, root, f, new(nfs3.Attr)), unix.ESTALE)
		} else if got := c.read(root, f); got != "data" {
			t.Errorf("after the server has closed the file: got %q, want %q", got, "data")
		}
	})
}

// MNT accepts the export, directories below it, and nothing outside.
func TestMountPoints(t *testing.T) {
	both(t, func(t *testing.T, change func(*Config)) {
		c := start(t, change)
		c.OK(os.MkdirAll(c.path("a/b"), 0o755))
		c.OK(os.Symlink("/", c.path("out")))
		c.OK(os.WriteFile(c.path("file"), nil, 0o644))
		for path, want := range map[string]nfs3.Status{"/": nfs3.OK, "": nfs3.OK, "/a/b": nfs3.OK, c.dir: nfs3.OK,
			c.dir + "/a/": nfs3.OK, "/no": nfs3.ErrNoEnt, "/file": nfs3.ErrNotDir, "/../..": nfs3.OK,
			"/out/etc": nfs3.ErrIO,
			"/a\x00":   nfs3.ErrInval} {
			fh, err := c.s.mountPoint(path)
			if got := statusOf(err); got != want && (want == nfs3.OK || got == nfs3.OK) {
				t.Errorf("MNT of %q: got %v, want %v", path, got, want)
			}
			if err == nil {
				c.getattr(fh)
			}
		}
		fh, err := c.s.mountPoint("/a/b")
		c.OK(err)
		c.s.objects.end()
		if got := c.MustLookup(fh, "..").FH; got != c.MustLookup(c.Root, "a").FH {
			t.Errorf("parent of a mounted directory: got %v, want that of a", got)
		}
	})
}

// A file system that is mounted below the export is not served.
func TestMountBelowExport(t *testing.T) {
	kit.NeedsRoot(t)
	both(t, func(t *testing.T, change func(*Config)) {
		c := start(t, change)
		c.OK(os.Mkdir(c.path("m"), 0o755))
		c.OK(unix.Mount("none", c.path("m"), "tmpfs", 0, ""))
		defer func() { c.OK(unix.Unmount(c.path("m"), unix.MNT_DETACH)) }()
		c.OK(os.WriteFile(c.path("m/secret"), nil, 0o644))
		c.Want(c.Lookup(c.Ctx, root, c.Root, "m", new(nfs3.LookupResult)), unix.EXDEV)
		if _, err := c.s.mountPoint("/m"); err == nil {
			t.Error("MNT of another file system succeeded")
		}
		found := false
		var res nfs3.ReadDirResult
		c.OK(c.ReadDirPlus(c.Ctx, root, c.Root, 0, nfs3.Verifier{}, 4096, 4096, &res, func(e *nfs3.DirEntry) bool {
			found = found || string(e.Name) == "m" && !e.HasFH && !e.Attr.Present
			return true
		}))
		if !found {
			t.Error("READDIRPLUS: want the mount point without attributes and handle")
		}
	})
}

// Paths may be longer than the kernel takes at once.
func TestDeepDirectories(t *testing.T) {
	both(t, func(t *testing.T, change func(*Config)) {
		c := start(t, change)
		at := c.Root
		for range 20 {
			at = c.mkdir(root, at, strings.Repeat("d", 250), 0o755)
		}
		c.s.objects.end()
		c.getattr(at)
	})
}
