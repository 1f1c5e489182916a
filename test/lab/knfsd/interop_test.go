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
	interopFile   = "../../../docs/interop.md"
	interopBegin  = "<!-- written by go test ./test/lab/knfsd -update -->\n"
	interopEnd    = "<!-- end -->\n"
	interopHead   = "| knfsd over | kernel | provider | what was proved |\n|---|---|---|---|\n"
	betweenProved = "; "
)

// A row says what was proved with a provider against a server.
type row struct {
	server   string // as in -servers
	kernel   string // its release, as the server itself says
	provider string
	proved   []string
}

func (r row) String() string {
	return fmt.Sprintf("| %s | %s | %s | %s |\n", r.server, r.kernel, r.provider, strings.Join(r.proved, betweenProved))
}

// interop holds docs/interop.md to what a run has proved: all that it claims, and nothing less. Of a run of some cases only it asks nothing: what
// failed has failed by itself. With -update it writes the row instead.
func interop(t *testing.T, got row, whole bool) {
	t.Helper()
	if !whole {
		return
	}
	text, err := os.ReadFile(interopFile)
	if err != nil {
		t.Fatal(err)
	}
	before, rows, after, err := splitInterop(string(text))
	if err != nil {
		t.Fatalf("%s: %v", interopFile, err)
	}
	i := slices.IndexFunc(rows, func(r row) bool { return r.server == got.server && r.provider == got.provider })
	if *updateFlag {
		if t.Failed() {
			t.Logf("%s stays as it is: a case failed", interopFile)
			return
		}
		if i >= 0 {
			rows[i] = got
		} else {
			rows = append(rows, got)
		}
		if err := writeInterop(before, rows, after); err != nil {
			t.Fatal(err)
		}
		return
	}
	if i < 0 {
		t.Errorf("docs/interop.md has no row of %s with %s: run with -update", got.server, got.provider)
		return
	}
	for _, d := range differences(rows[i].proved, got.proved) {
		t.Errorf("docs/interop.md, %s with %s: %s", got.server, got.provider, d)
	}
	if rows[i].kernel != got.kernel {
		t.Logf("docs/interop.md is about kernel %s, this run about %s", rows[i].kernel, got.kernel)
	}
}

// differences compares claims with what was proved.
func differences(claimed, proved []string) (d []string) {
	for _, c := range claimed {
		if !slices.Contains(proved, c) {
			d = append(d, "claims what this run has not proved: "+c)
		}
	}
	for _, p := range proved {
		if !slices.Contains(claimed, p) {
			d = append(d, "does not say what this run has proved (run with -update): "+p)
		}
	}
	return d
}

// splitInterop takes the document apart.
func splitInterop(text string) (before string, rows []row, after string, err error) {
	before, rest, found := strings.Cut(text, interopBegin)
	table, after, foundEnd := strings.Cut(rest, interopEnd)
	if !found || !foundEnd {
		return "", nil, "", fmt.Errorf("the table's marks %q and %q are not there", interopBegin, interopEnd)
	}
	table, found = strings.CutPrefix(table, interopHead)
	if !found && table != "" {
		return "", nil, "", fmt.Errorf("the table does not begin with %q", interopHead)
	}
	for line := range strings.Lines(table) {
		cells := strings.Split(strings.Trim(line, "|\n"), "|")
		if len(cells) != 4 {
			return "", nil, "", fmt.Errorf("not a row of four cells: %q", line)
		}
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		rows = append(rows, row{cells[0], cells[1], cells[2], strings.Split(cells[3], betweenProved)})
	}
	return before, rows, after, nil
}

// writeInterop puts it together again, and replaces the file as a whole.
func writeInterop(before string, rows []row, after string) error {
	var b strings.Builder
	b.WriteString(before + interopBegin + interopHead)
	for _, r := range rows {
		b.WriteString(r.String())
	}
	b.WriteString(interopEnd + after)
	tmp := filepath.Join(filepath.Dir(interopFile), ".interop.md.new")
	if err := os.WriteFile(tmp, []byte(b.String()), 0o644); err != nil {
		return err
	}
	return os.Rename(tmp, interopFile)
}

// TestInterop needs no server: the document can be read, is written as it is read, and holds rows of every server and provider by default.
func TestInterop(t *testing.T) {
	text, err := os.ReadFile(interopFile)
	if err != nil {
		t.Fatal(err)
	}
	before, rows, after, err := splitInterop(string(text))
	if err != nil {
		t.Fatal(err)
	}
	again := before + interopBegin + interopHead
	for _, r := range rows {
		again += r.String()
	}
	if again += interopEnd + after; again != string(text) {
		t.Errorf("read and written again it is\n%s", again)
	}
	if d := differences([]string{"a", "b"}, []string{"b", "c"}); len(d) != 2 || !strings.Contains(d[0], ": a") || !strings.Contains(d[1], ": c") {
		t.Errorf("differences: %q", d)
	}
}
