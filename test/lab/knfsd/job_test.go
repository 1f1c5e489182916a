package knfsd

import (
	"os"
	"path/filepath"
	"testing"
)

var _ = register("job", "tree in and out, git clone and fsck", testJob)

// testJob is the main job: a source tree goes in, and a second mount, which has nothing cached, finds it whole; git works on the mount.
func testJob(t *testing.T, b bench) {
	m := b.mount(t, nil)
	src := goTree(t, "net")
	run(t, "", "cp", "-a", src, m.dir)
	cold := b.mount(t, nil)
	run(t, "", "diff", "-r", "--no-dereference", src, filepath.Join(cold.dir, "net"))
	out := t.TempDir()
	run(t, "", "cp", "-a", filepath.Join(cold.dir, "net"), out)
	run(t, "", "diff", "-r", "--no-dereference", src, filepath.Join(out, "net"))
	// Linux is asked too, by the sums of all files.
	const sums = "find net -type f -exec sha256sum {} + | sort | sha256sum"
	if here, there := run(t, filepath.Dir(src), "sh", "-c", sums), b.MustRun("cd /export && "+sums); here != there {
		t.Errorf("the server has a tree with sum %s, sent was one with %s", there, here)
	}

	origin := filepath.Join(out, "net")
	run(t, origin, "git", "init", "-q")
	run(t, origin, "git", "add", "http", "url")
	run(t, origin, "git", "-c", "user.name=t", "-c", "user.email=t@localhost", "commit", "-qm", "tree")
	run(t, m.dir, "git", "clone", "-q", "--no-hardlinks", origin, "clone")
	clone := filepath.Join(m.dir, "clone")
	run(t, clone, "git", "fsck", "--strict")
	if out := run(t, clone, "git", "status", "--porcelain"); out != "" {
		t.Errorf("git status in a fresh clone:\n%s", out)
	}
	for _, dir := range []string{"net", "clone"} {
		if err := os.RemoveAll(filepath.Join(m.dir, dir)); err != nil {
			t.Error(err)
		}
	}
	for _, st := range []*mount{m, cold} {
		if x := st.tr.Stats(); x.Connects != 1 || x.BadXIDs != 0 || x.BadReply != 0 || x.FailedMarshal != 0 || x.RemoteAccessErrors != 0 || x.RDMAErrors != 0 || x.MRsOrphaned != 0 {
			t.Errorf("not a quiet mount: %+v", x)
		}
	}
}
