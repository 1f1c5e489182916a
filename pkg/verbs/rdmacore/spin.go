package rdmacore

import "time"

const (
	// maxSpin is how long a dispatcher polls an empty queue before it sleeps, at most: about what
	// it costs to sleep and be woken.
	maxSpin = 50 * time.Microsecond
	// minSpin is what it begins with when a sleep turned out to be short.
	minSpin = 5 * time.Microsecond
)

// A spinner decides for how long an empty completion queue is polled before its dispatcher sleeps:
// longer while completions keep coming within that time, not at all while they do not, so that an
// idle connection costs nothing.
type spinner struct {
	budget time.Duration
	since  time.Time // when the queue was first found empty; zero while it is not
	slept  time.Time // when the dispatcher went to sleep last
}

// hit notes that there were completions.
func (s *spinner) hit() {
	if !s.since.IsZero() { // found by polling
		s.budget = min(2*s.budget, maxSpin)
		s.since = time.Time{}
	}
}

// again reports whether an empty queue is to be polled once more.
func (s *spinner) again(now time.Time) bool {
	if s.budget == 0 {
		return false
	}
	if s.since.IsZero() {
		s.since = now
		return true
	}
	if now.Sub(s.since) < s.budget {
		return true
	}
	s.since = time.Time{}
	if s.budget /= 2; s.budget < minSpin {
		s.budget = 0
	}
	return false
}

// sleeps and woken enclose a sleep.
func (s *spinner) sleeps(now time.Time) { s.slept, s.since = now, time.Time{} }

func (s *spinner) woken(now time.Time) {
	if now.Sub(s.slept) < maxSpin {
		s.budget = max(s.budget, minSpin)
	}
}
