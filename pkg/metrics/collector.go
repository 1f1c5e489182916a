package metrics

import "github.com/prometheus/client_golang/prometheus"

const namespace = "nfsrdmad"

var mountLabels = []string{"mount", "server", "provider"}

func desc(name, help string, more ...string) *prometheus.Desc {
	labels := append(append([]string(nil), mountLabels...), more...)
	return prometheus.NewDesc(prometheus.BuildFQName(namespace, "", name), help, labels, nil)
}

// A series is one metric of a mount that is a single number.
type series struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(*Transport) float64
}

func counter(name, help string, value func(*Transport) uint64) series {
	return series{desc(name, help), prometheus.CounterValue, func(t *Transport) float64 { return float64(value(t)) }}
}

func gauge(name, help string, value func(*Transport) float64) series {
	return series{desc(name, help), prometheus.GaugeValue, value}
}

var transportSeries = []series{
	counter("connects_total", "RDMA connections made.", func(t *Transport) uint64 { return t.Connects }),
	{desc("connect_seconds_total", "Time spent connecting."), prometheus.CounterValue, func(t *Transport) float64 { return t.ConnectTime.Seconds() }},
	counter("rpc_sends_total", "RPC calls sent.", func(t *Transport) uint64 { return t.Sends }),
	counter("rpc_receives_total", "RPC replies received.", func(t *Transport) uint64 { return t.Receives }),
	counter("bad_xids_total", "Replies whose XID belongs to no call.", func(t *Transport) uint64 { return t.BadXIDs }),
	counter("inflight_sum_total", "Sum over calls of the calls in flight when each was sent.", func(t *Transport) uint64 { return t.InflightSum }),
	counter("backlog_sum_total", "Sum over calls of the calls that waited for a slot when each was sent.", func(t *Transport) uint64 { return t.BacklogSum }),
	counter("read_chunk_total", "Read segments encoded, position-zero chunks included.", func(t *Transport) uint64 { return t.ReadChunks }),
	counter("write_chunk_total", "Write segments encoded.", func(t *Transport) uint64 { return t.WriteChunks }),
	counter("reply_chunk_total", "Reply chunk segments encoded.", func(t *Transport) uint64 { return t.ReplyChunks }),
	counter("rdma_request_bytes_total", "Octets offered in write and reply chunks.", func(t *Transport) uint64 { return t.TotalRDMARequest }),
	counter("rdma_reply_bytes_total", "Octets that servers returned by RDMA Write.", func(t *Transport) uint64 { return t.TotalRDMAReply }),
	counter("pullup_copy_bytes_total", "Octets copied on send to make a message contiguous.", func(t *Transport) uint64 { return t.PullupCopyBytes }),
	counter("fixup_copy_bytes_total", "Octets copied out of receive buffers.", func(t *Transport) uint64 { return t.FixupCopyBytes }),
	counter("hardway_register_total", "Buffers made anew because they were too small.", func(t *Transport) uint64 { return t.HardwayRegister }),
	counter("failed_marshal_total", "Calls that could not be marshaled.", func(t *Transport) uint64 { return t.FailedMarshal }),
	counter("bad_reply_total", "Replies whose transport header was wrong, and RDMA_ERROR.", func(t *Transport) uint64 { return t.BadReply }),
	counter("nomsg_call_total", "Calls sent as RDMA_NOMSG.", func(t *Transport) uint64 { return t.NomsgCall }),
	counter("mrs_recovered_total", "Memory regions made usable again after a flush.", func(t *Transport) uint64 { return t.MRsRecovered }),
	counter("mrs_recycled_total", "Memory regions destroyed and replaced.", func(t *Transport) uint64 { return t.MRsRecycled }),
	counter("mrs_orphaned_total", "Memory regions that could not be recovered.", func(t *Transport) uint64 { return t.MRsOrphaned }),
	counter("mrs_allocated_total", "Memory regions ever allocated.", func(t *Transport) uint64 { return t.MRsAllocated }),
	counter("local_inv_needed_total", "Memory regions that had to be invalidated locally.", func(t *Transport) uint64 { return t.LocalInvNeeded }),
	counter("empty_sendctx_total", "Sends that waited for a send context.", func(t *Transport) uint64 { return t.EmptySendctx }),
	counter("reply_waits_for_send_total", "Replies that waited for the completion of their Send.", func(t *Transport) uint64 { return t.ReplyWaitsForSend }),

	gauge("credits", "Calls that the server grants in parallel.", func(t *Transport) float64 { return float64(t.Credits) }),
	gauge("slots", "RPC slots of the transport.", func(t *Transport) float64 { return float64(t.Slots) }),
	gauge("slots_in_use", "RPC slots that carry a call now.", func(t *Transport) float64 { return float64(t.SlotsInUse) }),
	gauge("idle_seconds", "Time since the last use of the connection.", func(t *Transport) float64 { return t.Idle.Seconds() }),
	gauge("connected", "1 while the RDMA connection stands.", func(t *Transport) float64 {
		if t.Connected {
			return 1
		}
		return 0
	}),
}

var (
	mrsDesc  = desc("mrs", "Memory regions by state.", "state")
	procDesc = desc("rpc_duration_seconds", "Time from call to reply of an RPC, reconnects included.", "procedure")
	opDesc   = desc("fuse_op_duration_seconds", "Time that a FUSE operation took.", "operation")
)

// A Collector is a prometheus.Collector over snapshots, which it asks for at each scrape.
type Collector struct {
	snapshots func() []Snapshot
}

// NewCollector makes a Collector. snapshots must not block on a server; it may be called concurrently.
func NewCollector(snapshots func() []Snapshot) *Collector {
	return &Collector{snapshots: snapshots}
}

// Describe implements prometheus.Collector.
func (c *Collector) Describe(ch chan<- *prometheus.Desc) {
	for _, s := range transportSeries {
		ch <- s.desc
	}
	ch <- mrsDesc
	ch <- procDesc
	ch <- opDesc
}

// Collect implements prometheus.Collector.
func (c *Collector) Collect(ch chan<- prometheus.Metric) {
	for _, snap := range c.snapshots() {
		snap.collect(ch)
	}
}

func (s *Snapshot) collect(ch chan<- prometheus.Metric) {
	for _, one := range transportSeries {
		ch <- prometheus.MustNewConstMetric(one.desc, one.kind, one.value(&s.Transport), s.Mount, s.Server, s.Provider)
	}
	for state, n := range s.Transport.MRs {
		ch <- prometheus.MustNewConstMetric(mrsDesc, prometheus.GaugeValue, float64(n), s.Mount, s.Server, s.Provider, state)
	}
	s.histograms(ch, procDesc, s.Procs)
	s.histograms(ch, opDesc, s.Ops)
}

func (s *Snapshot) histograms(ch chan<- prometheus.Metric, d *prometheus.Desc, hs []NamedHistogram) {
	for i := range hs {
		h := &hs[i]
		ch <- prometheus.MustNewConstHistogram(d, h.Count, h.Sum.Seconds(), h.cumulative(), s.Mount, s.Server, s.Provider, h.Name)
	}
}
