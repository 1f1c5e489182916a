package faults

import (
	"sync"
	"time"
)

// timers are what a queue pair has put off. All of it has run when flush returns.
type timers struct {
	running sync.WaitGroup

	mu   sync.Mutex
	jobs []*job // guarded by mu; in the order in which they were put off
}

type job struct {
	timer *time.Timer
	run   func(early bool)
}

// after calls run(false) d from now, or run(true) from flush.
func (t *timers) after(d time.Duration, run func(early bool)) {
	j := &job{run: run}
	t.running.Add(1)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.jobs = append(t.jobs, j)
	j.timer = time.AfterFunc(d, func() {
		if t.take(j) {
			defer t.running.Done()
			j.run(false)
		}
	})
}

// take removes j, and reports whether it was still there.
func (t *timers) take(j *job) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range t.jobs {
		if t.jobs[i] == j {
			t.jobs = append(t.jobs[:i], t.jobs[i+1:]...)
			return true
		}
	}
	return false
}

// flush runs what is left at once, in the order in which it was put off, and waits for what is
// running. Nothing may be put off at the same time.
func (t *timers) flush() {
	t.mu.Lock()
	jobs := t.jobs
	t.jobs = nil
	t.mu.Unlock()
	for _, j := range jobs {
		j.timer.Stop()
		j.run(true)
		t.running.Done()
	}
	t.running.Wait()
}
