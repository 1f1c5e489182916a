package vfs

import (
	"maps"
	"slices"
	"testing"

	"github.com/hanwen/go-fuse/v2/posixtest"
)

// knownFailures are the go-fuse tests that fail on an NFSv3 mount, with the reason.
var knownFailures = map[string]string{
	"Fallocate": "NFSv3 has no procedure that allocates space (RFC 1813 §3); fallocate(2) fails with EOPNOTSUPP",

	"FallocateKeepSize": "see Fallocate",
	"Tmpfile":           "NFSv3 cannot make a file without a name; open(2) with O_TMPFILE fails with EOPNOTSUPP",

	"FcntlFlockLocksFile": "the test expects two locks of one process to conflict, but fcntl(2) locks belong to " +
		"the process; it also fails on a local disk",
	"XAttr":      "NFSv3 has no extended attributes; setxattr(2) fails with EOPNOTSUPP",
	"XAttrLarge": "see XAttr",
}

func TestPosix(t *testing.T) {
	t.Parallel()
	e := startOwnExport(t)
	for _, name := range slices.Sorted(maps.Keys(posixtest.All)) {
		if knownFailures[name] != "" || name == "FdLeak" {
			continue
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			posixtest.All[name](t, subdir(t, e.mount(t, mountConfig{})))
		})
	}
}

// TestPosixWriteback runs the tests of file data with the kernel's writeback cache, and the one that
// counts the descriptors of the process while no other test runs.
func TestPosixWriteback(t *testing.T) {
	m := startOwnExport(t).mount(t, writebackMount)
	for _, name := range []string{"AppendWrite", "DirectIO", "FileBasic", "FileLarge", "TruncateFile", "FdLeak"} {
		t.Run(name, func(t *testing.T) { posixtest.All[name](t, subdir(t, m)) })
	}
}
