package integration

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

// exportAndOutside makes a directory to export, and beside it files that no client may reach.
func exportAndOutside(t *testing.T) (export, outside string, inodes map[uint64]bool) {
	t.Helper()
	top := mounts.OpenTempDir(t)
	export, outside = filepath.Join(top, "export"), filepath.Join(top, "outside")
	writeFiles(t, top, map[string]string{"export/f": "inside", "export/d/g": "inside", "export/moved": "moved",
		"export/movedir/h": "moved", "outside/secret": "secret", "outside/dir/secret": "secret"})
	runScript(t, export, "r symlink ../outside/secret file; r symlink ../outside dir; r symlink /etc/passwd abs")
	inodes = map[uint64]bool{}
	err := filepath.WalkDir(export, func(path string, _ os.DirEntry, err error) error {
		var st unix.Stat_t
		if err == nil {
			err = unix.Lstat(path, &st)
		}
		inodes[st.Ino] = true
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return export, outside, inodes
}

// checkForged presents a forged handle to procedures that read, write and look up.
func (c *rawClient) checkForged(t *testing.T, what string, fh nfs3.FH, inside map[uint64]bool) {
	t.Helper()
	cred := credential(0, 0)
	var attr nfs3.Attr
	err := c.GetAttr(c.ctx, cred, fh, &attr)
	if err == nil && inside[attr.FileID] {
		return // a handle of another file of the export reveals nothing
	}
	if err == nil {
		t.Errorf("%s: GETATTR of handle %v: got file ID %d of mode %o", what, fh, attr.FileID, attr.Mode)
	}
	if got, err := c.read(cred, fh); err == nil {
		t.Errorf("%s: READ of handle %v: got %q", what, fh, got)
	}
	var w nfs3.WriteResult
	if err := c.Write(c.ctx, cred, fh, 0, []byte("overwritten"), nfs3.FileSync, &w); err == nil {
		t.Errorf("%s: WRITE to handle %v succeeded", what, fh)
	}
	for _, name := range []string{"secret", "..", "f"} {
		if got, err := c.lookup(cred, fh, name); err == nil {
			t.Errorf("%s: LOOKUP of %q in handle %v: got %v", what, name, fh, got)
		}
	}
	var res nfs3.ReadDirResult
	err = c.ReadDir(c.ctx, cred, fh, 0, nfs3.Verifier{}, 4096, &res, func(*nfs3.DirEntry) bool { return true })
	if err == nil {
		t.Errorf("%s: READDIR of handle %v succeeded", what, fh)
	}
	if _, err := c.create(cred, fh, "made", 0o644); err == nil {
		t.Errorf("%s: CREATE in handle %v succeeded", what, fh)
	}
}

// TestServeForgedHandles changes bits of handles, builds handles of files outside the export, and
// uses handles of files that left the export.
func TestServeForgedHandles(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	export, outside, inodes := exportAndOutside(t)
	s := mounts.ServeDir(t, export, "--no-root-squash")
	c := mustDial(t, s)
	cred := credential(0, 0)

	t.Run("bits", func(t *testing.T) {
		for _, fh := range []nfs3.FH{c.root, c.mustLookup("f"), c.mustLookup("d")} {
			for bit := range fh.Len() * 8 {
				b := bytes.Clone(fh.Bytes())
				b[bit/8] ^= 1 << (bit % 8)
				c.checkForged(t, "bit flip", newHandle(t, b), inodes)
			}
			for n := range nfs3.FHSize + 1 {
				c.checkForged(t, "length", newHandle(t, append(bytes.Clone(fh.Bytes()), make([]byte, 64)...)[:n]),
					inodes)
			}
		}
	})
	t.Run("another export", func(t *testing.T) {
		other := mustDial(t, mounts.ServeDir(t, outside, "--no-root-squash"))
		both := mustDial(t, mounts.ServeDir(t, filepath.Dir(outside), "--no-root-squash"))
		in, err := both.lookup(cred, both.mustLookup("outside"), "secret")
		if err != nil {
			t.Fatal(err)
		}
		for _, fh := range []nfs3.FH{other.root, other.mustLookup("secret"), other.mustLookup("dir"), both.root, in} {
			c.checkForged(t, "handle of another export", fh, inodes)
		}
	})
	t.Run("built", func(t *testing.T) {
		for name, target := range map[string]string{"f": "secret", "d": "dir"} {
			inside, outside := filepath.Join(export, name), filepath.Join(outside, target)
			for _, b := range splice(t, c.mustLookup(name), inside, outside) {
				c.checkForged(t, "handle with the numbers of an outside file", newHandle(t, b), inodes)
			}
		}
	})
	t.Run("moved away", func(t *testing.T) {
		dir := c.mustLookup("movedir")
		child, err := c.lookup(cred, dir, "h")
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(filepath.Join(export, "movedir"), filepath.Join(outside, "movedir")); err != nil {
			t.Fatal(err)
		}
		c.checkForged(t, "directory that left the export", dir, map[uint64]bool{})
		_ = child // a file has no parent that the kernel could find; see internal/nfsd
	})
}

func newHandle(t *testing.T, b []byte) nfs3.FH {
	t.Helper()
	fh, err := nfs3.NewFH(b)
	if err != nil {
		t.Fatal(err)
	}
	return fh
}

// splice replaces in a handle everything that identifies the file inside by the same of the file
// outside: the bytes of the kernel's handle, and the inode number.
func splice(t *testing.T, fh nfs3.FH, inside, outside string) (forged [][]byte) {
	t.Helper()
	var numbers [2][][]byte
	for i, path := range []string{inside, outside} {
		// Not every file system has handles, for example overlayfs.
		kernel, _, handleErr := unix.NameToHandleAt(unix.AT_FDCWD, path, 0)
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			t.Fatal(err)
		}
		numbers[i] = [][]byte{binary.BigEndian.AppendUint64(nil, st.Ino),
			binary.LittleEndian.AppendUint64(nil, st.Ino), binary.BigEndian.AppendUint32(nil, uint32(st.Ino)),
			binary.LittleEndian.AppendUint32(nil, uint32(st.Ino))}
		if handleErr == nil {
			numbers[i] = append(numbers[i], kernel.Bytes())
		}
	}
	for i, in := range numbers[0] {
		if bytes.Contains(fh.Bytes(), in) {
			forged = append(forged, bytes.ReplaceAll(fh.Bytes(), in, numbers[1][i]))
		}
	}
	return forged
}

// outsideState describes everything outside the export, with the times.
func outsideState(t *testing.T, outside string) string {
	t.Helper()
	lines := runScript(t, outside, "")
	for _, name := range []string{"secret", "dir", "dir/secret"} {
		var st unix.Statx_t
		if err := statx(filepath.Join(outside, name), 0, &st); err != nil {
			t.Fatal(err)
		}
		lines = append(lines, fmt.Sprintf("%s changed at %v %v", name, st.Mtime, st.Ctime))
	}
	return strings.Join(lines, "\n")
}

// TestServeNamesStayInside sends names and paths that lead out of the export elsewhere.
func TestServeNamesStayInside(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	export, outside, inodes := exportAndOutside(t)
	s := mounts.ServeDir(t, export, "--no-root-squash")
	cred := credential(0, 0)
	before := outsideState(t, outside)
	attributes := []nfs3.SetAttr{{HasSize: true}, {HasMode: true, Mode: 0o6711}, {HasUID: true, UID: 1001},
		{HasGID: true, GID: 1001}, {MtimeHow: nfs3.SetToClientTime, Mtime: nfs3.Time3{Sec: 1}},
		{AtimeHow: nfs3.SetToServerTime}}
	for _, tr := range transports {
		c, err := tr.dial(t, s)
		if err != nil {
			t.Fatalf("%s: %v", tr.name, err)
		}
		for _, path := range []string{"/..", "/../outside", "/dir", "/dir/dir", "..", "/abs", outside, "/f", ""} {
			if fh, err := c.mnt(path); err == nil && fh != c.root {
				var attr nfs3.Attr
				if err := c.GetAttr(c.ctx, cred, fh, &attr); err != nil || !inodes[attr.FileID] {
					t.Errorf("%s: MNT %q: got file ID %d, %v", tr.name, path, attr.FileID, err)
				}
			}
		}
		if up, err := c.lookup(cred, c.root, ".."); err == nil && up != c.root {
			t.Errorf("%s: LOOKUP of \"..\" in the root left the export", tr.name)
		}
		// nfs3 refuses names with a slash, so that they are encoded here.
		for _, name := range []string{"../outside", "../outside/secret", "d/../../outside/secret", "/etc/passwd",
			"dir/secret", ""} {
			if fh, err := c.lookupRaw(c.root, name); err == nil && fh != c.root {
				t.Errorf("%s: LOOKUP of %q: got %v", tr.name, name, fh)
			}
		}
		var made nfs3.CreateResult
		var w nfs3.WriteResult
		var wcc nfs3.WccData
		for _, name := range []string{"file", "dir", "abs"} {
			link := c.mustLookup(name)
			_ = c.Create(c.ctx, cred, c.root, name, &nfs3.CreateHow{Attr: nfs3.SetAttr{HasSize: true}}, &made)
			for _, set := range attributes {
				_ = c.SetAttr(c.ctx, cred, link, &set, nil, &wcc)
			}
			if err := c.Write(c.ctx, cred, link, 0, []byte("overwritten"), nfs3.FileSync, &w); err == nil {
				t.Errorf("%s: WRITE to symlink %s succeeded", tr.name, name)
			}
			if got, err := c.read(cred, link); err == nil {
				t.Errorf("%s: READ of symlink %s: got %q", tr.name, name, got)
			}
			if fh, err := c.lookup(cred, link, "secret"); err == nil {
				t.Errorf("%s: LOOKUP in symlink %s: got %v", tr.name, name, fh)
			}
		}
		for i, set := range attributes {
			name := fmt.Sprintf("new%d%s", i, tr.name)
			_ = c.Symlink(c.ctx, cred, c.root, name, "../outside/secret", &set, &made)
			_ = c.Symlink(c.ctx, cred, c.root, name+"abs", filepath.Join(outside, "dir"), &set, &made)
		}
		if after := outsideState(t, outside); after != before {
			t.Errorf("%s: outside of the export: got\n%s, want\n%s", tr.name, after, before)
		}
	}
}
