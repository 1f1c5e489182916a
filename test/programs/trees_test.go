package programs

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// goSource returns the directory with the sources of the standard library.
func goSource(t *testing.T) string {
	t.Helper()
	return filepath.Join(strings.TrimSpace(run(t, "", "go", "env", "GOROOT")), "src")
}

// TestRsync copies a tree to a mount, changes it, and copies the changes. rsync compares the
// checksums of all files from a second mount.
func TestRsync(t *testing.T) {
	kit.NeedsPrograms(t, "rsync")
	s := startEmbedded(t)
	mnt := s.mount(t)
	src := t.TempDir()
	run(t, "", "cp", "-a", goSource(t), src+"/tree")
	run(t, src, "sh", "-ec", `ln tree/fmt/print.go tree/hard; ln -s fmt/print.go tree/soft; mkfifo tree/fifo
		truncate -s 100M tree/sparse; echo end >>tree/sparse; chmod 4751 tree/hard; touch -d 2001-02-03 tree/net`)
	copyTree := func(args ...string) {
		t.Helper()
		run(t, "", "rsync", append(append([]string{"-aH", "--delete"}, args...), src+"/tree/", mnt+"/tree/")...)
		other := s.mount(t)
		differences := run(t, "", "rsync", "-aHi", "--delete", "--dry-run", "--checksum", src+"/tree/", other+"/tree/")
		if differences != "" {
			t.Errorf("rsync %v: the copy differs:\n%s", args, differences)
		}
	}
	copyTree("--sparse")
	run(t, src, "sh", "-ec", `cd tree; rm -r os; mv net moved; for f in moved/*.go; do echo "// end" >>$f; done
		chmod -R go-rwx moved; dd if=/dev/urandom of=sparse bs=1M seek=50 count=3 conv=notrunc status=none`)
	copyTree("--inplace", "--no-whole-file")
	run(t, src, "sh", "-ec", `cd tree; mkdir os; cp -a moved os; rm -r moved; truncate -s 70M sparse`)
	copyTree("--no-whole-file", "--checksum")
}

// TestTar packs and unpacks a tree on a mount. tar compares the archive with the files of a second
// mount.
func TestTar(t *testing.T) {
	kit.NeedsPrograms(t, "tar")
	s := startEmbedded(t)
	mnt := s.mount(t)
	src := goSource(t)
	run(t, src, "tar", "-cf", filepath.Join(mnt, "a.tar"), ".")
	tree := makeDir(t, mnt, "tree")
	run(t, tree, "tar", "-xpf", "../a.tar")
	other := s.mount(t)
	run(t, filepath.Join(other, "tree"), "tar", "--compare", "-f", "../a.tar")
	run(t, "", "diff", "-r", "--no-dereference", src, filepath.Join(other, "tree"))
	run(t, filepath.Join(other, "tree"), "tar", "-czf", "../b.tgz", ".")
	run(t, tree, "tar", "--compare", "-zf", "../b.tgz")
	run(t, mnt, "rm", "-r", "tree")
	if left, err := os.ReadDir(other); err != nil || len(left) != 2 {
		t.Errorf("second mount after rm -r: got %v, %v, want the two archives", left, err)
	}
}

// TestGoBuild builds this project on a mount. The build cache is on the mount, too. The result must
// be the same file as a build on a local disk.
func TestGoBuild(t *testing.T) {
	s := startEmbedded(t)
	mnt := s.mount(t)
	module := strings.TrimSpace(run(t, "", "go", "list", "-m", "-f", "{{.Dir}}"))
	project, local := makeDir(t, mnt, "project"), t.TempDir()
	for _, dir := range []string{project, local} {
		run(t, module, "cp", "-a", "go.mod", "go.sum", "cmd", "internal", "pkg", dir)
	}
	build := func(dir, cache string) string {
		t.Helper()
		file := filepath.Join(dir, "built")
		run(t, dir, "env", "CGO_ENABLED=0", "GOFLAGS=", "GOCACHE="+cache, "GOTMPDIR="+makeDir(t, dir, "tmp"),
			"go", "build", "-trimpath", "-buildvcs=false", "-o", file, "./cmd/nfsrdmad")
		return file
	}
	localCache := strings.TrimSpace(run(t, "", "go", "env", "GOCACHE"))
	cache := makeDir(t, mnt, "cache")
	want, got := build(local, localCache), build(project, cache)
	run(t, "", "cmp", want, got)
	run(t, "", got, "version")
	other := s.mount(t)
	run(t, "", "cmp", want, filepath.Join(other, "project/built"))
	run(t, filepath.Join(other, "project"), "env", "CGO_ENABLED=0", "GOFLAGS=",
		"GOCACHE="+filepath.Join(other, "cache"), "go", "vet", "./pkg/nfs/nfs3/...")
}
