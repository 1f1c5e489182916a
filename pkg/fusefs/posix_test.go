package fusefs

import (
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/hanwen/go-fuse/v2/posixtest"
)

// knownFailures are the tests of go-fuse's that do not pass on an NFSv3 mount, each with the reason
// and with what of the test's output shows that it still is that reason.
var knownFailures = map[string]struct{ reason, shows string }{
	"Fallocate":         {"NFSv3 has no procedure that allocates space (RFC 1813 §3); fallocate(2) fails with EOPNOTSUPP", "Fallocate failed: operation not supported"},
	"FallocateKeepSize": {"as Fallocate", "operation not supported"},
	"Tmpfile": {"NFSv3 cannot make a file without a name; open(2) with O_TMPFILE fails with EOPNOTSUPP",
		"O_TMPFILE: operation not supported"},
	"FcntlFlockLocksFile": {"the test wants two locks of one process to conflict, but fcntl(2) locks belong to the process: it fails on a local disk, too", "returned <nil>, expected EAGAIN"},
	"SetattrSymlink": {"NFS-Ganesha 4's VFS back end answers SETATTR of a symbolic link's times with NFS3_OK and leaves them as they are; " +
		"TestSetattrSymlink sees the test pass on another server", "want 43"},
	"XAttr":      {"NFSv3 has no extended attributes; setxattr(2) fails with EOPNOTSUPP", "does not support xattrs"},
	"XAttrLarge": {"as XAttr", "Setxattr: operation not supported"},
}

// onlyTest, in the environment, makes TestPosix run one test, known to fail or not.
const onlyTest = "NFSRDMAD_POSIX_TEST"

func TestPosix(t *testing.T) {
	e := startExport(t)
	names := slices.Sorted(maps.Keys(posixtest.All))
	only := os.Getenv(onlyTest)
	for _, name := range names {
		if _, known := knownFailures[name]; known && name != only || only != "" && name != only {
			continue
		}
		t.Run(name, func(t *testing.T) {
			m := e.mount(t, mountConfig{})
			posixtest.All[name](t, subdir(t, m))
		})
	}
}

// TestKnownFailures runs each known failure in a process of its own, and fails when it passes: then
// it does not belong in the list any more. None of them races, so that one run tells.
func TestKnownFailures(t *testing.T) {
	for name, known := range knownFailures {
		t.Run(name, func(t *testing.T) {
			if posixtest.All[name] == nil {
				t.Fatal("there is no such test")
			}
			cmd := exec.Command(os.Args[0], "-test.run", "^TestPosix$", "-test.v")
			cmd.Env = append(os.Environ(), onlyTest+"="+name)
			out, err := cmd.CombinedOutput()
			switch {
			case strings.Contains(string(out), "--- PASS: TestPosix/"+name+" "):
				t.Errorf("passes: take it off the list")
			case !strings.Contains(string(out), known.shows):
				t.Errorf("fails (%v) for another reason than that %s:\n%s", err, known.reason, out)
			}
		})
	}
}

// TestSetattrSymlink shows that the times of a symbolic link are the server's affair alone.
func TestSetattrSymlink(t *testing.T) {
	m := startOwnExport(t).mount(t, mountConfig{})
	posixtest.SetattrSymlink(t, m.dir)
}
