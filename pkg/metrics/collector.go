package metrics

import (
	"strconv"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/stats"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs"
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
	stateDesc = desc("state_records", "Records from which the next daemon continues the mount.", "table")
	opDesc    = desc("fuse_op_duration_seconds", "Duration of FUSE operations.", "operation")

	procPhaseDesc = desc("rpc_phase_seconds", "Time of RPC calls in each phase; a native histogram.", "phase",
		"procedure")
	opPhaseDesc = desc("fuse_phase_seconds", "Time of FUSE requests in each phase, with the sum of their RPC calls; "+
		"a native histogram.", "phase", "operation")
)

// numberDescs describe Snapshot.Numbers by name.
var numberDescs = make(map[string]*prometheus.Desc)

func init() {
	all := Snapshot{Files: new(vfs.Counters), State: new(vfs.StateStats), Locks: new(nlm.Counters)}
	for _, m := range all.Numbers() {
		numberDescs[m.Name] = desc(m.Name, m.Help)
	}
}

func kindOf(name string) prometheus.ValueType {
	if stats.IsCounter(name) {
		return prometheus.CounterValue
	}
	return prometheus.GaugeValue
}

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
	for _, d := range numberDescs {
		ch <- d
	}
	for _, d := range []*prometheus.Desc{addrDesc, stateDesc, mrsDesc, connDesc, failDesc, procDesc, opDesc,
		reqDesc, errDesc, procPhaseDesc, opPhaseDesc} {
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
	for _, m := range s.Numbers() {
		send(numberDescs[m.Name], kindOf(m.Name), m.Value())
	}
	sendCounts(mrsDesc, prometheus.GaugeValue, s.Transport.MRStates)
	sendCounts(connDesc, prometheus.GaugeValue, s.Transport.Connections)
	sendCounts(failDesc, prometheus.CounterValue, s.Faults)
	for i, c := range s.Connections {
		connected := 0.0
		if c.Connected {
			connected = 1
		}
		send(addrDesc, prometheus.GaugeValue, connected, strconv.Itoa(i), c.Address)
	}
	s.sendTimes(ch, procDesc, procPhaseDesc, s.Procs)
	s.sendTimes(ch, opDesc, opPhaseDesc, s.Ops)
	if s.State != nil {
		sendCounts(stateDesc, prometheus.GaugeValue, s.State.Records)
	}
	if s.Files == nil {
		return
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

// A DaemonCollector is a prometheus.Collector over the metrics of the whole daemon. It calls the
// function at each scrape, perhaps concurrently.
type DaemonCollector func() []stats.Metric

// Describe implements prometheus.Collector.
func (c DaemonCollector) Describe(ch chan<- *prometheus.Desc) { prometheus.DescribeByCollect(c, ch) }

// Collect implements prometheus.Collector.
func (c DaemonCollector) Collect(ch chan<- prometheus.Metric) {
	for _, m := range c() {
		var names, values []string
		if m.Label != "" {
			names, values = []string{m.Label}, []string{m.Of}
		}
		d := prometheus.NewDesc(prometheus.BuildFQName(namespace, "", m.Name), m.Help, names, nil)
		ch <- prometheus.MustNewConstMetric(d, kindOf(m.Name), m.Value(), values...)
	}
}
