package main

import (
	"encoding/json"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
)

// commonFlags are the flags that most commands have.
type commonFlags struct {
	socket string
	output string
}

// buildCommands are the commands of programs with special build tags.
var buildCommands []*cobra.Command

func rootCommand() *cobra.Command {
	c := &commonFlags{}
	root := &cobra.Command{
		Use:                        "nfsrdmad",
		Short:                      "Mount NFS exports over RDMA in user space",
		Version:                    control.Version().Version,
		DisableFlagsInUseLine:      true,
		SuggestionsMinimumDistance: 2,
		Args:                       rejectUnknownCommand,
		RunE:                       func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		PersistentPreRunE: func(*cobra.Command, []string) error {
			if c.output != "text" && c.output != "json" {
				return fmt.Errorf("invalid --output %q: use text or json", c.output)
			}
			return nil
		},
	}
	root.PersistentFlags().StringVar(&c.output, "output", "text",
		"text or json, for mount, list, status, stats, trace, doctor and version")
	root.AddCommand(childCommands()...)
	root.AddCommand(daemonCommand(), stopCommand(c), mountCommand(c), virtiofsCommand(c), umountCommand(c),
		listCommand(c), statusCommand(c), statsCommand(c), traceCommand(c), csiCommand(c),
		doctorCommand(c), serveCommand(), demoCommand(), benchCommand(c), versionCommand(c))
	root.AddCommand(buildCommands...)
	root.SetVersionTemplate("nfsrdmad {{.Version}}\n")
	configureHelp(root)
	return root
}

// socketFlag adds the flag --control-socket.
func (c *commonFlags) socketFlag(cmd *cobra.Command) {
	cmd.Flags().StringVar(&c.socket, "control-socket", control.DefaultSocket, "Unix socket of the daemon")
}

// print writes v as JSON, or calls text to write it as text.
func (c *commonFlags) print(w io.Writer, v any, text func(io.Writer)) error {
	if c.output == "json" {
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		return enc.Encode(v)
	}
	text(w)
	return nil
}

// printFromDaemon fetches a value from the daemon and prints it.
func printFromDaemon[T any](c *commonFlags, cmd *cobra.Command, fetch func(*control.Client) (T, error),
	text func(io.Writer, T)) error {
	v, err := fetch(control.NewClient(c.socket))
	if err != nil {
		return err
	}
	return c.print(cmd.OutOrStdout(), v, func(w io.Writer) { text(w, v) })
}
