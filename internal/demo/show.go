package demo

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/nfsrdmad/nfsrdmad/pkg/daemon"
)

// show does the work: copy in, remount for a cold cache, compare, tell.
func (s *site) show(ctx context.Context) error {
	t, err := listTree(s.cfg.Source, s.cfg.MaxFiles)
	if err != nil {
		return err
	}
	fmt.Fprintf(s.cfg.Out, "copying %d files, %.1f MiB from %s\n", len(t.files), mib(t.bytes), t.root)
	start := time.Now()
	if err := t.copyTo(ctx, s.cfg.Out, s.dir); err != nil {
		return err
	}
	copied := time.Since(start)
	first, err := s.scrape(ctx)
	if err != nil {
		return err
	}
	// A new mount has empty caches: every octet comes from the server again.
	if err := s.client.Umount(ctx, daemon.UmountRequest{Dir: s.dir}); err != nil {
		return err
	}
	if err := s.mount(ctx); err != nil {
		return err
	}
	start = time.Now()
	if err := t.compareTo(ctx, s.cfg.Out, s.dir); err != nil {
		return err
	}
	compared := time.Since(start)
	second, err := s.scrape(ctx)
	if err != nil {
		return err
	}
	fmt.Fprintf(s.cfg.Out, "all %d files equal, octet by octet\n\n", len(t.files))
	table(s.cfg.Out, t, []pass{{"copy in", copied, first}, {"read back", compared, second}})
	return s.client.Umount(ctx, daemon.UmountRequest{Dir: s.dir})
}

// A pass is one half of the demo with the mount's metrics at its end.
type pass struct {
	name    string
	took    time.Duration
	metrics map[string]float64 // by name; sums over labels
}

// counters are shown in this order.
var counters = []string{"rpc_sends_total", "read_chunk_total", "write_chunk_total", "reply_chunk_total", "mrs_allocated_total",
	"local_inv_needed_total", "mrs_recovered_total", "mrs_recycled_total", "mrs_orphaned_total", "bad_reply_total", "bad_xids_total", "connects_total", "credits"}

func table(w io.Writer, t *tree, passes []pass) {
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', tabwriter.AlignRight)
	defer tw.Flush()
	line := func(what string, value func(pass) string) {
		fmt.Fprintf(tw, "%s\t", what)
		for _, p := range passes {
			fmt.Fprintf(tw, "%s\t", value(p))
		}
		fmt.Fprintln(tw)
	}
	line("", func(p pass) string { return p.name })
	line("seconds", func(p pass) string { return fmt.Sprintf("%.2f", p.took.Seconds()) })
	line("MiB/s", func(p pass) string { return fmt.Sprintf("%.1f", mib(t.bytes)/p.took.Seconds()) })
	line("files/s", func(p pass) string { return fmt.Sprintf("%.0f", float64(len(t.files))/p.took.Seconds()) })
	for _, c := range counters {
		line("nfsrdmad_"+c, func(p pass) string { return fmt.Sprintf("%.0f", p.metrics[c]) })
	}
	ops := map[string]bool{}
	for _, p := range passes {
		for name := range p.metrics {
			if op, ok := strings.CutPrefix(name, opPrefix); ok {
				ops[op] = true
			}
		}
	}
	for _, op := range slices.Sorted(maps.Keys(ops)) {
		line(op+" calls", func(p pass) string { return fmt.Sprintf("%.0f", p.metrics[opPrefix+op]) })
	}
}

const (
	namespace = "nfsrdmad_"
	opPrefix  = "procedure "
	maxScrape = 8 << 20
)

// scrape fetches /metrics as Prometheus does.
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
		return nil, fmt.Errorf("reading /metrics: %w", err)
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
	case one.Histogram != nil:
		for _, l := range one.GetLabel() {
			if l.GetName() == "procedure" {
				m[opPrefix+l.GetValue()] += float64(one.GetHistogram().GetSampleCount())
			}
		}
	}
}
