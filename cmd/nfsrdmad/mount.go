package main

import (
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/daemon"
	"github.com/nfsrdmad/nfsrdmad/pkg/mount"
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
		prepareService()
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

// mountLong is the help of "mount" and of mount.nfsrdma.
var mountLong = "Mount the export of an NFS server over RDMA.\n\n" + optionHelp()

// optionHelp returns the help of the mount options. The manual page nfsrdma(5) has the same text.
func optionHelp() string {
	const indent = 24 // columns
	var b strings.Builder
	for i, section := range mount.OptionSections() {
		if i > 0 {
			fmt.Fprintf(&b, "%s\n\n", wrap("Accepted for compatibility; no effect: "+mount.NoEffect+
				", and options of fstab(5) for other programs.", "", "  ", columns))
		}
		fmt.Fprintf(&b, "%s%s:\n", section.Title, []string{"; defaults in parentheses", ""}[min(i, 1)])
		for _, o := range section.Options {
			first := fmt.Sprintf("  %-*s ", indent-3, o.Syntax)
			if len(first) > indent {
				fmt.Fprintln(&b, strings.TrimRight(first, " "))
				first = strings.Repeat(" ", indent)
			}
			fmt.Fprintln(&b, wrap(o.Text, first, strings.Repeat(" ", indent), columns))
		}
	}
	return strings.TrimSuffix(b.String(), "\n")
}

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
