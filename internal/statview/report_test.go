package statview

import (
	"math"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/stats"
)

// readingAfter returns counters after n seconds of a constant load.
func readingAfter(n uint64) *control.MountStats {
	seconds := float64(n)
	return &control.MountStats{Dir: "/mnt", Spec: "host:/export", State: control.StateMounted, Uptime: seconds,
		Bounds: []float64{0.001, 0.002, 0.004},
		Operations: []control.OperationStats{
			{Name: "read", Count: 10 * n, Seconds: 0.03 * seconds, Buckets: []uint64{n, 6 * n, 2 * n}},
			{Name: "lookup", Count: 20 * n, Errors: 5 * n, Seconds: 0.02 * seconds,
				Buckets: []uint64{20 * n, 0, 0}}},
		Procedures: []control.OperationStats{{Name: "READ", Count: 10 * n, Seconds: seconds,
			Buckets: []uint64{0, 0, 0}}},
		Numbers: control.Numbers{
			Metrics: stats.Values{readBytes: 40960 * seconds, writtenBytes: 1000 * seconds,
				"write_sent_bytes_total": 500 * seconds, sends: 30 * seconds, "rpc_resends_total": seconds, "slots": 64,
				"slots_in_use": 3, "credits": 32, "calls_in_flight": 2},
			MRs: map[string]uint64{"VALID": 1, "INVALID": 2, "FLUSHED": 0}},
		Processes: []control.Usage{
			{PID: 7, Command: "dd", UID: 1, Requests: 10 * n, ReadBytes: 40960 * n, Seconds: 0.03 * seconds},
			{PID: 8, Command: "ls", UID: 2, Requests: 20 * n, Seconds: 0.02 * seconds}},
		Users: []control.Usage{{UID: 1, Requests: 10 * n}, {UID: 2, Requests: 20 * n}}}
}

func near(a, b float64) bool { return math.Abs(a-b) < 1e-9*max(math.Abs(b), 1) }

// checkRates checks a report of the load of readingAfter over the given seconds.
func checkRates(t *testing.T, r *Report, interval float64) {
	t.Helper()
	if r.Interval != interval || r.ReadBytes != 40960 || r.WrittenBytes != 1000 || r.SentBytes != 500 ||
		r.Requests != 30 || r.RPCs != 30 || r.Metrics["rpc_resends_total"] != interval || r.Metrics["slots"] != 64 {
		t.Errorf("got %+v, want an interval of %v s with the rates of the load", r, interval)
	}
	want := []Latency{
		{Name: "lookup", Rate: 20, Errors: 5, Mean: 0.001, P50: 0.0005, P90: 0.0009, P99: 0.00099},
		{Name: "read", Rate: 10, Mean: 0.003, P50: 0.001 + 0.001*4/6, P90: 0.004, P99: 0.004}}
	for i, l := range r.Operations {
		w := want[i]
		if l.Name != w.Name || l.Rate != w.Rate || l.Errors != w.Errors || !near(l.Mean, w.Mean) ||
			!near(l.P50, w.P50) || !near(l.P90, w.P90) || !near(l.P99, w.P99) {
			t.Errorf("operation: got %+v, want %+v", l, w)
		}
	}
	if len(r.Operations) != 2 || len(r.Procedures) != 1 || r.Procedures[0].P50 != 0.004 {
		t.Errorf("got %+v and %+v, want 2 operations and READ with all times above the last bound", r.Operations,
			r.Procedures)
	}
	if len(r.Processes) != 2 || r.Processes[0].PID != 7 || !near(r.Processes[0].Pending, 0.03) ||
		r.Processes[0].ReadBytes != 40960 || len(r.Users) != 2 {
		t.Errorf("got processes %+v and users %+v, want two of each, process 7 first", r.Processes, r.Users)
	}
}

func TestReportOfInterval(t *testing.T) {
	r := Between(readingAfter(10), readingAfter(14))
	checkRates(t, &r, 4)
}

// TestReportSinceMount compares with no reading, with one of a daemon that has ended, and with one
// of another mount.
func TestReportSinceMount(t *testing.T) {
	other := readingAfter(3)
	other.Dir = "/other"
	detached := readingAfter(3)
	detached.Since = time.Unix(1, 0)
	for name, before := range map[string]*control.MountStats{"none": {}, "ended": readingAfter(100), "other": other,
		"detached": detached} {
		t.Run(name, func(t *testing.T) {
			r := Between(before, readingAfter(5))
			checkRates(t, &r, 5)
		})
	}
}

// TestReportOmitsIdle checks that operations, processes and users without requests are left out.
func TestReportOmitsIdle(t *testing.T) {
	now := readingAfter(10)
	now.Uptime++
	r := Between(readingAfter(10), now)
	if len(r.Operations)+len(r.Procedures)+len(r.Processes)+len(r.Users) != 0 || r.Requests != 0 || r.All.P99 != 0 {
		t.Errorf("got %+v, want no operations, processes and users", r)
	}
}

// TestReportOfNoTime checks that a mount without counters has no rates.
func TestReportOfNoTime(t *testing.T) {
	r := Between(&control.MountStats{}, &control.MountStats{Dir: "/mnt", State: control.StateMounting})
	if math.IsNaN(r.ReadBytes+r.Requests+r.All.Mean) || r.Requests != 0 {
		t.Errorf("got %+v, want zero rates", r)
	}
}

func TestTextFitsTerminal(t *testing.T) {
	now := readingAfter(5)
	for i := range uint32(30) {
		now.Processes = append(now.Processes, control.Usage{PID: 4194304 - i, UID: 4294967294,
			Command: "a-long-\x1bcommand", Requests: uint64(i) * 1e9, ReadBytes: 123456789012345})
	}
	r := Between(&control.MountStats{}, now)
	var text strings.Builder
	r.Text(&text, 10)
	for line := range strings.Lines(text.String()) {
		if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > 80 {
			t.Errorf("got a line of %d columns: %q", n, line)
		}
	}
	for _, want := range []string{"/mnt from host:/export: mounted", "read 41.0 kB/s", "30.0 RPCs/s",
		"32 credits, 3 of 64 slots", "2 INVALID, 1 VALID; 0 failed", "lookup", "a-long-?command", "... and 21 more",
		"uid 2"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("got %s, want %q in it", text.String(), want)
		}
	}
}

func TestFormats(t *testing.T) {
	for _, c := range []struct {
		got, want string
	}{
		{number(0), "0"}, {number(0.123), "0.12"}, {number(42.04), "42.0"}, {number(99999), "99999"},
		{number(123456), "123k"}, {number(2.5e6), "2.5M"}, {byteRate(0), "0 B/s"}, {byteRate(999), "999 B/s"},
		{byteRate(999.9), "1 kB/s"},
		{byteRate(1.5e9), "1.50 GB/s"}, {duration(0), "-"}, {duration(25e-6), "25 µs"}, {duration(0.00123), "1.23 ms"},
		{duration(0.25), "250 ms"}, {duration(90), "90.0 s"},
	} {
		if c.got != c.want {
			t.Errorf("got %q, want %q", c.got, c.want)
		}
	}
}
