package programs

import (
	"bufio"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

const (
	gitFiles   = 20_000
	gitCommits = 20_000
)

// TestGit imports, clones, packs and checks a large repository. A second client clones the packed
// repository and checks it.
func TestGit(t *testing.T) {
	kit.NeedsPrograms(t, "git")
	stream := filepath.Join(t.TempDir(), "stream")
	writeGitStream(t, stream)
	local := importGit(t, t.TempDir(), stream)
	head := gitHead(t, local)
	onEachServer(t, func(t *testing.T, s *server) {
		mnt := s.mount(t)
		origin := importGit(t, mnt, stream)
		if got := gitHead(t, origin); got != head {
			t.Errorf("import on the mount: got head %s, want %s", got, head)
		}
		checkClone(t, origin, filepath.Join(mnt, "clone"), head)
		run(t, origin, "git", "gc", "-q", "--prune=now")
		run(t, origin, "git", "fsck", "--full", "--strict", "--no-progress")

		other := s.mount(t)
		checkClone(t, filepath.Join(other, "origin.git"), filepath.Join(other, "second"), head)
		run(t, "", "diff", "-r", "--exclude", ".git", filepath.Join(mnt, "clone"), filepath.Join(other, "second"))
		run(t, mnt, "rm", "-rf", "clone")
	})
}

// writeGitStream writes a repository for git fast-import: a commit with all files, and commits that
// each change two of them. The content is the same in each run.
func writeGitStream(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	rng := rand.New(rand.NewPCG(1, 2))
	w := bufio.NewWriter(f)
	file := func(i int) {
		text := strings.Repeat(fmt.Sprintf("%x\n", rng.Uint64()), 1+rng.IntN(100))
		fmt.Fprintf(w, "M 100644 inline d%d/sub%d/f%d\ndata %d\n%s\n", i%101, i%7, i, len(text), text)
	}
	for commit := range gitCommits {
		fmt.Fprintf(w, "commit refs/heads/main\ncommitter T <t@localhost> %d +0000\ndata 2\nc\n", 1_600_000_000+commit)
		if commit == 0 {
			for i := range gitFiles {
				file(i)
			}
			continue
		}
		file(rng.IntN(gitFiles))
		file(rng.IntN(gitFiles))
	}
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
}

// importGit makes the repository origin.git below dir.
func importGit(t *testing.T, dir, stream string) string {
	t.Helper()
	origin := filepath.Join(dir, "origin.git")
	run(t, dir, "git", "init", "-q", "--bare", "-b", "main", origin)
	run(t, origin, "sh", "-c", `git fast-import --quiet <"$0"`, stream)
	return origin
}

func gitHead(t *testing.T, repository string) string {
	t.Helper()
	return strings.TrimSpace(run(t, repository, "git", "rev-parse", "main"))
}

// checkClone clones a repository into a new directory and checks the clone.
func checkClone(t *testing.T, origin, clone, head string) {
	t.Helper()
	run(t, "", "git", "clone", "-q", "--no-local", origin, clone)
	run(t, clone, "git", "fsck", "--full", "--strict", "--no-progress")
	if got := gitHead(t, clone); got != head {
		t.Errorf("clone: got head %s, want %s", got, head)
	}
	if out := run(t, clone, "git", "status", "--porcelain"); out != "" {
		t.Errorf("git status in a new clone: got\n%s, want nothing", out)
	}
	tracked := strings.Count(run(t, clone, "git", "ls-files"), "\n")
	if tracked != gitFiles {
		t.Errorf("clone: got %d files, want %d", tracked, gitFiles)
	}
}
