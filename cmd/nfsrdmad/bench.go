package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/nfsrdmad/nfsrdmad/internal/bench"
	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/mountpoint"
)

const benchHelp = `Measure the file system of a directory with plain system calls: sequential
reads and writes in blocks of 1 MiB and 4 KiB (a write includes fsync and
close), random reads of 4 KiB with O_DIRECT, and create, stat, list, rename and
unlink of files.

The command works in a new directory below DIR and removes it at the end. It
needs 2 x --size of free space. Before each read it drops the data of the file
from the cache of this host. As root it also drops the cached names and
attributes, of all file systems of this host; without that, stat and ls -l can
find them in the cache. Caches of the server stay. As root, do not measure a
directory that belongs to an untrusted user, who could replace the new one.

The table has the median and the range of all runs. A time of several callers is
the time of the run divided by the calls of all. If DIR is on a mount of the
daemon, the table also has the processor time of the daemon and its voluntary
context switches for each call.`

// benchFlags are the flags of "bench".
type benchFlags struct {
	size, runs, files int
	time              time.Duration
	json              string
}

func benchCommand(c *commonFlags) *cobra.Command {
	f := benchFlags{size: bench.DefaultSize >> 20, runs: 3, files: bench.DefaultFiles, time: bench.DefaultTime}
	cmd := &cobra.Command{
		Use:   "bench DIR",
		Short: "Measure the file system of a directory",
		Long:  benchHelp,
		Args:  argCount(1, 1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return f.run(cmd, c, args[0])
		},
	}
	c.socketFlag(cmd)
	cmd.Flags().IntVar(&f.size, "size", f.size, "size of the file for data in `MiB`")
	cmd.Flags().DurationVar(&f.time, "time", f.time, "maximum time of one measurement, without its fsync")
	cmd.Flags().IntVar(&f.files, "files", f.files, "maximum number of files that create makes")
	cmd.Flags().IntVar(&f.runs, "runs", f.runs, "number of runs of each workload, 1 to 1000")
	cmd.Flags().StringVar(&f.json, "json", "", "also write the results and all runs to the new `FILE`")
	return cmd
}

func (f *benchFlags) check() error {
	switch {
	case f.size < 1 || f.size > bench.MaxSize>>20:
		return fmt.Errorf("flag --size=%d: must be from 1 to %d (MiB)", f.size, bench.MaxSize>>20)
	case f.time <= 0 || f.time > time.Hour:
		return fmt.Errorf("flag --time=%v: must be more than 0 and at most 1h", f.time)
	case f.files < 1 || f.files > bench.MaxFiles:
		return fmt.Errorf("flag --files=%d: must be from 1 to %d", f.files, bench.MaxFiles)
	case f.runs < 1 || f.runs > 1000:
		return fmt.Errorf("flag --runs=%d: must be from 1 to 1000", f.runs)
	}
	return nil
}

func (f *benchFlags) run(cmd *cobra.Command, c *commonFlags, dir string) (err error) {
	if err := f.check(); err != nil {
		return err
	}
	ctx := cmd.Context()
	m, err := bench.MountOf(dir)
	if err != nil {
		return control.Errorf(control.CodeUsage, "bench: %w", err)
	}
	var out *os.File
	if f.json != "" {
		if out, err = os.OpenFile(f.json, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644); err != nil {
			return control.Errorf(control.CodeUsage, "bench: %w", err)
		}
		defer func() {
			if err = errors.Join(err, out.Close()); err != nil {
				_ = os.Remove(f.json)
			}
		}()
	}
	o := bench.Options{Path: dir, Size: int64(f.size) << 20, Time: f.time, Files: f.files}
	pid, note := mountDaemon(ctx, c.socket, m)
	if pid != 0 {
		o.Watch = bench.Processes{bench.Daemon: pid}
	}
	show, erase := benchProgress(cmd.ErrOrStderr(), f.runs)
	r, err := bench.Measure(ctx, o, f.runs, show)
	erase()
	var left *fs.PathError
	switch {
	case errors.Is(err, context.Canceled) && !errors.As(err, &left):
		return &control.Error{Code: control.CodeCanceled, Text: "bench: interrupted; the files were removed", Err: err}
	case err != nil:
		return &control.Error{Code: control.CodeSystem, Text: "bench: " + control.OneLine(err.Error()), Err: err}
	}
	if out != nil {
		enc := json.NewEncoder(out)
		enc.SetIndent("", "  ")
		if err := enc.Encode(r); err != nil {
			return control.Errorf(control.CodeSystem, "bench: write %s: %w", f.json, err)
		}
	}
	return printReport(cmd.OutOrStdout(), r, note)
}

// mountDaemon returns the process of the daemon that serves m. If the process is not known, note
// tells why.
func mountDaemon(ctx context.Context, socket string, m bench.Mount) (pid int, note string) {
	if m.Type != mountpoint.FSType {
		return 0, "none; " + m.Dir + " is no nfsrdma mount"
	}
	client := control.NewClient(socket)
	mounts, err := client.List(ctx)
	if err == nil {
		for _, i := range mounts {
			if i.Dir == m.Dir {
				pid, err = client.PID(ctx)
			}
		}
	}
	switch {
	case err != nil:
		return 0, "not known: no answer from " + socket + "; name the socket of the daemon with --control-socket"
	case pid == 0:
		return 0, "not known: the daemon at " + socket + " does not serve this mount, or is not visible"
	}
	return pid, fmt.Sprintf("pid %d", pid)
}

// benchProgress returns functions that show the current workload on one line of a terminal and
// erase the line. They do nothing if w is not a terminal.
func benchProgress(w io.Writer, runs int) (show func(run int, workload string), erase func()) {
	f, ok := w.(*os.File)
	if !ok || !isTerminal(f) {
		return func(int, string) {}, func() {}
	}
	erase = func() { fmt.Fprint(f, "\r\x1b[K") } // ECMA-48, EL
	return func(run int, workload string) {
		erase()
		fmt.Fprintf(f, "run %d of %d: %s", run, runs, workload)
	}, erase
}

func printReport(w io.Writer, r *bench.Report, daemonNote string) error {
	reads := "O_DIRECT"
	if !r.Direct {
		reads = "buffered, because the file system does not support O_DIRECT"
	}
	for _, line := range [][2]string{
		{"directory", printable(r.Path)},
		{"file system", printable(r.FileSystem + ", " + r.Source)},
		{"host", fmt.Sprintf("Linux %s, %s", r.Kernel, plural(uint64(r.Processors), "processor"))},
		{"work", fmt.Sprintf("%d MiB, at most %d files, at most %v each, %s", r.Size>>20, r.Files,
			seconds(r.Seconds), plural(uint64(r.Runs), "run"))},
		{"data cache", r.Caches.Data},
		{"name cache", r.Caches.Names},
		{"random read", reads},
		{"daemon", printable(daemonNote)},
	} {
		wrapIndented(w, fmt.Sprintf("%-12s ", line[0]), line[1], " ")
	}
	fmt.Fprintln(w)
	return bench.WriteTable(w, r.Results)
}
