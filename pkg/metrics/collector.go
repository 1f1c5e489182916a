package metrics

import (
	"strconv"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
)

const namespace = "nfsrdmad"

var mountLabels = []string{"mount", "server", "provider"}

func desc(name, help string, more ...string) *prometheus.Desc {
	labels := append(append([]string(nil), mountLabels...), more...)
	return prometheus.NewDesc(prometheus.BuildFQName(namespace, "", name), help, labels, nil)
}

// A series is one metric of a mount that is a single number of a T.
type series[T any] struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(*T) float64
}

func counter[T any](name, help string, value func(*T) uint64) series[T] {
	return series[T]{desc(name, help), prometheus.CounterValue, func(t *T) float64 { return float64(value(t)) }}
}

func gauge[T any](name, help string, value func(*T) float64) series[T] {
	return series[T]{desc(name, help), prometheus.GaugeValue, value}
}

var transportSeries = []series[Transport]{
	counter("connects_total", "RDMA connections made.", func(t *Transport) uint64 { return t.Connects }),
	{desc("connect_seconds_total", "Time spent connecting."), prometheus.CounterValue,
		func(t *Transport) float64 { return t.ConnectTime.Seconds() }},
	counter("connect_failures_total", "Attempts to connect that failed.",
		func(t *Transport) uint64 { return t.ConnectFailures }),
	counter("rpc_sends_total", "RPC calls sent.", func(t *Transport) uint64 { return t.Sends }),
	counter("rpc_receives_total", "Messages received of servers, those that were discarded included.",
		func(t *Transport) uint64 { return t.Receives }),
	counter("bad_xids_total", "Replies whose XID belongs to no call.", func(t *Transport) uint64 { return t.BadXIDs }),
	counter("inflight_sum_total", "Sum over calls of the calls in flight when each asked for a credit.",
		func(t *Transport) uint64 { return t.InflightSum }),
	counter("backlog_sum_total", "Sum over calls of the calls that waited for a credit, or for the connection, when each asked for one.", func(t *Transport) uint64 { return t.BacklogSum }),
	counter("read_chunk_total", "Read segments encoded, position-zero chunks included.",
		func(t *Transport) uint64 { return t.ReadChunks }),
	counter("write_chunk_total", "Write segments encoded.", func(t *Transport) uint64 { return t.WriteChunks }),
	counter("reply_chunk_total", "Reply chunk segments encoded.", func(t *Transport) uint64 { return t.ReplyChunks }),
	counter("rdma_request_bytes_total", "Octets offered in write and reply chunks.",
		func(t *Transport) uint64 { return t.TotalRDMARequest }),
	counter("rdma_reply_bytes_total", "Octets that servers returned by RDMA Write.",
		func(t *Transport) uint64 { return t.TotalRDMAReply }),
	counter("pullup_copy_bytes_total", "Octets copied on send to make a message contiguous.",
		func(t *Transport) uint64 { return t.PullupCopyBytes }),
	counter("fixup_copy_bytes_total", "Octets copied out of receive buffers.",
		func(t *Transport) uint64 { return t.FixupCopyBytes }),
	counter("hardway_register_total", "Buffers made anew because they were too small.",
		func(t *Transport) uint64 { return t.HardwayRegister }),
	counter("failed_marshal_total", "Calls that could not be marshaled.",
		func(t *Transport) uint64 { return t.FailedMarshal }),
	counter("bad_reply_total", "Replies that could not be used: a malformed transport header, chunks that were not offered, RDMA_ERROR.", func(t *Transport) uint64 { return t.BadReply }),
	counter("nomsg_call_total", "Calls sent as RDMA_NOMSG.", func(t *Transport) uint64 { return t.NomsgCall }),
	counter("mrs_recovered_total", "Memory regions made anew in their place after a connection was lost.",
		func(t *Transport) uint64 { return t.MRsRecovered }),
	counter("mrs_recycled_total", "Memory regions destroyed because their invalidation failed; others are made on demand.", func(t *Transport) uint64 { return t.MRsRecycled }),
	counter("mrs_orphaned_total", "Memory regions that could not be destroyed, or not made anew.",
		func(t *Transport) uint64 { return t.MRsOrphaned }),
	counter("mrs_allocated_total", "Memory regions ever allocated.",
		func(t *Transport) uint64 { return t.MRsAllocated }),
	counter("local_inv_needed_total", "Memory regions that had to be invalidated locally.",
		func(t *Transport) uint64 { return t.LocalInvNeeded }),
	counter("empty_sendctx_total", "Sends that waited for a send context.",
		func(t *Transport) uint64 { return t.EmptySendctx }),
	counter("reply_waits_for_send_total", "Replies that waited for the completion of their Send.",
		func(t *Transport) uint64 { return t.ReplyWaitsForSend }),
	counter("mrs_failed_total", "Memory regions that a flush, an error or a lost connection left in doubt: those recovered, recycled and orphaned.", func(t *Transport) uint64 { return t.MRsFailed }),
	counter("map_errors_total", "Registrations that the device refused, or had no memory region for.",
		func(t *Transport) uint64 { return t.MapErrors }),
	counter("remote_invalidations_total", "Memory regions that servers invalidated by Send With Invalidate.",
		func(t *Transport) uint64 { return t.RemoteInvalidations }),
	counter("rpc_timeouts_total", "Calls that waited too long, so that their connection was dropped.",
		func(t *Transport) uint64 { return t.Timeouts }),
	counter("rpc_resends_total", "Calls sent again on another connection.",
		func(t *Transport) uint64 { return t.Resends }),
	counter("rpc_interrupts_total", "Calls that their callers gave up.",
		func(t *Transport) uint64 { return t.Interrupts }),
	counter("liveness_calls_total", "NULL calls that asked the server for a sign of life.",
		func(t *Transport) uint64 { return t.Liveness }),
	counter("nudges_total", "Empty RDMA Writes sent because the first reply was late.",
		func(t *Transport) uint64 { return t.Nudges }),
	counter("rdma_errors_total", "RDMA_ERROR messages of servers.", func(t *Transport) uint64 { return t.RDMAErrors }),
	counter("remote_access_errors_total",
		"RDMA operations of servers that were refused: no such key, wrong direction, outside of the memory.", func(
			t *Transport) uint64 {
			return t.RemoteAccessErrors
		}),
	counter("posted_chains_total", "Chains of work requests posted.",
		func(t *Transport) uint64 { return t.PostedChains }),
	counter("send_completions_total", "Work completions of the send queue.",
		func(t *Transport) uint64 { return t.SendCompletions }),
	counter("trace_events_dropped_total", "Trace events that were not recorded.",
		func(t *Transport) uint64 { return t.TraceDropped }),

	gauge("credits", "Calls that the server grants in parallel.",
		func(t *Transport) float64 { return float64(t.Credits) }),
	gauge("slots", "RPC slots of the transport.", func(t *Transport) float64 { return float64(t.Slots) }),
	gauge("slots_in_use", "RPC slots that carry a call now.",
		func(t *Transport) float64 { return float64(t.SlotsInUse) }),
	gauge("calls_in_flight", "Calls that hold a credit.", func(t *Transport) float64 { return float64(t.InFlight) }),
	gauge("calls_queued", "Calls that wait for a credit or for the connection.",
		func(t *Transport) float64 { return float64(t.Queued) }),
	gauge("mrs_free", "Memory regions that no call holds.", func(t *Transport) float64 { return float64(t.MRsFree) }),
	gauge("mrs_pooled", "Memory regions that there are.", func(t *Transport) float64 { return float64(t.MRsPooled) }),
	gauge("max_payload_bytes", "Largest payload of one call.",
		func(t *Transport) float64 { return float64(t.MaxPayload) }),
	gauge("idle_seconds", "Time since the last call; 0 while not connected.",
		func(t *Transport) float64 { return t.Idle.Seconds() }),
	gauge("connected", "1 while the RDMA connection stands.", func(t *Transport) float64 {
		if t.Connected {
			return 1
		}
		return 0
	}),
}

