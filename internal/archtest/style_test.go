package archtest

import (
	"go/scanner"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"
)

const (
	maxCode    = 120 // columns, a tab counts as 4
	maxComment = 100
	maxText    = 100 // Markdown
)

func columns(line string) int {
	return utf8.RuneCountInString(strings.ReplaceAll(line, "\t", "    "))
}

func TestLineLengths(t *testing.T) {
	for _, f := range goFiles(t) {
		for i, line := range strings.Split(string(f.src), "\n") {
			limit := maxCode
			if text, ok := strings.CutPrefix(strings.TrimSpace(line), "//"); ok && wraps(text) {
				limit = maxComment
			}
			if n := columns(line); n > limit {
				t.Errorf("%s:%d has %d columns, want at most %d", f.path, i+1, n, limit)
			}
		}
	}
	for _, page := range files(t, ".md") {
		b, err := os.ReadFile(filepath.Join(root, page))
		if err != nil {
			t.Fatal(err)
		}
		code := false
		for i, line := range strings.Split(string(b), "\n") {
			if strings.HasPrefix(line, "```") {
				code = !code
			}
			if n := columns(line); n > maxText && wraps(line) && !code && !strings.HasPrefix(line, "|") {
				t.Errorf("%s:%d has %d columns, want at most %d", page, i+1, n, maxText)
			}
		}
	}
}

// wraps reports whether a line of text can be broken: directives, indented blocks and single long
// words cannot.
func wraps(text string) bool {
	return strings.Contains(strings.TrimSpace(text), " ") && !strings.HasPrefix(text, "\t") &&
		!strings.HasPrefix(text, "    ") && !strings.HasPrefix(text, "go:")
}

// unwanted are words for which the project uses a plainer one.
var unwanted = regexp.MustCompile(`(?i)\b(octets?|whom|nobody|hence|patience|thereof|` +
	`is no more|are no more|of (its|their|his) own|by whatever hand|so that it does|evil|gentle|liars?)\b`)

func TestWords(t *testing.T) {
	for _, f := range goFiles(t) {
		if f.pkg == "internal/archtest" {
			continue
		}
		for _, text := range texts(t, f) {
			if m := unwanted.FindString(text.value); m != "" {
				t.Errorf("%s:%d: replace %q by a plainer word", f.path, text.line, m)
			}
		}
	}
	for _, page := range files(t, ".md") {
		b, err := os.ReadFile(filepath.Join(root, page))
		if err != nil {
			t.Fatal(err)
		}
		for i, line := range strings.Split(string(b), "\n") {
			if m := unwanted.FindString(line); m != "" {
				t.Errorf("%s:%d: replace %q by a plainer word", page, i+1, m)
			}
		}
	}
}

func TestUnwantedWordsAreFound(t *testing.T) {
	for text, want := range map[string]bool{
		"a message of 4 octets":        true,
		"nobody waits":                 true,
		"a connection that is no more": true,
		"a counter of its own":         true,
		"a message of 4 bytes":         false,
		"the user 'nobodyelse'":        false,
	} {
		if got := unwanted.MatchString(text); got != want {
			t.Errorf("unwanted words found in %q: got %v, want %v", text, got, want)
		}
	}
}

// A text is a comment or a string literal.
type text struct {
	line  int
	value string
}

// texts returns the comments and the string literals of a file.
func texts(t *testing.T, f goFile) []text {
	t.Helper()
	var (
		all  []text
		s    scanner.Scanner
		fset = token.NewFileSet()
		file = fset.AddFile(f.path, -1, len(f.src))
	)
	s.Init(file, f.src, nil, scanner.ScanComments)
	for {
		pos, tok, lit := s.Scan()
		switch tok {
		case token.EOF:
			return all
		case token.COMMENT, token.STRING:
			all = append(all, text{line: fset.Position(pos).Line, value: lit})
		}
	}
}
