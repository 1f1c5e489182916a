package main

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/nfsrdmad/nfsrdmad/pkg/csi"
	"github.com/nfsrdmad/nfsrdmad/pkg/daemon"
)

const csiLong = `Run the CSI driver for Kubernetes.

The driver serves the Container Storage Interface on a Unix socket. It asks the
daemon for mounts and owns none, so mounts stay when the driver ends. The daemon
must see the directories of kubelet and --work-dir at the same paths, and mounts
must propagate in both directions. See deploy/kubernetes and docs/kubernetes.md.`

func csiCommand(c *commonFlags) *cobra.Command {
	var cfg csi.Config
	log := daemon.DefaultConfig()
	cmd := &cobra.Command{
		Use:   "csi --node-id NAME",
		Short: "Run the CSI driver for Kubernetes",
		Long:  csiLong,
		Args:  argCount(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := log.Check("from flags"); err != nil {
				return err
			}
			cfg.ControlSocket, cfg.Logger = c.socket, daemon.NewLogger(log, os.Stderr)
			prepareService()
			return csi.Run(cmd.Context(), cfg)
		},
	}
	c.socketFlag(cmd)
	cmd.Flags().StringVar(&cfg.NodeID, "node-id", "", "`name` of this node in Kubernetes")
	cmd.Flags().StringVar(&cfg.Name, "name", csi.DefaultName, "name of the driver in Kubernetes")
	cmd.Flags().StringVar(&cfg.Endpoint, "endpoint", csi.DefaultEndpoint, "Unix socket to serve, unix:///PATH")
	cmd.Flags().StringVar(&cfg.WorkDir, "work-dir", csi.DefaultWorkDir,
		"`directory` in which the controller mounts shares to create and delete volumes")
	cmd.Flags().Var(&log.LogLevel, "log-level", "trace, debug, info, warn or error")
	cmd.Flags().Var(&log.LogFormat, "log-format", "text or json")
	return cmd
}