var fileSeries = []series[Files]{
	counter("read_bytes_total", "Octets of files given to the kernel.", func(f *Files) uint64 { return f.ReadBytes }),
	counter("written_bytes_total", "Octets of files taken from the kernel.",
		func(f *Files) uint64 { return f.WrittenBytes }),
	counter("write_sent_bytes_total", "Octets of files that servers took by WRITE, those sent again included.",
		func(f *Files) uint64 { return f.SentBytes }),
	counter("commits_total", "COMMIT calls.", func(f *Files) uint64 { return f.Commits }),
	counter("write_replays_total", "Times that a server had lost data before its COMMIT, told by another write verifier, and data was sent again.", func(f *Files) uint64 { return f.Replays }),
	counter("write_replayed_bytes_total", "Octets of files sent again because a server had lost them.",
		func(f *Files) uint64 { return f.ReplayedBytes }),
	counter("write_errors_total", "Pieces of data that were given up after an error; fsync or close told whoever wrote them.", func(f *Files) uint64 { return f.WriteErrors }),
	counter("buffer_waits_total", "Times that a request found no free buffer.",
		func(f *Files) uint64 { return f.BufferWaits }),
	counter("silly_renames_total", "Open files that were renamed instead of removed.",
		func(f *Files) uint64 { return f.SillyRenames }),
	counter("jukebox_retries_total", "Calls made again because the server asked for patience (NFS3ERR_JUKEBOX).",
		func(f *Files) uint64 { return f.JukeboxRetries }),
	counter("fuse_interrupts_total", "Requests given up for a deadly signal, or because the kernel ended the mount.",
		func(f *Files) uint64 { return f.Interrupts }),
	counter("stale_handles_total", "Files and directories forgotten because the server no longer knew their handles (NFS3ERR_STALE).", func(f *Files) uint64 { return f.Stale }),
	counter("cache_drops_total", "Opens that found the file changed by somebody else.",
		func(f *Files) uint64 { return f.CacheDrops }),
	counter("readdir_restarts_total", "Directories read again from the start because the server refused a cookie (NFS3ERR_BAD_COOKIE).", func(f *Files) uint64 { return f.ReadDirRestarts }),
}

