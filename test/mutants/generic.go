package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/scanner"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

const gremlins = "github.com/go-gremlins/gremlins/cmd/gremlins@v0.6.0"

// operators are the mutations of gremlins that are off by default.
var operators = []string{"--invert-assignments", "--invert-bitwise", "--invert-bwassign", "--invert-logical",
	"--invert-loopctrl", "--remove-self-assignments"}

// A genericPackage is a package with generic mutants.
type genericPackage struct {
	path    string
	exclude []string // regular expressions: files without mutants
	goal    int      // percent of the mutants to kill
}

var genericPackages = []genericPackage{
	{"pkg/memreg", nil, 90},
	{"pkg/xprt", nil, 90},
	{"pkg/rpcrdma", nil, 90},
	{"pkg/sunrpc", nil, 0},
	// Placement and access checks only.
	{"pkg/verbs/softiwarp", []string{`softiwarp/([^rs].*|s[^t].*)\.go$`}, 0},
}

// A genericMutant is one mutant of gremlins. The fields are those of an equivalent.
type genericMutant struct {
	file, operator string
	nth            int    // 1 for the first mutant of operator in the line
	line           string // source, without spaces around it
}

// An equivalent is a mutant that no test can kill, because the program does what it did before.
type equivalent struct {
	genericMutant
	reason string
}

// readEquivalents reads equivalent.txt. Each of its lines is FILE OPERATOR NTH | LINE | REASON.
func readEquivalents(root string) ([]equivalent, error) {
	path := filepath.Join(root, dir, "equivalent.txt")
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var all []equivalent
	for s, n := bufio.NewScanner(f), 1; s.Scan(); n++ {
		if s.Text() == "" || strings.HasPrefix(s.Text(), "#") {
			continue
		}
		e, err := parseEquivalent(s.Text())
		if err != nil {
			return nil, fmt.Errorf("%s:%d: %w", path, n, err)
		}
		all = append(all, e)
	}
	return all, nil
}

func parseEquivalent(text string) (equivalent, error) {
	parts := strings.Split(text, " | ")
	names := strings.Fields(parts[0])
	if len(parts) < 3 || len(names) != 3 {
		return equivalent{}, fmt.Errorf("%q: want FILE OPERATOR NTH | LINE | REASON", text)
	}
	nth, err := strconv.Atoi(names[2])
	if err != nil {
		return equivalent{}, err
	}
	last := len(parts) - 1
	line := strings.Join(parts[1:last], " | ")
	return equivalent{genericMutant{names[0], names[1], nth, line}, parts[last]}, nil
}

// gremlinsReport is the part of the output of gremlins that this program uses.
type gremlinsReport struct {
	Files []reportFile `json:"files"`
}

type reportFile struct {
	Name      string     `json:"file_name"`
	Mutations []mutation `json:"mutations"`
}

type mutation struct {
	Operator string `json:"type"`
	Status   string `json:"status"`
	Line     int    `json:"line"`
	Column   int    `json:"column"`
}

// runGeneric tests the mutants of one package and prints the score and the survivors. It reports
// whether the score reaches the goal.
func runGeneric(ctx context.Context, p genericPackage, equivalents []equivalent, workers int) (bool, error) {
	tmp, err := os.MkdirTemp("", "gremlins")
	if err != nil {
		return false, err
	}
	defer os.RemoveAll(tmp)
	output := filepath.Join(tmp, "report.json")
	args := append([]string{"run", gremlins, "unleash", "--silent", "--output", output,
		"--workers", strconv.Itoa(workers), "--timeout-coefficient", "10"}, operators...)
	for _, re := range p.exclude {
		args = append(args, "--exclude-files", re)
	}
	fmt.Printf("generic:  %s: gremlins runs\n", p.path)
	cmd := exec.CommandContext(ctx, "go", append(args, "./"+p.path)...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return false, fmt.Errorf("gremlins %s: %w: %s", p.path, err, out)
	}
	data, err := os.ReadFile(output)
	if err != nil {
		return false, err
	}
	var report gremlinsReport
	if err := json.Unmarshal(data, &report); err != nil {
		return false, fmt.Errorf("report of gremlins on %s: %w", p.path, err)
	}
	if err := report.testUncovered(ctx, p); err != nil {
		return false, err
	}
	return score(p, report, equivalents)
}

// testUncovered tests the mutants in constants and in the expressions of case clauses. gremlins
// skips them as not covered, because these are not statements.
func (r gremlinsReport) testUncovered(ctx context.Context, p genericPackage) error {
	for _, f := range r.Files {
		file := filepath.Join(p.path, filepath.Base(f.Name))
		src, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		files := token.NewFileSet()
		tree, err := parser.ParseFile(files, file, src, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		for i := range f.Mutations {
			mu := &f.Mutations[i]
			pos := files.File(tree.Pos()).LineStart(mu.Line) + token.Pos(mu.Column-1)
			if mu.Status != "NOT COVERED" || !isNoStatement(tree, pos) {
				continue
			}
			if mu.Status, err = testMutation(ctx, p, file, src, files.Position(pos).Offset, mu.Operator); err != nil {
				return err
			}
		}
	}
	return nil
}

// isNoStatement reports whether a position is in a constant or in the expressions of a case clause.
func isNoStatement(tree *ast.File, pos token.Pos) (found bool) {
	in := func(n ast.Node) bool { return n.Pos() <= pos && pos < n.End() }
	ast.Inspect(tree, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.GenDecl:
			found = found || n.Tok == token.CONST && in(n)
		case *ast.CaseClause:
			found = found || slices.ContainsFunc(n.List, func(e ast.Expr) bool { return in(e) })
		}
		return n != nil && !found && in(n)
	})
	return found
}

