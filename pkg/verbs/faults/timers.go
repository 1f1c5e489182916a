package faults

import (
	"sync"
	"time"
)

// timers holds the delayed jobs of a queue pair. All jobs have run when flush returns.
type timers struct {
	running sync.WaitGroup

	mu   sync.Mutex
	jobs []*job // guarded by mu; in the order of the calls of after
}

type job struct {
	timer *time.Timer
	run   func(draining bool)
}

// after calls run(false) after d. If flush comes first, flush calls run(true).
func (t *timers) after(d time.Duration, run func(draining bool)) {
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

// take removes j and reports whether j was still present.
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

// flush runs the remaining jobs at once, in order, and waits for running jobs. The caller must not
// call after at the same time.
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
