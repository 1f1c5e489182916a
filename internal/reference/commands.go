package reference

import (
	"bytes"
	"fmt"
	"strings"

	"mvdan.cc/sh/v3/syntax"
)

// A Statement is one command line of a block of language sh or console.
type Statement struct {
	Line     int    // in the page
	Text     string // without comments
	Commands [][]string
	// Output is what a console block shows below the command, or "".
	Output string
}

// Statements returns the command lines of a block. Each line of a console block that starts with
// "# " or "$ " is a command line, and the others are its output; lines that end with "\" continue
// on the next one.
func Statements(b *Block) ([]Statement, error) {
	if b.Language == "sh" {
		return parseShell(b.Text, b.Line+1)
	}
	var all []Statement
	lines := strings.SplitAfter(strings.TrimSuffix(b.Text, "\n"), "\n")
	for i := 0; i < len(lines); i++ {
		first := i
		if !strings.HasPrefix(lines[i], "# ") && !strings.HasPrefix(lines[i], "$ ") {
			if len(all) == 0 {
				return nil, fmt.Errorf("%s: output without a command", b)
			}
			all[len(all)-1].Output += lines[i]
			continue
		}
		command := lines[i][2:]
		for strings.HasSuffix(command, "\\\n") && i+1 < len(lines) {
			i++
			command += lines[i]
		}
		more, err := parseShell(command, b.Line+1+first)
		if err != nil {
			return nil, err
		}
		all = append(all, more...)
	}
	return all, nil
}

func parseShell(text string, line int) ([]Statement, error) {
	f, err := syntax.NewParser().Parse(strings.NewReader(text), "")
	if err != nil {
		return nil, fmt.Errorf("line %d: %w", line, err)
	}
	var all []Statement
	for _, s := range f.Stmts {
		st := Statement{Line: line + int(s.Pos().Line()) - 1, Text: printed(s)}
		syntax.Walk(s, func(n syntax.Node) bool {
			if c, ok := n.(*syntax.CallExpr); ok && len(c.Args) > 0 {
				var words []string
				for _, w := range c.Args {
					words = append(words, unquoted(w))
				}
				st.Commands = append(st.Commands, words)
			}
			return true
		})
		all = append(all, st)
	}
	return all, nil
}

// Words returns the words of a command, as the shell splits it.
func Words(command string) ([]string, error) {
	all, err := parseShell(command, 1)
	if err != nil || len(all) != 1 || len(all[0].Commands) == 0 {
		return nil, fmt.Errorf("%q is not one command: %w", command, err)
	}
	return all[0].Commands[0], nil
}

func printed(n syntax.Node) string {
	var b bytes.Buffer
	_ = syntax.NewPrinter(syntax.SingleLine(true)).Print(&b, n) // a Buffer accepts all
	return strings.TrimSpace(b.String())
}

// unquoted returns a word without quotes. Variables and patterns stay.
func unquoted(w *syntax.Word) string {
	var b strings.Builder
	for _, part := range w.Parts {
		switch part := part.(type) {
		case *syntax.Lit:
			b.WriteString(strings.ReplaceAll(part.Value, "\\\n", ""))
		case *syntax.SglQuoted:
			b.WriteString(part.Value)
		case *syntax.DblQuoted:
			for _, inner := range part.Parts {
				b.WriteString(strings.Trim(printed(inner), `"`))
			}
		default:
			b.WriteString(printed(part))
		}
	}
	return b.String()
}
