package archtest

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"
)

func TestPackagesHavePages(t *testing.T) {
	documented := make(map[string]bool)
	for _, f := range goFiles(t) {
		if !f.test {
			documented[f.pkg] = documented[f.pkg] || f.syntax.Doc != nil
		}
	}
	for pkg, ok := range documented {
		if !ok {
			t.Errorf("package %s has no package comment", pkg)
		}
	}
}

func TestDocumentsNameExistingTests(t *testing.T) {
	declared := declaredTests(t)
	names := 0
	for _, page := range files(t, ".md") {
		b, err := os.ReadFile(filepath.Join(root, page))
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range regexp.MustCompile("`((?:Test|Benchmark|Fuzz)[A-Z]\\w+)`").FindAllSubmatch(b, -1) {
			names++
			if !declared[string(name[1])] && page != "CONTRIBUTING.md" {
				t.Errorf("%s names %s, which does not exist", page, name[1])
			}
		}
	}
	if names == 0 {
		t.Error("the documents name no test; the pattern is wrong")
	}
}

func TestMakefileNamesExistingTests(t *testing.T) {
	declared := declaredTests(t)
	b, err := os.ReadFile(filepath.Join(root, "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	names := regexp.MustCompile(`\bTest[A-Z]\w+`).FindAllString(string(b), -1)
	for _, name := range names {
		if !declared[name] {
			t.Errorf("Makefile runs %s, which does not exist", name)
		}
	}
	if len(names) == 0 {
		t.Error("the Makefile names no test; the pattern is wrong")
	}
}

// declaredTests returns the names of all tests, benchmarks and fuzz targets.
func declaredTests(t *testing.T) map[string]bool {
	t.Helper()
	declared := make(map[string]bool)
	decl := regexp.MustCompile(`(?m)^func ((?:Test|Benchmark|Fuzz)\w+)\(`)
	for _, f := range goFiles(t) {
		for _, m := range decl.FindAllSubmatch(f.src, -1) {
			declared[string(m[1])] = true
		}
	}
	return declared
}
