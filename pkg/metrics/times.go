package metrics

import (
	"math"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/nfsrdmad/nfsrdmad/pkg/observe/ledger"
)

// The buckets of a phase are those of a native histogram of Prometheus with this schema: 4 for each
// power of 2, so the width of a bucket is 19 %. Bucket i ends at 2^(i/4) seconds. Shorter times
// than those of the first bucket are in the zero bucket, and longer ones than those of the last
// bucket are in the last one.
const (
	phaseSchema  = 2
	perOctave    = 1 << phaseSchema
	firstOctave  = -22 // the first bucket begins at 2^-23 s, which is 119 ns
	lastOctave   = 16  // the last bucket ends at 2^16 s, which is 18 hours
	firstBucket  = (firstOctave-1)*perOctave + 1
	lastBucket   = lastOctave * perOctave
	phaseBuckets = lastBucket - firstBucket + 1
)

// zeroThreshold is the end of the zero bucket.
var zeroThreshold = math.Ldexp(1, firstOctave-1)

const mantissaBits = 52 // of a float64

// phaseBounds are the mantissas of the upper bounds of the buckets between two powers of 2.
var phaseBounds = [perOctave - 1]uint64{mantissa(math.Exp2(1. / 4)), mantissa(math.Exp2(2. / 4)),
	mantissa(math.Exp2(3. / 4))}

func mantissa(v float64) uint64 { return math.Float64bits(v) & (1<<mantissaBits - 1) }

// phaseBucket returns the bucket of a time of more than zeroThreshold.
func phaseBucket(seconds float64) int {
	bits := math.Float64bits(seconds)
	octave, m := int(bits>>mantissaBits)-1023, bits&(1<<mantissaBits-1)
	bucket := octave * perOctave
	if m > 0 {
		bucket++
	}
	for _, bound := range phaseBounds {
		if m > bound {
			bucket++
		}
	}
	return min(bucket, lastBucket)
}

// Bounds are the upper bounds of the buckets of the duration, from a cache hit to a call that
// waited for a reconnect. A longer time is in no bucket; the count and the sum include it, as
// Prometheus expects of the bucket +Inf.
var Bounds = [...]time.Duration{
	50 * time.Microsecond, 100 * time.Microsecond, 250 * time.Microsecond, 500 * time.Microsecond,
	time.Millisecond, 2500 * time.Microsecond, 5 * time.Millisecond, 10 * time.Millisecond,
	25 * time.Millisecond, 50 * time.Millisecond, 100 * time.Millisecond, 250 * time.Millisecond,
	time.Second, 5 * time.Second, 30 * time.Second, 120 * time.Second,
}

// A phaseHistogram counts the times of one phase that are longer than zeroThreshold.
type phaseHistogram struct {
	since   time.Time
	sum     atomic.Int64
	buckets [phaseBuckets]atomic.Uint64
}

// Times counts the duration of calls, and their time in each phase. The zero value is empty.
// Observe takes no lock, and allocates only for the first call that spends time in a phase. All
// methods may be called concurrently.
type Times struct {
	durations [len(Bounds) + 1]atomic.Uint64 // calls by duration; those above all bounds are last
	phases    [ledger.NumPhases]atomic.Pointer[phaseHistogram]
}

// Durations is a snapshot of the durations of calls. Its buckets are not cumulative.
type Durations struct {
	Buckets [len(Bounds)]uint64
	Count   uint64
	Sum     time.Duration
}

// Observe counts a call.
func (h *Times) Observe(t *ledger.Times) {
	h.durations[bucket(t.Total())].Add(1)
	for p := range h.phases {
		if d := t.Spent(ledger.Phase(p)); d > 0 {
			h.phase(p).observe(d)
		}
	}
}

// bucket returns the index of the first bound that is at least d.
func bucket(d time.Duration) int {
	for i := range Bounds {
		if d <= Bounds[i] {
			return i
		}
	}
	return len(Bounds)
}

// Durations returns the durations. The phases of a call sum to its duration, so their sums are the
// sum of the durations. It may include a concurrent Observe that the count lacks, or the other way
// round.
func (h *Times) Durations() (d Durations) {
	for i := range d.Buckets {
		d.Buckets[i] = h.durations[i].Load()
		d.Count += d.Buckets[i]
	}
	d.Count += h.durations[len(Bounds)].Load()
	for p := range h.phases {
		if one := h.phases[p].Load(); one != nil {
			d.Sum += time.Duration(one.sum.Load())
		}
	}
	return d
}

func (h *Times) phase(p int) *phaseHistogram {
	if one := h.phases[p].Load(); one != nil {
		return one
	}
	h.phases[p].CompareAndSwap(nil, &phaseHistogram{since: time.Now()})
	return h.phases[p].Load()
}

func (h *phaseHistogram) observe(d time.Duration) {
	h.sum.Add(int64(d))
	if s := float64(d) / float64(time.Second); s > zeroThreshold {
		h.buckets[phaseBucket(s)-firstBucket].Add(1)
	}
}

// NamedTimes are the Times of one procedure or operation. They are live.
type NamedTimes struct {
	Name string
	*Times
}

// sendTimes sends two metrics of each procedure or operation: the histogram of the durations, and a
// native histogram for each phase.
func (s *Snapshot) sendTimes(ch chan<- prometheus.Metric, duration, phase *prometheus.Desc, all []NamedTimes) {
	for _, named := range all {
		d := named.Durations()
		ch <- prometheus.MustNewConstHistogram(duration, d.Count, d.Sum.Seconds(), d.cumulative(), s.Mount, s.Server,
			s.Provider, named.Name)
		for p := range named.phases {
			if h := named.phases[p].Load(); h != nil {
				ch <- h.metric(phase, d.Count, s.Mount, s.Server, s.Provider, ledger.Phase(p).String(), named.Name)
			}
		}
	}
}

// cumulative returns the cumulative buckets by upper bound in seconds.
func (d *Durations) cumulative() map[float64]uint64 {
	m := make(map[float64]uint64, len(Bounds))
	var n uint64
	for i, b := range Bounds {
		n += d.Buckets[i]
		m[b.Seconds()] = n
	}
	return m
}

// metric returns the native histogram of a phase. A call that spent no time in it is in the zero
// bucket.
func (h *phaseHistogram) metric(d *prometheus.Desc, calls uint64, labels ...string) prometheus.Metric {
	var counted uint64
	buckets := make(map[int]int64)
	for i := range h.buckets {
		if n := h.buckets[i].Load(); n > 0 {
			buckets[firstBucket+i] = int64(n)
			counted += n
		}
	}
	calls = max(calls, counted) // the call of a concurrent Observe may be missing
	return prometheus.MustNewConstNativeHistogram(d, calls, time.Duration(h.sum.Load()).Seconds(), buckets, nil,
		calls-counted, phaseSchema, zeroThreshold, h.since, labels...)
}
