package programs

import (
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// stressors are the stressors of stress-ng that work on files, with options that make their files
// small. TestStress does not run these stressors of the class "filesystem":
//
//	binderfs, bind-mount, eventfd, procfs, ioprio                do not use the directory under test
//	chattr, inode-flags                                          need the ioctl(2) of file attributes
//	fallocate                                                    needs fallocate(2), not in NFSv3
//	fiemap, verity                                               need ioctls of local file systems
//	fanotify                                                     watches the whole mount namespace
//	xattr                                                        needs user attributes, not in NFSv3
var stressors = []struct{ name, options string }{
	{"access", ""},
	{"aio", ""},
	{"aiol", ""},
	{"chdir", "--chdir-dirs 256"},
	{"chmod", ""},
	{"chown", ""},
	{"copy-file", ""},
	{"dentry", "--dentries 256"},
	{"dir", "--dir-dirs 256"},
	{"dirdeep", "--dirdeep-inodes 512"},
	{"dirmany", ""},
	{"dnotify", ""},
	{"dup", ""},
	{"fault", ""},
	{"fcntl", ""},
	{"file-ioctl", ""},
	{"filename", ""},
	{"flock", ""},
	{"fpunch", ""},
	{"fsize", ""},
	{"fstat", ""},
	{"getdent", ""},
	{"handle", ""},
	{"hdd", "--hdd-bytes 16m --hdd-opts wr-seq,rd-rnd,fsync,utimes"},
	{"inotify", ""},
	{"io", ""},
	{"io-uring", ""},
	{"iomix", "--iomix-bytes 16m"},
	{"lease", ""},
	{"link", ""},
	{"locka", ""},
	{"lockf", ""},
	{"lockofd", ""},
	{"mknod", ""},
	{"open", ""},
	{"readahead", "--readahead-bytes 16m"},
	{"rename", ""},
	{"revio", "--revio-bytes 16m"},
	{"seek", ""},
	{"sendfile", ""},
	{"symlink", ""},
	{"sync-file", "--sync-file-bytes 1m"},
	{"touch", ""},
	{"utime", ""},
}

// TestStress runs each stressor in two processes, with the checks of stress-ng. A stressor that
// does nothing fails.
func TestStress(t *testing.T) {
	kit.NeedsPrograms(t, "stress-ng")
	mnt := startEmbedded(t).mount(t)
	for _, s := range stressors {
		t.Run(s.name, func(t *testing.T) {
			dir := makeDir(t, mnt, s.name)
			args := append([]string{"--" + s.name, "2", "--timeout", "10s", "--verify", "--metrics-brief",
				"--temp-path", "."}, strings.Fields(s.options)...)
			out := run(t, dir, "stress-ng", args...)
			if n := stressOperations(t, out, s.name); n == 0 {
				t.Errorf("%s made no operation:\n%s", s.name, out)
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