var (
	mrsDesc  = desc("mrs", "Memory regions by state.", "state")
	connDesc = desc("connections", "Connections by state.", "state")
	failDesc = desc("faults_injected_total", "Faults injected on purpose.", "fault")
	procDesc = desc("rpc_duration_seconds", "Time from call to reply of an RPC, reconnects included.", "procedure")
	reqDesc  = desc("fuse_ops_total", "FUSE requests, those that the kernel does not wait for included.", "operation")
	errDesc  = desc("fuse_op_errors_total", "FUSE requests answered with an error, names that do not exist included.",
		"operation")
	opDesc = desc("fuse_op_duration_seconds", "Time that a FUSE operation took.", "operation")
)

// A Collector is a prometheus.Collector over snapshots, which it asks for at each scrape.
type Collector struct {
	snapshots func() []Snapshot
}

// NewCollector makes a Collector. snapshots must not block on a server; it may be called
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
	ch <- mrsDesc
	ch <- connDesc
	ch <- failDesc
	ch <- procDesc
	ch <- opDesc
	ch <- reqDesc
	ch <- errDesc
}

// Collect implements prometheus.Collector.
func (c *Collector) Collect(ch chan<- prometheus.Metric) {
	for _, snap := range c.snapshots() {
		snap.Mount = labelValue(snap.Mount)
		snap.collect(ch)
	}
}

// labelValue escapes what is no UTF-8, as names of directories may be: one such label would be the
// end of the whole scrape.
func labelValue(s string) string {
	if utf8.ValidString(s) {
		return s
	}
	quoted := strconv.Quote(s)
	return quoted[1 : len(quoted)-1]
}

func (s *Snapshot) collect(ch chan<- prometheus.Metric) {
	for _, one := range transportSeries {
		ch <- prometheus.MustNewConstMetric(one.desc, one.kind, one.value(&s.Transport), s.Mount, s.Server, s.Provider)
	}
	for _, one := range fileSeries {
		ch <- prometheus.MustNewConstMetric(one.desc, one.kind, one.value(&s.Files), s.Mount, s.Server, s.Provider)
	}
	labeled := func(d *prometheus.Desc, kind prometheus.ValueType, values map[string]uint64) {
		for label, n := range values {
			ch <- prometheus.MustNewConstMetric(d, kind, float64(n), s.Mount, s.Server, s.Provider, label)
		}
	}
	labeled(mrsDesc, prometheus.GaugeValue, s.Transport.MRs)
	labeled(connDesc, prometheus.GaugeValue, s.Transport.Connections)
	labeled(failDesc, prometheus.CounterValue, s.Faults)
	labeled(reqDesc, prometheus.CounterValue, s.Files.Ops)
	labeled(errDesc, prometheus.CounterValue, s.Files.OpErrors)
	s.histograms(ch, procDesc, s.Procs)
	s.histograms(ch, opDesc, s.Ops)
}

// FaultInjection is the gauge that is 1 in a daemon that breaks its connections on purpose.
func FaultInjection(on bool) prometheus.Collector {
	g := prometheus.NewGauge(prometheus.GaugeOpts{Namespace: namespace, Name: "fault_injection_enabled",
		Help: "1 when this daemon was told to inject faults: never in production."})
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
