package fusefs

import (
	"sort"
	"testing"

	"github.com/hanwen/go-fuse/v2/posixtest"
)

// knownFailures are the tests of go-fuse's that an NFSv3 file system cannot pass, each with the reason.
var knownFailures = map[string]string{
	"Fallocate":           "NFSv3 has no procedure that allocates space (RFC 1813 §3); fallocate(2) fails with EOPNOTSUPP",
	"FallocateKeepSize":   "as Fallocate",
	"Tmpfile":             "NFSv3 cannot make a file without a name; open(2) with O_TMPFILE fails with EOPNOTSUPP",
	"FcntlFlockLocksFile": "the test wants two locks of one process to conflict; fcntl(2) locks, which the kernel keeps itself here, belong to the process",
	"OpenSymlinkRace":     "NFSv3 has no open: a file removed between its lookup and its open is stale, and the kernel tries an open again once only",
	"SetattrSymlink":      "NFS-Ganesha 4's VFS back end answers SETATTR of a symbolic link's times with NFS3_OK and leaves them as they are",
	"XAttr":               "NFSv3 has no extended attributes; setxattr(2) fails with EOPNOTSUPP",
	"XAttrLarge":          "as XAttr",
}

func TestPosix(t *testing.T) {
	e := startExport(t)
	names := make([]string, 0, len(posixtest.All))
	for name := range posixtest.All {
		names = append(names, name)
	}
	sort.Strings(names)
	for _, name := range names {
		if _, known := knownFailures[name]; known {
			continue
		}
		t.Run(name, func(t *testing.T) {
			m := e.mount(t, mountConfig{})
			posixtest.All[name](t, subdir(t, m))
		})
	}
}
