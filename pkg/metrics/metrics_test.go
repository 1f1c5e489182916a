package metrics

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	promtest "github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/stats"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func TestMain(m *testing.M) { kit.Main(m) }

// distinct returns a Transport whose counters differ, so that a swapped field fails a test.
func distinct() stats.Transport {
	return stats.Transport{
		Connections: map[string]uint64{stats.Connected: 1},
		Connects:    3, ConnectTime: 4 * time.Second, IdleTime: 5 * time.Second, Sends: 6, Recvs: 7, BadXIDs: 8,
		InFlightSum: 9, QueuedSum: 10, ReadChunks: 11, WriteChunks: 12, ReplyChunks: 13, TotalRDMARequest: 14,
		TotalRDMAReply: 15, PullupCopyBytes: 16, FixupCopyBytes: 17, FailedMarshal: 19, BadReply: 20, NomsgCall: 21,
		MRsRecovered: 20, MRsRecycled: 2, MRsOrphaned: 23, MRsAllocated: 24, LocalInvNeeded: 25, EmptySendCtx: 26,
		ReplyWaitsForSend: 27, Credits: 64, Slots: 128, SlotsInUse: 2,
		MRStates: map[string]uint64{"valid": 4, "invalid": 28},
	}
}

func TestXprtLineKeepsKernelOrder(t *testing.T) {
	tr := distinct()
	want := "\txprt:\trdma 0 0 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 0 19 20 21 22 23 24 25 26 27"
	if got := XprtLine(&tr); got != want {
		t.Errorf("xprt line: got %q, want %q", got, want)
	}
}

const addr = "192.0.2.1:20049" // of the server

func snapshots() []Snapshot {
	var h Histogram
	h.Observe(time.Millisecond)
	h.Observe(time.Hour)
	var f vfs.Counters
	f.ReadBytes.Add(30)
	f.Ops[kernel.OpRead].Add(31)
	f.Errors[kernel.OpRead].Add(33)
	f.Ops[kernel.OpForget].Add(32)
	ops := []NamedHistogram{{"READ", h.Data()}}
	phases := []NamedPhases{{"READ", new(Phases)}}
	phases[0].Observe(server(time.Millisecond))
	return []Snapshot{
		{Mount: "/mnt/a", Server: addr, Provider: "softiwarp", Transport: distinct(),
			Connections: []Connection{{"[::1]:1", true}, {"[::2]:1", false}},
			Files:       &f, Procs: ops, Ops: ops, ProcPhases: phases, OpPhases: phases,
			State: &vfs.StateStats{Restarts: 35, Records: map[string]uint64{"files": 36, "nodes": 37}}},
		{Mount: "/mnt/b", Server: addr, Provider: "softiwarp", Files: new(vfs.Counters)},
	}
}

