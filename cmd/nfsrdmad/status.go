package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
)

// columns is the maximum width of the output in columns.
const columns = 80

func statusCommand(c *commonFlags) *cobra.Command {
	var slow bool
	cmd := &cobra.Command{
		Use:   "status [--slow] [DIR]",
		Short: "Show connection, pending calls and memory regions of mounts",
		Args:  argCount(0, 1),
		RunE: func(cmd *cobra.Command, args []string) error {
			dir, err := optionalDir(args)
			if err != nil {
				return err
			}
			if slow {
				fetch := func(d *control.Client) ([]control.SlowCalls, error) { return d.Slow(cmd.Context(), dir) }
				return printFromDaemon(c, cmd, fetch, func(w io.Writer, l []control.SlowCalls) {
					printSlow(w, l, time.Now())
				})
			}
			fetch := func(d *control.Client) ([]control.MountStatus, error) { return d.Status(cmd.Context(), dir) }
			return printFromDaemon(c, cmd, fetch, func(w io.Writer, l []control.MountStatus) {
				if v, err := control.NewClient(c.socket).Version(cmd.Context()); err == nil {
					printMetricsError(w, &v)
				}
				printStatus(w, l, time.Now())
			})
		},
	}
	c.socketFlag(cmd)
	cmd.Flags().BoolVar(&slow, "slow", false,
		"show the slowest requests and RPCs of the last 10 minutes, and in which phases they spent their time")
	return cmd
}

// optionalDir returns the first argument as an absolute path, or "" without arguments.
func optionalDir(args []string) (string, error) {
	if len(args) == 0 {
		return "", nil
	}
	return control.AbsolutePath(args[0])
}

func printStatus(w io.Writer, l []control.MountStatus, now time.Time) {
	if len(l) == 0 {
		fmt.Fprintln(w, "no mounts")
	}
	for i := range l {
		if i > 0 {
			fmt.Fprintln(w)
		}
		printMount(w, &l[i], now)
	}
}

func printMount(w io.Writer, m *control.MountStatus, now time.Time) {
	if m.FaultInjection != "" {
		item(w, "", control.FaultBanner+m.FaultInjection, ",")
	}
	state := string(m.State)
	if m.State == control.StateStalled {
		state += ", " + string(control.StateMounted) // Since is the time of the mount
	}
	item(w, "", fmt.Sprintf("%s on %s: %s since %s", printable(m.Spec), printable(m.Dir), state,
		m.Since.Local().Format(time.DateTime)), " ")
	item(w, "options", m.Options, ",")
	one := len(m.Addresses) == 0 || len(m.Addresses) == 1 && m.Addresses[0].Address == m.Server
	if m.Connection != "" {
		to := ""
		if one {
			to = " to " + m.Server
		}
		item(w, "connection", fmt.Sprintf("%s%s by %s, %s", m.Connection, to, m.Provider,
			plural(m.Metrics.Count("connects_total"), "connect")), " ")
	}
	if !one {
		item(w, "addresses", addressesLine(m.Addresses), ",")
	}
	if m.ProviderReason != "" {
		item(w, "provider", m.Provider+": "+printable(m.ProviderReason), " ")
	}
	if m.Failure != "" {
		item(w, "failure", printable(m.Failure), " ")
	}
	if m.Reason != "" {
		reason := printable(m.Reason)
		if m.Stalled > 0 {
			reason += fmt.Sprintf(" (for %.0f s)", m.Stalled)
		}
		item(w, "reason", reason, " ")
	}
	if m.NotKept != "" {
		item(w, "not kept", printable(m.NotKept), " ")
	}
	if m.LastError != "" {
		item(w, "last error", printable(m.LastError), " ")
	}
	if m.FaultInjection != "" {
		item(w, "injected", counts(m.FaultsInjected), " ")
	}
	item(w, "sizes", fmt.Sprintf("rsize %d, wsize %d", m.MaxRead, m.MaxWrite), " ")
	n := m.Metrics.Count
	item(w, "slots", fmt.Sprintf("%d of %d in use, %s", n("slots_in_use"), n("slots"), plural(n("credits"), "credit")),
		" ")
	item(w, "MRs", fmt.Sprintf("%s; failed %d: recovered %d, recycled %d, orphaned %d", counts(m.MRs),
		n("mrs_failed_total"), n("mrs_recovered_total"), n("mrs_recycled_total"), n("mrs_orphaned_total")), " ")
	item(w, "locks", locksLine(m), " ")
	item(w, "calls", callsLine(m), " ")
	printCalls(w, m)
	printHistory(w, m, now)
	if m.XprtLine != "" {
		fmt.Fprintln(w, m.XprtLine)
	}
}

// addressesLine describes the connections of a mount.
func addressesLine(l []control.Connection) string {
	parts := make([]string, len(l))
	for i, c := range l {
		parts[i] = fmt.Sprintf("#%d %s %s", i, c.State, c.Address)
		if c.Address != c.Preferred {
			parts[i] += " (prefers " + c.Preferred + ")"
		}
	}
	return strings.Join(parts, ", ")
}

