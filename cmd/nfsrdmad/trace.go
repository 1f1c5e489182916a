package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
)

const traceLong = `Show trace events of the calls and memory regions of a mount.

With --follow (the default) the command prints new events until Ctrl-C or
until the mount ends. --last N first prints the newest N stored events.
--follow=false prints the stored events and exits. The mount never waits for
a reader: when a reader is too slow, the output says how many events were
lost.`

func traceCommand(c *commonFlags) *cobra.Command {
	var follow bool
	var last int
	cmd := &cobra.Command{
		Use:   "trace DIR [--follow=false] [--last N]",
		Short: "Show the trace events of a mount",
		Long:  traceLong,
		Args:  argCount(1, 1),
		RunE: func(cmd *cobra.Command, args []string) error {
			dir, err := optionalDir(args)
			if err != nil {
				return err
			}
			given := cmd.Flags().Changed("last")
			if given && last < 0 {
				return fmt.Errorf("invalid --last %d: use 0 or more", last)
			}
			if !given && !follow {
				last = -1 // all stored events
			}
			r := control.TraceRequest{Dir: dir, JSON: c.output == "json", Follow: follow, Last: last}
			return control.NewClient(c.socket).Trace(cmd.Context(), r, cmd.OutOrStdout())
		},
	}
	c.socketFlag(cmd)
	cmd.Flags().BoolVar(&follow, "follow", true, "print new events; false prints the stored events and exits")
	cmd.Flags().IntVar(&last, "last", 0,
		"first print the newest `N` stored events (default none; all with --follow=false)")
	return cmd
}
