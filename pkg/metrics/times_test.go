package metrics

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"google.golang.org/protobuf/proto"

	"github.com/nfsrdmad/nfsrdmad/pkg/observe/ledger"
)

// histogramOf returns the only series of c.
func histogramOf(t *testing.T, c prometheus.Collector) *dto.Histogram {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(c)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	if len(families) != 1 || len(families[0].Metric) != 1 {
		t.Fatalf("series: got %v, want 1", families)
	}
	return families[0].Metric[0].Histogram
}

// server returns the times of a call that spent d at the server.
func server(d time.Duration) *ledger.Times {
	var t ledger.Times
	t.Begin(1)
	t.Mark(ledger.PhaseServer, ledger.Time(1+d))
	return &t
}

// TestPhasesAreNativeHistograms compares the series of a phase with a native histogram of the
// client library that has observed the same times.
func TestPhasesAreNativeHistograms(t *testing.T) {
	library := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "h", NativeHistogramBucketFactor: 1.2,
		NativeHistogramZeroThreshold: zeroThreshold})
	var times Times
	observe := func(d time.Duration) {
		library.Observe(d.Seconds())
		times.Observe(server(d))
	}
	random := rand.New(rand.NewPCG(5, 6))
	for range 10000 {
		observe(time.Duration(1) << random.IntN(45) * time.Duration(1+random.IntN(3)))
		observe(time.Duration(random.Int64N(int64(time.Second))))
	}
	for i := range 16 { // bounds of buckets
		observe(time.Second << i)
		observe(time.Second >> i)
		observe(time.Second<<i + 1)
	}
	observe(0)
	observe(119)
	observe(120)
	got := histogramOf(t, NewCollector(func() []Snapshot {
		return []Snapshot{{Procs: []NamedTimes{{"READ", &times}}}}
	}).only(procPhaseDesc))
	want := histogramOf(t, library)
	if got.CreatedTimestamp.AsTime().IsZero() {
		t.Error("created timestamp: got none")
	}
	// The library sums floating-point numbers in another order.
	if d := got.GetSampleSum() - want.GetSampleSum(); d > 1e-6*want.GetSampleSum() || -d > 1e-6*want.GetSampleSum() {
		t.Errorf("sum: got %v, want %v", got.GetSampleSum(), want.GetSampleSum())
	}
	got.CreatedTimestamp, want.CreatedTimestamp, got.SampleSum, want.SampleSum = nil, nil, nil, nil
	if !proto.Equal(got, want) {
		t.Errorf("got %v\nwant %v", got, want)
	}
}

// An onlyCollector passes on the series of one description.
type onlyCollector struct {
	*Collector
	desc *prometheus.Desc
}

func (c *Collector) only(d *prometheus.Desc) prometheus.Collector { return onlyCollector{c, d} }

func (c onlyCollector) Describe(ch chan<- *prometheus.Desc) { ch <- c.desc }

func (c onlyCollector) Collect(ch chan<- prometheus.Metric) {
	all := make(chan prometheus.Metric)
	go func() {
		defer close(all)
		c.Collector.Collect(all)
	}()
	for m := range all {
		if m.Desc() == c.desc {
			ch <- m
		}
	}
}

// TestPhaseWithoutTimeIsInTheZeroBucket checks that the series of a phase counts all calls.
func TestPhaseWithoutTimeIsInTheZeroBucket(t *testing.T) {
	var times Times
	var credit ledger.Times
	credit.Begin(0)
	credit.Mark(ledger.PhaseCredit, ledger.Time(time.Hour*100)) // longer than the last bucket
	times.Observe(&credit)
	for range 4 {
		times.Observe(new(ledger.Times))
	}
	h := histogramOf(t, NewCollector(func() []Snapshot {
		return []Snapshot{{Ops: []NamedTimes{{"read", &times}}}}
	}).only(opPhaseDesc))
	if h.GetSampleCount() != 5 || h.GetZeroCount() != 4 || h.GetSampleSum() != 360000 || len(h.PositiveDelta) != 1 ||
		h.PositiveSpan[0].GetOffset() != lastBucket {
		t.Errorf("got %v, want 5 calls, of which 4 in the zero bucket and 1 in the last one", h)
	}
}

// TestDurationsCountEveryCall checks the bounds of the buckets and the sum, which comes from the
// phases.
func TestDurationsCountEveryCall(t *testing.T) {
	var times Times
	for _, d := range []time.Duration{0, Bounds[0], Bounds[0] + 1, time.Hour} {
		var call ledger.Times
		call.Begin(1)
		call.Mark(ledger.PhaseSend, ledger.Time(1+d/2))
		call.Mark(ledger.PhaseServer, ledger.Time(1+d))
		times.Observe(&call)
	}
	d := times.Durations()
	if d.Count != 4 || d.Buckets[0] != 2 || d.Buckets[1] != 1 {
		t.Errorf("got %+v, want count 4 and buckets 2, 1", d)
	}
	if want := 2*Bounds[0] + 1 + time.Hour; d.Sum != want {
		t.Errorf("sum: got %v, want %v", d.Sum, want)
	}
	if cum := d.cumulative(); cum[Bounds[len(Bounds)-1].Seconds()] != 3 {
		t.Errorf("last bucket: got %v, want 3 (the call of 1 h exceeds the last bound)", cum)
	}
}

func TestObserveDoesNotAllocate(t *testing.T) {
	var all Times
	times := server(time.Millisecond)
	if n := testing.AllocsPerRun(100, func() { all.Observe(times) }); n != 0 {
		t.Errorf("allocations: got %v, want 0", n)
	}
}

func BenchmarkObserve(b *testing.B) {
	var all Times
	var times ledger.Times
	times.Begin(0)
	for p := ledger.PhaseRegister; p <= ledger.PhaseReturn; p++ {
		times.Mark(p, ledger.Time(p)*1000)
	}
	for b.Loop() {
		all.Observe(&times)
	}
}
