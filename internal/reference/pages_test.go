package reference

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// pages returns the pages for users.
func pages(t *testing.T) []*Page {
	t.Helper()
	all, err := Pages("../..")
	if err != nil {
		t.Fatal(err)
	}
	if len(all) < 15 {
		t.Fatalf("got %d pages, want those of docs", len(all))
	}
	return all
}

var link = regexp.MustCompile(`\]\(([^)\s]+)\)`)

// TestLinks checks that each link inside the project leads to a file, and to a heading of its page.
func TestLinks(t *testing.T) {
	headings := make(map[string]map[string]bool)
	for _, p := range pages(t) {
		headings[p.Name] = p.Headings
	}
	n := 0
	for _, p := range pages(t) {
		for _, m := range link.FindAllStringSubmatch(p.Text, -1) {
			file, section, _ := strings.Cut(m[1], "#")
			if strings.Contains(file, "://") {
				continue
			}
			n++
			target := p.Name
			if file != "" {
				target = filepath.Join(filepath.Dir(p.Name), file)
			}
			if _, err := os.Stat(filepath.Join("../..", target)); err != nil {
				t.Errorf("%s links to %s, which does not exist", p.Name, m[1])
			}
			if section != "" && !headings[target][section] {
				t.Errorf("%s links to %s, but %s has no such heading", p.Name, m[1], target)
			}
		}
	}
	if n < 50 {
		t.Errorf("got %d links, want more; the pattern is wrong", n)
	}
}

// TestReadmeListsAllPages checks that the README links to each page of docs.
func TestReadmeListsAllPages(t *testing.T) {
	readme := ""
	for _, p := range pages(t) {
		if p.Name == "README.md" {
			readme = p.Text
		}
	}
	for _, p := range pages(t) {
		if strings.HasPrefix(p.Name, "docs/") && !strings.Contains(readme, "]("+p.Name+")") {
			t.Errorf("README.md has no link to %s", p.Name)
		}
	}
}

// named matches names of pages and sections in files that are not Markdown.
var named = regexp.MustCompile(`docs/([a-z]+\.md)(?:, "([^"]+)")?`)

// TestSourceNamesExistingSections checks the names of pages, and of their sections, in the source,
// the configuration and the scripts.
func TestSourceNamesExistingSections(t *testing.T) {
	headings := make(map[string]map[string]bool)
	for _, p := range pages(t) {
		headings[p.Name] = p.Headings
	}
	n := 0
	for _, top := range []string{"cmd", "configs", "deploy", "internal", "pkg", "Makefile"} {
		err := filepath.WalkDir(filepath.Join("../..", top), func(path string, e os.DirEntry, err error) error {
			if err != nil || e.IsDir() {
				return err
			}
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			for _, m := range named.FindAllStringSubmatch(string(text), -1) {
				n++
				page := headings["docs/"+m[1]]
				if page == nil || m[2] != "" && !page[anchor(m[2])] {
					t.Errorf("%s names %s, which does not exist", path, m[0])
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if n < 10 {
		t.Errorf("got %d names of pages, want more; the pattern is wrong", n)
	}
}

// TestBlocksOfCodeHaveFences checks that pages show commands in fenced blocks with a language, as
// the tests of commands expect.
func TestBlocksOfCodeHaveFences(t *testing.T) {
	languages := []string{"sh", "console", "text", "fstab", "toml", "yaml"}
	for _, p := range pages(t) {
		for _, b := range p.Indented {
			t.Errorf("%s: indented block; use a fence", &b)
		}
		for _, b := range p.Blocks {
			if !slices.Contains(languages, b.Language) {
				t.Errorf("%s: block with language %q; use one of %q", &b, b.Language, languages)
			}
		}
	}
}

func TestParsePage(t *testing.T) {
	p := parsePage("x.md", "# A `b` c!\n\ntext `one\ntwo`\n\n    indented\n\n- item\n\n    more\n\n"+
		"```sh\nls\n```\n`last`\n")
	if want := []Span{{"x.md", 1, "b"}, {"x.md", 3, "one two"}, {"x.md", 15, "last"}}; !slices.Equal(p.Spans, want) {
		t.Errorf("spans: got %v, want %v", p.Spans, want)
	}
	if len(p.Blocks) != 1 || p.Blocks[0] != (Block{"x.md", 12, "sh", "ls\n"}) {
		t.Errorf("blocks: got %v", p.Blocks)
	}
	if len(p.Indented) != 1 || p.Indented[0].Line != 6 || !p.Headings["a-b-c"] {
		t.Errorf("got indented %v, headings %v", p.Indented, p.Headings)
	}
}
