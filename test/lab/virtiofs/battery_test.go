package virtiofs

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/posixtest"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

const module = "github.com/nfsrdmad/nfsrdmad/"

// batteryLimit bounds a program in the guest. The guest is slow on a busy host.
const batteryLimit = 8 * time.Minute

// groups is the reason why scripts fail that use supplementary groups.
const groups = "FUSE requests of a guest have no supplementary groups"

// differentScripts are the scripts of test/integration whose outcome on a share differs from the
// outcome on a directory of the guest.
var differentScripts = map[string]string{
	"symlink_owner": groups,
	"chmod_setgid_by_a_user_outside_the_group": groups,
	"chown":                             groups,
	"setgid_file_in_a_setgid_directory": groups,
	"access_by_group":                   groups,
	"statfs":                            "the directory of the guest is not on the file system of the server",
}

// failingPosixTests are the tests of go-fuse that fail on a share.
var failingPosixTests = map[string]string{
	"Fallocate":           "NFSv3 has no procedure that allocates space",
	"FallocateKeepSize":   "NFSv3 has no procedure that allocates space",
	"Tmpfile":             "NFSv3 cannot make a file without a name",
	"FcntlFlockLocksFile": "the test expects two locks of one process to conflict",
	"XAttr":               "NFSv3 has no extended attributes",
	"XAttrLarge":          "NFSv3 has no extended attributes",
	"RenameOpenDir":       "RENAME removes the object of a handle that another process has open",
}

// racingPosixTests are the tests of go-fuse that can pass and fail on a share.
var racingPosixTests = map[string]string{
	"OpenSymlinkRace": "a file that is replaced twice between the LOOKUP and the OPEN of a slow guest: ESTALE",
}

// TestBattery runs the tests of file systems in the guest, on a share: the scripts of
// test/integration and the tests of go-fuse, which also run on the mounts of the host.
func TestBattery(t *testing.T) {
	lab.SkipIfDisabled(t)
	g := start(t)
	for _, pkg := range []string{"test/integration", "test/lab/virtiofs"} {
		lab.BuildPure(t, "test", "-c", "-o", filepath.Join(g.files, filepath.Base(pkg)+".test"), module+pkg)
	}
	g.must("cp /share/*.test /host/tmp/ && mkdir -m 777 /host/tmp/local")
	t.Run("Scripts", func(t *testing.T) {
		got := g.runTests(t, "integration", "TestBatteryOfShare",
			"NFSRDMAD_BATTERY_DIRS='/tmp/local "+g.export+" /tmp/share'")
		const least = 140
		if len(got) < least {
			t.Errorf("got results of %d scripts, want at least %d", len(got), least)
		}
		compareResults(t, got, differentScripts)
	})
	t.Run("Posix", func(t *testing.T) {
		got := g.runTests(t, "virtiofs", "TestPosixOnShare", shareEnv+"=/tmp/share")
		if len(got) != len(posixtest.All) {
			t.Errorf("got results of %d tests, want %d", len(got), len(posixtest.All))
		}
		for name, reason := range racingPosixTests {
			t.Logf("%s, %s:%s", name, reason, got[name])
			delete(got, name)
		}
		compareResults(t, got, failingPosixTests)
	})
}

// runTests runs a test of a program in the guest. It returns the output of the subtests that
// failed, and "" for those that passed.
func (g *guest) runTests(t *testing.T, program, test, env string) map[string]string {
	t.Helper()
	out, err := g.RunFor("cd /host/tmp && chroot /host env "+env+" /tmp/"+program+
		".test -test.v -test.run '^"+test+"$' 2>&1", batteryLimit)
	results := make(map[string]string)
	begin := regexp.MustCompile(`(?m)^=== RUN +`+test+`/(\S+)$`).FindAllStringSubmatchIndex(out, -1)
	for i, at := range begin {
		end := len(out)
		if i+1 < len(begin) {
			end = begin[i+1][0]
		}
		name := out[at[2]:at[3]]
		switch {
		case strings.Contains(out, "--- PASS: "+test+"/"+name+" ("):
			results[name] = ""
		default:
			results[name] = out[at[1]:end]
		}
	}
	if len(results) == 0 || !strings.Contains(out, "\n--- ") {
		t.Fatalf("%s: %v\n%s", test, err, out)
	}
	return results
}

// compareResults fails for each test that failed and is not known to, and for each that passed but
// is known to fail.
func compareResults(t *testing.T, got, known map[string]string) {
	t.Helper()
	for _, name := range slices.Sorted(maps.Keys(got)) {
		reason, failed := known[name], got[name] != ""
		if failed && reason == "" {
			t.Errorf("%s failed:%s", name, got[name])
		}
		if !failed && reason != "" {
			t.Errorf("%s passed; remove it from the known failures", name)
		}
	}
	for name := range known {
		if _, ran := got[name]; !ran {
			t.Errorf("%s did not run; remove it from the known failures", name)
		}
	}
}

// shareEnv is the directory for TestPosixOnShare.
const shareEnv = "NFSRDMAD_SHARE"

// TestPosixOnShare runs the tests of go-fuse in the guest.
func TestPosixOnShare(t *testing.T) {
	dir := os.Getenv(shareEnv)
	if dir == "" {
		t.Skip("runs in a guest; see TestBattery")
	}
	for _, name := range slices.Sorted(maps.Keys(posixtest.All)) {
		t.Run(name, func(t *testing.T) {
			sub := filepath.Join(dir, "posix-"+name)
			kit.Must(t, os.Mkdir(sub, 0o777))
			posixtest.All[name](t, sub)
		})
	}
}
