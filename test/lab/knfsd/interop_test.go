package knfsd

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// The table in docs/interop.md is between these lines.
const (
	interopFile  = "../../../docs/interop.md"
	interopBegin = "<!-- written by go test ./test/lab/knfsd -update -->\n"
	interopEnd   = "<!-- end -->\n"

	interopHead = "what was proved"
	kernelHead  = "kernel"
	proved      = "yes"
	with        = " with "
)

// A column of the table lists the cases that passed with one provider against one server.
type column struct {
	server   string // as in -servers
	provider string
	kernel   string // kernel release of the server
	proved   []string
}

func (c column) name() string { return c.server + with + c.provider }

// A document is docs/interop.md with its parsed table.
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
		return d, fmt.Errorf("parse %s: table marks %q and %q not found", interopFile, interopBegin, interopEnd)
	}
	d.before, d.after = before, after
	for line := range strings.Lines(table) {
		cells := strings.Split(strings.TrimSuffix(strings.TrimPrefix(line, "|"), "|\n"), "|")
		first := strings.TrimSpace(cells[0])
		if first == interopHead {
			d.columns = make([]column, len(cells)-1)
		}
		if len(cells) != 1+len(d.columns) {
			return d, fmt.Errorf("parse %s: got a row of %d cells, want %d: %q", interopFile, len(cells),
				1+len(d.columns), line)
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

// checkInterop checks that a complete run proved every claim in docs/interop.md. An incomplete run
// does not check the claims of the cases that it omits. With -update checkInterop writes the column
// instead.
func checkInterop(t *testing.T, got column, whole bool) {
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
	unproved, undocumented := differences(d.columns[i].proved, got.proved)
	for _, claim := range unproved {
		t.Errorf("docs/interop.md: %s: claim not proved by this run: %s", got.name(), claim)
	}
	for _, fact := range undocumented {
		t.Logf("docs/interop.md: %s: proved but not documented; run with -update: %s", got.name(), fact)
	}
	if d.columns[i].kernel != got.kernel {
		t.Logf("docs/interop.md: documented kernel %q, tested kernel %s", d.columns[i].kernel, got.kernel)
	}
}

// differences compares claims with results.
func differences(claimed, proved []string) (unproved, undocumented []string) {
	for _, c := range claimed {
		if !slices.Contains(proved, c) {
			unproved = append(unproved, c)
		}
	}
	for _, p := range proved {
		if !slices.Contains(claimed, p) {
			undocumented = append(undocumented, p)
		}
	}
	return unproved, undocumented
}

// TestInteropTableRoundTrips needs no server. It checks that the table in the document is what a
// run would write, and so contains no claim without a case.
func TestInteropTableRoundTrips(t *testing.T) {
	text, err := os.ReadFile(interopFile)
	if err != nil {
		t.Fatal(err)
	}
	d, err := readDocument()
	if err != nil {
		t.Fatal(err)
	}
	if again := d.String(); again != string(text) {
		t.Errorf("parse and write %s: got\n%s", interopFile, again)
	}
	for _, c := range d.columns {
		if c.kernel == "" || len(c.proved) == 0 {
			t.Errorf("column %s: got no kernel or no claim", c.name())
		}
	}
	unproved, undocumented := differences([]string{"a", "b"}, []string{"b", "c"})
	if !slices.Equal(unproved, []string{"a"}) || !slices.Equal(undocumented, []string{"c"}) {
		t.Errorf("differences: got %q and %q, want a and c", unproved, undocumented)
	}
}
