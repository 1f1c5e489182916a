// Command nfsrdmad mounts NFS exports over RDMA in user space. Under the name mount.nfsrdma it is
// the helper of mount(8).
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
)

// helperName is what mount(8) calls for "-t nfsrdma".
const helperName = "mount.nfsrdma"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), endingSignals()...)
	defer stop()
	cmd := rootCommand()
	if filepath.Base(os.Args[0]) == helperName {
		cmd = helperCommand()
	}
	os.Exit(run(ctx, cmd))
}

// endingSignals ask for an end in order. A terminal that is closed is one of them, unless nohup(1)
// said otherwise: mounts of a process that just dies hang in the tree.
func endingSignals() []os.Signal {
	signals := []os.Signal{syscall.SIGINT, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) {
		signals = append(signals, syscall.SIGHUP)
	}
	return signals
}

// ignoreSIGPIPE keeps a process that serves mounts alive when nobody reads what it says any more.
func ignoreSIGPIPE() { signal.Ignore(syscall.SIGPIPE) }

func run(ctx context.Context, cmd *cobra.Command) int {
	err := cmd.ExecuteContext(ctx)
	if err != nil {
		fmt.Fprintf(cmd.ErrOrStderr(), "%s: %v\n", cmd.Name(), err)
	}
	return control.ExitCode(err)
}
