package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/nfsrdmad/nfsrdmad/pkg/daemon"
)

func listCommand(c *common) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the daemon's mounts",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return ask(c, cmd, func(d *daemon.Client) ([]daemon.MountInfo, error) { return d.List(cmd.Context()) }, printList)
		},
	}
	c.socketFlag(cmd)
	return cmd
}

func printList(w io.Writer, l []daemon.MountInfo) {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "MOUNT POINT\tSOURCE\tSTATE\tPROVIDER\tSERVER")
	for _, m := range l {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", m.Dir, m.Spec, m.State, m.Provider, m.Server)
	}
	t.Flush()
}

func statusCommand(c *common) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status [DIR]",
		Short: "Show what is known about a mount, or about all",
		Args:  cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			dir, err := daemon.OptionalDir(args)
			if err != nil {
				return err
			}
			return ask(c, cmd, func(d *daemon.Client) ([]daemon.MountStatus, error) { return d.Status(cmd.Context(), dir) }, printStatus)
		},
	}
	c.socketFlag(cmd)
	return cmd
}

func printStatus(w io.Writer, l []daemon.MountStatus) {
	for _, m := range l {
		fmt.Fprintf(w, "%s on %s: %s since %s\n", m.Spec, m.Dir, m.State, m.Since.Format("2006-01-02 15:04:05"))
		fmt.Fprintf(w, "  options:    %s\n", m.Options)
		fmt.Fprintf(w, "  connection: %s to %s by %s, %d connects\n", m.Connection, m.Server, m.Provider, m.Connects)
		if m.LastError != "" {
			fmt.Fprintf(w, "  last error: %s\n", m.LastError)
		}
		fmt.Fprintf(w, "  sizes:      rsize %d, wsize %d\n", m.MaxRead, m.MaxWrite)
		fmt.Fprintf(w, "  slots:      %d of %d in use, %d credits\n", m.SlotsInUse, m.Slots, m.Credits)
		fmt.Fprintf(w, "  calls:      %d sent, %d answered\n", m.Sends, m.Receives)
		fmt.Fprint(w, "  MRs:       ")
		for _, state := range slices.Sorted(maps.Keys(m.MRs)) {
			fmt.Fprintf(w, " %s %d", state, m.MRs[state])
		}
		fmt.Fprintf(w, "; recycled %d, orphaned %d\n", m.MRsRecycled, m.MRsOrphaned)
		fmt.Fprintln(w, m.XprtLine)
	}
}

func versionCommand(c *common) *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version of this program",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			v := daemon.Version()
			return c.print(cmd.OutOrStdout(), v, func(w io.Writer) { fmt.Fprintln(w, "nfsrdmad", v.Version, v.Go) })
		},
	}
}
