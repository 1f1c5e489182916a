package stats

import (
	"maps"
	"sync/atomic"
	"testing"
	"time"
)

// A count has a number with each rule.
type count[N uint64 | atomic.Uint64] struct {
	Calls       N
	Spent, Idle time.Duration
	Most        uint64
}

func (c *count[N]) metrics() []Metric {
	return []Metric{New("calls_total", "", &c.Calls), New("spent_seconds_total", "", &c.Spent),
		New("most", "", &c.Most).Largest(), New("idle_seconds", "", &c.Idle).Smallest()}
}

func TestAddTotalsByKind(t *testing.T) {
	var total count[uint64]
	for i, idle := range []time.Duration{0, 9 * time.Second, 5 * time.Second, 7 * time.Second, 0} {
		one := count[atomic.Uint64]{Spent: time.Second, Most: uint64(7 - i), Idle: idle}
		one.Calls.Store(10)
		Add(total.metrics(), one.metrics())
	}
	want := Values{"calls_total": 50, "spent_seconds_total": 5, "most": 7, "idle_seconds": 5}
	got := make(Values)
	if got.Add(total.metrics()); !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestSinceSubtractsCounters(t *testing.T) {
	before := Values{"calls_total": 5, "late_total": 9, "slots": 4}
	got := Values{"calls_total": 7, "late_total": 8, "new_total": 2, "slots": 3}.Since(before)
	if want := (Values{"calls_total": 2, "late_total": 0, "new_total": 2, "slots": 3}); !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}
