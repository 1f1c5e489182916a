package main

import (
	"errors"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

const root = "../.."

// TestPatchesApply checks that every semantic mutant fits the code of today: its patch applies, its
// test exists, and docs/features.md names it in its row.
func TestPatchesApply(t *testing.T) {
	kit.NeedsPrograms(t, "git")
	mutants, err := readMutants(root)
	if err != nil {
		t.Fatal(err)
	}
	features, err := os.ReadFile(filepath.Join(root, "docs/features.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range mutants {
		t.Run(m.name, func(t *testing.T) {
			if _, err := m.overlay(t.Context(), root, t.TempDir()); err != nil {
				t.Error(err)
			}
			if top, _, _ := strings.Cut(m.test, "/"); !declares(t, m.pkg, top) {
				t.Errorf("%s has no %s", m.pkg, top)
			}
			row := regexp.MustCompile(`(?m)^\| ` + m.row + ` \|.*` + "`" + regexp.QuoteMeta(m.name) + "`")
			if !row.Match(features) {
				t.Errorf("row %s of docs/features.md does not name `%s`", m.row, m.name)
			}
		})
	}
}

func declares(t *testing.T, pkg, test string) bool {
	files, err := filepath.Glob(filepath.Join(root, pkg, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		src, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(src), "\nfunc "+test+"(") {
			return true
		}
	}
	return false
}

// TestEquivalentsExist checks that each line of equivalent.txt quotes a line of its file.
func TestEquivalentsExist(t *testing.T) {
	equivalents, err := readEquivalents(root)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range equivalents {
		src, err := os.ReadFile(filepath.Join(root, e.file))
		if err != nil {
			t.Error(err)
			continue
		}
		quoted := false
		for line := range strings.Lines(string(src)) {
			quoted = quoted || strings.TrimSpace(line) == e.line
		}
		if !quoted {
			t.Errorf("%s has no line %q", e.file, e.line)
		}
	}
}

func TestJudge(t *testing.T) {
	failed := errors.New("exit status 1")
	for _, c := range []struct {
		name, out string
		err       error
		want      verdict
	}{
		{"passes", "=== RUN   TestX\n--- PASS: TestX (0.00s)\nPASS\nok", nil, survived},
		{"fails", "=== RUN   TestX\n--- FAIL: TestX (0.00s)\nFAIL", failed, killed},
		{"panics", "=== RUN   TestX\npanic: index out of range", failed, killed},
		{"blocks", "=== RUN   TestX\npanic: test timed out after 3m0s", failed, timedOut},
		{"skips", "=== RUN   TestX\n--- SKIP: TestX (0.00s)\nPASS\nok", nil, notStarted},
		{"no such test", "testing: warning: no tests to run\nPASS\nok", nil, notStarted},
		{"does not compile", "# pkg\nx.go:1: undefined: y\nFAIL pkg [build failed]", failed, notBuilt},
	} {
		if got := judge("TestX/case", c.out, c.err); got != c.want {
			t.Errorf("%s: got %s, want %s", c.name, got, c.want)
		}
	}
}

func TestParseMutantRejectsInvalidHeaders(t *testing.T) {
	const header = "Row: S1\nPackage: pkg/memreg\nTest: TestX\nMutant: Nothing works.\n\n"
	const patch = "diff --git a/f b/f\n--- a/f\n+++ b/f\n"
	if m, err := parseMutant("a/b", []byte(header+patch)); err != nil || m.row != "S1" || len(m.files) != 1 {
		t.Errorf("got %+v, error %v", m, err)
	}
	for name, data := range map[string]string{
		"no test":     strings.Replace(header, "Test: TestX\n", "", 1) + patch,
		"unknown key": "Color: red\n" + header + patch,
		"free text":   "This breaks everything.\n" + header + patch,
		"no file":     header + "diff --git a/f b/f\n",
	} {
		if m, err := parseMutant("a/b", []byte(data)); err == nil {
			t.Errorf("%s: got %+v, want an error", name, m)
		}
	}
}

// TestConstantsAreTested checks that mutants in constants are tested again, and that mutants in
// statements are not.
func TestConstantsAreTested(t *testing.T) {
	t.Chdir(root)
	const name = "pkg/rpcrdma/private.go"
	src, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	at := func(text string) (line, column int) {
		before, _, found := strings.Cut(string(src), text)
		if !found {
			t.Fatalf("%s has no %q", name, text)
		}
		return 1 + strings.Count(before, "\n"), len(before) - strings.LastIndex(before, "\n")
	}
	constant, column := at("* 1024 // maximum")
	statement, otherColumn := at("- 1)\n}")
	r := gremlinsReport{Files: []reportFile{{name, []mutation{
		{"ARITHMETIC_BASE", "NOT COVERED", constant, column},
		{"ARITHMETIC_BASE", "NOT COVERED", statement, otherColumn},
		{"ARITHMETIC_BASE", "LIVED", constant, column},
	}}}}
	if err := r.testUncovered(t.Context(), genericPackage{path: "pkg/rpcrdma"}); err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{"KILLED", "NOT COVERED", "LIVED"} {
		if got := r.Files[0].Mutations[i].Status; got != want {
			t.Errorf("mutation %d: got %s, want %s", i, got, want)
		}
	}
	r.Files[0].Mutations[0] = mutation{"INVERT_LOGICAL", "NOT COVERED", constant, column}
	if err := r.testUncovered(t.Context(), genericPackage{path: "pkg/rpcrdma"}); err == nil {
		t.Error("an operator that the line does not have: got no error")
	}
}

// TestIsNoStatement checks the positions of the operators + in a file.
func TestIsNoStatement(t *testing.T) {
	const src = `package p

const c = 1 + 2

var v = 3 + 4

func f(x int) int {
	const d = 5 + 6
	switch {
	case x == 7+8, x < 9:
		return x + 10
	case x > 11:
		switch x {
		case 12 + x:
		}
	}
	return x + 13
}
`
	files := token.NewFileSet()
	tree, err := parser.ParseFile(files, "p.go", src, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	var got []bool
	for offset, c := range src {
		if c == '+' {
			got = append(got, isNoStatement(tree, files.File(tree.Pos()).Pos(offset)))
		}
	}
	if want := []bool{true, false, true, true, false, true, false}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// TestScore checks that survivors lower the score, that equivalents do not, and that an equivalent
// that no longer survives is reported.
func TestScore(t *testing.T) {
	t.Chdir(root)
	p := genericPackage{path: "pkg/rpcrdma", goal: 50}
	report := func(statuses ...string) (r gremlinsReport) {
		r.Files = []reportFile{{Name: "pkg/rpcrdma/doc.go"}}
		for _, s := range statuses {
			r.Files[0].Mutations = append(r.Files[0].Mutations, mutation{"ARITHMETIC_BASE", s, 1, 1})
		}
		return r
	}
	src, err := os.ReadFile("pkg/rpcrdma/doc.go")
	if err != nil {
		t.Fatal(err)
	}
	first, _, _ := strings.Cut(string(src), "\n")
	second := equivalent{genericMutant{"pkg/rpcrdma/doc.go", "ARITHMETIC_BASE", 2, first}, "for this test"}
	for _, c := range []struct {
		name        string
		report      gremlinsReport
		equivalents []equivalent
		want        bool
	}{
		{"half killed", report("KILLED", "LIVED"), nil, true},
		{"not covered is not killed", report("KILLED", "LIVED", "NOT COVERED"), nil, false},
		{"timeout kills", report("TIMED OUT", "LIVED"), nil, true},
		{"the second is equivalent", report("KILLED", "LIVED", "LIVED"), []equivalent{second}, true},
		{"one of two equal equivalents", report("KILLED", "LIVED", "LIVED"), []equivalent{second, second}, false},
		{"the equivalent is killed", report("KILLED", "KILLED"), []equivalent{second}, false},
		{"equivalent of another package", report("KILLED"),
			[]equivalent{{genericMutant{file: "pkg/xprt/x.go"}, ""}}, true},
	} {
		if got, err := score(p, c.report, c.equivalents); got != c.want || err != nil {
			t.Errorf("%s: got %v, error %v; want %v", c.name, got, err, c.want)
		}
	}
	if _, err := score(p, gremlinsReport{}, nil); err == nil {
		t.Error("no mutants: got no error")
	}
}
