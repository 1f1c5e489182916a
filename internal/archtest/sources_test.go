package archtest

import (
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const root = "../.."

// sources returns the text of the Go files of the repository, by their path.
func sources(t *testing.T) map[string]string { return files(t, ".go") }

// files returns the files of the repository whose names end in suffix. It leaves out directories
// that do not belong to the source: hidden ones, testdata, bin and dist.
func files(t *testing.T, suffix string) map[string]string {
	t.Helper()
	all := make(map[string]string)
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			left := []string{"testdata", "bin", "dist"}
			if path != root && (strings.HasPrefix(d.Name(), ".") || slices.Contains(left, d.Name())) {
				return fs.SkipDir
			}
			return nil
		}
		if strings.HasSuffix(path, suffix) {
			text, err := os.ReadFile(path)
			all[strings.TrimPrefix(path, root+"/")] = string(text)
			return err
		}
		return nil
	})
	if err != nil || len(all) == 0 {
		t.Fatalf("got %d files %s, error %v", len(all), suffix, err)
	}
	return all
}

var (
	// newDescriptor lists system calls that return a file descriptor. Flags make it close-on-exec.
	newDescriptor = []string{"Accept4", "Dup3", "EpollCreate1", "Eventfd", "Open", "OpenTree", "Openat",
		"Pipe2", "Socket", "Socketpair"}
	// sharedDescriptor lists those without such flags.
	sharedDescriptor = []string{"Accept", "Creat", "Dup", "EpollCreate", "Pipe"}
)

// calls returns the calls of a function in text, with their arguments. It is faster than a regular
// expression.
func calls(text, function string) (all []string) {
	for {
		i := strings.Index(text, function+"(")
		if i < 0 {
			return all
		}
		text = text[i:]
		end, depth := len(function), 0
		for ; end < len(text); end++ {
			switch text[end] {
			case '(':
				depth++
			case ')':
				depth--
			}
			if depth == 0 {
				break
			}
		}
		all = append(all, text[:end])
		text = text[end:]
	}
}

// TestDescriptorsCloseOnExec checks that programs which this process starts get no descriptor by
// accident. They would keep files open, for example those of a mount.
func TestDescriptorsCloseOnExec(t *testing.T) {
	found := 0
	for file, text := range sources(t) {
		for _, pkg := range []string{"unix.", "syscall."} {
			for _, name := range newDescriptor {
				for _, call := range calls(text, pkg+name) {
					if found++; !strings.Contains(call, "CLOEXEC") {
						t.Errorf("%s: %s) is not close-on-exec", file, call)
					}
				}
			}
			for _, name := range sharedDescriptor {
				for _, call := range calls(text, pkg+name) {
					t.Errorf("%s: %s) is not close-on-exec; use a call with flags", file, call)
				}
			}
		}
	}
	if found < 10 {
		t.Errorf("found %d system calls, want 10 or more", found)
	}
}

// timedPackages have timeouts on which calls of a mount depend.
var timedPackages = []string{"pkg/sunrpc/rpctcp", "internal/running", "pkg/vfs", "pkg/memreg", "pkg/mount",
	"pkg/nfs/nfs3", "pkg/nfs/mountd", "pkg/nfs/nfsacl", "pkg/nfs/nlm", "pkg/verbs/rdmacore", "pkg/verbs/softiwarp",
	"pkg/xprt"}

// wallClock matches the methods and functions of package time whose results have no reading of the
// monotonic clock. A time computed with them jumps when the clock of the host is set.
var wallClock = regexp.MustCompile(`\.(?:AddDate|Date|In|Local|UTC|Unix|UnixMicro|UnixMilli|UnixNano)\(.*`)

// TestTimeoutsUseMonotonicClock checks that no timeout depends on the wall clock, which an
// administrator or NTP may set by any amount. The times of files do, and time.Unix(1, 0) is a
// deadline that has passed.
func TestTimeoutsUseMonotonicClock(t *testing.T) {
	found := 0
	for file, text := range sources(t) {
		if strings.HasSuffix(file, "_test.go") || !slices.Contains(timedPackages, path.Dir(file)) {
			continue
		}
		for _, call := range wallClock.FindAllString(text, -1) {
			if found++; file != "pkg/nfs/nfs3/types.go" && !strings.HasPrefix(call, ".Unix(1, 0)") {
				t.Errorf("%s: %s has no reading of the monotonic clock; use time.Now, Since and Sub", file, call)
			}
		}
	}
	if found == 0 {
		t.Error("found no time of a file; the pattern is wrong")
	}
}

// TestNamedTestsExist checks the names of tests in the documents and in the Makefile.
func TestNamedTestsExist(t *testing.T) {
	declared := make(map[string]bool)
	for _, text := range sources(t) {
		for _, after := range strings.Split(text, "\nfunc ")[1:] {
			name, _, _ := strings.Cut(after, "(")
			declared[name] = true
		}
	}
	check := func(file, text, pattern string) {
		all := regexp.MustCompile(pattern).FindAllStringSubmatch(text, -1)
		for _, m := range all {
			if !declared[m[1]] {
				t.Errorf("%s names %s, which does not exist", file, m[1])
			}
		}
		if len(all) == 0 && (file == "Makefile" || file == "docs/features.md") {
			t.Errorf("%s names no test; the pattern is wrong", file)
		}
	}
	for file, text := range files(t, ".md") {
		if file != "CONTRIBUTING.md" { // has examples
			check(file, text, "`((?:Test|Benchmark|Fuzz)[A-Z]\\w+)`")
		}
	}
	check("Makefile", files(t, "Makefile")["Makefile"], `\b(Test[A-Z]\w+)`)
}
