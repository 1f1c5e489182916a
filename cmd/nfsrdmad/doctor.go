package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/nfsrdmad/nfsrdmad/internal/screen"
	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/daemon"
	"github.com/nfsrdmad/nfsrdmad/pkg/doctor"
	"github.com/nfsrdmad/nfsrdmad/pkg/mount"
)

// defaultConfigFile is the configuration file that the systemd unit names.
const defaultConfigFile = "/etc/nfsrdmad.toml"

// daemonUnit is the systemd unit of the daemon.
const daemonUnit = "nfsrdmad.service"

// doctorFlags are the flags of "doctor".
type doctorFlags struct {
	options []string
	write   bool
	timeout time.Duration
	bundle  string
	config  string
}

const doctorLong = `Find out why a mount does not work.

Without HOST:/EXPORT the command checks this host only. With it, the command
also tries each step of that mount in order, without making the mount. Give
the options of the mount with -o. A step that fails stops only the steps that
need it. Each step has a result, its time, and what to do about a failure:

  ok       works
  warning  a mount works, but not as well as it could
  FAILED   a mount fails
  skipped  not tried

The command then compares the connection with published attacks on RDMA keys.
It says which results are measured, with keys of calls on this connection, and
which the provider states by its design.

The steps change nothing on the server. With --write, the step read-write
creates a scratch file in the root of the export, and removes it.

--bundle also writes an archive for support, which only you can read. It has
no names, handles or contents of files, no RDMA keys, and no user IDs. Its
README.txt lists what is in it and what is left out.

The exit code is 0 if no step failed, 2 if this host cannot mount, 32 if the
mount would fail, and 8 after Ctrl-C.`

func doctorCommand(c *commonFlags) *cobra.Command {
	f := &doctorFlags{}
	cmd := &cobra.Command{
		Use:   "doctor [HOST:/EXPORT] [-o OPTIONS]",
		Short: "Find out why a mount does not work",
		Long:  doctorLong,
		Args:  argCount(0, 1),
		RunE:  func(cmd *cobra.Command, args []string) error { return f.run(cmd, c, args) },
	}
	c.socketFlag(cmd)
	cmd.Flags().StringArrayVarP(&f.options, "options", "o", nil, "mount `options`, comma separated")
	cmd.Flags().BoolVar(&f.write, "write", false, "write, read and remove a scratch file in the root of the export")
	cmd.Flags().DurationVar(&f.timeout, "timeout", doctor.DefaultTimeout,
		fmt.Sprintf("time for each step; the command takes at most %d times as long", doctor.MaxTimeouts))
	cmd.Flags().StringVar(&f.bundle, "bundle", "", "write a support archive to `FILE` (.tar.gz), which must not exist")
	cmd.Flags().StringVar(&f.config, "config", defaultConfigFile,
		"configuration `file` of the daemon, with the base of -o and the allowed mounts")
	return cmd
}

func (f *doctorFlags) run(cmd *cobra.Command, c *commonFlags, args []string) error {
	settings, configErr := daemon.LoadConfig(f.config)
	if configErr != nil {
		if cmd.Flags().Changed("config") && errors.Is(configErr, fs.ErrNotExist) && f.bundle == "" {
			return configErr
		}
		settings = daemon.DefaultConfig()
	}
	cfg, err := f.diagnosis(args, string(settings.MountOptions))
	if err != nil {
		return err
	}
	cfg.Socket, cfg.ConfigFile, cfg.ConfigError = c.socket, f.config, configErr
	if cfg.Allowed, err = mount.ParseAllowed(string(settings.AllowMounts)); err != nil {
		return err
	}
	var bundle *doctor.Bundle
	if f.bundle != "" {
		if bundle, err = doctor.CreateBundle(f.bundle); err != nil {
			return err
		}
	}
	report := f.diagnose(cmd, c, cfg)
	if c.output == "json" {
		err = c.print(cmd.OutOrStdout(), report, nil)
	}
	if bundle != nil && (err != nil || cmd.Context().Err() != nil) {
		bundle.Discard()
	} else if bundle != nil {
		err = f.writeBundle(cmd, c, bundle, report, &settings, configErr)
	}
	if err != nil {
		return err
	}
	return doctorError(report)
}

// diagnosis returns what to diagnose.
func (f *doctorFlags) diagnosis(args []string, defaults string) (cfg doctor.Config, err error) {
	cfg = doctor.Config{Write: f.write, Timeout: f.timeout}
	if f.timeout < time.Millisecond || f.timeout > control.MaxMountTimeout {
		return cfg, fmt.Errorf("invalid --timeout %v: use 1ms to %v", f.timeout, control.MaxMountTimeout)
	}
	if len(args) == 0 && (f.write || len(f.options) > 0) {
		return cfg, errors.New("--write and -o need HOST:/EXPORT")
	}
	base, err := mount.ParseOptions(mount.DefaultOptions(), defaults)
	if err != nil {
		return cfg, err
	}
	if cfg.Options, err = mount.ParseOptions(base, strings.Join(f.options, ",")); err != nil {
		return cfg, err
	}
	if len(args) == 1 {
		spec, err := mount.ParseSpec(args[0])
		if err != nil {
			return cfg, err
		}
		cfg.Spec = &spec
	}
	return cfg, nil
}

// progressDelay is the time after which a step that takes long is shown on a terminal.
const progressDelay = 500 * time.Millisecond

