// Command nfsrdmad mounts NFS exports over RDMA in user space. When it is started as mount.nfsrdma,
// it is the helper that mount(8) calls for "-t nfsrdma".
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
	"github.com/nfsrdmad/nfsrdmad/pkg/daemon"
)

// helperName is the name under which mount(8) starts this program.
const helperName = "mount.nfsrdma"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), terminationSignals()...)
	defer stop()
	cmd := rootCommand()
	if filepath.Base(os.Args[0]) == helperName {
		cmd = helperCommand()
	}
	os.Exit(run(ctx, cmd))
}

// terminationSignals returns the signals that end the process in order. SIGHUP is one of them,
// because a process that it kills leaves dead mounts behind. Under nohup(1) SIGHUP stays ignored.
func terminationSignals() []os.Signal {
	signals := []os.Signal{syscall.SIGINT, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) {
		signals = append(signals, syscall.SIGHUP)
	}
	return signals
}

// prepareService prepares a process that serves mounts or clients. The process stays alive when the
// reader of its output is gone.
func prepareService() {
	signal.Ignore(syscall.SIGPIPE)
	daemon.SetProcs()
	go daemon.ReturnMemory()
	_ = daemon.ForbidCoreDumps() // fails on no kernel
}

func run(ctx context.Context, cmd *cobra.Command) int {
	err := cmd.ExecuteContext(ctx)
	if err != nil {
		fmt.Fprintf(cmd.ErrOrStderr(), "%s: %v\n", cmd.Name(), err)
	}
	return control.ExitCode(err)
}
