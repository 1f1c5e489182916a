package docs

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
)

const root = "../.."

var (
	fencedBlock = regexp.MustCompile("(?ms)^ *```(\\w*)\n(.*?)^ *```\n")
	code        = regexp.MustCompile("`[^`]+`")
	heading     = regexp.MustCompile(`(?m)^#+ (.*)`)
	link        = regexp.MustCompile(`\]\(([^)\s#]*)(?:#([^)\s]*))?\)`)
)

// pages returns the text of the pages for users, by their name.
func pages(t *testing.T) map[string]string {
	t.Helper()
	all := make(map[string]string)
	for _, pattern := range []string{"*.md", "docs/*.md"} {
		names, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range names {
			all[strings.TrimPrefix(name, root+"/")] = read(t, name)
		}
	}
	if len(all) < 15 {
		t.Fatalf("got %d pages, want those of docs", len(all))
	}
	return all
}

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// anchors returns the anchors that GitHub makes for the headings of a page.
func anchors(text string) map[string]bool {
	all := make(map[string]bool)
	for _, m := range heading.FindAllStringSubmatch(fencedBlock.ReplaceAllString(text, ""), -1) {
		all[anchor(m[1])] = true
	}
	return all
}

func anchor(title string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == ' ':
			return '-'
		case strings.ContainsRune("abcdefghijklmnopqrstuvwxyz0123456789-_", r):
			return r
		}
		return -1
	}, strings.ToLower(title))
}

// TestLinks checks that each link inside the project leads to a file, and to a heading of its page,
// and that the README has a link to each page.
func TestLinks(t *testing.T) {
	all := pages(t)
	n := 0
	for name, text := range all {
		for _, m := range link.FindAllStringSubmatch(text, -1) {
			file, section := m[1], m[2]
			if strings.Contains(file, "://") {
				continue
			}
			n++
			target := name
			if file != "" {
				target = filepath.Join(filepath.Dir(name), file)
			}
			if _, err := os.Stat(filepath.Join(root, target)); err != nil {
				t.Errorf("%s links to %s, which does not exist", name, target)
			}
			if section != "" && !anchors(all[target])[section] {
				t.Errorf("%s links to %s#%s, which does not exist", name, target, section)
			}
		}
		if strings.HasPrefix(name, "docs/") && !strings.Contains(all["README.md"], "]("+name+")") {
			t.Errorf("README.md has no link to %s", name)
		}
	}
	if n < 50 {
		t.Errorf("got %d links, want more; the pattern is wrong", n)
	}
}

