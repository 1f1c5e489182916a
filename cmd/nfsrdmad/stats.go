package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/statview"
	"github.com/nfsrdmad/nfsrdmad/pkg/control"
)

const statsLong = `Show throughput, operations, latencies, credits, slots, memory regions, and
the use by process and by user.

Without flags the command prints the means since the mount, or since the
start of a daemon that continues the mount. --interval prints the means of
each interval until Ctrl-C, or --count times. --watch shows them in a
full-screen view with plots; when the output is not a terminal, it prints
them as --interval does.

With --output json each interval is one line, an array with an object for
each mount. Rates are per second and times are in seconds. PENDING is the
mean number of pending requests. Percentiles are interpolated between the
bounds of the histogram in the metrics.`

// minInterval is the shortest interval, and defaultInterval that of --watch.
const (
	minInterval     = 100 * time.Millisecond
	defaultInterval = time.Second
	statsRows       = 10 // of each table in text
)

// statsFlags are the flags of the command stats.
type statsFlags struct {
	watch    bool
	interval time.Duration
	count    int
}

func statsCommand(c *commonFlags) *cobra.Command {
	var f statsFlags
	cmd := &cobra.Command{
		Use:   "stats [DIR] [--watch] [--interval TIME] [--count N]",
		Short: "Show throughput, latencies, and the use by process and by user",
		Long:  statsLong,
		Args:  argCount(0, 1),
		RunE: func(cmd *cobra.Command, args []string) error {
			dir, err := optionalDir(args)
			if err != nil {
				return err
			}
			if err := f.check(cmd); err != nil {
				return err
			}
			d := control.NewClient(c.socket)
			fetch := func(ctx context.Context) ([]control.MountStats, error) { return d.Stats(ctx, dir) }
			if out, ok := cmd.OutOrStdout().(*os.File); ok && f.watch && c.output == "text" && isTerminal(out) {
				if _, err := fetch(cmd.Context()); err != nil { // before the screen changes
					return err
				}
				return statview.Watch(cmd.Context(), cmd.InOrStdin(), out, f.interval, f.count, fetch)
			}
			return f.print(cmd.Context(), cmd.OutOrStdout(), c.output == "json", fetch)
		},
	}
	c.socketFlag(cmd)
	cmd.Flags().BoolVar(&f.watch, "watch", false, "show a full-screen view with plots")
	cmd.Flags().DurationVar(&f.interval, "interval", 0, "print the means of each interval `TIME` (1s with --watch)")
	cmd.Flags().IntVar(&f.count, "count", 0, "stop after `N` intervals (default: do not stop)")
	return cmd
}

// check checks the flags and sets their defaults.
func (f *statsFlags) check(cmd *cobra.Command) error {
	if f.interval == 0 && !cmd.Flags().Changed("interval") {
		if !f.watch && cmd.Flags().Changed("count") {
			return errors.New("--count needs --interval or --watch")
		}
		if f.watch {
			f.interval = defaultInterval
		}
	} else if f.interval < minInterval {
		return fmt.Errorf("invalid --interval %v: use %v or more", f.interval, minInterval)
	}
	if f.count < 0 || f.count == 0 && cmd.Flags().Changed("count") {
		return fmt.Errorf("invalid --count %d: use 1 or more", f.count)
	}
	return nil
}

// print prints reports until the last interval or until ctx ends.
func (f *statsFlags) print(ctx context.Context, w io.Writer, asJSON bool,
	fetch func(context.Context) ([]control.MountStats, error)) error {
	before := make(map[control.MountKey]control.MountStats)
	for n := 0; ; n++ {
		l, err := fetch(ctx)
		if err != nil {
			if ctx.Err() != nil && n > 0 {
				return nil
			}
			return err
		}
		if f.interval == 0 || n > 0 {
			if err := printReports(w, l, before, asJSON); err != nil {
				return err
			}
			if n > 0 && !asJSON {
				fmt.Fprintln(w)
			}
		}
		if f.interval == 0 || n == f.count && n > 0 {
			return nil
		}
		clear(before)
		for i := range l {
			before[l[i].Key()] = l[i]
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(f.interval):
		}
	}
}

func printReports(w io.Writer, l []control.MountStats, before map[control.MountKey]control.MountStats,
	asJSON bool) error {
	reports := []statview.Report{}
	for i := range l {
		old := before[l[i].Key()]
		reports = append(reports, statview.Between(&old, &l[i]))
	}
	if asJSON {
		return json.NewEncoder(w).Encode(reports)
	}
	if len(reports) == 0 {
		fmt.Fprintln(w, "no mounts")
	}
	for i := range reports {
		if i > 0 {
			fmt.Fprintln(w)
		}
		reports[i].Text(w, statsRows)
	}
	return nil
}

// isTerminal reports whether f is a terminal.
func isTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}
