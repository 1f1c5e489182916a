package metrics

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	promtest "github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/memreg"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/stats"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func TestMain(m *testing.M) { kit.Main(m) }

// distinct returns Numbers whose counters differ, so that a swapped field fails a test.
func distinct() xprt.Numbers {
	return xprt.Numbers{
		Connections: map[string]uint64{xprt.StateConnected: 1},
		Counters: xprt.Counters[uint64]{Connects: 3, Sends: 6, Recvs: 7, BadXIDs: 8, ReadChunks: 11, WriteChunks: 12,
			ReplyChunks: 13, TotalRDMARequest: 14, TotalRDMAReply: 15, PullupCopyBytes: 16, FixupCopyBytes: 17,
			FailedMarshal: 19, BadReply: 20, NomsgCall: 21, EmptySendCtx: 26, ReplyWaitsForSend: 27},
		Counts: memreg.Counts[uint64]{MRsRecovered: 20, MRsRecycled: 2, MRsOrphaned: 23, MRsAllocated: 24,
			LocalInvNeeded: 25},
		ConnectTime: 4 * time.Second, IdleTime: 5 * time.Second, InFlightSum: 9, QueuedSum: 10,
		Credits: 64, Slots: 128, SlotsInUse: 2, MRStates: map[string]uint64{"valid": 4, "invalid": 28},
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
	var f vfs.Counters
	f.ReadBytes.Add(30)
	f.Ops[kernel.OpRead].Add(31)
	f.Errors[kernel.OpRead].Add(33)
	f.Ops[kernel.OpForget].Add(32)
	times := []NamedTimes{{"READ", new(Times)}}
	times[0].Observe(server(time.Millisecond))
	return []Snapshot{
		{Mount: "/mnt/a", Server: addr, Provider: "softiwarp", Transport: distinct(),
			Connections: []Connection{{"[::1]:1", true}, {"[::2]:1", false}},
			Files:       &f, Procs: times, Ops: times,
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

func TestDaemonCollector(t *testing.T) {
	const want = `
# HELP nfsrdmad_aborts_total Aborts.
# TYPE nfsrdmad_aborts_total counter
nfsrdmad_aborts_total 3
# HELP nfsrdmad_mounts Mounts by state.
# TYPE nfsrdmad_mounts gauge
nfsrdmad_mounts{state="mounted"} 4
nfsrdmad_mounts{state="stalled"} 5
`
	aborts, mounted, stalled := uint64(3), uint64(4), uint64(5)
	c := DaemonCollector(func() []stats.Metric {
		return []stats.Metric{stats.New("aborts_total", "Aborts.", &aborts),
			stats.New("mounts", "Mounts by state.", &mounted).With("state", "mounted"),
			stats.New("mounts", "Mounts by state.", &stalled).With("state", "stalled")}
	})
	if err := promtest.CollectAndCompare(c, strings.NewReader(want)); err != nil {
		t.Error(err)
	}
}

// namesIn returns the names that a pattern finds in files below the root of the repository, and a
// file with each.
func namesIn(t *testing.T, pattern string, files ...string) map[string]string {
	t.Helper()
	names := make(map[string]string)
	for _, glob := range files {
		pages, err := filepath.Glob("../../" + glob)
		kit.Must(t, err)
		for _, page := range pages {
			text, err := os.ReadFile(page)
			kit.Must(t, err)
			for _, m := range regexp.MustCompile(pattern).FindAllSubmatch(text, -1) {
				names[string(m[1])] = page
			}
		}
	}
	if len(names) < 10 {
		t.Fatalf("names in %v: got %d, want 10 or more; the pattern may be wrong", files, len(names))
	}
	return names
}

// TestMetricsExist checks the names in the documents, and in the packages that read stats.Values.
// docs/reference.md has all metrics of the program.
func TestMetricsExist(t *testing.T) {
	all := namesIn(t, "(?m)^\\| `nfsrdmad_([a-z0-9_]+)` ", "docs/reference.md")
	suffix := regexp.MustCompile(`_(bucket|sum|count)$`)
	for name, page := range namesIn(t, `\bnfsrdmad_([a-z0-9_]+)`, "docs/*.md", "README.md") {
		if all[name] == "" && all[suffix.ReplaceAllString(name, "")] == "" {
			t.Errorf("%s names the metric %s, which does not exist", page, name)
		}
	}
	for name, page := range namesIn(t, `(?:Metrics\[|Count\(|\bn\()"([a-z_]+)"`, "cmd/nfsrdmad/*.go",
		"internal/statview/*.go", "test/restart/*.go", "test/scale/*.go", "test/lab/rdmacore/*.go") {
		if numberDescs[name] == nil {
			t.Errorf("%s names the metric %s, which does not exist", page, name)
		}
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
