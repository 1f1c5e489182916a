package main

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/hashicorp/go-hclog"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/daemon"
	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/metrics"
	"github.com/nfsrdmad/nfsrdmad/pkg/mount"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/ledger"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

const referenceFile = "../../docs/reference.md"

var updateFlag = flag.Bool("update", false, "make TestReference write docs/reference.md")

// TestReference checks that docs/reference.md is that of the code. "make reference" writes it.
func TestReference(t *testing.T) {
	var page bytes.Buffer
	page.WriteString(`# Reference

"make reference" writes this page from the program: commands, mount options, configuration, metrics
and exit codes. [mount.md](mount.md) and [operator.md](operator.md) explain how to use them.
[troubleshooting.md](troubleshooting.md) explains errors and messages of the log.

`)
	referCommands(&page)
	referOptions(&page)
	referConfiguration(&page)
	referMetrics(t, &page)
	referExitCodes(&page)
	got := append(bytes.TrimSpace(page.Bytes()), '\n')
	if *updateFlag {
		if err := os.WriteFile(referenceFile, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(referenceFile)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("docs/reference.md is not up to date; run make reference: %s",
			firstDifference(string(want), string(got)))
	}
}

// firstDifference returns the first lines that differ.
func firstDifference(have, want string) string {
	a, b := strings.Split(have, "\n"), strings.Split(want, "\n")
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return fmt.Sprintf("line %d: have %q, want %q", i+1, a[i], b[i])
		}
	}
	return fmt.Sprintf("have %d lines, want %d", len(a), len(b))
}

// cell returns text for a cell of a table.
func cell(text string) string {
	return strings.ReplaceAll(strings.ReplaceAll(control.OneLine(text), "|", `\|`), "<", "&lt;")
}

func referCommands(page *bytes.Buffer) {
	page.WriteString("## Commands\n\n")
	root := rootCommand()
	fmt.Fprintf(page, "All commands have `--help`. `--output` is\n%s.\n\n",
		root.PersistentFlags().Lookup("output").Usage)
	for _, cmd := range append(root.Commands(), helperCommand()) {
		if cmd.Hidden {
			continue
		}
		use := strings.TrimSuffix(cmd.UseLine(), " [flags]")
		text := cmd.Long
		if text == "" || text == mountLong {
			text = cmd.Short + "."
		}
		fmt.Fprintf(page, "### %s\n\n`%s`\n\n%s", cmd.CommandPath(), use, paragraphs(text))
		referFlags(page, cmd)
	}
}

// paragraphs wraps the paragraphs of a help text. Indented lines become a block of code.
func paragraphs(text string) string {
	var b strings.Builder
	for p := range strings.SplitSeq(text, "\n\n") {
		switch {
		case strings.TrimSpace(p) == "":
		case strings.Contains("\n"+p, "\n "):
			fmt.Fprintf(&b, "```text\n%s\n```\n\n", strings.Trim(p, "\n"))
		default:
			fmt.Fprintf(&b, "%s\n\n", wrap(p, "", "", 100))
		}
	}
	return b.String()
}

func referFlags(page *bytes.Buffer, cmd *cobra.Command) {
	cmd.Flags().SortFlags = true
	rows := 0
	cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
		if f.Hidden || f.Name == "help" || f.Name == "output" {
			return
		}
		if rows++; rows == 1 {
			page.WriteString("| flag | default | meaning |\n|---|---|---|\n")
		}
		value, usage := pflag.UnquoteUsage(f)
		name := "--" + f.Name
		if f.Shorthand != "" {
			name = "-" + f.Shorthand + ", " + name
		}
		if value != "" {
			name += " " + value
		}
		def := f.DefValue
		if def != "" && def != "[]" && (f.Value.Type() != "bool" || def != "false") {
			def = "`" + def + "`"
		} else {
			def = ""
		}
		fmt.Fprintf(page, "| `%s` | %s | %s |\n", name, def, cell(usage))
	})
	if rows > 0 {
		page.WriteString("\n")
	}
}

func referOptions(page *bytes.Buffer) {
	page.WriteString("## Mount options\n\nThe value in parentheses is the default.\n\n")
	for _, section := range mount.OptionSections() {
		fmt.Fprintf(page, "### %s\n\n| option | meaning | range |\n|---|---|---|\n", section.Title)
		for _, o := range section.Options {
			fmt.Fprintf(page, "| `%s` | %s | %s |\n", strings.ReplaceAll(o.Syntax, "|", `\|`), cell(o.Text), o.Range)
		}
		page.WriteString("\n")
	}
	fmt.Fprintf(page, "### Options without effect\n\n%s\n\n", wrap("These options are accepted for compatibility: "+
		mount.NoEffect+", and the options of fstab(5) for other programs.", "", "", 100))
}

func referConfiguration(page *bytes.Buffer) {
	page.WriteString(`## Configuration

The keys of ` + "`/etc/nfsrdmad.toml`" + `, and the flags of ` + "`nfsrdmad daemon`" + ` that override them. All values
are strings.

| key | flag | default | meaning |
|---|---|---|---|
`)
	config := daemon.DefaultConfig()
	for _, f := range config.Fields() {
		fmt.Fprintf(page, "| `%s` | `--%s` | `%q` | %s |\n", f.Key, f.Flag(), f.Value.String(), cell(f.Usage))
	}
	page.WriteString("\n")
}

