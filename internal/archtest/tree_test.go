package archtest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

const (
	module = "github.com/nfsrdmad/nfsrdmad"
	root   = "../.."
)

// A goFile is one parsed Go file of the repository.
type goFile struct {
	path    string // from the root of the repository
	pkg     string // its directory
	test    bool
	src     []byte
	syntax  *ast.File
	fset    *token.FileSet
	imports []string // packages of this module
}

// goFiles returns all Go files of the repository.
func goFiles(t *testing.T) []goFile {
	t.Helper()
	var all []goFile
	for _, path := range files(t, ".go") {
		src, err := os.ReadFile(filepath.Join(root, path))
		if err != nil {
			t.Fatal(err)
		}
		fset := token.NewFileSet()
		syntax, err := parser.ParseFile(fset, path, src, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		f := goFile{path: path, pkg: filepath.ToSlash(filepath.Dir(path)), src: src, syntax: syntax, fset: fset,
			test: strings.HasSuffix(path, "_test.go")}
		for _, spec := range syntax.Imports {
			p, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				t.Fatal(err)
			}
			if in, ok := strings.CutPrefix(p, module+"/"); ok {
				f.imports = append(f.imports, in)
			}
		}
		all = append(all, f)
	}
	if len(all) < 100 {
		t.Fatalf("found %d Go files; want the whole repository", len(all))
	}
	return all
}

// files returns the files of the repository whose names end in suffix. It leaves out directories
// that do not belong to the source: hidden ones, testdata, bin and dist.
func files(t *testing.T, suffix string) []string {
	t.Helper()
	var all []string
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			switch name := d.Name(); {
			case path == root:
				return nil
			case strings.HasPrefix(name, "."), name == "testdata", name == "bin", name == "dist":
				return fs.SkipDir
			}
			return nil
		}
		if strings.HasSuffix(path, suffix) {
			rel, err := filepath.Rel(root, path)
			if err != nil {
				return err
			}
			all = append(all, filepath.ToSlash(rel))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}
