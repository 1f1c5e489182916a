package main

import (
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
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

func (f *mountFlags) request(args []string) control.MountRequest {
	return control.MountRequest{Spec: args[0], Dir: args[1], Options: strings.Join(f.options, ",")}
}

func (f *mountFlags) run(cmd *cobra.Command, c *common, args []string) error {
	if f.foreground {
		ignoreSIGPIPE()
	}
	return daemon.MountCommand(cmd.Context(), daemon.MountCommandConfig{
		Request: f.request(args), Socket: c.socket, Foreground: f.foreground, CheckOnly: f.check, Sloppy: f.sloppy,
		LogLevel: f.logLevel, Inject: f.inject, Log: os.Stderr,
		Mounted: func(i control.MountInfo) { // it stands, whoever reads of it
			_ = c.print(cmd.OutOrStdout(), i, func(w io.Writer) { f.print(w, &i) })
		},
	})
}

func (f *mountFlags) print(w io.Writer, i *control.MountInfo) {
	if f.verbose {
		fmt.Fprintf(w, "%s on %s type nfsrdma (%s)\n", printable(i.Spec), printable(i.Dir), i.Options)
	}
}

const mountLong = `Mount the export of an NFS server over RDMA.

Options of -o, with nfs(5)'s names and meanings; defaults in parentheses:
  ro | rw               (rw)
  hard | soft | softerr a call without answer: wait for ever, EIO, ETIMEDOUT
                        (hard)
  timeo=TENTHS          after which a call ends its connection (600: 60 s)
  retrans=N             times that soft and softerr try again (2)
  rsize=N, wsize=N      most octets of a READ, a WRITE, 4096 to 1048576
                        (as many as the server takes)
  port=N                RDMA port of the server (20049)
  mountport=N           TCP port of its MOUNT service (its port mapper tells)
  nconnect=N            connections, 1 to 16 (1)
  acregmin=, acregmax=, acdirmin=, acdirmax=SECONDS
                        for which attributes are kept (3, 60, 30, 60)
  actimeo=SECONDS       all four of them
  ac | noac             keep attributes, or do not (ac)
  lookupcache=all | pos | none
                        names that are kept (all)
  nosuid, nodev, noexec, noatime, nodiratime and their opposites
                        as in mount(8)
Accepted, because it is so anyhow: vers=3, nfsvers=3, mountvers=3, proto=rdma,
  rdma, mountproto=tcp, sec=sys, nolock, local_lock=all, cto, rdirplus, intr,
  nointr, and what fstab(5) says to others.

This client's own:
  provider=auto | softiwarp | rdmacore
                        what carries RDMA (auto: rdmacore where the route to
                        the server goes through an RDMA device)
  device=NAME           the one RDMA device to use
  slots=N               calls in flight on a connection, 4 to 1024 (64)
  inline=N              octets of a message without chunks, 1024 to 65536, in
                        steps of 1024 (4096)
  mpacrc=off | on       make and check CRCs on iWARP (off)
  writepad              room for the padding that old servers write
  trace=N               events kept for "nfsrdmad trace", 0 for none (1024)
  keepalive=SECONDS     of silence until the server is asked for a sign of
                        life, 0 for never (10)
  idle=SECONDS          after which an unused connection is closed, 0 for
                        never (300)`

func mountCommand(c *common) *cobra.Command {
	f := &mountFlags{}
	cmd := &cobra.Command{
		Use:   "mount HOST:/EXPORT DIR [-o OPTIONS]",
		Short: "Mount an export",
		Long:  mountLong,
		Args:  takes(2, 2),
		RunE:  func(cmd *cobra.Command, args []string) error { return f.run(cmd, c, args) },
	}
	c.socketFlag(cmd)
	cmd.Flags().StringArrayVarP(&f.options, "options", "o", nil, "mount `options`, comma separated")
	cmd.Flags().BoolVarP(&f.verbose, "verbose", "v", false, "say what was done")
	cmd.Flags().BoolVar(&f.foreground, "foreground", false,
		"serve the mount in this process until it is interrupted or unmounted; no daemon needed")
	cmd.Flags().StringVar(&f.logLevel, "log-level", "warn", "trace, debug, info, warn or error, with --foreground")
	cmd.Flags().StringVar(&f.inject, "inject", "", "break connections on purpose, for tests, with --foreground")
	return cmd
}

// helperCommand follows mount(8), "External helpers": mount.nfsrdma SPEC DIR [-sfnv] [-N namespace]
// [-o options] [-t type.subtype].
func helperCommand() *cobra.Command {
	f := &mountFlags{}
	var ignored, namespace string
	cmd := &cobra.Command{
		Use:   helperName + " HOST:/EXPORT DIR [-sfnv] [-o OPTIONS]",
		Short: "Mount an export, for mount(8)",
		Long:  mountLong,
		Args:  takes(2, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if namespace != "" {
				return fmt.Errorf("flag -N %s: the daemon mounts in its own mount namespace; run a daemon in that one, or nfsrdmad mount --foreground", namespace)
			}
			return f.run(cmd, &common{socket: control.DefaultSocket}, args)
		},
	}
	cmd.Flags().StringArrayVarP(&f.options, "options", "o", nil, "mount `options`, comma separated")
	cmd.Flags().BoolVarP(&f.verbose, "verbose", "v", false, "say what was done")
	cmd.Flags().BoolVarP(&f.sloppy, "sloppy", "s", false, "ignore unknown options")
	cmd.Flags().BoolVarP(&f.check, "fake", "f", false, "check everything that needs no server, and mount nothing")
	cmd.Flags().BoolVarP(&f.noMtab, "no-mtab", "n", false, "without effect: there is no mtab")
	cmd.Flags().StringVarP(&ignored, "types", "t", "", "without effect")
	cmd.Flags().StringVarP(&namespace, "namespace", "N", "", "refused: the daemon mounts where it runs")
	configureHelp(cmd)
	return cmd
}

func umountCommand(c *common) *cobra.Command {
	var force, lazy bool
	cmd := &cobra.Command{
		Use:   "umount [--force|--lazy] DIR",
		Short: "End a mount",
		Args:  takes(1, 1),
		RunE: func(cmd *cobra.Command, args []string) error {
			dir, err := control.AbsolutePath(args[0])
			if err != nil {
				return err
			}
			mode := control.UmountNormal
			switch {
			case force:
				mode = control.UmountForce
			case lazy:
				mode = control.UmountLazy
			}
			return control.NewClient(c.socket).Umount(cmd.Context(), control.UmountRequest{Dir: dir, Mode: mode})
		},
	}
	c.socketFlag(cmd)
	cmd.Flags().BoolVarP(&force, "force", "f", false, "abort what is under way; data not yet written is lost")
	cmd.Flags().BoolVarP(&lazy, "lazy", "l", false, "detach now; open files stay usable")
	cmd.MarkFlagsMutuallyExclusive("force", "lazy")
	return cmd
}