// descriptor matches the text of a prometheus.Desc.
var descriptor = regexp.MustCompile(`fqName: "([^"]*)", help: "((?:[^"\\]|\\.)*)".*variableLabels: \{([^}]*)\}`)

func referMetrics(t *testing.T, page *bytes.Buffer) {
	page.WriteString(`## Metrics

The metrics of ` + "`/metrics`" + `. Those with the label ` + "`mount`" + ` exist for each mount.
Those of traces exist only with ` + "`otlp_endpoint`" + `. The daemon also has the standard metrics
` + "`go_…` and `process_…`" + `.

| metric | type | labels | meaning |
|---|---|---|---|
`)
	all := []prometheus.Collector{
		metrics.NewCollector(func() []metrics.Snapshot { return []metrics.Snapshot{fullSnapshot()} }),
		metrics.DaemonCollector(startDaemon(t).Metrics),
	}
	types := make(map[string]string)
	described := make(map[string][]string)
	for _, c := range all {
		for d := range collect(c.Describe) {
			m := descriptor.FindStringSubmatch(d.String())
			if m == nil {
				t.Fatalf("cannot parse %s", d)
			}
			described[m[1]] = m
		}
		for metric := range collect(c.Collect) {
			var value dto.Metric
			if err := metric.Write(&value); err != nil {
				t.Fatal(err)
			}
			types[descriptor.FindStringSubmatch(metric.Desc().String())[1]] = metricType(&value)
		}
	}
	for _, name := range sortedKeys(described) {
		if types[name] == "" {
			t.Errorf("fullSnapshot has no value for the metric %s", name)
		}
		labels := strings.FieldsFunc(described[name][3], func(r rune) bool { return r == ',' || r == ' ' })
		for i, l := range labels {
			labels[i] = "`" + l + "`"
		}
		help := strings.ReplaceAll(described[name][2], `\"`, `"`)
		fmt.Fprintf(page, "| `%s` | %s | %s | %s |\n", name, types[name], strings.Join(labels, ", "), cell(help))
	}
	page.WriteString("\n")
}

// collect returns what a method of a collector sends.
func collect[T any](method func(chan<- T)) <-chan T {
	ch := make(chan T)
	go func() {
		defer close(ch)
		method(ch)
	}()
	return ch
}

// startDaemon starts a daemon with all metrics in this process.
func startDaemon(t *testing.T) *daemon.Daemon {
	cfg := daemon.DefaultConfig()
	cfg.ControlSocket, cfg.StateDir = daemon.Text(filepath.Join(t.TempDir(), "control.sock")), daemon.Text(t.TempDir())
	cfg.KeepMounts, cfg.MetricsListen, cfg.NLMListen, cfg.OTLPEndpoint = false, "", "", "http://127.0.0.1:1"
	d, err := daemon.Start(cfg, hclog.NewNullLogger())
	kit.Must(t, err)
	t.Cleanup(func() { kit.Must(t, d.Close()) })
	return d
}

func sortedKeys[T any](m map[string]T) []string {
	var keys []string
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

func metricType(m *dto.Metric) string {
	switch {
	case m.Counter != nil:
		return "counter"
	case m.Gauge != nil:
		return "gauge"
	case m.Histogram != nil && m.Histogram.Schema != nil:
		return "native histogram"
	case m.Histogram != nil:
		return "histogram"
	}
	return ""
}

// fullSnapshot returns a mount that has a value for each metric.
func fullSnapshot() metrics.Snapshot {
	times := []metrics.NamedTimes{{Name: "READ", Times: new(metrics.Times)}}
	var spent ledger.Times
	spent.Begin(1)
	spent.Mark(ledger.PhaseServer, 2)
	times[0].Observe(&spent)
	files := new(vfs.Counters)
	files.Ops[kernel.OpRead].Add(1)
	return metrics.Snapshot{Connections: []metrics.Connection{{}},
		Transport: xprt.Numbers{Connections: map[string]uint64{xprt.StateConnected: 1},
			MRStates: map[string]uint64{"valid": 1}},
		Files: files, State: &vfs.StateStats{Records: map[string]uint64{"files": 1}}, Locks: new(nlm.Counters),
		Procs: times, Ops: times, Faults: map[string]uint64{"disconnect": 1}}
}

func referExitCodes(page *bytes.Buffer) {
	page.WriteString(`## Exit codes

The exit codes are those of mount(8). An error without a class, for example of an unknown flag, has
exit code 1.

| exit code | class | meaning |
|---|---|---|
| 0 |  | success |
`)
	for _, c := range []struct {
		code    control.Code
		meaning string
	}{
		{control.CodeUsage, "invalid request: command line, mount option, source, directory or configuration"},
		{control.CodePermission, "the user, the process or the configuration of the daemon does not allow it"},
		{control.CodeSystem, "this host lacks something: /dev/fuse, the daemon, a socket or port; or a backend does " +
			"not respond"},
		{control.CodeInternal, "internal error; report it"},
		{control.CodeCanceled, "interrupted"},
		{control.CodeMount, "a mount or unmount failed, or written data was lost"},
		{control.CodeNotMounted, "the daemon has no such mount"},
	} {
		fmt.Fprintf(page, "| %d | %s | %s |\n", control.ExitCode(&control.Error{Code: c.code}), c.code, c.meaning)
	}
}
