package vfs

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func hash(b []byte) [32]byte { return sha256.Sum256(b) }

// createTree makes a tree with all kinds of objects that a copy must preserve.
func createTree(t *testing.T, root string) {
	t.Helper()
	must(t, os.MkdirAll(root, 0o755))
	for i := range 60 {
		dir := filepath.Join(root, fmt.Sprintf("d%02d", i%17), fmt.Sprintf("e%d", i%3))
		must(t, os.MkdirAll(dir, 0o750))
		must(t, os.WriteFile(filepath.Join(dir, fmt.Sprintf("f%03d", i)), randomBytes(uint64(i), i*i*7%200_000),
			os.FileMode(0o400|i%0o400)))
	}
	must(t, os.WriteFile(filepath.Join(root, "large"), randomBytes(1000, 3<<20+17), 0o644))
	must(t, os.Link(filepath.Join(root, "large"), filepath.Join(root, "hardlink")))
	must(t, os.Symlink("d00/e0", filepath.Join(root, "symlink")))
	must(t, unix.Mkfifo(filepath.Join(root, "fifo"), 0o600))
	must(t, unix.Mknod(filepath.Join(root, "device"), unix.S_IFCHR|0o600, int(unix.Mkdev(5, 300))))
	must(t, unix.Mknod(filepath.Join(root, "socket"), unix.S_IFSOCK|0o600, 0))
	must(t, os.WriteFile(filepath.Join(root, "owned"), []byte("x"), 0o600))
	must(t, os.Chown(filepath.Join(root, "owned"), 12345, 54321))
	must(t, os.WriteFile(filepath.Join(root, "suid"), []byte("x"), 0o755))
	must(t, unix.Chmod(filepath.Join(root, "suid"), 0o4755))
	must(t, os.WriteFile(filepath.Join(root, "old"), []byte("x"), 0o644))
	must(t, unix.UtimesNanoAt(unix.AT_FDCWD, filepath.Join(root, "old"), []unix.Timespec{{Sec: 1e9, Nsec: 123456789},
		{Sec: 1e9 + 7, Nsec: 987654321}}, 0))
}

func wantTree(t *testing.T, got, want string) {
	t.Helper()
	if got == want {
		return
	}
	g, w := strings.Split(got, "\n"), strings.Split(want, "\n")
	for i := range min(len(g), len(w)) {
		if g[i] != w[i] {
			t.Fatalf("trees differ:\n got %s\nwant %s", g[i], w[i])
		}
	}
	t.Fatalf("tree: got %d entries, want %d", len(g), len(w))
}

// TestCopyTree copies a tree to and from the mount, and compares source and copy.
func TestCopyTree(t *testing.T) {
	e := startExport(t)
	src := filepath.Join(t.TempDir(), "src")
	createTree(t, src)
	want := tree(t, src)
	m := e.mount(t, mountConfig{})
	run(t, ".", "cp", "-a", src, m.path("copy"))
	wantTree(t, tree(t, filepath.Join(e.dir, "copy")), want)
	again := e.mount(t, mountConfig{}) // a new mount with empty caches
	wantTree(t, tree(t, again.path("copy")), want)
	back := filepath.Join(t.TempDir(), "back")
	run(t, ".", "cp", "-a", again.path("copy"), back)
	wantTree(t, tree(t, back), want)
	run(t, ".", "rm", "-rf", m.path("copy"))
	if left, err := os.ReadDir(e.dir); err != nil || len(left) != 0 {
		t.Errorf("files on the server after rm: got %v, %v, want none", left, err)
	}
}
