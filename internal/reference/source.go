package reference

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Unknown stands in a text for a part that the source computes.
const Unknown = "…"

// testPackages are packages of tests in the directories of the program.
var testPackages = []string{"internal/archtest", "test/kit/ganesha", "test/kit/hostile", "test/kit/mounts",
	"test/kit/power", "internal/reference", "test/kit/server", "test/kit/systemd", "test/kit",
	"pkg/verbs/verbstest"}

// A Source is the parsed source of the program, without tests.
type Source struct {
	fset     *token.FileSet
	packages []*sourcePackage
	// constants are the string constants of all packages, by "package.Name".
	constants map[string]string
}

type sourcePackage struct {
	dir   string // such as "pkg/mount"
	files []*ast.File
}

// Parse parses the packages below cmd, internal and pkg of the module at root.
func Parse(root string) (*Source, error) {
	s := &Source{fset: token.NewFileSet(), constants: make(map[string]string)}
	for _, top := range []string{"cmd", "internal", "pkg"} {
		err := filepath.WalkDir(filepath.Join(root, top), func(path string, e fs.DirEntry, err error) error {
			if err != nil || !e.IsDir() {
				return err
			}
			dir, err := filepath.Rel(root, path)
			if err != nil {
				return err
			}
			if slices.Contains(testPackages, dir) || e.Name() == "testdata" {
				return filepath.SkipDir
			}
			return s.parseDir(dir, path)
		})
		if err != nil {
			return nil, err
		}
	}
	for _, p := range s.packages {
		s.addConstants(p)
	}
	return s, nil
}

func (s *Source) parseDir(dir, path string) error {
	names, err := filepath.Glob(filepath.Join(path, "*.go"))
	if err != nil {
		return err
	}
	p := &sourcePackage{dir: dir}
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(s.fset, name, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		p.files = append(p.files, f)
	}
	if len(p.files) > 0 {
		s.packages = append(s.packages, p)
	}
	return nil
}

// addConstants adds the string constants that p declares outside functions.
func (s *Source) addConstants(p *sourcePackage) {
	for _, f := range p.files {
		for _, d := range f.Decls {
			g, ok := d.(*ast.GenDecl)
			if !ok || g.Tok != token.CONST {
				continue
			}
			for _, spec := range g.Specs {
				v := spec.(*ast.ValueSpec)
				for i, value := range v.Values {
					if text := s.text(f, value); !strings.Contains(text, Unknown) {
						s.constants[f.Name.Name+"."+v.Names[i].Name] = text
					}
				}
			}
		}
	}
}

// text returns the value of a string expression in f, with [Unknown] for each part that is not
// constant.
func (s *Source) text(f *ast.File, e ast.Expr) string {
	switch e := e.(type) {
	case *ast.BasicLit:
		if e.Kind == token.STRING {
			if text, err := strconv.Unquote(e.Value); err == nil {
				return text
			}
		}
	case *ast.BinaryExpr:
		if e.Op == token.ADD {
			return strings.ReplaceAll(s.text(f, e.X)+s.text(f, e.Y), Unknown+Unknown, Unknown)
		}
	case *ast.ParenExpr:
		return s.text(f, e.X)
	case *ast.Ident:
		if text, ok := s.constants[f.Name.Name+"."+e.Name]; ok {
			return text
		}
	case *ast.SelectorExpr:
		if x, ok := e.X.(*ast.Ident); ok {
			if text, ok := s.constants[x.Name+"."+e.Sel.Name]; ok {
				return text
			}
		}
	}
	return Unknown
}

// Texts returns all texts of the program: each string literal and each sum of strings, with
// [Unknown] for the parts that are not constant. Verbs of package fmt stay.
func (s *Source) Texts() []string {
	var all []string
	for _, p := range s.packages {
		for _, f := range p.files {
			ast.Inspect(f, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.ImportSpec:
					return false
				case *ast.BinaryExpr:
					if n.Op == token.ADD {
						all = append(all, s.text(f, n))
					}
				case *ast.BasicLit:
					if n.Kind == token.STRING {
						all = append(all, s.text(f, n))
					}
				}
				return true
			})
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// position returns the file and the line of n, for errors.
func (s *Source) position(n ast.Node) string { return s.fset.Position(n.Pos()).String() }

// lastName returns the name at the end of a selector: "log" of s.shared.log.
func lastName(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		return e.Sel.Name
	}
	return ""
}
