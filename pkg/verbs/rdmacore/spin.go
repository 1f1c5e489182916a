package rdmacore

import "time"

const (
	// maxSpin is the longest time that a dispatcher polls an empty queue before it sleeps. A sleep
	// and a wake-up cost about the same time.
	maxSpin = 50 * time.Microsecond
	// minSpin is the time for which a dispatcher polls after a short sleep.
	minSpin = 5 * time.Microsecond
)

// A spinner decides how long a dispatcher polls an empty completion queue before it sleeps. The
// time grows while completions arrive within the time, and shrinks to zero while no completion
// does. An idle connection then costs no processor time.
type spinner struct {
	budget time.Duration
	since  time.Time // when the queue was first found empty; zero if it was not empty
	slept  time.Time // when the last sleep began
}

// foundCompletions records that the queue was not empty.
func (s *spinner) foundCompletions() {
	if !s.since.IsZero() { // polling found them
		s.budget = min(2*s.budget, maxSpin)
		s.since = time.Time{}
	}
}

// pollAgain reports whether to poll the empty queue again.
func (s *spinner) pollAgain(now time.Time) bool {
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

// beginSleep records that the dispatcher goes to sleep.
func (s *spinner) beginSleep(now time.Time) { s.slept, s.since = now, time.Time{} }

// endSleep records that the dispatcher woke up.
func (s *spinner) endSleep(now time.Time) {
	if now.Sub(s.slept) < maxSpin {
		s.budget = max(s.budget, minSpin)
	}
}