// replacements are the mutations of gremlins, by the name of the mutant operator.
var replacements = map[string]map[string]string{
	"ARITHMETIC_BASE":       {"+": "-", "-": "+", "*": "/", "/": "*", "%": "*"},
	"CONDITIONALS_BOUNDARY": {">": ">=", ">=": ">", "<": "<=", "<=": "<"},
	"CONDITIONALS_NEGATION": {"==": "!=", "!=": "==", "<=": ">", ">": "<=", "<": ">=", ">=": "<"},
	"INVERT_BITWISE":        {"&": "|", "|": "&", "^": "&", "&^": "&", "<<": ">>", ">>": "<<"},
	"INVERT_LOGICAL":        {"&&": "||", "||": "&&"},
	"INVERT_NEGATIVES":      {"-": "+"},
}

// testMutation tests the package with a mutation at an offset of file, and returns the status that
// gremlins would report.
func testMutation(ctx context.Context, p genericPackage, file string, src []byte, offset int, operator string) (string,
	error) {
	var s scanner.Scanner
	files := token.NewFileSet()
	s.Init(files.AddFile(file, -1, len(src)-offset), src[offset:], nil, 0)
	_, tok, _ := s.Scan()
	other := replacements[operator][tok.String()]
	if other == "" {
		return "", fmt.Errorf("%s: no operator for %s at offset %d", file, operator, offset)
	}
	tmp, err := os.MkdirTemp("", "mutant")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(tmp)
	mutated := filepath.Join(tmp, filepath.Base(file))
	text := slices.Concat(src[:offset], []byte(other), src[offset+len(tok.String()):])
	if err := os.WriteFile(mutated, text, 0o644); err != nil {
		return "", err
	}
	original, err := filepath.Abs(file)
	if err != nil {
		return "", err
	}
	overlay, err := writeOverlay(tmp, map[string]string{original: mutated})
	if err != nil {
		return "", err
	}
	out, err := exec.CommandContext(ctx, "go", "test", "-count=1", "-overlay="+overlay, "./"+p.path).CombinedOutput()
	switch {
	case ctx.Err() != nil:
		return "", ctx.Err()
	case err == nil:
		return "LIVED", nil
	case strings.Contains(string(out), "[build failed]"):
		return "NOT VIABLE", nil
	}
	return "KILLED", nil
}

// score prints the survivors that are not equivalent, and the score. A mutant in code that no test
// runs is a survivor. A mutant that does not compile does not count.
func score(p genericPackage, report gremlinsReport, equivalents []equivalent) (bool, error) {
	count := make(map[string]int)
	unused := slices.DeleteFunc(slices.Clone(equivalents), func(e equivalent) bool {
		return filepath.Dir(e.file) != p.path
	})
	for _, f := range report.Files {
		file := filepath.Join(p.path, filepath.Base(f.Name))
		src, err := os.ReadFile(file)
		if err != nil {
			return false, err
		}
		lines := strings.Split(string(src), "\n")
		slices.SortFunc(f.Mutations, func(a, b mutation) int {
			return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Operator, b.Operator),
				cmp.Compare(a.Column, b.Column))
		})
		var last genericMutant
		lastLine := 0
		for _, mu := range f.Mutations {
			m := genericMutant{file, mu.Operator, 1, strings.TrimSpace(lines[mu.Line-1])}
			if mu.Line == lastLine && m.operator == last.operator {
				m.nth = last.nth + 1
			}
			last, lastLine = m, mu.Line
			is := func(e equivalent) bool { return e.genericMutant == m }
			switch mu.Status {
			case "LIVED", "NOT COVERED":
				if i := slices.IndexFunc(unused, is); i >= 0 { // one for each of several equal lines
					unused = slices.Delete(unused, i, i+1)
					mu.Status = "EQUIVALENT"
					break
				}
				fmt.Printf("generic:  %-11s %s:%d: %s %d | %s\n", mu.Status, file, mu.Line, m.operator, m.nth, m.line)
			}
			count[mu.Status]++
		}
	}
	for _, e := range unused {
		fmt.Printf("generic:  not a survivor: %s %s %d | %s; remove the line from equivalent.txt\n",
			e.file, e.operator, e.nth, e.line)
	}
	dead := count["KILLED"] + count["TIMED OUT"]
	all := dead + count["LIVED"] + count["NOT COVERED"]
	if all == 0 {
		return false, fmt.Errorf("gremlins found no mutants in %s", p.path)
	}
	fmt.Printf("generic:  %s: %d of %d killed (%d %%, goal %d %%); %d of these by a timeout; "+
		"%d survived, %d not covered, %d equivalent, %d do not compile\n", p.path, dead, all, 100*dead/all, p.goal,
		count["TIMED OUT"], count["LIVED"], count["NOT COVERED"], count["EQUIVALENT"], count["NOT VIABLE"])
	return 100*dead >= p.goal*all && len(unused) == 0, nil
}
