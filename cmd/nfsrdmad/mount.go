package main

import (
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/nfsrdmad/nfsrdmad/pkg/daemon"
)

// mountFlags are those of "mount" and of mount.nfsrdma.
type mountFlags struct {
	options    []string
	verbose    bool
	foreground bool
	check      bool
	sloppy     bool
	noMtab     bool
	logLevel   string
	inject     string
}

func (f *mountFlags) request(args []string) daemon.MountRequest {
	return daemon.MountRequest{Spec: args[0], Dir: args[1], Options: strings.Join(f.options, ",")}
}

func (f *mountFlags) run(cmd *cobra.Command, socket string, args []string) error {
	return daemon.MountCommand(cmd.Context(), daemon.MountCommandConfig{
		Request: f.request(args), Socket: socket, Foreground: f.foreground, CheckOnly: f.check, Sloppy: f.sloppy,
		Verbose: f.verbose, LogLevel: f.logLevel, Inject: f.inject, Out: cmd.OutOrStdout(), Log: os.Stderr,
	})
}

const mountLong = `Mount the export of an NFS server over RDMA.

Options of -o have nfs(5)'s names and meanings:
  vers=3 proto=rdma port= mountport= mountproto=tcp sec=sys nconnect=
  rsize= wsize= timeo= retrans= hard|soft|softerr intr nolock local_lock=all ro|rw
  acregmin= acregmax= acdirmin= acdirmax= actimeo= ac|noac lookupcache=all|none|pos
and this client's own:
  provider=auto|softiwarp device= slots= inline= mpacrc=off|on writepad
  trace=EVENTS keepalive=SECONDS idle=SECONDS`

func mountCommand(c *common) *cobra.Command {
	f := &mountFlags{}
	cmd := &cobra.Command{
		Use:   "mount HOST:/EXPORT DIR [-o OPTIONS]",
		Short: "Mount an export",
		Long:  mountLong,
		Args:  cobra.ExactArgs(2),
		RunE:  func(cmd *cobra.Command, args []string) error { return f.run(cmd, c.socket, args) },
	}
	c.socketFlag(cmd)
	cmd.Flags().StringSliceVarP(&f.options, "options", "o", nil, "mount options, comma separated")
	cmd.Flags().BoolVarP(&f.verbose, "verbose", "v", false, "say what was done")
	cmd.Flags().BoolVar(&f.foreground, "foreground", false, "serve the mount in this process until it is interrupted or unmounted; no daemon needed")
	cmd.Flags().StringVar(&f.logLevel, "log-level", "warn", "trace, debug, info, warn or error, with --foreground")
	cmd.Flags().StringVar(&f.inject, "inject", "", "break connections on purpose, for tests, with --foreground")
	return cmd
}

// helperCommand follows mount(8), "External helpers": mount.nfsrdma SPEC DIR [-sfnv] [-N namespace] [-o options] [-t type.subtype].
func helperCommand() *cobra.Command {
	f := &mountFlags{}
	var ignored string
	cmd := &cobra.Command{
		Use:           helperName + " HOST:/EXPORT DIR [-sfnv] [-o OPTIONS]",
		Short:         "Mount an export, for mount(8)",
		Long:          mountLong,
		Args:          cobra.ExactArgs(2),
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE:          func(cmd *cobra.Command, args []string) error { return f.run(cmd, daemon.DefaultControlSocket, args) },
	}
	cmd.Flags().StringSliceVarP(&f.options, "options", "o", nil, "mount options, comma separated")
	cmd.Flags().BoolVarP(&f.verbose, "verbose", "v", false, "say what was done")
	cmd.Flags().BoolVarP(&f.sloppy, "sloppy", "s", false, "ignore unknown options")
	cmd.Flags().BoolVarP(&f.check, "fake", "f", false, "check everything that needs no server, and mount nothing")
	cmd.Flags().BoolVarP(&f.noMtab, "no-mtab", "n", false, "without effect: there is no mtab")
	cmd.Flags().StringVarP(&ignored, "types", "t", "", "without effect")
	return cmd
}

func umountCommand(c *common) *cobra.Command {
	var force, lazy bool
	cmd := &cobra.Command{
		Use:   "umount [--force|--lazy] DIR",
		Short: "Unmount",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return daemon.UmountCommand(cmd.Context(), c.socket, args[0], force, lazy)
		},
	}
	c.socketFlag(cmd)
	cmd.Flags().BoolVarP(&force, "force", "f", false, "abort what is under way; data not yet written is lost")
	cmd.Flags().BoolVarP(&lazy, "lazy", "l", false, "detach now; open files stay usable")
	cmd.MarkFlagsMutuallyExclusive("force", "lazy")
	return cmd
}
