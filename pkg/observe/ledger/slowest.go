package ledger

import (
	"cmp"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// SlowCalls is the largest number of calls that Slowest.All returns.
	SlowCalls = 32
	// SlowWindow is how far Slowest.All looks back.
	SlowWindow = 10 * time.Minute

	spanLength = time.Minute
	// spans is the number of spans that the window touches.
	spans = int64(SlowWindow/spanLength) + 1
)

// A Slowest keeps the SlowCalls slowest calls of the last SlowWindow, exactly. It keeps those of
// each minute, so that a call replaces slower ones when they become too old. Its memory is bounded.
// All methods may be called concurrently. The zero value is empty.
type Slowest[T any] struct {
	until     atomic.Int64 // Time at which the span of threshold ends
	threshold atomic.Int64 // total that a call of the span must exceed; 0 while the span has room

	mu    sync.Mutex
	spans [spans]span[T]
}

// A span holds the slowest calls of one minute, the slowest first.
type span[T any] struct {
	number int64 // since the start of the process, from 1
	calls  []slowCall[T]
}

type slowCall[T any] struct {
	total time.Duration
	end   Time
	value T
}

// Wants reports whether a call with the times t is among the slowest of its minute. The caller then
// calls Add.
func (s *Slowest[T]) Wants(t *Times) bool {
	return int64(t.Total()) > s.threshold.Load() || int64(t.End()) >= s.until.Load()
}

// Add adds a call with the times t, if it is among the slowest of its minute.
func (s *Slowest[T]) Add(t *Times, value T) {
	c := slowCall[T]{t.Total(), t.End(), value}
	number := int64(c.end)/int64(spanLength) + 1
	s.mu.Lock()
	defer s.mu.Unlock()
	p := &s.spans[number%spans]
	if p.number > number {
		return // a call of a span that was replaced
	}
	if p.number < number {
		clear(p.calls)
		p.number, p.calls = number, p.calls[:0]
	}
	at, _ := slices.BinarySearchFunc(p.calls, c, func(a, b slowCall[T]) int { return cmp.Compare(b.total, a.total) })
	if len(p.calls) == SlowCalls {
		if at == SlowCalls {
			return
		}
		p.calls = p.calls[:SlowCalls-1]
	}
	p.calls = slices.Insert(p.calls, at, c)
	if until := number * int64(spanLength); until >= s.until.Load() {
		least := int64(0)
		if len(p.calls) == SlowCalls {
			least = int64(p.calls[SlowCalls-1].total)
		}
		s.threshold.Store(least)
		s.until.Store(until)
	}
}

// All returns the slowest calls that ended in the SlowWindow before now, the slowest first.
func (s *Slowest[T]) All(now Time) []T {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []slowCall[T]
	for i := range s.spans {
		for _, c := range s.spans[i].calls {
			if time.Duration(now-c.end) <= SlowWindow {
				all = append(all, c)
			}
		}
	}
	slices.SortStableFunc(all, func(a, b slowCall[T]) int { return cmp.Compare(b.total, a.total) })
	values := make([]T, 0, SlowCalls)
	for _, c := range all[:min(len(all), SlowCalls)] {
		values = append(values, c.value)
	}
	return values
}
