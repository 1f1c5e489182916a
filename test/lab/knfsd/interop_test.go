package knfsd

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// The table in docs/interop.md lies between these lines.
const (
	interopFile  = "../../../docs/interop.md"
	interopBegin = "<!-- written by go test ./test/lab/knfsd -update -->\n"
	interopEnd   = "<!-- end -->\n"

	interopHead = "what was proved"
	kernelHead  = "kernel"
	proved      = "yes"
	with        = " with "
)

// A column of the table says what was proved with a provider against a server.
type column struct {
	server   string // as in -servers
	provider string
	kernel   string // its release, as the server itself says
	proved   []string
}

func (c column) name() string { return c.server + with + c.provider }

// A document is docs/interop.md, with its table taken apart.
type document struct {
	before, after string
	columns       []column
}

func (d document) String() string {
	var b strings.Builder
	line := func(first string, cell func(column) string) {
		b.WriteString("| " + first + " |")
		for _, c := range d.columns {
			b.WriteString(" " + cell(c) + " |")
		}
		b.WriteString("\n")
	}
	b.WriteString(d.before + interopBegin)
	line(interopHead, column.name)
	b.WriteString(strings.Repeat("|---", 1+len(d.columns)) + "|\n")
	line(kernelHead, func(c column) string { return c.kernel })
	for _, test := range cases {
		claims := func(c column) bool { return slices.Contains(c.proved, test.proves) }
		if !slices.ContainsFunc(d.columns, claims) {
			continue
		}
		line(test.proves, func(c column) string {
			if claims(c) {
				return proved
			}
			return ""
		})
	}
	b.WriteString(interopEnd + d.after)
	return b.String()
}

func readDocument() (d document, err error) {
	text, err := os.ReadFile(interopFile)
	if err != nil {
		return d, err
	}
	before, rest, found := strings.Cut(string(text), interopBegin)
	table, after, foundEnd := strings.Cut(rest, interopEnd)
	if !found || !foundEnd {
		return d, fmt.Errorf("%s: the table's marks %q and %q are not there", interopFile, interopBegin, interopEnd)
	}
	d.before, d.after = before, after
	for line := range strings.Lines(table) {
		cells := strings.Split(strings.TrimSuffix(strings.TrimPrefix(line, "|"), "|\n"), "|")
		first := strings.TrimSpace(cells[0])
		if first == interopHead {
			d.columns = make([]column, len(cells)-1)
		}
		if len(cells) != 1+len(d.columns) {
			return d, fmt.Errorf("%s: a row of %d cells, want %d: %q", interopFile, len(cells), 1+len(d.columns), line)
		}
		for i, cell := range cells[1:] {
			cell, c := strings.TrimSpace(cell), &d.columns[i]
			switch {
			case first == interopHead:
				c.server, c.provider, _ = strings.Cut(cell, with)
			case first == kernelHead:
				c.kernel = cell
			case cell == proved:
				c.proved = append(c.proved, first)
			}
		}
	}
	return d, nil
}

// interop holds docs/interop.md to what a run has proved: all that it claims. Of a run of some
// cases only it asks nothing: what failed has failed by itself. With -update it writes the column
// instead.
func interop(t *testing.T, got column, whole bool) {
	t.Helper()
	if !whole {
		return
	}
	d, err := readDocument()
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(d.columns, func(c column) bool { return c.name() == got.name() })
	if i < 0 {
		i = len(d.columns)
		d.columns = append(d.columns, column{server: got.server, provider: got.provider})
	}
	if *updateFlag {
		d.columns[i] = got
		tmp := filepath.Join(filepath.Dir(interopFile), ".interop.md.new")
		if err := os.WriteFile(tmp, []byte(d.String()), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(tmp, interopFile); err != nil {
			t.Fatal(err)
		}
		return
	}
	unproved, unsaid := differences(d.columns[i].proved, got.proved)
	for _, claim := range unproved {
		t.Errorf("docs/interop.md claims of %s what this run has not proved: %s", got.name(), claim)
	}
	for _, fact := range unsaid {
		t.Logf("docs/interop.md does not say of %s what this run has proved (-update writes it): %s", got.name(), fact)
	}
	if d.columns[i].kernel != got.kernel {
		t.Logf("docs/interop.md is about kernel %q, this run about %s", d.columns[i].kernel, got.kernel)
	}
}

// differences compares claims with what was proved.
func differences(claimed, proved []string) (unproved, unsaid []string) {
	for _, c := range claimed {
		if !slices.Contains(proved, c) {
			unproved = append(unproved, c)
		}
	}
	for _, p := range proved {
		if !slices.Contains(claimed, p) {
			unsaid = append(unsaid, p)
		}
	}
	return unproved, unsaid
}

// TestInterop needs no server: the document's table is as a run would write it, so that it claims
// nothing that no case proves any more.
func TestInterop(t *testing.T) {
	text, err := os.ReadFile(interopFile)
	if err != nil {
		t.Fatal(err)
	}
	d, err := readDocument()
	if err != nil {
		t.Fatal(err)
	}
	if again := d.String(); again != string(text) {
		t.Errorf("read and written again %s is\n%s", interopFile, again)
	}
	for _, c := range d.columns {
		if c.kernel == "" || len(c.proved) == 0 {
			t.Errorf("nothing is said of %s", c.name())
		}
	}
	unproved, unsaid := differences([]string{"a", "b"}, []string{"b", "c"})
	if !slices.Equal(unproved, []string{"a"}) || !slices.Equal(unsaid, []string{"c"}) {
		t.Errorf("differences: %q, %q", unproved, unsaid)
	}
}
