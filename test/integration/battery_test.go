package integration

import (
	_ "embed"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

//go:embed testdata/battery.txt
var batteryText string

// A namedScript is one paragraph of testdata/battery.txt.
type namedScript struct{ name, script string }

// readBattery parses testdata/battery.txt.
func readBattery(t *testing.T) (scripts []namedScript) {
	t.Helper()
	for line := range strings.Lines(batteryText) {
		line = strings.TrimSuffix(line, "\n")
		switch {
		case line == "" || line[0] == '#':
		case line[0] != '\t':
			scripts = append(scripts, namedScript{name: line})
		default:
			steps, err := strconv.Unquote(`"` + line[1:] + `"`)
			if err != nil || len(scripts) == 0 {
				t.Fatalf("testdata/battery.txt: invalid line %q: %v", line, err)
			}
			scripts[len(scripts)-1].script += " " + steps
		}
	}
	return scripts
}

// A difference is a line of the outcome that a mount cannot have in common with a directory.
type difference struct {
	script string // its name
	mount  string // the line on the mount
	reason string
}

// knownDifferences are outcomes that differ because NFSv3, or every client of it, cannot do what a
// local file system does. A difference that this server or this client can avoid does not belong
// here.
var knownDifferences = []difference{
	{"fallocate", "a fallocate f keep 0 10000 => ENOTSUP", "NFSv3 has no procedure that allocates space"},
	{"extended attributes", "a setxattr f user.test value => ENOTSUP", "NFSv3 has no extended attributes"},
	{"exchange", "a renameat2 f g exchange => EINVAL", "RENAME of NFSv3 has no flags"},
	{"times before 1970", "a times f => atime=0.000000000 mtime=0.000000000",
		"nfstime3 holds seconds as an unsigned integer (RFC 1813 §2.5)"},
	{"rmdir of an open directory", "a fstat d => ESTALE",
		"RMDIR removes the object of a handle that another process has open"},
}

// checkBattery runs every script on a local directory and on the mount, and compares with each
// other the outcomes, and the state that the served directory has at the end.
func checkBattery(t *testing.T, local, served, mnt string, known []difference) {
	for i, b := range readBattery(t) {
		name := fmt.Sprintf("%03d", i)
		t.Run(strings.ReplaceAll(b.name, " ", "_"), func(t *testing.T) {
			for _, root := range []string{local, mnt} {
				makeOpenDir(t, filepath.Join(root, name))
			}
			want := runScript(t, filepath.Join(local, name), b.script)
			got := runScript(t, filepath.Join(mnt, name), b.script)
			compareOutcomes(t, b.name, want, got, known)
			// Without steps, the outcome is the state of the directory behind the mount.
			if behind := runScript(t, filepath.Join(served, name), ""); !t.Failed() {
				compareOutcomes(t, b.name, onlyEnd(got), behind, nil)
			}
		})
	}
}

func makeOpenDir(t *testing.T, dir string) {
	t.Helper()
	kit.Must(t, os.Mkdir(dir, 0o755))
	kit.Must(t, os.Chmod(dir, 0o777)) // without the umask
}

func onlyEnd(lines []string) (end []string) {
	for _, l := range lines {
		if strings.HasPrefix(l, "end: ") {
			end = append(end, l)
		}
	}
	return end
}

// compareOutcomes fails for each line that differs and is not known, and for each known difference
// that did not occur.
func compareOutcomes(t *testing.T, name string, want, got []string, known []difference) {
	t.Helper()
	expected, seen := map[string]bool{}, map[string]bool{}
	for _, d := range known {
		if d.script == name {
			expected[d.mount] = true
		}
	}
	for i := range max(len(want), len(got)) {
		var w, g string
		if i < len(want) {
			w = want[i]
		}
		if i < len(got) {
			g = got[i]
		}
		switch {
		case w == g:
		case expected[g]:
			seen[g] = true
		default:
			t.Errorf("outcome differs\n\tdirectory %s\n\tmount     %s", w, g)
		}
	}
	for line := range expected {
		if !seen[line] {
			t.Errorf("known difference did not occur: %s; remove it from knownDifferences", line)
		}
	}
}

// TestServeBattery compares a directory with a mount of a served directory.
func TestServeBattery(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	local, served := mounts.OpenTempDir(t), mounts.OpenTempDir(t)
	s := mounts.ServeDir(t, served, "--no-root-squash", "--allow-suid")
	checkBattery(t, local, served, mounts.MountServed(t, s), knownDifferences)
}

// shareEnv tells TestBatteryOfShare the directories: a local one, the served one, and its mount.
const shareEnv = "NFSRDMAD_BATTERY_DIRS"

// TestBatteryOfShare compares a directory with a virtiofs mount. test/lab/virtiofs runs it in a
// guest.
func TestBatteryOfShare(t *testing.T) {
	dirs := strings.Fields(os.Getenv(shareEnv))
	if len(dirs) != 3 {
		t.Skip("runs in a guest; see test/lab/virtiofs")
	}
	checkBattery(t, dirs[0], dirs[1], dirs[2], knownDifferences)
}
