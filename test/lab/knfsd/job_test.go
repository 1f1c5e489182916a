package knfsd

import (
	"os"
	"path/filepath"
	"testing"
)

var _ = register("main job", "the main job: copy a source tree in and out, git clone, git fsck --strict", testJob)

// testJob runs the main job: it copies a source tree to the mount, compares the tree through a
// second mount without cache, and uses git on the mount.
func testJob(t *testing.T, b bench) {
	m := b.mount(t, nil)
	local := t.TempDir()
	tree := filepath.Join(local, "tree")
	if err := os.MkdirAll(filepath.Join(tree, "encoding"), 0o755); err != nil {
		t.Fatal(err)
	}
	run(t, "", "cp", "-a", goTree(t, "encoding/json"), goTree(t, "encoding/xml"), filepath.Join(tree, "encoding"))
	if !b.inGuest { // everything takes many times as long in a guest
		run(t, "", "cp", "-a", goTree(t, "encoding"), goTree(t, "net/http"), tree)
	}
	run(t, "", "cp", "-a", tree, m.dir)
	cold := b.mount(t, nil)
	run(t, "", "diff", "-r", "--no-dereference", tree, filepath.Join(cold.dir, "tree"))
	// Compare the checksums that the server's kernel computes.
	const sums = "cd tree && find . -type f -exec sha256sum {} + | sort"
	if here, there := run(t, local, "sh", "-c", sums), b.MustRun("cd /export && "+sums); here != there {
		t.Errorf("got checksums on the client\n%s\nand on the server\n%s", here, there)
	}
	run(t, cold.dir, "cp", "-a", "tree/encoding", filepath.Join(local, "out"))
	run(t, "", "diff", "-r", "--no-dereference", filepath.Join(tree, "encoding"), filepath.Join(local, "out"))

	run(t, tree, "git", "init", "-q")
	run(t, tree, "git", "add", "encoding/json", "encoding/xml")
	run(t, tree, "git", "-c", "user.name=t", "-c", "user.email=t@localhost", "commit", "-qm", "tree")
	run(t, m.dir, "git", "clone", "-q", "--no-hardlinks", tree, "clone")
	clone := filepath.Join(m.dir, "clone")
	run(t, clone, "git", "fsck", "--strict")
	if out := run(t, clone, "git", "status", "--porcelain"); out != "" {
		t.Errorf("git status in a fresh clone: got\n%s", out)
	}
	run(t, m.dir, "rm", "-rf", "clone", "tree")
	if out := b.MustRun("ls -A /export"); out != "" {
		t.Errorf("rm -rf: got remaining files %s", out)
	}
	for _, st := range []*mount{m, cold} {
		if x := st.tr.Stats(); x.Connects != 1 || x.BadXIDs != 0 || x.BadReply != 0 || x.FailedMarshal != 0 ||
			x.RemoteAccessErrors != 0 || x.RDMAErrors != 0 || x.MRsOrphaned != 0 {
			t.Errorf("got reconnects or errors: %+v", x)
		}
	}
}
