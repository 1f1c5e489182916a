package metrics

import (
	"sync/atomic"
	"time"
)

// Bounds are the upper bounds of the buckets of a [Histogram], from a cache hit to a call that
// waited for a reconnect. A longer time is in no bucket; the count and the sum include it, as
// Prometheus expects of the bucket +Inf.
var Bounds = [...]time.Duration{
	50 * time.Microsecond, 100 * time.Microsecond, 250 * time.Microsecond, 500 * time.Microsecond,
	time.Millisecond, 2500 * time.Microsecond, 5 * time.Millisecond, 10 * time.Millisecond,
	25 * time.Millisecond, 50 * time.Millisecond, 100 * time.Millisecond, 250 * time.Millisecond,
	time.Second, 5 * time.Second, 30 * time.Second, 120 * time.Second,
}

// A Histogram counts durations. The zero value is an empty histogram. Observe allocates nothing and
// takes no lock. All methods may be called concurrently.
type Histogram struct {
	buckets [len(Bounds)]atomic.Uint64
	over    atomic.Uint64
	sum     atomic.Int64
}

// HistogramData is a snapshot of a [Histogram]. Its buckets are not cumulative.
type HistogramData struct {
	Buckets [len(Bounds)]uint64
	Count   uint64
	Sum     time.Duration
}

// Observe counts d.
func (h *Histogram) Observe(d time.Duration) {
	h.sum.Add(int64(d))
	for i := range Bounds {
		if d <= Bounds[i] {
			h.buckets[i].Add(1)
			return
		}
	}
	h.over.Add(1)
}

// Data returns a snapshot of h. Its sum may include a concurrent Observe that its count lacks.
func (h *Histogram) Data() HistogramData {
	var d HistogramData
	for i := range h.buckets {
		d.Buckets[i] = h.buckets[i].Load()
		d.Count += d.Buckets[i]
	}
	d.Count += h.over.Load()
	d.Sum = time.Duration(h.sum.Load())
	return d
}

// cumulative returns the cumulative buckets by upper bound in seconds.
func (d *HistogramData) cumulative() map[float64]uint64 {
	m := make(map[float64]uint64, len(Bounds))
	var n uint64
	for i, b := range Bounds {
		n += d.Buckets[i]
		m[b.Seconds()] = n
	}
	return m
}
