package statview

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
)

// Text prints r in lines of at most 80 columns. rows limits the rows of each table; 0 is no limit.
func (r *Report) Text(w io.Writer, rows int) {
	fmt.Fprintf(w, "%s from %s: %s\n", printable(r.Dir), printable(r.Spec), r.State)
	for _, line := range r.summary() {
		fmt.Fprintln(w, "  "+line)
	}
	printTables(w, r.tables(rows))
}

// summary describes r without its tables.
func (r *Report) summary() []string {
	n := r.Metrics.Count
	lines := []string{
		fmt.Sprintf("%-10s read %s, written %s, %s requests/s", "programs:", byteRate(r.ReadBytes),
			byteRate(r.WrittenBytes), number(r.Requests)),
		fmt.Sprintf("%-10s %s RPCs/s, %s accepted; %d resent, %d timed out", "server:", number(r.RPCs),
			byteRate(r.SentBytes), n("rpc_resends_total"), n("rpc_timeouts_total")),
		fmt.Sprintf("%-10s %d credits, %d of %d slots in use, %d in flight, %d queued", "calls:", n("credits"),
			n("slots_in_use"), n("slots"), n("calls_in_flight"), n("calls_queued")),
		fmt.Sprintf("%-10s %s; %d failed", "MRs:", states(r.MRs), n("mrs_failed_total")),
	}
	if connects := n("connects_total"); connects > 0 {
		lines = append(lines, fmt.Sprintf("%-10s %d new", "connects:", connects))
	}
	return lines
}

func states(m map[string]uint64) string {
	var l []string
	for _, name := range slices.Sorted(maps.Keys(m)) {
		if m[name] > 0 {
			l = append(l, fmt.Sprintf("%d %s", m[name], name))
		}
	}
	if len(l) == 0 {
		return "none"
	}
	return strings.Join(l, ", ")
}

// A table has a head and rows of as many cells. The first column is text, and the others are
// numbers.
type table [][]string

// tables returns the tables of r, without empty ones.
func (r *Report) tables(rows int) []table {
	var l []table
	for _, t := range []table{latencyTable("FUSE REQUEST", r.Operations), latencyTable("RPC", r.Procedures),
		processTable(r.Processes), userTable(r.Users)} {
		if n := len(t) - 1; rows > 0 && n > rows {
			t = append(t[:rows+1], []string{fmt.Sprintf("... and %d more", n-rows)})
		}
		if len(t) > 1 {
			l = append(l, t)
		}
	}
	return l
}

func latencyTable(head string, l []Latency) table {
	t := table{{head, "PER S", "ERRORS", "MEAN", "P50", "P90", "P99"}}
	for i := range l {
		x := &l[i]
		t = append(t, []string{x.Name, number(x.Rate), number(x.Errors), duration(x.Mean), duration(x.P50),
			duration(x.P90), duration(x.P99)})
	}
	return t
}

func processTable(l []Use) table {
	t := table{{"PROCESS", "UID", "REQUESTS", "READ", "WRITTEN", "PENDING"}}
	for i := range l {
		u := &l[i]
		name := fmt.Sprintf("%d %s", u.PID, printable(u.Command))
		switch {
		case u.PID == 0:
			name = "kernel or other namespace"
		case u.Command == "":
			name = fmt.Sprintf("%d (ended)", u.PID)
		}
		t = append(t, append([]string{name, fmt.Sprint(u.UID)}, use(u)...))
	}
	return t
}

func userTable(l []Use) table {
	t := table{{"USER", "REQUESTS", "READ", "WRITTEN", "PENDING"}}
	for i := range l {
		t = append(t, append([]string{fmt.Sprintf("uid %d", l[i].UID)}, use(&l[i])...))
	}
	return t
}

func use(u *Use) []string {
	return []string{number(u.Requests), byteRate(u.ReadBytes), byteRate(u.WrittenBytes), fmt.Sprintf("%.2f", u.Pending)}
}

// nameColumns is the width of the first column of a table.
const nameColumns = 25

func printTables(w io.Writer, tables []table) {
	for _, t := range tables {
		var text strings.Builder
		tw := tabwriter.NewWriter(&text, 0, 8, 2, ' ', tabwriter.AlignRight)
		for _, row := range t {
			fmt.Fprintf(tw, "%-*.*s\t%s\t\n", nameColumns, nameColumns, row[0], strings.Join(row[1:], "\t"))
		}
		tw.Flush()
		fmt.Fprintln(w)
		for line := range strings.Lines(text.String()) {
			fmt.Fprintln(w, strings.TrimRight(line, " \n"))
		}
	}
}

// number formats a count or a rate with about three digits.
func number(v float64) string {
	switch {
	case v < 0.005:
		return "0"
	case v < 10:
		return fmt.Sprintf("%.2f", v)
	case v < 100:
		return fmt.Sprintf("%.1f", v)
	case v < 1e5:
		return fmt.Sprintf("%.0f", v)
	case v < 1e6:
		return fmt.Sprintf("%.0fk", v/1e3)
	}
	return fmt.Sprintf("%.1fM", v/1e6)
}

// byteRate formats bytes per second.
func byteRate(v float64) string {
	for _, unit := range []string{"B/s", "kB/s", "MB/s"} {
		if v < 999.5 {
			return strings.TrimSuffix(number(v), ".00") + " " + unit
		}
		v /= 1000
	}
	return number(v) + " GB/s"
}

// duration formats seconds with three digits.
func duration(s float64) string {
	d := time.Duration(s * float64(time.Second))
	switch {
	case d == 0:
		return "-"
	case d < time.Millisecond:
		return fmt.Sprintf("%.0f µs", s*1e6)
	case d < 10*time.Millisecond:
		return fmt.Sprintf("%.2f ms", s*1e3)
	case d < 100*time.Millisecond:
		return fmt.Sprintf("%.1f ms", s*1e3)
	case d < time.Second:
		return fmt.Sprintf("%.0f ms", s*1e3)
	}
	return fmt.Sprintf("%.1f s", s)
}

// printable replaces characters that could change the terminal.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '?'
	}, s)
}
