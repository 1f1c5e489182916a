package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode/utf8"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
)

const (
	// slowColumns is the maximum width of the table of slow calls in columns.
	slowColumns = 100
	// ownerColumns is the maximum width of an owner in that table.
	ownerColumns = 24
	// minShare is the smallest part of the total time for which the table shows a phase.
	minShare = 0.01
)

// printSlow prints the slowest requests and RPCs of mounts.
func printSlow(w io.Writer, l []control.SlowCalls, now time.Time) {
	if len(l) == 0 {
		fmt.Fprintln(w, "no mounts")
	}
	for i := range l {
		if i > 0 {
			fmt.Fprintln(w)
		}
		m := &l[i]
		fmt.Fprintf(w, "%s\n", printable(m.Dir))
		if len(m.Requests)+len(m.Calls) == 0 {
			fmt.Fprintln(w, "  no requests in the last 10 minutes")
		}
		printSlowTable(w, "REQUEST", m.Requests, now)
		printSlowTable(w, "RPC", m.Calls, now)
	}
}

// printSlowTable prints a table of slow calls. kind is the heading of their names. The last column
// has the phases, the longest first; it continues in further lines.
func printSlowTable(w io.Writer, kind string, calls []control.SlowCall, now time.Time) {
	if len(calls) == 0 {
		return
	}
	var b strings.Builder
	t := tabwriter.NewWriter(&b, 0, 8, 2, ' ', 0)
	fmt.Fprintf(t, "  TOTAL\tAGO\t%s\tOWNER\tTIME IN EACH PHASE\n", kind)
	for i := range calls {
		c := &calls[i]
		fmt.Fprintf(t, "  %s\t%s\t%s\t%s\t%s\n", short(seconds(c.Total)), age(now.Sub(c.Ended)), c.Name,
			cut(owner(&c.CallOwner), ownerColumns), slowDetails(c))
	}
	t.Flush()
	at := -1 // column of the phases
	for line := range strings.Lines(b.String()) {
		line = strings.TrimSuffix(line, "\n")
		if at < 0 {
			at = utf8.RuneCountInString(line[:strings.Index(line, "TIME IN")])
			fmt.Fprintln(w, line)
			continue
		}
		head := []rune(line)
		wrapAt(w, string(head[:at]), string(head[at:]), ", ", slowColumns)
	}
}

// slowDetails describes the phases of a call, and its error.
func slowDetails(c *control.SlowCall) string {
	var parts []string
	names := make([]string, 0, len(c.Phases))
	for name := range c.Phases {
		names = append(names, name)
	}
	slices.SortFunc(names, func(a, b string) int {
		return cmp.Or(cmp.Compare(c.Phases[b], c.Phases[a]), cmp.Compare(a, b))
	})
	for _, name := range names {
		if d := c.Phases[name]; d >= minShare*c.Total {
			parts = append(parts, name+" "+short(seconds(d)))
		}
	}
	if c.Calls > 0 {
		parts = append(parts, plural(uint64(c.Calls), "RPC"))
	}
	if c.Resends > 0 {
		parts = append(parts, plural(uint64(c.Resends), "resend"))
	}
	if c.Error != "" {
		parts = append(parts, printable(c.Error))
	}
	return strings.Join(parts, ", ")
}

// short formats a duration with three digits.
func short(d time.Duration) string {
	unit, name := time.Microsecond, "us"
	switch {
	case d >= 100*time.Second:
		return age(d)
	case d >= time.Second:
		unit, name = time.Second, "s"
	case d >= time.Millisecond:
		unit, name = time.Millisecond, "ms"
	}
	v := float64(d) / float64(unit)
	digits := 2
	switch {
	case v >= 99.95:
		digits = 0
	case v >= 9.995:
		digits = 1
	}
	return strconv.FormatFloat(v, 'f', digits, 64) + name
}

// cut shortens s to n columns.
func cut(s string, n int) string {
	if r := []rune(s); len(r) > n {
		return string(r[:n-1]) + "…"
	}
	return s
}
