package main

import (
	"github.com/spf13/cobra"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/daemon"
	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/keep/fdstore"
)

const stopHelp = `Stop the daemon, and wait until it has exited.

The daemon writes dirty data and unmounts all mounts, as for SIGTERM. With
--keep-mounts it leaves mounts and shares to the next daemon: programs and
guests that use them wait until that daemon runs. It fails, and the daemon
serves the mounts further, if a mount would end with the daemon. Without
systemd only: in a unit, use "systemctl restart".`

func stopCommand(c *commonFlags) *cobra.Command {
	var r control.StopRequest
	cmd := &cobra.Command{
		Use:   "stop [--keep-mounts]",
		Short: "Stop the daemon",
		Long:  stopHelp,
		Args:  argCount(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return control.NewClient(c.socket).Stop(cmd.Context(), r)
		},
	}
	c.socketFlag(cmd)
	cmd.Flags().BoolVar(&r.KeepMounts, "keep-mounts", false, "do not unmount; the next daemon continues the mounts")
	return cmd
}

// childCommands returns the commands that the daemon starts. Users do not call them.
func childCommands() []*cobra.Command {
	child := func(name, short string, run func() error) *cobra.Command {
		return &cobra.Command{Use: name, Short: short, Hidden: true, Args: argCount(0, 0),
			RunE: func(*cobra.Command, []string) error { return run() }}
	}
	return []*cobra.Command{
		child(daemon.HolderCommand, "Keep the mounts of a daemon; only the daemon starts this command",
			func() error { return systemError(fdstore.RunHolder()) }),
		child(daemon.NotifyHelperCommand, "Notify the kernel; only the daemon starts this command", runNotifyHelper),
	}
}

// systemError gives err the class of an error of this host.
func systemError(err error) error {
	if err == nil {
		return nil
	}
	return &control.Error{Code: control.CodeSystem, Text: control.OneLine(err.Error()), Err: err}
}

// runNotifyHelper runs the notify helper.
func runNotifyHelper() error { return systemError(kernel.RunHelper()) }
