package programs

import (
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// stressors are the stressors of stress-ng that work on files and need no options. TestStress does
// not run these stressors of the class "filesystem":
//
//	binderfs, bind-mount, eventfd, procfs, ioprio                do not use the directory under test
//	chattr, inode-flags                                          need the ioctl(2) of file attributes
//	fallocate                                                    needs fallocate(2), not in NFSv3
//	fiemap, verity                                               need ioctls of local file systems
//	fanotify                                                     watches the whole mount namespace
//	xattr                                                        needs user attributes, not in NFSv3
const stressors = `
	access aio aiol chmod chown copy-file dirmany dnotify dup fault fcntl file-ioctl filename flock
	fpunch fsize fstat getdent handle inotify io io-uring lease link locka lockf lockofd mknod open
	rename seek sendfile symlink touch utime
`

// stressOptions are further stressors, with options that make their files small.
var stressOptions = map[string]string{
	"chdir":     "--chdir-dirs 256",
	"dentry":    "--dentries 256",
	"dir":       "--dir-dirs 256",
	"dirdeep":   "--dirdeep-inodes 512",
	"hdd":       "--hdd-bytes 16m --hdd-opts wr-seq,rd-rnd,fsync,utimes",
	"iomix":     "--iomix-bytes 16m",
	"readahead": "--readahead-bytes 16m",
	"revio":     "--revio-bytes 16m",
	"sync-file": "--sync-file-bytes 1m",
}

// TestStress runs each stressor in two processes, with the checks of stress-ng. A stressor that
// does nothing fails.
func TestStress(t *testing.T) {
	kit.NeedsPrograms(t, "stress-ng")
	mnt := startEmbedded(t).mount(t)
	for _, name := range append(strings.Fields(stressors), slices.Collect(maps.Keys(stressOptions))...) {
		t.Run(name, func(t *testing.T) {
			dir := makeDir(t, mnt, name)
			args := append([]string{"--" + name, "2", "--timeout", "10s", "--verify", "--metrics-brief",
				"--temp-path", "."}, strings.Fields(stressOptions[name])...)
			out := run(t, dir, "stress-ng", args...)
			if n := stressOperations(t, out, name); n == 0 {
				t.Errorf("%s made no operation:\n%s", name, out)
			} else {
				t.Logf("%d operations", n)
			}
			run(t, "", "rmdir", dir) // fails when a stressor could not remove its files
		})
	}
}

// stressOperations returns the number of operations of a stressor from the output of stress-ng.
func stressOperations(t *testing.T, out, stressor string) int {
	t.Helper()
	m := regexp.MustCompile(`(?m)^stress-ng: metrc: \[\d+\] ` + stressor + ` +(\d+) `).FindStringSubmatch(out)
	if m == nil {
		return 0
	}
	n, err := strconv.Atoi(m[1])
	if err != nil {
		t.Fatal(err)
	}
	return n
}
