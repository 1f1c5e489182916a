package metrics

import (
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	promtest "github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/nfsrdmad/nfsrdmad/internal/testutil"
)

func TestMain(m *testing.M) { testutil.Main(m) }

// distinct gives each counter a value of its own, so that a swapped field shows.
func distinct() Transport {
	return Transport{
		Connects: 3, ConnectTime: 4 * time.Second, Idle: 5 * time.Second, Sends: 6, Receives: 7, BadXIDs: 8, InflightSum: 9, BacklogSum: 10,
		ReadChunks: 11, WriteChunks: 12, ReplyChunks: 13, TotalRDMARequest: 14, TotalRDMAReply: 15, PullupCopyBytes: 16, FixupCopyBytes: 17,
		HardwayRegister: 18, FailedMarshal: 19, BadReply: 20, NomsgCall: 21, MRsRecovered: 20, MRsRecycled: 2, MRsOrphaned: 23, MRsAllocated: 24,
		LocalInvNeeded: 25, EmptySendctx: 26, ReplyWaitsForSend: 27,
		Credits: 64, Slots: 128, SlotsInUse: 2, Connected: true, MRs: map[string]uint64{"valid": 4, "invalid": 28},
	}
}

func TestXprtLineHasTheKernelsFieldsInOrder(t *testing.T) {
	tr := distinct()
	want := "\txprt:\trdma 0 0 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27"
	if got := XprtLine(&tr); got != want {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

func snapshots() []Snapshot {
	var h Histogram
	h.Observe(time.Millisecond)
	h.Observe(time.Hour)
	return []Snapshot{
		{Mount: "/mnt/a", Server: "192.0.2.1:20049", Provider: "softiwarp", Transport: distinct(),
			Files: Files{ReadBytes: 30, Ops: map[string]uint64{"read": 31, "forget": 32},
				OpErrors: map[string]uint64{"read": 33}},
			Procs: []NamedHistogram{{"READ", h.Data()}}, Ops: []NamedHistogram{{"READ", h.Data()}}},
		{Mount: "/mnt/b", Server: "192.0.2.1:20049", Provider: "softiwarp"},
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

// The names are a contract with dashboards.
func TestContractNames(t *testing.T) {
	c := NewCollector(snapshots)
	for _, name := range strings.Fields(`mrs_orphaned_total mrs_recovered_total mrs_recycled_total mrs_allocated_total
		local_inv_needed_total read_chunk_total write_chunk_total reply_chunk_total pullup_copy_bytes_total failed_marshal_total
		bad_reply_total nomsg_call_total reply_waits_for_send_total empty_sendctx_total bad_xids_total connects_total credits slots_in_use`) {
		if n := promtest.CollectAndCount(c, "nfsrdmad_"+name); n != 2 {
			t.Errorf("nfsrdmad_%s: %d series, want one for each of the 2 mounts", name, n)
		}
	}
	for _, name := range []string{"rpc_duration_seconds", "fuse_op_duration_seconds", "fuse_op_errors_total"} {
		if n := promtest.CollectAndCount(c, "nfsrdmad_"+name); n != 1 {
			t.Errorf("nfsrdmad_%s: %d series, want 1", name, n)
		}
	}
}

func TestCollectorValues(t *testing.T) {
	const want = `
# HELP nfsrdmad_local_inv_needed_total Memory regions that had to be invalidated locally.
# TYPE nfsrdmad_local_inv_needed_total counter
nfsrdmad_local_inv_needed_total{mount="/mnt/a",provider="softiwarp",server="192.0.2.1:20049"} 25
nfsrdmad_local_inv_needed_total{mount="/mnt/b",provider="softiwarp",server="192.0.2.1:20049"} 0
# HELP nfsrdmad_mrs Memory regions by state.
# TYPE nfsrdmad_mrs gauge
nfsrdmad_mrs{mount="/mnt/a",provider="softiwarp",server="192.0.2.1:20049",state="invalid"} 28
nfsrdmad_mrs{mount="/mnt/a",provider="softiwarp",server="192.0.2.1:20049",state="valid"} 4
`
	if err := promtest.CollectAndCompare(NewCollector(snapshots), strings.NewReader(want),
		"nfsrdmad_local_inv_needed_total", "nfsrdmad_mrs"); err != nil {
		t.Error(err)
	}
}

// The documentation names no metric that there is not, and what the package says of one it says
// where /metrics does.
func TestDocumentedNames(t *testing.T) {
	all := make(map[string]bool)
	ch := make(chan *prometheus.Desc, 200)
	NewCollector(snapshots).Describe(ch)
	FaultInjection(true).Describe(ch)
	close(ch)
	for d := range ch {
		all[regexp.MustCompile(`fqName: "([^"]*)"`).FindStringSubmatch(d.String())[1]] = true
	}
	if len(all) < 60 {
		t.Fatalf("%d names", len(all))
	}
	suffix := regexp.MustCompile(`_(bucket|sum|count)$`)
	n := 0
	for _, page := range []string{"README.md", "docs/operator.md", "docs/semantics.md", "docs/features.md"} {
		text, err := os.ReadFile("../../" + page)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range regexp.MustCompile(`\bnfsrdmad_[a-z0-9_]+`).FindAllString(string(text), -1) {
			n++
			if !all[name] && !all[suffix.ReplaceAllString(name, "")] {
				t.Errorf("%s: there is no %s", page, name)
			}
		}
	}
	if n < 10 {
		t.Errorf("%d names in the documentation", n)
	}
}

// A mount point whose name is no UTF-8 costs nobody the scrape.
func TestMountPointIsNotUTF8(t *testing.T) {
	c := NewCollector(func() []Snapshot {
		return []Snapshot{{Mount: "/mnt/a"}, {Mount: "/mnt/\xff"}, {Mount: "/mnt/\xfe"}}
	})
	const want = `
# HELP nfsrdmad_credits Calls that the server grants in parallel.
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
		t.Errorf("got %+v", d)
	}
	if want := 2*Bounds[0] + 1 + time.Hour; d.Sum != want {
		t.Errorf("sum %v, want %v", d.Sum, want)
	}
	if cum := d.cumulative(); cum[Bounds[len(Bounds)-1].Seconds()] != 3 {
		t.Errorf("the last bucket must hold all but the hour: %v", cum)
	}
	if n := testing.AllocsPerRun(100, func() { h.Observe(time.Second) }); n != 0 {
		t.Errorf("Observe allocates %v times", n)
	}
}
