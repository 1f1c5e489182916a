package main

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/nfsrdmad/nfsrdmad/pkg/daemon"
)

func daemonCommand() *cobra.Command {
	var file string
	flags := daemon.DefaultConfig()
	cmd := &cobra.Command{
		Use:   "daemon [--config FILE]",
		Short: "Run the daemon",
		Args:  argCount(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := daemon.ConfigFrom(file, flags,
				func(f daemon.Field) bool { return cmd.Flags().Changed(f.Flag()) })
			if err != nil {
				return err
			}
			_ = daemon.PrepareProcess() // Run logs the failure
			prepareService()
			return daemon.Run(cmd.Context(), cfg, daemon.NewLogger(cfg, os.Stderr))
		},
	}
	cmd.Flags().StringVar(&file, "config", "", "configuration `file` (TOML); flags override it")
	for _, f := range flags.Fields() {
		if cmd.Flags().Var(f.Value, f.Flag(), f.Usage); f.Value.Type() == "bool" {
			cmd.Flags().Lookup(f.Flag()).NoOptDefVal = "true"
		}
	}
	return cmd
}
