// Package mutants checks that tests fail when the code that they test is wrong.
//
// Each patch below this directory is a mutant: the code with one fault, written by hand for a row of
// docs/features.md. Its header names the row, the package, the test that must fail, and the fault:
//
//	Row: S3
//	Package: pkg/memreg
//	Test: TestMapLayout
//	Mutant: An MR has one page more than the device allows.
//
// An optional line "Flags:" adds flags of go test, for example -race. `make test` checks that the
// patches apply and that every row has one. `make mutants` runs their tests.
package mutants

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

const root = "../.."

// rows is the number of rows of docs/features.md, S1 to S25.
const rows = 25

// testTimeout ends the test of a mutant that blocks. A test that ends this way has not found the
// fault, so the timeout is long.
const testTimeout = "5m"

// TestPatchesApply checks that each mutant fits the current code: its patch applies, its package
// declares its test, and each row has at least one mutant.
func TestPatchesApply(t *testing.T) {
	kit.NeedsPrograms(t, "git")
	found := make(map[string]bool)
	for _, m := range readMutants(t) {
		m.overlay(t)
		found[m.header["Row"]] = true
		if test, _, _ := strings.Cut(m.header["Test"], "/"); !declares(t, m.header["Package"], test) {
			t.Errorf("%s: %s has no %s", m.name, m.header["Package"], test)
		}
	}
	for i := range rows {
		if row := fmt.Sprintf("S%d", i+1); !found[row] {
			t.Errorf("row %s has no mutant", row)
		}
	}
}

// TestMutantsAreKilled runs the test of each mutant, first on the unchanged code, where it must pass,
// and then on the mutant, where it must fail.
func TestMutantsAreKilled(t *testing.T) {
	if os.Getenv("NFSRDMAD_MUTANTS") == "" {
		t.Skip("takes ten minutes; run make mutants")
	}
	unchanged := make(map[string]bool)
	for _, m := range readMutants(t) {
		if args := strings.Join(m.goTest(), " "); !unchanged[args] {
			unchanged[args] = true
			if out, err := m.run(); err != nil {
				t.Fatalf("go %s fails on the unchanged code: %v\n%s", args, err, out)
			}
		}
		t.Run(m.name, func(t *testing.T) {
			out, err := m.run("-overlay=" + m.overlay(t))
			switch {
			case err == nil:
				t.Errorf("survived: %s", m.header["Mutant"])
			case strings.Contains(out, "[build failed]"), strings.Contains(out, "panic: test timed out"),
				!strings.Contains(out, "--- FAIL: ") && !strings.Contains(out, "panic: "):
				t.Errorf("the test has not found the fault: %v\n%s", err, out)
			}
		})
	}
}

// A mutant is one patch.
type mutant struct {
	name   string            // memreg/shared-lock
	header map[string]string // the values of the header by their keys
	files  []string          // the files that the patch changes
	patch  []byte
}

// readMutants returns the mutants, sorted by name.
func readMutants(t *testing.T) []mutant {
	t.Helper()
	paths, err := filepath.Glob("*/*.patch")
	kit.Must(t, err)
	var all []mutant
	for _, path := range paths {
		patch, err := os.ReadFile(path)
		kit.Must(t, err)
		m := mutant{name: strings.TrimSuffix(path, ".patch"), header: make(map[string]string), patch: patch}
		header, _, _ := strings.Cut(string(patch), "\n\n")
		for line := range strings.Lines(header) {
			key, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
			m.header[key] = value
		}
		for _, key := range []string{"Row", "Package", "Test", "Mutant"} {
			if m.header[key] == "" {
				t.Fatalf("%s: no line %q in the header", path, key+": ...")
			}
		}
		for line := range strings.Lines(string(patch)) {
			if file, ok := strings.CutPrefix(line, "+++ b/"); ok {
				m.files = append(m.files, strings.TrimSpace(file))
			}
		}
		all = append(all, m)
	}
	return all
}

// overlay applies the patch to copies of its files. It returns the path of a file for the flag
// -overlay of the go command, with which the tree itself does not change.
func (m mutant) overlay(t *testing.T) string {
	t.Helper()
	tmp, top := t.TempDir(), filepath.Dir(filepath.Dir(workingDirectory(t)))
	replace := make(map[string]string)
	for _, file := range m.files {
		mutated := filepath.Join(tmp, file)
		kit.Must(t, os.MkdirAll(filepath.Dir(mutated), 0o755))
		src, err := os.ReadFile(filepath.Join(top, file))
		kit.Must(t, err)
		kit.Must(t, os.WriteFile(mutated, src, 0o644))
		replace[filepath.Join(top, file)] = mutated
	}
	apply := exec.Command("git", "apply", "-")
	apply.Dir, apply.Stdin = tmp, bytes.NewReader(m.patch)
	if out, err := apply.CombinedOutput(); err != nil {
		t.Fatalf("%s: git apply: %v: %s; write the patch again for the current code", m.name, err, out)
	}
	data, err := json.Marshal(map[string]any{"Replace": replace})
	kit.Must(t, err)
	path := filepath.Join(tmp, "overlay.json")
	kit.Must(t, os.WriteFile(path, data, 0o644))
	return path
}

// goTest returns the arguments of the go command that runs the test of m.
func (m mutant) goTest(flags ...string) []string {
	run := "^" + strings.ReplaceAll(m.header["Test"], "/", "$/^") + "$"
	args := append([]string{"test", "-count=1", "-timeout=" + testTimeout, "-run=" + run}, flags...)
	return append(append(args, strings.Fields(m.header["Flags"])...), "./"+m.header["Package"])
}

func (m mutant) run(flags ...string) (out string, err error) {
	cmd := exec.Command("go", m.goTest(flags...)...)
	cmd.Dir = root
	b, err := cmd.CombinedOutput()
	if err == nil && strings.Contains(string(b), "[no tests to run]") {
		err = fmt.Errorf("no test %s", m.header["Test"])
	}
	return string(b), err
}

// declares reports whether a package has a test.
func declares(t *testing.T, pkg, test string) bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(root, pkg, "*_test.go"))
	kit.Must(t, err)
	for _, file := range files {
		src, err := os.ReadFile(file)
		kit.Must(t, err)
		if strings.Contains(string(src), "\nfunc "+test+"(") {
			return true
		}
	}
	return false
}

func workingDirectory(t *testing.T) string {
	t.Helper()
	dir, err := os.Getwd()
	kit.Must(t, err)
	return dir
}
