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

// mountFlags are the flags of "mount" and of mount.nfsrdma.
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

func (f *mountFlags) run(cmd *cobra.Command, c *commonFlags, args []string) error {
	if f.foreground {
		ignoreSIGPIPE()
	}
	return daemon.MountCommand(cmd.Context(), daemon.MountCommandConfig{
		Request: f.request(args), Socket: c.socket, Foreground: f.foreground, CheckOnly: f.check, Sloppy: f.sloppy,
		LogLevel: f.logLevel, Inject: f.inject, Log: os.Stderr,
		Mounted: func(i control.MountInfo) { // an error of the output does not undo the mount
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

Options of -o with the names and meanings of nfs(5); defaults in parentheses:
  ro | rw               mount read-only or read-write (rw)
  hard | soft | softerr when the server does not reply: retry forever, return
                        EIO, or return ETIMEDOUT (hard)
  timeo=TENTHS          reply timeout in tenths of a second; the client then
                        reconnects (600)
  retrans=N             retries before soft or softerr returns an error (2)
  rsize=N, wsize=N      maximum bytes of a READ or WRITE, 4096 to 1048576
                        (the server's maximum)
  port=N                RDMA port of the server (20049)
  mountport=N           TCP port of the server's MOUNT service (ask the port
                        mapper, then try 20048)
  nconnect=N            number of connections, 1 to 16 (1)
  acregmin=, acregmax=, acdirmin=, acdirmax=SECONDS
                        minimum and maximum time to cache attributes of files
                        and directories (3, 60, 30, 60)
  actimeo=SECONDS       set all four cache times
  ac | noac             cache attributes or not (ac)
  lookupcache=all | pos | none
                        cache all names, existing names, or none (all)
  cto | nocto           ask the server at each open, or use cached attributes
                        and permissions of the user until they expire (cto)
  acl | noacl           use POSIX ACLs of the server, or ignore them (acl)
  lock | nolock         fcntl(2) and flock(2) locks exclude other clients, or
                        only processes of this host (lock)
  local_lock=all | flock | posix | none
                        kinds of locks that are local to this host (none)
  nlmport=N             TCP port of the server's lock service NLM (ask the
                        port mapper, or use the port of MOUNT)
  suid | nosuid, dev | nodev
                        allow set-user-ID programs, and device files (nosuid,
                        nodev; also with the option defaults)
  noexec, noatime, nodiratime, strictatime and their opposites
                        see mount(8)
Accepted for compatibility; no effect: vers=3, nfsvers=3, mountvers=3,
  proto=rdma, rdma, mountproto=tcp, sec=sys, rdirplus, intr, nointr,
  and options of fstab(5) for other programs.

Options of this client:
  dirty_expire=SECONDS  age after which the data of open files is written to
                        stable storage, 0 to wait for fsync or close (5)
  dirty_bytes=N         bound of written data that is not on stable storage,
                        1048576 to 1073741824; writes wait (33554432)
  provider=auto | softiwarp | rdmacore
                        RDMA provider (auto: rdmacore if the route to the
                        server uses an RDMA device, else softiwarp)
  device=NAME           RDMA device to use
  slots=N               maximum calls in flight per connection, 4 to 1024 (64)
  inline=N              inline threshold in bytes, 1024 to 65536 in steps of
                        1024 (4096)
  mpacrc=off | on       send and check iWARP CRCs (off)
  writepad              offer memory for XDR padding, for old servers
  front=devfuse | uring
                        how requests reach the daemon: /dev/fuse, or FUSE over
                        io_uring if the kernel has it (devfuse)
  sharednames | nosharednames
                        let the kernel cache names for all users or not; it
                        checks search permission by mode bits alone
                        (nosharednames)
  trace=N               trace events to keep, 0 for none (1024)
  keepalive=SECONDS     idle time before a keepalive NULL call, 0 for never
                        (10)
  idle=SECONDS          close a connection that is unused for this time, 0 for
                        never (300)`

func mountCommand(c *commonFlags) *cobra.Command {
	f := &mountFlags{}
	cmd := &cobra.Command{
		Use:   "mount HOST:/EXPORT DIR [-o OPTIONS]",
		Short: "Mount an export",
		Long:  mountLong,
		Args:  argCount(2, 2),
		RunE:  func(cmd *cobra.Command, args []string) error { return f.run(cmd, c, args) },
	}
	c.socketFlag(cmd)
	cmd.Flags().StringArrayVarP(&f.options, "options", "o", nil, "mount `options`, comma separated")
	cmd.Flags().BoolVarP(&f.verbose, "verbose", "v", false, "print the mount when it succeeds")
	cmd.Flags().BoolVar(&f.foreground, "foreground", false,
		"serve the mount in this process until it is interrupted or unmounted; needs no daemon")
	cmd.Flags().StringVar(&f.logLevel, "log-level", "warn",
		"log `level` with --foreground: trace, debug, info, warn or error")
	cmd.Flags().StringVar(&f.inject, "inject", "",
		"inject faults for tests, with --foreground: seed=S,disconnect-every=N,... (see docs/operator.md)")
	return cmd
}

// helperCommand returns the command for mount.nfsrdma. mount(8), section "External helpers",
// defines its arguments: mount.nfsrdma SPEC DIR [-sfnv] [-N namespace] [-o options] [-t
// type.subtype].
func helperCommand() *cobra.Command {
	f := &mountFlags{}
	var ignored, namespace string
	cmd := &cobra.Command{
		Use:   helperName + " HOST:/EXPORT DIR [-sfnv] [-o OPTIONS]",
		Short: "Mount an export; mount(8) calls this helper",
		Long:  mountLong,
		Args:  argCount(2, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if namespace != "" {
				return fmt.Errorf("-N %s is not supported: the daemon mounts in its own mount namespace; "+
					"run a daemon or nfsrdmad mount --foreground in that namespace", namespace)
			}
			return f.run(cmd, &commonFlags{socket: control.DefaultSocket}, args)
		},
	}
	cmd.Flags().StringArrayVarP(&f.options, "options", "o", nil, "mount `options`, comma separated")
	cmd.Flags().BoolVarP(&f.verbose, "verbose", "v", false, "print the mount when it succeeds")
	cmd.Flags().BoolVarP(&f.sloppy, "sloppy", "s", false, "ignore unknown options")
	cmd.Flags().BoolVarP(&f.check, "fake", "f", false,
		"check the arguments without contacting the server; do not mount")
	cmd.Flags().BoolVarP(&f.noMtab, "no-mtab", "n", false, "no effect")
	cmd.Flags().StringVarP(&ignored, "types", "t", "", "no effect")
	cmd.Flags().StringVarP(&namespace, "namespace", "N", "", "not supported")
	configureHelp(cmd)
	return cmd
}

func umountCommand(c *commonFlags) *cobra.Command {
	var force, lazy bool
	cmd := &cobra.Command{
		Use:   "umount [--force|--lazy] DIR",
		Short: "Unmount a file system",
		Args:  argCount(1, 1),
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
	cmd.Flags().BoolVarP(&force, "force", "f", false,
		"write dirty data while the server accepts it, abort pending operations, and unmount; other data is lost")
	cmd.Flags().BoolVarP(&lazy, "lazy", "l", false, "detach now; clean up when the last open file is closed")
	cmd.MarkFlagsMutuallyExclusive("force", "lazy")
	return cmd
}
