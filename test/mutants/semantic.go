package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
)

// dir is the directory of this program in the repository.
const dir = "test/mutants"

// testTimeout ends the test of a mutant that blocks. It is long, because it must not end a test
// that would fail for the right reason.
const testTimeout = "3m"

// A mutant is one semantic mutant. Each of its fields is a line in the header of the patch.
type mutant struct {
	name  string // memreg/shared-lock
	row   string // row of docs/features.md: S2
	pkg   string // package whose test must fail: pkg/memreg
	test  string // the test that must fail, as for go test -run without ^ and $
	flags string // further flags of go test: -race
	fault string // what is wrong, in one sentence
	files []string
	patch []byte
}

// readMutants returns the mutants of the repository at root, sorted by name.
func readMutants(root string) ([]mutant, error) {
	paths, err := filepath.Glob(filepath.Join(root, dir, "*", "*.patch"))
	if err != nil {
		return nil, err
	}
	var all []mutant
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		name := filepath.Join(filepath.Base(filepath.Dir(path)), strings.TrimSuffix(filepath.Base(path), ".patch"))
		m, err := parseMutant(name, data)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		all = append(all, m)
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("no patches in %s; run this program in the root of the repository",
			filepath.Join(root, dir))
	}
	return all, nil
}

// parseMutant reads a patch. Its header has lines "Key: value" before the first "diff" line.
func parseMutant(name string, data []byte) (mutant, error) {
	m := mutant{name: name, patch: data}
	fields := map[string]*string{"Row": &m.row, "Package": &m.pkg, "Test": &m.test, "Flags": &m.flags,
		"Mutant": &m.fault}
	header := true
	for line := range strings.Lines(string(data)) {
		line = strings.TrimRight(line, "\n")
		if file, ok := strings.CutPrefix(line, "+++ b/"); ok {
			m.files = append(m.files, file)
		}
		header = header && !strings.HasPrefix(line, "diff ")
		if !header || line == "" {
			continue
		}
		key, value, ok := strings.Cut(line, ": ")
		if !ok || fields[key] == nil {
			return m, fmt.Errorf("header line %q: want Row, Package, Test, Flags or Mutant, a colon and a value", line)
		}
		*fields[key] = value
	}
	m.pkg = strings.TrimPrefix(m.pkg, "./")
	for _, key := range []string{"Row", "Package", "Test", "Mutant"} {
		if *fields[key] == "" {
			return m, fmt.Errorf("no line %q in the header", key+": ...")
		}
	}
	if len(m.files) == 0 {
		return m, errors.New(`no line "+++ b/FILE" in the patch`)
	}
	return m, nil
}

// overlay applies the patch to copies of its files below tmp. It returns the path of a file for the
// flag -overlay of the go command, with which the tree itself stays as it is.
func (m mutant) overlay(ctx context.Context, root, tmp string) (string, error) {
	root, err := filepath.Abs(root)
	if err != nil {
		return "", err
	}
	replace := make(map[string]string)
	for _, file := range m.files {
		data, err := os.ReadFile(filepath.Join(root, file))
		if err != nil {
			return "", err
		}
		mutated := filepath.Join(tmp, file)
		if err := os.MkdirAll(filepath.Dir(mutated), 0o755); err != nil {
			return "", err
		}
		if err := os.WriteFile(mutated, data, 0o644); err != nil {
			return "", err
		}
		replace[filepath.Join(root, file)] = mutated
	}
	apply := exec.CommandContext(ctx, "git", "apply", "-")
	apply.Dir, apply.Stdin = tmp, bytes.NewReader(m.patch)
	if out, err := apply.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%s: git apply: %w: %s; write the patch again for the code of today", m.name, err, out)
	}
	return writeOverlay(tmp, replace)
}

// writeOverlay writes a file for the flag -overlay, in which the keys of replace are the original
// files. It returns the path of the file.
func writeOverlay(tmp string, replace map[string]string) (string, error) {
	data, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	path := filepath.Join(tmp, "overlay.json")
	return path, os.WriteFile(path, data, 0o644)
}

// goTest returns the arguments of the go command that runs the test of m.
func (m mutant) goTest(overlay string) []string {
	var elements []string
	for element := range strings.SplitSeq(m.test, "/") {
		elements = append(elements, "^"+element+"$")
	}
	args := []string{"test", "-v", "-count=1", "-timeout=" + testTimeout, "-run=" + strings.Join(elements, "/")}
	if overlay != "" {
		args = append(args, "-overlay="+overlay)
	}
	return append(append(args, strings.Fields(m.flags)...), "./"+m.pkg)
}

