package metrics

import (
	"math"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/nfsrdmad/nfsrdmad/pkg/ledger"
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

// A phaseHistogram counts the times of one phase that are longer than zeroThreshold.
type phaseHistogram struct {
	since   time.Time
	sum     atomic.Int64
	buckets [phaseBuckets]atomic.Uint64
}

// Phases counts the time of calls in each phase. The zero value is empty. Observe takes no lock,
// and allocates only for the first call that spends time in a phase. All methods may be called
// concurrently.
type Phases struct {
	calls  atomic.Uint64
	phases [ledger.NumPhases]atomic.Pointer[phaseHistogram]
}

// Observe counts a call.
func (h *Phases) Observe(t *ledger.Times) {
	h.calls.Add(1)
	for p := range h.phases {
		if d := t.Spent(ledger.Phase(p)); d > 0 {
			h.phase(p).observe(d)
		}
	}
}

// Empty reports whether no call was observed.
func (h *Phases) Empty() bool { return h.calls.Load() == 0 }

func (h *Phases) phase(p int) *phaseHistogram {
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

// NamedPhases are the Phases of one procedure or operation. They are live.
type NamedPhases struct {
	Name string
	*Phases
}

// phaseSeries sends one native histogram for each phase in which a call has spent time. A call that
// spent no time in the phase is in the zero bucket.
func (s *Snapshot) phaseSeries(ch chan<- prometheus.Metric, d *prometheus.Desc, all []NamedPhases) {
	for _, named := range all {
		for p := range named.phases {
			h := named.phases[p].Load()
			if h == nil {
				continue
			}
			var counted uint64
			buckets := make(map[int]int64)
			for i := range h.buckets {
				if n := h.buckets[i].Load(); n > 0 {
					buckets[firstBucket+i] = int64(n)
					counted += n
				}
			}
			calls := max(named.calls.Load(), counted) // calls is counted first
			ch <- prometheus.MustNewConstNativeHistogram(d, calls, time.Duration(h.sum.Load()).Seconds(), buckets, nil,
				calls-counted, phaseSchema, zeroThreshold, h.since, s.Mount, s.Server, s.Provider,
				ledger.Phase(p).String(), named.Name)
		}
	}
}
