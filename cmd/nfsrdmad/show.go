package main

import (
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
)

func listCommand(c *commonFlags) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the mounts of the daemon",
		Args:  argCount(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return printFromDaemon(c, cmd, func(d *control.Client) ([]control.MountInfo,
				error) {
				return d.List(cmd.Context())
			},
				printList)
		},
	}
	c.socketFlag(cmd)
	return cmd
}

func printList(w io.Writer, l []control.MountInfo) {
	for _, m := range l {
		if m.FaultInjection != "" {
			item(w, "", control.FaultBanner+m.FaultInjection, ",")
			break
		}
	}
	if n := control.NotKept(l); len(n) > 0 {
		item(w, "", fmt.Sprintf("%s would end with the daemon: %s", plural(uint64(len(n)), "mount"),
			printable(n[0].NotKept)), " ")
	}
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "MOUNT POINT\tSOURCE\tSTATE\tPROVIDER\tSERVER")
	for _, m := range l {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", printable(m.Dir), printable(m.Spec), m.State, m.Provider, m.Server)
	}
	t.Flush()
}

func versionCommand(c *commonFlags) *cobra.Command {
	var verbose bool
	cmd := &cobra.Command{
		Use:   "version [--verbose]",
		Short: "Print the version",
		Args:  argCount(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			v := versions{VersionInfo: control.Version()}
			if verbose {
				d, err := control.NewClient(c.socket).Version(cmd.Context())
				if err != nil {
					return err
				}
				v.Daemon = &d
			}
			return c.print(cmd.OutOrStdout(), v, v.print)
		},
	}
	c.socketFlag(cmd)
	cmd.Flags().BoolVarP(&verbose, "verbose", "v", false, "also print the version of the daemon")
	return cmd
}

// versions holds the version of this program and, with --verbose, of the daemon.
type versions struct {
	control.VersionInfo
	Daemon *control.VersionInfo `json:"daemon,omitempty"`
}

func (v versions) print(w io.Writer) {
	fmt.Fprintln(w, "nfsrdmad", v.Version, v.Go)
	if v.Daemon == nil {
		return
	}
	fmt.Fprintf(w, "daemon   %s %s, pid %d\n", v.Daemon.Version, v.Daemon.Go, v.Daemon.PID)
	if v.Daemon.FaultInjection != "" {
		item(w, "", control.FaultBanner+v.Daemon.FaultInjection, ",")
	}
	printMetricsError(w, v.Daemon)
}

// printMetricsError prints why the daemon does not serve metrics, if it does not.
func printMetricsError(w io.Writer, v *control.VersionInfo) {
	if v.MetricsError != "" {
		item(w, "", v.MetricsError, " ")
	}
}
