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

const virtiofsLong = `Serve the export of an NFS server over RDMA to a virtual machine.

The command makes a Unix socket for the device vhost-user-fs of the virtual
machine monitor. The guest mounts it with "mount -t virtiofs TAG DIR" and needs
no NFS, no RDMA and no network. For QEMU:

  -object memory-backend-memfd,id=mem,size=4G,share=on -numa node,memdev=mem
  -chardev socket,id=fs,path=SOCKET
  -device vhost-user-fs-pci,chardev=fs,tag=TAG,queue-size=1024

"nfsrdmad umount SOCKET" ends the share. It stays when the daemon is restarted
or killed: the guest waits for the next daemon. With --foreground it ends with
its process, and a guest that uses it hangs. The options of -o are those of
"nfsrdmad mount". suid, dev, exec, atime and their opposites have no effect: the
guest decides about them.`

func virtiofsCommand(c *commonFlags) *cobra.Command {
	f := &mountFlags{}
	var share string
	cmd := &cobra.Command{
		Use:   "virtiofs --socket SOCKET HOST:/EXPORT [-o OPTIONS]",
		Short: "Serve an export to a virtual machine",
		Long:  virtiofsLong,
		Args:  argCount(1, 1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if share == "" {
				return fmt.Errorf("--socket is missing; give the path of the socket to make")
			}
			if f.foreground {
				prepareService()
			}
			r := control.MountRequest{Spec: args[0], Dir: share, Options: strings.Join(f.options, ","), Virtiofs: true}
			return daemon.MountCommand(cmd.Context(), daemon.MountCommandConfig{Request: r, Socket: c.socket,
				Foreground: f.foreground, LogLevel: f.logLevel, Inject: f.inject, Log: os.Stderr,
				Mounted: func(i control.MountInfo) { // an error of the output does not undo the share
					_ = c.print(cmd.OutOrStdout(), i, func(w io.Writer) {
						fmt.Fprintf(w, "%s is served on %s\n", printable(i.Spec), printable(i.Dir))
					})
				}})
		},
	}
	c.socketFlag(cmd)
	cmd.Flags().StringVar(&share, "socket", "", "`path` of the socket to make, mode 0600")
	cmd.Flags().StringArrayVarP(&f.options, "options", "o", nil, "mount `options`, comma separated")
	cmd.Flags().BoolVar(&f.foreground, "foreground", false,
		"serve the share in this process until it is interrupted; needs no daemon")
	cmd.Flags().StringVar(&f.logLevel, "log-level", "warn",
		"log `level` with --foreground: trace, debug, info, warn or error")
	cmd.Flags().StringVar(&f.inject, "inject", "",
		"inject faults for tests, with --foreground: seed=S,disconnect-every=N,... (see docs/operator.md)")
	return cmd
}
