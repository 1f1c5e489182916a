package metrics

import (
	"strconv"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
)

const namespace = "nfsrdmad"

var mountLabels = []string{"mount", "server", "provider"}

func desc(name, help string, more ...string) *prometheus.Desc {
	labels := append(append([]string(nil), mountLabels...), more...)
	return prometheus.NewDesc(prometheus.BuildFQName(namespace, "", name), help, labels, nil)
}

var (
	mrsDesc  = desc("mrs", "Memory regions by state.", "state")
	connDesc = desc("connections", "Connections by state.", "state")
	failDesc = desc("faults_injected_total", "Faults injected on purpose.", "fault")
	procDesc = desc("rpc_duration_seconds", "Time from RPC call to reply, including reconnects.", "procedure")
	reqDesc  = desc("fuse_ops_total", "FUSE requests, including those without a reply.", "operation")
	errDesc  = desc("fuse_op_errors_total", "FUSE requests that failed, including lookups of missing names.",
		"operation")
	addrDesc = desc("connection_info",
		"Address of each connection, or of its last attempt to connect; 1 if connected, else 0.", "connection",
		"address")
	stalledDesc = desc("mount_stalled_seconds",
		"Age of the oldest request without reply of a stalled mount; 0 for other mounts.")
	stallsDesc = desc("mount_stalls_total", "How often the mount became stalled.")
	stateDesc  = desc("state_records", "Records from which the next daemon continues the mount.", "table")
	opDesc     = desc("fuse_op_duration_seconds", "Duration of FUSE operations.", "operation")

	procPhaseDesc = desc("rpc_phase_seconds", "Time of RPC calls in each phase; a native histogram.", "phase",
		"procedure")
	opPhaseDesc = desc("fuse_phase_seconds", "Time of FUSE requests in each phase, with the sum of their RPC calls; "+
		"a native histogram.", "phase", "operation")
)

// A Collector is a prometheus.Collector over snapshots. It takes the snapshots at each scrape.
type Collector struct {
	snapshots func() []Snapshot
}

// NewCollector returns a Collector. snapshots must not wait for a server; the Collector may call it
// concurrently.
func NewCollector(snapshots func() []Snapshot) *Collector {
	return &Collector{snapshots: snapshots}
}

// Describe implements prometheus.Collector.
func (c *Collector) Describe(ch chan<- *prometheus.Desc) {
	for _, s := range transportSeries {
		ch <- s.desc
	}
	for _, s := range fileSeries {
		ch <- s.desc
	}
	for _, s := range lockSeries {
		ch <- s.desc
	}
	for _, s := range stateSeries {
		ch <- s.desc
	}
	for _, d := range []*prometheus.Desc{addrDesc, stateDesc, mrsDesc, connDesc, failDesc, procDesc, opDesc,
		reqDesc, errDesc, procPhaseDesc, opPhaseDesc, stalledDesc, stallsDesc} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *Collector) Collect(ch chan<- prometheus.Metric) {
	for _, snap := range c.snapshots() {
		snap.Mount = labelValue(snap.Mount)
		snap.collect(ch)
	}
}

// labelValue escapes s if s is not UTF-8, which names of directories may be. A label that is not
// UTF-8 would fail the whole scrape.
func labelValue(s string) string {
	if utf8.ValidString(s) {
		return s
	}
	quoted := strconv.Quote(s)
	return quoted[1 : len(quoted)-1]
}

