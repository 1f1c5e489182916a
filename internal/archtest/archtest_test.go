package archtest

import (
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

const (
	module = "github.com/nfsrdmad/nfsrdmad"
	top    = "../.."
)

// floors lists the rooms from the top floor down. A room may import rooms of lower floors only;
// rooms that share a floor know nothing of each other. Tests may import anything.
var floors = [][]string{
	{"cmd/nfsrdmad"},
	{"internal/demo"},
	{"pkg/daemon", "internal/nfsserve"},
	{"pkg/fusefs"},
	{"pkg/nfs3/mountd", "internal/nfsd"},
	{"pkg/nfs3"},
	{"internal/rpctcp"},
	{"pkg/xprt", "internal/svcrdma"},
	{"pkg/memreg"},
	{"pkg/rpcrdma"},
	{"pkg/sunrpc"},
	{"pkg/verbs/softiwarp", "pkg/verbs/rdmacore", "pkg/verbs/verbstest", "pkg/verbs/faults"},
	{"pkg/verbs"},
	{"pkg/metrics"},
	{"pkg/trace"},
	{"internal/verify"},
}

// besides are rooms outside the house: helpers of tests, which no product code may import.
var besides = map[string]bool{"internal/archtest": true, "internal/ganeshatest": true, "internal/hostile": true}

func floorOf(room string) int {
	for i, rooms := range floors {
		for _, r := range rooms {
			if r == room {
				return i
			}
		}
	}
	return -1
}

// mayImport tells whether from may import to.
func mayImport(from, to string) bool {
	return !besides[to] && floorOf(from) >= 0 && floorOf(from) < floorOf(to)
}

// A source is one non-test file.
type source struct {
	room, path string
	imports    []string // rooms of this module
	doc        bool
}

func sources(t *testing.T) []source {
	t.Helper()
	var all []source
	err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if name := d.Name(); name == "testdata" || name == "test" ||
				(name != ".." && name != top && strings.HasPrefix(name, ".")) {
				return fs.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly|parser.ParseComments)
		if err != nil {
			return err
		}
		room, err := filepath.Rel(top, filepath.Dir(path))
		if err != nil {
			return err
		}
		s := source{room: filepath.ToSlash(room), path: path, doc: f.Doc != nil}
		for _, spec := range f.Imports {
			p, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				return err
			}
			if in, ok := strings.CutPrefix(p, module+"/"); ok {
				s.imports = append(s.imports, in)
			}
		}
		all = append(all, s)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(all) < 50 {
		t.Fatalf("only %d files found: looking in the wrong place?", len(all))
	}
	return all
}

func TestImportsRunDownward(t *testing.T) {
	for _, s := range sources(t) {
		if floorOf(s.room) < 0 && !besides[s.room] {
			t.Errorf("%s: room %s has no floor; give it one in this test", s.path, s.room)
			continue
		}
		for _, to := range s.imports {
			if !besides[s.room] && !mayImport(s.room, to) {
				t.Errorf("%s imports %s, which is not below it", s.path, to)
			}
		}
	}
}

func TestEveryRoomHasItsPage(t *testing.T) {
	doc := make(map[string]bool)
	for _, s := range sources(t) {
		doc[s.room] = doc[s.room] || s.doc
	}
	for room, ok := range doc {
		if !ok {
			t.Errorf("%s has no package doc", room)
		}
	}
}

// The rule itself can fail.
func TestRule(t *testing.T) {
	for _, tt := range []struct {
		from, to string
		want     bool
	}{
		{"pkg/daemon", "pkg/verbs", true},
		{"pkg/verbs", "pkg/daemon", false},
		{"pkg/nfs3", "pkg/fusefs", false},
		{"pkg/verbs/softiwarp", "pkg/verbs/verbstest", false},
		{"pkg/xprt", "internal/svcrdma", false},
		{"pkg/daemon", "internal/ganeshatest", false},
		{"pkg/unheard", "pkg/verbs", false},
	} {
		if got := mayImport(tt.from, tt.to); got != tt.want {
			t.Errorf("%s imports %s: %v, want %v", tt.from, tt.to, got, tt.want)
		}
	}
}

// TestDocsNameRealTests holds the docs to the tests and benchmarks that they name.
func TestDocsNameRealTests(t *testing.T) {
	there := map[string]bool{}
	decl := regexp.MustCompile(`(?m)^func ((?:Test|Benchmark|Fuzz)\w+)\(`)
	err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		b, err := os.ReadFile(path)
		for _, m := range decl.FindAllSubmatch(b, -1) {
			there[string(m[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	pages, err := filepath.Glob(filepath.Join(top, "docs", "*.md"))
	if err != nil || len(pages) == 0 {
		t.Fatalf("no pages: %v", err)
	}
	names := 0
	for _, p := range pages {
		b, err := os.ReadFile(p)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range regexp.MustCompile("`((?:Test|Benchmark|Fuzz)[A-Z]\\w+)`").FindAllSubmatch(b, -1) {
			names++
			if !there[string(name[1])] {
				t.Errorf("%s names %s, which there is not", p, name[1])
			}
		}
	}
	if names == 0 {
		t.Error("the docs name no test: the pattern is wrong")
	}
}
