package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
)

const traceLong = `Show what happens to a mount's calls and memory regions, event by event, as it
happens.

With --follow (the default) it goes on until Ctrl-C, or until the mount ends.
Events of the past that are still kept come first with --last N;
--follow=false shows them and ends. The mount never waits for a reader: one
that is too slow is told how many events it lost.`

func traceCommand(c *common) *cobra.Command {
	var follow bool
	var last int
	cmd := &cobra.Command{
		Use:   "trace DIR [--follow=false] [--last N]",
		Short: "Show a mount's trace events",
		Long:  traceLong,
		Args:  takes(1, 1),
		RunE: func(cmd *cobra.Command, args []string) error {
			dir, err := optionalDir(args)
			if err != nil {
				return err
			}
			given := cmd.Flags().Changed("last")
			if given && last < 0 {
				return fmt.Errorf("flag --last=%d: must not be negative", last)
			}
			if !given && !follow {
				last = -1 // everything that is kept
			}
			r := control.TraceRequest{Dir: dir, JSON: c.output == "json", Follow: follow, Last: last}
			return control.NewClient(c.socket).Trace(cmd.Context(), r, cmd.OutOrStdout())
		},
	}
	c.socketFlag(cmd)
	cmd.Flags().BoolVar(&follow, "follow", true, "go on with new events; false shows what is kept and ends")
	cmd.Flags().IntVar(&last, "last", 0,
		"begin with so many of the newest events that are kept (default: none, or all with --follow=false)")
	return cmd
}