func locksLine(m *control.MountStatus) string {
	l, n := &m.Locks, m.Metrics.Count
	if l.Local == "all" {
		return "local to this host (local_lock=all)"
	}
	s := fmt.Sprintf("%d held, %d pending, %d granted (%d by callback, %d by poll), %d reclaimed, %d lost",
		n("locks_held"), n("locks_pending"), n("locks_granted_total"), n("locks_granted_callback_total"),
		n("locks_granted_poll_total"), n("locks_reclaimed_total"), n("locks_lost_total"))
	if l.Local != "none" {
		s += "; " + l.Local + " local to this host"
	}
	if l.Notices != "" {
		s += "; " + l.Notices
	}
	if l.LastError != "" {
		s += "; " + printable(l.LastError)
	}
	return s
}

func callsLine(m *control.MountStatus) string {
	s := fmt.Sprintf("%d sent, %d completed, ", m.Metrics.Count("rpc_sends_total"),
		m.Metrics.Count("rpc_receives_total"))
	if len(m.Calls) == 0 {
		return s + "0 pending"
	}
	by := make(map[string]uint64)
	for i := range m.Calls {
		by[m.Calls[i].WaitsFor]++
	}
	return s + fmt.Sprintf("%d pending (%s)", len(m.Calls), counts(by))
}

// printCalls prints the table of pending calls, oldest first.
func printCalls(w io.Writer, m *control.MountStatus) {
	if len(m.Calls) == 0 {
		return
	}
	several := severalConnections(m)
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "  AGE\tXID\tPROCEDURE\tSLOT\tWAITING FOR\tOWNER")
	for i := range m.Calls {
		c := &m.Calls[i]
		xid, slot := c.XID, strconv.Itoa(c.Slot)
		if c.Slot < 0 {
			xid, slot = "-", "-"
		}
		if several {
			slot = fmt.Sprintf("#%d %s", c.Connection, slot)
		}
		fmt.Fprintf(t, "  %s\t%s\t%s\t%s\t%s\t%s\n", age(seconds(c.Age)), xid, c.Procedure, slot, c.WaitsFor,
			owner(&c.CallOwner))
	}
	t.Flush()
}

func severalConnections(m *control.MountStatus) bool {
	return slices.ContainsFunc(m.History, func(n control.ConnEvent) bool { return n.Connection > 0 })
}

// owner describes the process or the part of the daemon that waits for a call.
func owner(c *control.CallOwner) string {
	switch c.Owner {
	case control.OwnerProcess:
		command := "(ended)"
		if c.Command != "" {
			command = printable(c.Command)
		}
		return fmt.Sprintf("%d %s uid %d", c.PID, command, c.UID)
	case control.OwnerGone:
		return "(caller exited)"
	case control.OwnerKernel:
		return fmt.Sprintf("kernel uid %d", c.UID)
	}
	return c.Owner
}

// printHistory prints the events of the connections, newest last.
func printHistory(w io.Writer, m *control.MountStatus, now time.Time) {
	if len(m.History) == 0 {
		return
	}
	several := severalConnections(m)
	fmt.Fprintln(w, "  history:")
	for _, n := range m.History {
		text := n.Event
		if n.Cause != "" {
			text += ": " + printable(n.Cause)
		}
		if n.Times > 1 {
			text += fmt.Sprintf(" (%d times)", n.Times)
		}
		if several {
			text = fmt.Sprintf("#%d %s", n.Connection, text)
		}
		wrapIndented(w, fmt.Sprintf("  %8s ago  ", age(now.Sub(n.Time))), text, " ")
	}
}

// item prints "  name:  text" and wraps a long text.
func item(w io.Writer, name, text, separator string) {
	first := ""
	if name != "" {
		first = fmt.Sprintf("  %-11s ", name+":")
	}
	wrapIndented(w, first, text, separator)
}

// wrapIndented is wrapAt for the usual width.
func wrapIndented(w io.Writer, first, text, separator string) {
	wrapAt(w, first, text, separator, columns)
}

// wrapAt prints first and text in lines of at most columns. It breaks a long text after
// separators and indents the following lines to the start of the text.
func wrapAt(w io.Writer, first, text, separator string, columns int) {
	indent := strings.Repeat(" ", max(utf8.RuneCountInString(first), 2))
	line := first
	empty := true
	for _, part := range strings.SplitAfter(text, separator) {
		if !empty && utf8.RuneCountInString(strings.TrimRight(line+part, " ")) > columns {
			fmt.Fprintln(w, strings.TrimRight(line, " "))
			line = indent
		}
		line, empty = line+part, false
	}
	fmt.Fprintln(w, strings.TrimRight(line, " "))
}

// counts lists the counters that are not zero, sorted by name.
func counts(m map[string]uint64) string {
	var l []string
	for _, name := range slices.Sorted(maps.Keys(m)) {
		if m[name] > 0 {
			l = append(l, fmt.Sprintf("%s %d", name, m[name]))
		}
	}
	if len(l) == 0 {
		return "none"
	}
	return strings.Join(l, ", ")
}

func plural(n uint64, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// age formats a duration with the precision that its size needs.
func age(d time.Duration) string {
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%.1fs", max(d, 0).Seconds())
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", d/time.Minute, d%time.Minute/time.Second)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh%02dm", d/time.Hour, d%time.Hour/time.Minute)
	}
	return fmt.Sprintf("%dd", d/(24*time.Hour))
}

// printable replaces control characters, so that a name from a server cannot send commands to the
// terminal.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '?'
	}, s)
}
