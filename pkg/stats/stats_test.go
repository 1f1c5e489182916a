package stats

import (
	"maps"
	"sync/atomic"
	"testing"
	"time"
)

// A count has a number of each type.
type count[N uint64 | atomic.Uint64] struct {
	Calls  N
	Spent  time.Duration
	Most   uint64
	Idle   time.Duration
	Active atomic.Int64
}

func (c *count[N]) metrics() []Metric {
	return []Metric{New("calls_total", "", &c.Calls), New("spent_seconds_total", "", &c.Spent),
		New("most", "", &c.Most).Largest(), New("idle_seconds", "", &c.Idle).Smallest()}
}

func valuesOf(m []Metric) Values {
	v := make(Values)
	v.Add(m)
	return v
}

func TestAddTotalsByKind(t *testing.T) {
	var total count[uint64]
	for i, idle := range []time.Duration{0, 9 * time.Second, 5 * time.Second, 7 * time.Second, 0} {
		one := count[atomic.Uint64]{Spent: time.Second, Most: uint64(7 - i), Idle: idle}
		one.Calls.Store(10)
		Add(total.metrics(), one.metrics())
	}
	want := Values{"calls_total": 50, "spent_seconds_total": 5, "most": 7, "idle_seconds": 5}
	if got := valuesOf(total.metrics()); !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	var active count[uint64]
	active.Active.Store(-1)
	if got := New("active", "", &active.Active).Value(); got != -1 {
		t.Errorf("atomic.Int64: got %v, want -1", got)
	}
}

func TestSinceSubtractsCounters(t *testing.T) {
	before := Values{"calls_total": 5, "late_total": 9, "slots": 4}
	got := Values{"calls_total": 7, "late_total": 8, "new_total": 2, "slots": 3}.Since(before)
	if want := (Values{"calls_total": 2, "late_total": 0, "new_total": 2, "slots": 3}); !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}
