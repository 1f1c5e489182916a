package fusefs

import (
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/hanwen/go-fuse/v2/posixtest"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// knownFailures are the go-fuse tests that fail on an NFSv3 mount. Each has the reason, and a part
// of the test's output that shows this reason.
var knownFailures = map[string]struct{ reason, shows string }{
	"Fallocate": {
		"NFSv3 has no procedure that allocates space (RFC 1813 §3); fallocate(2) fails with EOPNOTSUPP",
		"Fallocate failed: operation not supported",
	},
	"FallocateKeepSize": {"see Fallocate", "operation not supported"},
	"Tmpfile": {
		"NFSv3 cannot make a file without a name; open(2) with O_TMPFILE fails with EOPNOTSUPP",
		"O_TMPFILE: operation not supported",
	},
	"FcntlFlockLocksFile": {
		"the test expects two locks of one process to conflict, but fcntl(2) locks belong to the process; " +
			"it also fails on a local disk",
		"returned <nil>, expected EAGAIN",
	},
	"SetattrSymlink": {
		"NFS-Ganesha 4's VFS back end answers a SETATTR of a symbolic link's times with NFS3_OK but does not " +
			"change the times; TestSymlinkTimes shows that the test passes on another server",
		"want 43",
	},
	"XAttr": {
		"NFSv3 has no extended attributes; setxattr(2) fails with EOPNOTSUPP",
		"does not support xattrs",
	},
	"XAttrLarge": {"see XAttr", "Setxattr: operation not supported"},
}

// The environment variable onlyTest makes TestPosix run one test, even a known failure.
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

// TestKnownPosixFailures runs each known failure in a child process. TestKnownPosixFailures fails
// when a test passes: remove that test from the list. None of the tests depends on timing, so one
// run is enough.
func TestKnownPosixFailures(t *testing.T) {
	kit.NeedsFUSE(t)
	for name, known := range knownFailures {
		t.Run(name, func(t *testing.T) {
			if posixtest.All[name] == nil {
				t.Fatal("no such test in posixtest")
			}
			cmd := exec.Command(os.Args[0], "-test.run", "^TestPosix$", "-test.v")
			cmd.Env = append(os.Environ(), onlyTest+"="+name)
			out, err := cmd.CombinedOutput()
			switch {
			case strings.Contains(string(out), "--- PASS: TestPosix/"+name+" "):
				t.Errorf("test passes; remove it from knownFailures")
			case !strings.Contains(string(out), known.shows):
				t.Errorf("test failed with %v, want this reason: %s\n%s", err, known.reason, out)
			}
		})
	}
}

// TestSymlinkTimes checks that the times of a symbolic link can be set on a server that supports
// it.
func TestSymlinkTimes(t *testing.T) {
	m := startOwnExport(t).mount(t, mountConfig{})
	posixtest.SetattrSymlink(t, m.dir)
}
