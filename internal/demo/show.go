package demo

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/nfsrdmad/nfsrdmad/internal/screen"
	"github.com/nfsrdmad/nfsrdmad/pkg/control"
)

// show copies the tree, mounts again to empty the caches, compares, and prints the results.
func (s *site) show(ctx context.Context) error {
	t, err := listTree(s.cfg.Source, s.cfg.MaxFiles)
	if err != nil {
		return err
	}
	s.out.Line("tree       %d files in %d directories, %.1f MiB, from %s", len(t.files), len(t.dirs), mib(t.bytes),
		t.root)
	start := time.Now()
	if err := t.copyTo(ctx, s.out, s.dir); err != nil {
		return err
	}
	copied := time.Since(start)
	s.out.Line("copied in  %d files in %.1f s", len(t.files), copied.Seconds())
	first, err := s.scrape(ctx)
	if err != nil {
		return err
	}
	s.out.Line("remount    to empty the caches")
	// A new mount has empty caches, so that the server sends every byte again.
	if err := s.client.Umount(ctx, control.UmountRequest{Dir: s.dir}); err != nil {
		return err
	}
	if err := s.mount(ctx); err != nil {
		return err
	}
	start = time.Now()
	if err := t.compareTo(ctx, s.out, s.dir); err != nil {
		return err
	}
	compared := time.Since(start)
	s.out.Line("compared   %d files in %.1f s: all bytes are equal", len(t.files), compared.Seconds())
	second, err := s.scrape(ctx)
	if err != nil {
		return err
	}
	table(s.out, t, []pass{{"copy in", copied, first}, {"read back", compared, second}})
	return s.client.Umount(ctx, control.UmountRequest{Dir: s.dir})
}

// A pass is one half of the demo, with the metrics of the mount at its end.
type pass struct {
	name    string
	took    time.Duration
	metrics map[string]float64 // by name, summed over labels
}

// table prints counters in this order, and those of optional only if one of the passes counted.
var (
	counters = []string{"rpc_sends_total", "read_chunk_total", "write_chunk_total", "reply_chunk_total",
		"mrs_allocated_total", "local_inv_needed_total",
		"mrs_recovered_total", "mrs_recycled_total", "mrs_orphaned_total", "connects_total"}
	optional = []string{"bad_reply_total", "bad_xids_total", "failed_marshal_total"}
)

// table prints the passes side by side, in at most 80 columns.
func table(out *screen.Screen, t *tree, passes []pass) {
	row := func(what string, value func(pass) string) {
		text := fmt.Sprintf("%-32s", what)
		for _, p := range passes {
			text += fmt.Sprintf("%16s", value(p))
		}
		out.Line("%s", text)
	}
	count := func(key string) func(pass) string {
		return func(p pass) string { return fmt.Sprintf("%.0f", p.metrics[key]) }
	}
	out.Line("")
	row("", func(p pass) string { return p.name })
	row("time", func(p pass) string { return fmt.Sprintf("%.2f s", p.took.Seconds()) })
	row("throughput", func(p pass) string { return fmt.Sprintf("%.1f MiB/s", mib(t.bytes)/p.took.Seconds()) })
	row("files", func(p pass) string { return fmt.Sprintf("%.0f /s", float64(len(t.files))/p.took.Seconds()) })
	row("operations", func(p pass) string {
		return fmt.Sprintf("%.0f RPC/s",
			p.metrics["rpc_sends_total"]/p.took.Seconds())
	})
	out.Line("from /metrics, nfsrdmad_...")
	for _, c := range counters {
		row("  "+c, count(c))
	}
	for _, c := range optional {
		if slices.ContainsFunc(passes, func(p pass) bool { return p.metrics[c] != 0 }) {
			row("  "+c, count(c))
		}
	}
	ops := map[string]bool{}
	for _, p := range passes {
		for name := range p.metrics {
			if op, ok := strings.CutPrefix(name, opPrefix); ok {
				ops[op] = true
			}
		}
	}
	out.Line("calls by procedure")
	for _, op := range slices.Sorted(maps.Keys(ops)) {
		row("  "+op, count(opPrefix+op))
	}
}

const (
	namespace = "nfsrdmad_"
	opPrefix  = "procedure "
	maxScrape = 8 << 20
)

// scrape reads /metrics over HTTP, as Prometheus does.
func (s *site) scrape(ctx context.Context) (map[string]float64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+s.daemon.MetricsAddr()+"/metrics", nil)
	if err != nil {
		return nil, err
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(io.LimitReader(resp.Body, maxScrape))
	if err != nil {
		return nil, fmt.Errorf("parse /metrics: %w", err)
	}
	m := make(map[string]float64)
	for name, f := range families {
		short, ours := strings.CutPrefix(name, namespace)
		if !ours {
			continue
		}
		for _, one := range f.GetMetric() {
			add(m, short, one)
		}
	}
	return m, nil
}

func add(m map[string]float64, name string, one *dto.Metric) {
	switch {
	case one.Counter != nil:
		m[name] += one.GetCounter().GetValue()
	case one.Gauge != nil:
		m[name] += one.GetGauge().GetValue()
	case name == "rpc_duration_seconds": // each call is in several other histograms too
		for _, l := range one.GetLabel() {
			if l.GetName() == "procedure" {
				m[opPrefix+l.GetValue()] += float64(one.GetHistogram().GetSampleCount())
			}
		}
	}
}
