package nfsd

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/testutil"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
)

// Handles of files and directories stay valid when the server starts again, also after renames.
func TestHandlesSurviveRestart(t *testing.T) {
	both(t, func(t *testing.T, change func(*Config)) {
		cfg := Config{Dir: t.TempDir(), StateDir: t.TempDir(), NoRootSquash: true}
		change(&cfg)
		c := restart(t, cfg)
		dir := c.root
		for _, name := range []string{"a", "b", "c"} {
			dir = c.mkdir(root, dir, name, 0o755)
		}
		file := c.create(root, dir, "f", 0o644)
		c.write(root, file, "data")
		c.ok(c.Rename(c.ctx, root, c.root, "a", c.root, "moved", new(nfs3.RenameResult)))
		var link nfs3.CreateResult
		c.ok(c.Symlink(c.ctx, root, dir, "l", "target", &nfs3.SetAttr{}, &link))
		var pipe nfs3.CreateResult
		c.ok(c.Mknod(c.ctx, root, dir, "p", nfs3.NF3FIFO, &nfs3.SetAttr{}, nfs3.Device{}, &pipe))
		before := c.root
		c.ok(c.s.Close())

		c = restart(t, cfg)
		defer c.s.Close()
		if c.root != before {
			t.Errorf("handle of the root: got %v, want %v", c.root, before)
		}
		if got := c.read(root, file); got != "data" {
			t.Errorf("READ by a handle from before the restart: got %q, want %q", got, "data")
		}
		c.create(root, dir, "g", 0o644)
		for fh, typ := range map[nfs3.FH]nfs3.FileType{link.FH: nfs3.NF3LNK, pipe.FH: nfs3.NF3FIFO, dir: nfs3.NF3DIR} {
			if a := c.getattr(fh); a.Type != typ {
				t.Errorf("got %v, want %v", a.Type, typ)
			}
		}
		if got := c.lookup(dir, "f").FH; got != file {
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
		d := c.mkdir(root, c.root, "d", 0o755)
		f := c.create(root, d, "f", 0o644)
		c.write(root, f, "data")
		c.s.objects.end() // as after some seconds without use
		c.ok(os.Rename(c.path("d"), c.path("e")))
		c.ok(os.Rename(c.path("e/f"), c.path("g")))
		if got := c.read(root, f); got != "data" {
			t.Errorf("got %q, want %q", got, "data")
		}
		if a := c.getattr(d); a.Type != nfs3.NF3DIR {
			t.Errorf("got %v, want a directory", a.Type)
		}
		c.ok(os.Link(c.path("g"), c.path("e/h")))
		c.ok(os.Remove(c.path("g")))
		c.s.objects.end()
		c.s.forgetSearches()
		if got := c.read(root, f); got != "data" {
			t.Errorf("got %q, want %q", got, "data")
		}
		c.ok(os.Remove(c.path("e/h")))
		c.want(c.GetAttr(c.ctx, root, f, new(nfs3.Attr)), unix.ESTALE)
		c.s.objects.end()
		c.want(c.GetAttr(c.ctx, root, f, new(nfs3.Attr)), unix.ESTALE)
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
		outside := other.create(root, other.root, "secret", 0o666)
		fh := c.create(root, c.root, "f", 0o644)
		flip := func(at int) nfs3.FH {
			b := append([]byte(nil), fh.Bytes()...)
			b[at] ^= 1
			h, err := nfs3.NewFH(b)
			c.ok(err)
			return h
		}
		forged := map[string]nfs3.FH{"of another export": outside, "root of another export": other.root, "empty": {}}
		for at := range fh.Len() {
			forged["with a changed byte"] = flip(at)
			for name, h := range forged {
				c.want(c.GetAttr(c.ctx, root, h, new(nfs3.Attr)), unix.ESTALE)
				if t.Failed() {
					t.Fatalf("a handle %s was accepted (byte %d)", name, at)
				}
			}
		}
	})
}

// With another key, all handles are stale: the administrator removed the state directory.
func TestNewKeyEndsHandles(t *testing.T) {
	c := start(t, nil)
	fh := c.create(root, c.root, "f", 0o644)
	again := restart(t, Config{Dir: c.dir, StateDir: t.TempDir()})
	defer again.s.Close()
	again.want(again.GetAttr(again.ctx, root, fh, new(nfs3.Attr)), unix.ESTALE)
}

// A server that cannot keep its key serves, and says so.
func TestStateDirUnusable(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	c := start(t, func(cfg *Config) { cfg.StateDir = filepath.Join(file, "state") })
	c.create(root, c.root, "f", 0o644)
	short := filepath.Join(t.TempDir(), "state")
	c.ok(os.Mkdir(short, 0o700))
	c.ok(os.WriteFile(filepath.Join(short, keyFile), []byte("short"), 0o600))
	if _, err := handleKey(short); err == nil || !strings.Contains(err.Error(), "remove the file") {
		t.Errorf("got %v, want an error about the size of the key", err)
	}
}

// A directory that is moved out of the export is stale at once, with everything below it.
func TestDirectoryMovedOut(t *testing.T) {
	both(t, func(t *testing.T, change func(*Config)) {
		c := start(t, change)
		d := c.mkdir(root, c.root, "d", 0o755)
		sub := c.mkdir(root, d, "sub", 0o755)
		outside := filepath.Join(t.TempDir(), "d")
		c.ok(os.Rename(c.path("d"), outside))
		for _, fh := range []nfs3.FH{d, sub} { // while the server has them open
			c.want(c.GetAttr(c.ctx, root, fh, new(nfs3.Attr)), unix.ESTALE)
			c.want(c.Lookup(c.ctx, root, fh, "..", new(nfs3.LookupResult)), unix.ESTALE)
		}
		c.s.objects.end()
		var look nfs3.LookupResult
		for _, fh := range []nfs3.FH{d, sub} {
			c.want(c.GetAttr(c.ctx, root, fh, new(nfs3.Attr)), unix.ESTALE)
			c.want(c.Lookup(c.ctx, root, fh, "sub", &look), unix.ESTALE)
		}
	})
}

// MNT accepts the export, directories below it, and nothing outside.
func TestMountPoints(t *testing.T) {
	both(t, func(t *testing.T, change func(*Config)) {
		c := start(t, change)
		c.ok(os.MkdirAll(c.path("a/b"), 0o755))
		c.ok(os.Symlink("/", c.path("out")))
		c.ok(os.WriteFile(c.path("file"), nil, 0o644))
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
		c.ok(err)
		c.s.objects.end()
		if got := c.lookup(fh, "..").FH; got != c.lookup(c.root, "a").FH {
			t.Errorf("parent of a mounted directory: got %v, want that of a", got)
		}
	})
}

// A file system that is mounted below the export is not served.
func TestMountBelowExport(t *testing.T) {
	testutil.NeedsRoot(t)
	both(t, func(t *testing.T, change func(*Config)) {
		c := start(t, change)
		c.ok(os.Mkdir(c.path("m"), 0o755))
		c.ok(unix.Mount("none", c.path("m"), "tmpfs", 0, ""))
		defer func() { c.ok(unix.Unmount(c.path("m"), unix.MNT_DETACH)) }()
		c.ok(os.WriteFile(c.path("m/secret"), nil, 0o644))
		c.want(c.Lookup(c.ctx, root, c.root, "m", new(nfs3.LookupResult)), unix.EXDEV)
		if _, err := c.s.mountPoint("/m"); err == nil {
			t.Error("MNT of another file system succeeded")
		}
		found := false
		var res nfs3.ReadDirResult
		c.ok(c.ReadDirPlus(c.ctx, root, c.root, 0, nfs3.Verifier{}, 4096, 4096, &res, func(e *nfs3.DirEntry) bool {
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
		at := c.root
		for range 20 {
			at = c.mkdir(root, at, strings.Repeat("d", 250), 0o755)
		}
		c.s.objects.end()
		c.getattr(at)
	})
}

// A handle of a file that exists is never stale, however often local processes rename the file.
func TestHandlesAfterRepeatedRenames(t *testing.T) {
	both(t, func(t *testing.T, change func(*Config)) {
		c := start(t, change)
		fh := c.create(root, c.root, "a", 0o644)
		for _, names := range [...][2]string{{"a", "b"}, {"b", "c"}, {"c", "d"}} {
			c.s.objects.end()
			c.ok(os.Rename(c.path(names[0]), c.path(names[1])))
			err := c.GetAttr(c.ctx, root, fh, new(nfs3.Attr))
			if nfs3.Errno(err) == unix.ESTALE {
				t.Errorf("GETATTR after rename to %s: got %v, want success, or %v", names[1], err, nfs3.ErrJukebox)
			}
		}
	})
}