// diagnose runs the diagnosis. As text it prints each step when the step has ended. On a terminal
// it shows the running step.
func (f *doctorFlags) diagnose(cmd *cobra.Command, c *commonFlags, cfg doctor.Config) *doctor.Report {
	out := io.Discard
	if c.output == "text" {
		out = cmd.OutOrStdout()
	}
	table := newDoctorTable(out)
	running := make(chan string, 1) // "" when no step runs
	done := make(chan struct{})
	go func() {
		defer close(done)
		table.showProgress(running)
	}()
	cfg.Begin = func(_, name string) { running <- name }
	cfg.End = func(s doctor.Step) { running <- ""; table.step(&s, cfg.Spec) }
	report := doctor.Run(cmd.Context(), cfg)
	close(running)
	<-done
	table.end(report)
	return report
}

// A doctorTable prints a report as it grows.
type doctorTable struct {
	out   *screen.Screen
	width int
	group string
}

func newDoctorTable(w io.Writer) *doctorTable {
	t := &doctorTable{out: screen.New(w), width: columns}
	if w := t.out.Width(); w > 0 {
		t.width = max(w, minColumns)
	}
	return t
}

// minColumns is the width below which a table is not made narrower.
const minColumns = 60

// showProgress shows the running step on a terminal, until running is closed.
func (t *doctorTable) showProgress(running <-chan string) {
	if t.out.Width() == 0 {
		for range running {
		}
		return
	}
	tick := time.NewTicker(t.out.Tick())
	defer tick.Stop()
	name, began := "", time.Now()
	for {
		select {
		case next, open := <-running:
			if !open {
				return
			}
			name, began = next, time.Now()
		case <-tick.C:
			if d := time.Since(began); name != "" && d > progressDelay {
				t.out.Progress("         %-14s %7.1f s", name, d.Seconds())
			}
		}
	}
}

func (t *doctorTable) step(s *doctor.Step, spec *mount.Spec) {
	if s.Group != t.group {
		title := "this host"
		if s.Group == doctor.GroupServer {
			title = "\nmount of " + printable(spec.String())
		}
		fmt.Fprintln(t.out, title)
		t.group = s.Group
	}
	mark := string(s.Result)
	if s.Result == doctor.Failed {
		mark = "FAILED"
	}
	took := milliseconds(s.Seconds)
	if s.Result == doctor.Skipped {
		took = ""
	}
	t.row(fmt.Sprintf("%-8s %-14s %9s  ", mark, s.Name, took), s.Text)
	if s.Remedy != "" && s.Result != doctor.OK {
		t.row(strings.Repeat(" ", 35)+"> ", s.Remedy)
	}
}

func (t *doctorTable) row(first, text string) {
	wrapAt(t.out, first, printable(text), " ", t.width)
}

// milliseconds formats a time with a resolution that suits steps of a network.
func milliseconds(seconds float64) string {
	if seconds >= 1 {
		return fmt.Sprintf("%.1f s", seconds)
	}
	return fmt.Sprintf("%.1f ms", 1000*seconds)
}

// end prints what follows the steps.
func (t *doctorTable) end(r *doctor.Report) {
	if k := r.Keys; k != nil {
		holds := 0
		for _, c := range k.Checks {
			if c.Verdict == doctor.Holds {
				holds++
			}
		}
		fmt.Fprintf(t.out, "\nremote keys by %s: %d of %d checks hold\n", printable(k.Provider), holds, len(k.Checks))
		for _, c := range k.Checks {
			t.row(fmt.Sprintf("%-8s %-19s %-8s ", c.Verdict, c.Name, c.Basis), c.Text)
		}
	}
	by := map[doctor.Result]int{}
	for _, s := range r.Steps {
		by[s.Result]++
	}
	fmt.Fprintf(t.out, "\n%d ok, %d warning, %d failed, %d skipped in %s\n", by[doctor.OK], by[doctor.Warning],
		by[doctor.Failed], by[doctor.Skipped], milliseconds(r.Seconds))
}

// writeBundle writes the archive.
func (f *doctorFlags) writeBundle(cmd *cobra.Command, c *commonFlags, b *doctor.Bundle, report *doctor.Report,
	settings *daemon.Config, configErr error) error {
	cfg := doctor.BundleConfig{Report: report, Socket: c.socket, ConfigError: configErr, Unit: daemonUnit,
		Metrics: string(settings.MetricsListen)}
	if configErr == nil {
		for _, field := range settings.Fields() {
			cfg.Settings = append(cfg.Settings, doctor.Setting{Key: field.Key, Value: field.Value.String()})
		}
	}
	if err := b.Write(cmd.Context(), cfg); err != nil {
		return err
	}
	if c.output == "text" {
		fmt.Fprintf(cmd.OutOrStdout(), "archive: %s; look at it before you send it\n", printable(f.bundle))
	}
	return nil
}

// doctorError returns the error of a report whose exit code says what failed.
func doctorError(r *doctor.Report) error {
	if r.Outcome == doctor.OutcomeInterrupted {
		return &control.Error{Code: control.CodeCanceled, Text: "doctor: interrupted", Err: context.Canceled}
	}
	s := r.FirstFailure()
	if s == nil {
		return nil
	}
	if s.Group == doctor.GroupHost {
		return control.Errorf(control.CodeSystem, "this host cannot mount: %s: %s", s.Name, s.Text)
	}
	return control.Errorf(control.CodeMount, "a mount of %s fails: %s: %s", r.Source, s.Name, s.Text)
}
