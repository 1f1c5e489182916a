package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime/pprof"
	"syscall"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/daemon"
)

// profiledMount serves a mount like "nfsrdmad mount --foreground". It writes a CPU profile from
// each SIGUSR1 to the next SIGUSR2. The files are numbered, and renamed to their final names when
// they are complete.
func profiledMount(args []string) error {
	f := flag.NewFlagSet("mount", flag.ExitOnError)
	options := f.String("o", "", "mount options")
	prefix := f.String("profile", "/tmp/cpu", "`path` of the profiles, without the number")
	f.Parse(args)
	if f.NArg() != 2 {
		return fmt.Errorf("usage: program mount [flags] HOST:/EXPORT DIR")
	}
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGUSR1, syscall.SIGUSR2)
	go func() {
		var file *os.File
		n := 0
		for s := range signals {
			switch {
			case s == syscall.SIGUSR1 && file == nil:
				n++
				var err error
				if file, err = os.Create(fmt.Sprintf("%s%d.part", *prefix, n)); err == nil {
					err = pprof.StartCPUProfile(file)
				}
				if err != nil {
					fmt.Fprintln(os.Stderr, "profile:", err)
				}
			case s == syscall.SIGUSR2 && file != nil:
				pprof.StopCPUProfile()
				if err := errors.Join(file.Close(),
					os.Rename(file.Name(), fmt.Sprintf("%s%d", *prefix, n))); err != nil {
					fmt.Fprintln(os.Stderr, "profile:", err)
				}
				file = nil
			}
		}
	}()
	return daemon.MountCommand(context.Background(), daemon.MountCommandConfig{
		Request: control.MountRequest{Spec: f.Arg(0), Dir: f.Arg(1),
			Options: *options}, Foreground: true, LogLevel: "warn", Log: os.Stderr,
	})
}