func TestCollectorIsLintClean(t *testing.T) {
	problems, err := promtest.CollectAndLint(NewCollector(snapshots))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

// Dashboards rely on these names.
func TestContractNames(t *testing.T) {
	c := NewCollector(snapshots)
	for _, name := range strings.Fields(`mrs_orphaned_total mrs_recovered_total mrs_recycled_total mrs_allocated_total
		local_inv_needed_total read_chunk_total write_chunk_total reply_chunk_total pullup_copy_bytes_total
		failed_marshal_total bad_reply_total nomsg_call_total reply_waits_for_send_total empty_sendctx_total
		bad_xids_total connects_total credits slots_in_use`) {
		if n := promtest.CollectAndCount(c, "nfsrdmad_"+name); n != 2 {
			t.Errorf("series of nfsrdmad_%s: got %d, want 2, one per mount", name, n)
		}
	}
	for name, want := range map[string]int{"rpc_duration_seconds": 1, "fuse_op_duration_seconds": 1,
		"rpc_phase_seconds": 1, "fuse_phase_seconds": 1,
		"fuse_ops_total": 2, "fuse_op_errors_total": 2} {
		if n := promtest.CollectAndCount(c, "nfsrdmad_"+name); n != want {
			t.Errorf("series of nfsrdmad_%s: got %d, want %d", name, n, want)
		}
	}
}

func TestCollectorValues(t *testing.T) {
	const want = `
# HELP nfsrdmad_connection_info Address of each connection, or of its last attempt to connect; 1 if connected, else 0.
# TYPE nfsrdmad_connection_info gauge
nfsrdmad_connection_info{address="[::1]:1",connection="0",mount="/mnt/a",provider="softiwarp",server="` + addr + `"} 1
nfsrdmad_connection_info{address="[::2]:1",connection="1",mount="/mnt/a",provider="softiwarp",server="` + addr + `"} 0
# HELP nfsrdmad_fuse_op_errors_total FUSE requests that failed, including lookups of missing names.
# TYPE nfsrdmad_fuse_op_errors_total counter
nfsrdmad_fuse_op_errors_total{mount="/mnt/a",operation="forget",provider="softiwarp",server="192.0.2.1:20049"} 0
nfsrdmad_fuse_op_errors_total{mount="/mnt/a",operation="read",provider="softiwarp",server="192.0.2.1:20049"} 33
# HELP nfsrdmad_local_inv_needed_total Memory regions that the client had to invalidate.
# TYPE nfsrdmad_local_inv_needed_total counter
nfsrdmad_local_inv_needed_total{mount="/mnt/a",provider="softiwarp",server="192.0.2.1:20049"} 25
nfsrdmad_local_inv_needed_total{mount="/mnt/b",provider="softiwarp",server="192.0.2.1:20049"} 0
# HELP nfsrdmad_mount_restores_total Daemons that have continued the mount of an earlier daemon.
# TYPE nfsrdmad_mount_restores_total counter
nfsrdmad_mount_restores_total{mount="/mnt/a",provider="softiwarp",server="192.0.2.1:20049"} 35
# HELP nfsrdmad_mrs Memory regions by state.
# TYPE nfsrdmad_mrs gauge
nfsrdmad_mrs{mount="/mnt/a",provider="softiwarp",server="192.0.2.1:20049",state="invalid"} 28
nfsrdmad_mrs{mount="/mnt/a",provider="softiwarp",server="192.0.2.1:20049",state="valid"} 4
# HELP nfsrdmad_state_records Records from which the next daemon continues the mount.
# TYPE nfsrdmad_state_records gauge
nfsrdmad_state_records{mount="/mnt/a",provider="softiwarp",server="192.0.2.1:20049",table="files"} 36
nfsrdmad_state_records{mount="/mnt/a",provider="softiwarp",server="192.0.2.1:20049",table="nodes"} 37
`
	if err := promtest.CollectAndCompare(NewCollector(snapshots), strings.NewReader(want),
		"nfsrdmad_connection_info", "nfsrdmad_fuse_op_errors_total", "nfsrdmad_local_inv_needed_total", "nfsrdmad_mrs",
		"nfsrdmad_mount_restores_total", "nfsrdmad_state_records"); err != nil {
		t.Error(err)
	}
}

func TestLossCollector(t *testing.T) {
	const want = "# HELP nfsrdmad_write_lost_bytes_total " +
		"Written bytes that did not become stable: rejected by a server, or dropped by an unmount." + `
# TYPE nfsrdmad_write_lost_bytes_total counter
nfsrdmad_write_lost_bytes_total{reason="rejected"} 3
nfsrdmad_write_lost_bytes_total{reason="unmount"} 4
`
	c := LossCollector(func() LostBytes { return LostBytes{Rejected: 3, Unmount: 4} })
	if err := promtest.CollectAndCompare(c, strings.NewReader(want)); err != nil {
		t.Error(err)
	}
}

func TestSpanCollector(t *testing.T) {
	const want = `
# HELP nfsrdmad_otlp_spans_dropped_total Spans of traces that were dropped: the queue was full, or the collector ` +
		`did not accept them.
# TYPE nfsrdmad_otlp_spans_dropped_total counter
nfsrdmad_otlp_spans_dropped_total{reason="collector"} 5
nfsrdmad_otlp_spans_dropped_total{reason="queue"} 4
# HELP nfsrdmad_otlp_spans_exported_total Spans of traces that the OpenTelemetry collector has accepted.
# TYPE nfsrdmad_otlp_spans_exported_total counter
nfsrdmad_otlp_spans_exported_total 3
`
	c := SpanCollector(func() Spans { return Spans{Exported: 3, DroppedFull: 4, DroppedSend: 5} })
	if err := promtest.CollectAndCompare(c, strings.NewReader(want)); err != nil {
		t.Error(err)
	}
}

func TestDocumentsNameExistingMetrics(t *testing.T) {
	all := make(map[string]bool)
	ch := make(chan *prometheus.Desc, 200)
	NewCollector(snapshots).Describe(ch)
	FaultInjection(true).Describe(ch)
	LossCollector(nil).Describe(ch)
	StateCollector(nil).Describe(ch)
	AbortCollector(nil).Describe(ch)
	KeptCollector(nil).Describe(ch)
	SpanCollector(nil).Describe(ch)
	close(ch)
	for d := range ch {
		all[regexp.MustCompile(`fqName: "([^"]*)"`).FindStringSubmatch(d.String())[1]] = true
	}
	if len(all) < 60 {
		t.Fatalf("names of metrics: got %d, want 60 or more", len(all))
	}
	suffix := regexp.MustCompile(`_(bucket|sum|count)$`)
	n := 0
	pages, err := filepath.Glob("../../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range append(pages, "../../README.md") {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range regexp.MustCompile(`\bnfsrdmad_[a-z0-9_]+`).FindAllString(string(text), -1) {
			n++
			if !all[name] && !all[suffix.ReplaceAllString(name, "")] {
				t.Errorf("%s names the metric %s, which does not exist", page, name)
			}
		}
	}
	if n < 10 {
		t.Errorf("names in the documents: got %d, want 10 or more; the pattern may be wrong", n)
	}
}