func (s *Snapshot) collect(ch chan<- prometheus.Metric) {
	send := func(d *prometheus.Desc, kind prometheus.ValueType, value float64, more ...string) {
		labels := append([]string{s.Mount, s.Server, s.Provider}, more...)
		ch <- prometheus.MustNewConstMetric(d, kind, value, labels...)
	}
	sendCounts := func(d *prometheus.Desc, kind prometheus.ValueType, counts map[string]uint64) {
		for label, n := range counts {
			send(d, kind, float64(n), label)
		}
	}
	for _, one := range transportSeries {
		send(one.desc, one.kind, one.value(&s.Transport))
	}
	sendCounts(mrsDesc, prometheus.GaugeValue, s.Transport.MRStates)
	sendCounts(connDesc, prometheus.GaugeValue, s.Transport.Connections)
	sendCounts(failDesc, prometheus.CounterValue, s.Faults)
	send(stalledDesc, prometheus.GaugeValue, s.Stalled.Seconds())
	send(stallsDesc, prometheus.CounterValue, float64(s.Stalls))
	for i, c := range s.Connections {
		connected := 0.0
		if c.Connected {
			connected = 1
		}
		send(addrDesc, prometheus.GaugeValue, connected, strconv.Itoa(i), c.Address)
	}
	s.histograms(ch, procDesc, s.Procs)
	s.histograms(ch, opDesc, s.Ops)
	s.phaseSeries(ch, procPhaseDesc, s.ProcPhases)
	s.phaseSeries(ch, opPhaseDesc, s.OpPhases)
	if s.Locks != nil {
		for _, one := range lockSeries {
			send(one.desc, one.kind, one.value(s.Locks))
		}
	}
	if s.State != nil {
		for _, one := range stateSeries {
			send(one.desc, one.kind, one.value(s.State))
		}
		sendCounts(stateDesc, prometheus.GaugeValue, s.State.Records)
	}
	if s.Files == nil {
		return
	}
	for _, one := range fileSeries {
		send(one.desc, one.kind, one.value(s.Files))
	}
	for op := range s.Files.Ops {
		// An operation that the kernel never requested has no series.
		if n := s.Files.Ops[op].Load(); n > 0 {
			name := kernel.Op(op).String()
			send(reqDesc, prometheus.CounterValue, float64(n), name)
			send(errDesc, prometheus.CounterValue, float64(s.Files.Errors[op].Load()), name)
		}
	}
}

// LostBytes is written data that did not reach stable storage, in bytes. It includes mounts that
// have ended.
type LostBytes struct {
	Rejected uint64 // rejected by a server; fsync or close returned the error
	Unmount  uint64 // discarded at the end of a mount
}

var lostDesc = prometheus.NewDesc(prometheus.BuildFQName(namespace, "", "write_lost_bytes_total"),
	"Written bytes that did not become stable: rejected by a server, or dropped by an unmount.",
	[]string{"reason"}, nil)

// A LossCollector is a prometheus.Collector over LostBytes. It calls the function at each scrape,
// perhaps concurrently.
type LossCollector func() LostBytes

// Describe implements prometheus.Collector.
func (LossCollector) Describe(ch chan<- *prometheus.Desc) { ch <- lostDesc }

// Collect implements prometheus.Collector.
func (c LossCollector) Collect(ch chan<- prometheus.Metric) {
	lost := c()
	ch <- prometheus.MustNewConstMetric(lostDesc, prometheus.CounterValue, float64(lost.Rejected), "rejected")
	ch <- prometheus.MustNewConstMetric(lostDesc, prometheus.CounterValue, float64(lost.Unmount), "unmount")
}

var mountsDesc = prometheus.NewDesc(prometheus.BuildFQName(namespace, "", "mounts"), "Mounts by state.",
	[]string{"state"}, nil)

var abortsDesc = prometheus.NewDesc(prometheus.BuildFQName(namespace, "", "stall_aborts_total"),
	"Mounts that were aborted because of the mount option stallabort.", nil, nil)

// An AbortCollector is a prometheus.Collector over the number of mounts that were aborted because
// of a stall. It calls the function at each scrape, perhaps concurrently.
type AbortCollector func() uint64

// Describe implements prometheus.Collector.
func (AbortCollector) Describe(ch chan<- *prometheus.Desc) { ch <- abortsDesc }

// Collect implements prometheus.Collector.
func (c AbortCollector) Collect(ch chan<- prometheus.Metric) {
	ch <- prometheus.MustNewConstMetric(abortsDesc, prometheus.CounterValue, float64(c()))
}