// sources returns the text of all files below the directories of the repository, by their path.
func sources(t *testing.T, dirs ...string) map[string]string {
	t.Helper()
	all := make(map[string]string)
	for _, dir := range dirs {
		err := filepath.WalkDir(filepath.Join(root, dir), func(path string, e os.DirEntry, err error) error {
			if err == nil && !e.IsDir() {
				all[path] = read(t, path)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return all
}

// TestSourceNamesExistingSections checks the names of pages, and of their sections, in the source,
// the configuration and the scripts.
func TestSourceNamesExistingSections(t *testing.T) {
	all := pages(t)
	named := regexp.MustCompile(`docs/([a-z]+\.md)(?:, "([^"]+)")?`)
	n := 0
	for path, text := range sources(t, "cmd", "configs", "deploy", "internal", "pkg", "Makefile") {
		for _, m := range named.FindAllStringSubmatch(text, -1) {
			n++
			page, found := all["docs/"+m[1]]
			if !found || m[2] != "" && !anchors(page)[anchor(m[2])] {
				t.Errorf("%s names %s, which does not exist", path, m[0])
			}
		}
	}
	if n < 10 {
		t.Errorf("got %d names of pages, want more; the pattern is wrong", n)
	}
}

// TestTargetsAndFilesExist checks the targets of make and the paths of the repository in code, and
// the languages of blocks, by which other tests find commands.
func TestTargetsAndFilesExist(t *testing.T) {
	languages := []string{"sh", "console", "text", "fstab", "toml", "yaml"}
	path := regexp.MustCompile("(?:^|[\\s`])" + `(?:\./)?((?:cmd|configs|deploy|docs|internal|pkg|test)/[\w./-]*\w)`)
	command := regexp.MustCompile(`(?m)(?:^|[\s` + "`" + `])make ([a-z-]+)`)
	makefile := read(t, filepath.Join(root, "Makefile"))
	files, targets := 0, 0
	for name, text := range pages(t) {
		parts := code.FindAllString(fencedBlock.ReplaceAllString(text, ""), -1)
		for _, m := range fencedBlock.FindAllStringSubmatch(text, -1) {
			if !slices.Contains(languages, m[1]) {
				t.Errorf("%s: block with language %q; use one of %q", name, m[1], languages)
			}
			if m[1] == "sh" || m[1] == "console" {
				parts = append(parts, m[2])
			}
		}
		for _, part := range parts {
			for _, m := range path.FindAllStringSubmatch(part, -1) {
				files++
				if _, err := os.Stat(filepath.Join(root, m[1])); err != nil {
					t.Errorf("%s: %s does not exist", name, m[1])
				}
			}
			for _, m := range command.FindAllStringSubmatch(part, -1) {
				targets++
				if !regexp.MustCompile(`(?m)^([a-z -]+ )?` + m[1] + `( [a-z -]+)?:`).MatchString(makefile) {
					t.Errorf("%s: make %s: the Makefile has no such target", name, m[1])
				}
			}
		}
	}
	if files < 20 || targets < 20 {
		t.Errorf("got %d files and %d targets, want more; a pattern is wrong", files, targets)
	}
}

// foreign are messages of other programs that docs/troubleshooting.md quotes.
var foreign = []string{
	"unknown filesystem type 'nfsrdma'", // mount(8)
	"target is busy",                    // umount(8)
}

var (
	// quote matches a message in the first cell of a table row.
	quote = regexp.MustCompile("(?m)^\\| `([^`|]+)` \\|")
	// separator matches what separates the parts of a message: placeholders, colons and semicolons.
	separator = regexp.MustCompile(`\b(?:SOCKET|FILE|LINE|KEY|NAME|DIR|TYPE|EXPORT|VERB|[ADNP])\b|\.\.\.|[:;"]`)
)

// missingParts returns the parts of a quoted message that text does not have. The parts are those
// between placeholders, colons and semicolons.
func missingParts(quoted, text string) (missing []string) {
	for _, part := range separator.Split(quoted, -1) {
		if part = strings.TrimSpace(part); !strings.Contains(text, part) {
			missing = append(missing, part)
		}
	}
	return missing
}

// TestQuotedMessagesExist checks each message that the tables of docs/troubleshooting.md quote
// against the source and the errors of the system.
func TestQuotedMessagesExist(t *testing.T) {
	var b strings.Builder
	for path, text := range sources(t, "cmd", "internal", "pkg") {
		if strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go") {
			b.WriteString(text)
		}
	}
	for e := range syscall.Errno(134) {
		b.WriteString(e.Error() + "\n")
	}
	text := regexp.MustCompile(`" ?\+\n\s*"`).ReplaceAllString(b.String(), "") // sums of strings
	n := 0
	for table := range strings.SplitSeq(read(t, filepath.Join(root, "docs/troubleshooting.md")), "\n\n") {
		if !strings.HasPrefix(table, "| message |") {
			continue
		}
		for _, m := range quote.FindAllStringSubmatch(table, -1) {
			n++
			if missing := missingParts(m[1], text); len(missing) > 0 && !slices.Contains(foreign, m[1]) {
				t.Errorf("docs/troubleshooting.md quotes `%s`, but the source does not have %q", m[1], missing)
			}
		}
	}
	if n < 60 {
		t.Errorf("got %d quoted messages, want more; the pattern is wrong", n)
	}
}