type verdict string

const (
	killed     verdict = "killed"
	survived   verdict = "SURVIVED"
	timedOut   verdict = "TIMED OUT" // does not count as killed
	notBuilt   verdict = "DOES NOT COMPILE"
	notStarted verdict = "TEST DOES NOT RUN" // no such test, or it skips
)

// judge reads the output of go test -v. err is the error of the command.
func judge(test, out string, err error) verdict {
	top, _, _ := strings.Cut(test, "/")
	switch {
	case strings.Contains(out, "[build failed]"), strings.Contains(out, "[setup failed]"):
		return notBuilt
	case strings.Contains(out, "panic: test timed out"):
		return timedOut
	case strings.Contains(out, "--- SKIP: "+top+" ("), !strings.Contains(out, "=== RUN   "+top+"\n"):
		return notStarted
	case err != nil:
		return killed
	}
	return survived
}

// A result is the verdict on one mutant.
type result struct {
	mutant
	verdict verdict
	out     string // of go test
	err     error
}

// runSemantic tests the mutants whose name matches re and prints each verdict. It reports whether
// all are killed. Each test must first pass on the unchanged code.
func runSemantic(ctx context.Context, mutants []mutant, re *regexp.Regexp, workers int) (bool, error) {
	mutants = slices.DeleteFunc(mutants, func(m mutant) bool { return !re.MatchString(m.name) })
	if len(mutants) == 0 {
		return false, fmt.Errorf("-run %s: no semantic mutant has such a name", re)
	}
	var unchanged []mutant // one for each test
	for _, m := range mutants {
		if !slices.ContainsFunc(unchanged, func(u mutant) bool { return slices.Equal(u.goTest(""), m.goTest("")) }) {
			unchanged = append(unchanged, m)
		}
	}
	fmt.Printf("semantic: %d tests on unchanged code\n", len(unchanged))
	var errs []error
	for r := range try(ctx, unchanged, mutant.runUnchanged, workers) {
		if r.verdict != survived {
			errs = append(errs, fmt.Errorf("%s %s: %s on unchanged code:\n%s", r.pkg, r.test, r.verdict, r.out))
		}
	}
	if err := errors.Join(append(errs, ctx.Err())...); err != nil {
		return false, err
	}
	dead := 0
	for r := range try(ctx, mutants, mutant.runMutated, workers) {
		if r.err != nil {
			errs = append(errs, r.err)
			continue
		}
		fmt.Printf("semantic: %-9s %-4s %s: %s (%s)\n", r.verdict, r.row, r.name, r.fault, r.test)
		switch r.verdict {
		case killed:
			dead++
		case notBuilt, notStarted:
			fmt.Print(r.out)
		}
	}
	fmt.Printf("semantic: %d of %d mutants killed\n", dead, len(mutants))
	return dead == len(mutants), errors.Join(append(errs, ctx.Err())...)
}

// try calls run for each mutant, for several at the same time.
func try(ctx context.Context, mutants []mutant, run func(mutant, context.Context) result, workers int) <-chan result {
	results := make(chan result)
	go func() {
		defer close(results)
		var wg sync.WaitGroup
		defer wg.Wait()
		places := make(chan struct{}, max(workers, 1))
		for _, m := range mutants {
			places <- struct{}{}
			wg.Go(func() {
				results <- run(m, ctx)
				<-places
			})
		}
	}()
	return results
}

func (m mutant) runMutated(ctx context.Context) result {
	tmp, err := os.MkdirTemp("", "mutant")
	if err != nil {
		return result{mutant: m, err: err}
	}
	defer os.RemoveAll(tmp)
	overlay, err := m.overlay(ctx, ".", tmp)
	if err != nil {
		return result{mutant: m, err: err}
	}
	return m.run(ctx, overlay)
}

func (m mutant) runUnchanged(ctx context.Context) result { return m.run(ctx, "") }

func (m mutant) run(ctx context.Context, overlay string) result {
	out, err := exec.CommandContext(ctx, "go", m.goTest(overlay)...).CombinedOutput()
	return result{mutant: m, verdict: judge(m.test, string(out), err), out: string(out)}
}