// Prometheus refuses a scrape with a label that is not UTF-8.
func TestCollectorEscapesMountPoint(t *testing.T) {
	c := NewCollector(func() []Snapshot {
		return []Snapshot{{Mount: "/mnt/a"}, {Mount: "/mnt/\xff"}, {Mount: "/mnt/\xfe"}}
	})
	const want = `
# HELP nfsrdmad_credits Credits granted by the server: calls that may be in flight.
# TYPE nfsrdmad_credits gauge
nfsrdmad_credits{mount="/mnt/\\xfe",provider="",server=""} 0
nfsrdmad_credits{mount="/mnt/\\xff",provider="",server=""} 0
nfsrdmad_credits{mount="/mnt/a",provider="",server=""} 0
`
	if err := promtest.CollectAndCompare(c, strings.NewReader(want), "nfsrdmad_credits"); err != nil {
		t.Error(err)
	}
}

func TestHistogram(t *testing.T) {
	var h Histogram
	for _, d := range []time.Duration{0, Bounds[0], Bounds[0] + 1, time.Hour} {
		h.Observe(d)
	}
	d := h.Data()
	if d.Count != 4 || d.Buckets[0] != 2 || d.Buckets[1] != 1 {
		t.Errorf("histogram: got %+v, want count 4 and buckets 2, 1", d)
	}
	if want := 2*Bounds[0] + 1 + time.Hour; d.Sum != want {
		t.Errorf("sum: got %v, want %v", d.Sum, want)
	}
	if cum := d.cumulative(); cum[Bounds[len(Bounds)-1].Seconds()] != 3 {
		t.Errorf("last bucket: got %v, want 3 (the observation of 1 h exceeds the last bound)", cum)
	}
	if n := testing.AllocsPerRun(100, func() { h.Observe(time.Second) }); n != 0 {
		t.Errorf("allocations of Observe: got %v, want 0", n)
	}
}
