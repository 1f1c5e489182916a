package reference

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// A Block is a fenced block of code of a Markdown page.
type Block struct {
	Page     string // such as "docs/mount.md"
	Line     int    // of the fence
	Language string // "" for none
	Text     string
}

func (b *Block) String() string { return fmt.Sprintf("%s:%d", b.Page, b.Line) }

// A Span is inline code of a Markdown page, outside blocks.
type Span struct {
	Page string
	Line int
	Text string
}

// A Page is a parsed Markdown page.
type Page struct {
	Name   string // such as "docs/mount.md"
	Text   string
	Blocks []Block
	Spans  []Span
	// Indented are the indented blocks of code; this project uses fences.
	Indented []Block
	// Headings are the anchors of the headings, as GitHub makes them.
	Headings map[string]bool
}

// Pages returns the pages for users of the module at root: those of the root directory and of docs.
func Pages(root string) ([]*Page, error) {
	var pages []*Page
	for _, pattern := range []string{"*.md", "docs/*.md"} {
		names, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			return nil, err
		}
		for _, name := range names {
			text, err := os.ReadFile(name)
			if err != nil {
				return nil, err
			}
			rel, err := filepath.Rel(root, name)
			if err != nil {
				return nil, err
			}
			pages = append(pages, parsePage(rel, string(text)))
		}
	}
	return pages, nil
}

var (
	inline   = regexp.MustCompile("(?s)`([^`]+)`")
	listItem = regexp.MustCompile(`^ *([-*]|\d+\.) `)
)

func parsePage(name, text string) *Page {
	p := &Page{Name: name, Text: text, Headings: make(map[string]bool)}
	var prose strings.Builder // the lines outside blocks, and empty lines for the others
	fence, list := false, false
	before := ""
	for i, line := range strings.Split(text, "\n") {
		language, isFence := strings.CutPrefix(strings.TrimSpace(line), "```")
		keep := ""
		switch {
		case isFence && !fence:
			fence = true
			p.Blocks = append(p.Blocks, Block{Page: name, Line: i + 1, Language: language})
		case isFence:
			fence = false
		case fence:
			p.Blocks[len(p.Blocks)-1].Text += line + "\n"
		case strings.HasPrefix(line, "    ") && !list:
			if before == "" || len(p.Indented) == 0 {
				p.Indented = append(p.Indented, Block{Page: name, Line: i + 1})
			}
			p.Indented[len(p.Indented)-1].Text += line + "\n"
		default:
			keep = line
			if title := strings.TrimLeft(line, "#"); title != line && strings.HasPrefix(title, " ") {
				p.Headings[anchor(title)] = true
			}
			list = listItem.MatchString(line) || list && (line == "" || strings.HasPrefix(line, " "))
		}
		before = line
		prose.WriteString(keep + "\n")
	}
	// A code span can continue on the next line of its paragraph.
	for _, m := range inline.FindAllStringSubmatchIndex(prose.String(), -1) {
		span := prose.String()[m[2]:m[3]]
		if strings.Contains(span, "\n\n") {
			continue
		}
		p.Spans = append(p.Spans, Span{Page: name, Line: 1 + strings.Count(prose.String()[:m[2]], "\n"),
			Text: strings.Join(strings.Fields(span), " ")})
	}
	return p
}

// anchor returns the anchor that GitHub makes for a heading.
func anchor(title string) string {
	var b strings.Builder
	for _, r := range strings.ToLower(strings.TrimSpace(title)) {
		switch {
		case r == ' ':
			b.WriteByte('-')
		case r == '-' || r == '_' || r >= 'a' && r <= 'z' || r >= '0' && r <= '9':
			b.WriteRune(r)
		}
	}
	return b.String()
}