var (
	notKeptDesc = prometheus.NewDesc(prometheus.BuildFQName(namespace, "", "mounts_not_kept"),
		"Mounts that would end with the daemon now, although keep_mounts is true.", nil, nil)
	holderDesc = prometheus.NewDesc(prometheus.BuildFQName(namespace, "", "holder_restarts_total"),
		"How often the daemon replaced the holder process, which keeps the mounts without systemd.", nil, nil)
)

// Kept says how mounts are kept while no daemon runs.
type Kept struct {
	NotKept        int    // mounts that would end with the daemon although they are to be kept
	HolderRestarts uint64 // replacements of the holder process
}

// A KeptCollector is a prometheus.Collector over Kept. It calls the function at each scrape, perhaps
// concurrently.
type KeptCollector func() Kept

// Describe implements prometheus.Collector.
func (KeptCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- notKeptDesc
	ch <- holderDesc
}

// Collect implements prometheus.Collector.
func (c KeptCollector) Collect(ch chan<- prometheus.Metric) {
	kept := c()
	ch <- prometheus.MustNewConstMetric(notKeptDesc, prometheus.GaugeValue, float64(kept.NotKept))
	ch <- prometheus.MustNewConstMetric(holderDesc, prometheus.CounterValue, float64(kept.HolderRestarts))
}

// A StateCollector is a prometheus.Collector over the number of mounts in each state. It calls the
// function at each scrape, perhaps concurrently.
type StateCollector func() map[string]int

// Describe implements prometheus.Collector.
func (StateCollector) Describe(ch chan<- *prometheus.Desc) { ch <- mountsDesc }

// Collect implements prometheus.Collector.
func (c StateCollector) Collect(ch chan<- prometheus.Metric) {
	for state, n := range c() {
		ch <- prometheus.MustNewConstMetric(mountsDesc, prometheus.GaugeValue, float64(n), state)
	}
}

var (
	spansExportedDesc = prometheus.NewDesc(prometheus.BuildFQName(namespace, "", "otlp_spans_exported_total"),
		"Spans of traces that the OpenTelemetry collector has accepted.", nil, nil)
	spansDroppedDesc = prometheus.NewDesc(prometheus.BuildFQName(namespace, "", "otlp_spans_dropped_total"),
		"Spans of traces that were dropped: the queue was full, or the collector did not accept them.",
		[]string{"reason"}, nil)
)

// Spans count spans of traces.
type Spans struct {
	Exported    uint64 // accepted by the collector
	DroppedFull uint64 // the queue was full
	DroppedSend uint64 // the collector did not answer, or did not accept the whole batch
}

// SpanCollector is a prometheus.Collector over Spans. It calls the function at each scrape, perhaps
// concurrently.
type SpanCollector func() Spans

// Describe implements prometheus.Collector.
func (SpanCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- spansExportedDesc
	ch <- spansDroppedDesc
}

// Collect implements prometheus.Collector.
func (c SpanCollector) Collect(ch chan<- prometheus.Metric) {
	n := c()
	ch <- prometheus.MustNewConstMetric(spansExportedDesc, prometheus.CounterValue, float64(n.Exported))
	ch <- prometheus.MustNewConstMetric(spansDroppedDesc, prometheus.CounterValue, float64(n.DroppedFull), "queue")
	ch <- prometheus.MustNewConstMetric(spansDroppedDesc, prometheus.CounterValue, float64(n.DroppedSend), "collector")
}

// FaultInjection returns the gauge that is 1 if the daemon injects faults.
func FaultInjection(on bool) prometheus.Collector {
	g := prometheus.NewGauge(prometheus.GaugeOpts{Namespace: namespace, Name: "fault_injection_enabled",
		Help: "1 if the daemon injects faults; always 0 in production."})
	if on {
		g.Set(1)
	}
	return g
}

func (s *Snapshot) histograms(ch chan<- prometheus.Metric, d *prometheus.Desc, hs []NamedHistogram) {
	for i := range hs {
		h := &hs[i]
		ch <- prometheus.MustNewConstHistogram(d, h.Count, h.Sum.Seconds(), h.cumulative(), s.Mount, s.Server,
			s.Provider, h.Name)
	}
}
