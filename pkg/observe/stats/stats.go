// Package stats declares numbers that the daemon shows: counters and gauges.
//
// Each number is declared once, beside what counts it. A struct has the numbers as fields. Its
// method Metrics returns a [Metric] for each, with its name, its help text and its place.
// Everything else is derived from these lists: the metrics of Prometheus, the [Values] of the
// control API, and sums over the connections of a mount.
//
// The package has no locks.
package stats

import (
	"strings"
	"sync/atomic"
	"time"
)

// A Number is the type of a number.
type Number interface {
	uint64 | time.Duration | atomic.Uint64 | atomic.Int64
}

// A Metric is a counter, which only grows, or a gauge.
type Metric struct {
	// Name is that of the metric of Prometheus, without "nfsrdmad_". That of a counter ends in
	// "_total".
	Name, Help string
	// Label tells this metric from others with the same name by the value Of; "" for none.
	Label, Of string

	at  any // a pointer to a Number
	add func(total, n int64) int64
}

// New returns the Metric of a number. It is shown as the number at the time, a duration in seconds.
func New[N Number](name, help string, at *N) Metric {
	return Metric{Name: name, Help: help, at: at, add: sum}
}

// The functions that add to a total are no closures of New, which would allocate.

func sum(total, n int64) int64 { return total + n }

func largest(total, n int64) int64 { return max(total, n) }

func smallest(total, n int64) int64 {
	if total == 0 || n == 0 {
		return total + n
	}
	return min(total, n)
}

// With sets Label and Of.
func (m Metric) With(label, of string) Metric {
	m.Label, m.Of = label, of
	return m
}

// Largest makes the total of several numbers the largest one.
func (m Metric) Largest() Metric {
	m.add = largest
	return m
}

// Smallest makes the total of several numbers the smallest one that is not 0.
func (m Metric) Smallest() Metric {
	m.add = smallest
	return m
}

// Value returns the number.
func (m Metric) Value() float64 {
	if d, ok := m.at.(*time.Duration); ok {
		return d.Seconds()
	}
	return float64(m.load())
}

func (m Metric) load() int64 {
	switch n := m.at.(type) {
	case *uint64:
		return int64(*n)
	case *time.Duration:
		return int64(*n)
	case *atomic.Uint64:
		return int64(n.Load())
	default:
		return n.(*atomic.Int64).Load()
	}
}

// Add adds numbers to their totals, which are of the types uint64 and time.Duration. Both lists are
// of one kind of struct. Added to zeros, the totals are a copy.
func Add(totals, numbers []Metric) {
	for i, m := range totals {
		total := m.add(m.load(), numbers[i].load())
		switch at := m.at.(type) {
		case *uint64:
			*at = uint64(total)
		case *time.Duration:
			*at = time.Duration(total)
		}
	}
}

// Values are numbers by the names of their metrics.
type Values map[string]float64

// Add adds the present values of numbers.
func (v Values) Add(numbers []Metric) {
	for _, m := range numbers {
		v[m.Name] = m.Value()
	}
}

// Count returns the number of a metric as an integer.
func (v Values) Count(name string) uint64 { return uint64(v[name]) }

// Since returns how much each counter has grown since an earlier reading, and the gauges as they
// are.
func (v Values) Since(before Values) Values {
	d := make(Values, len(v))
	for name, n := range v {
		if IsCounter(name) {
			n = max(n-before[name], 0)
		}
		d[name] = n
	}
	return d
}

// IsCounter reports whether a metric with this name is a counter.
func IsCounter(name string) bool { return strings.HasSuffix(name, "_total") }
