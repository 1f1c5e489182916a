// Package running measures timeouts in time during which this process runs.
//
// All timers of a process that was stopped (SIGSTOP, a frozen cgroup, a paused virtual machine) are
// due when the process continues, and fire before the process reads what arrived in the meantime. A
// timer of this package notices that it fires late. It then leaves out the time of the stop, and
// waits for one more interval.
//
// The times are those of the monotonic clock, so changes of the wall clock have no effect.
//
// [AdjustOOMScore] says how long this process runs when memory is short.
package running

import (
	"context"
	"errors"
	"sync"
	"time"
)

const (
	// slack is how late a tick may be in addition to one interval.
	slack = 50 * time.Millisecond
	// maxLate bounds the consecutive late ticks that are left out, so that timeouts pass on a host
	// that is always overloaded.
	maxLate = 8
	// maxStep and minStep bound the interval of the ticks of a Timer. A short timeout has this
	// number of steps.
	maxStep = time.Second
	minStep = time.Millisecond
	steps   = 4
)

// A Detector finds stops of the process from the times of a periodic tick. It is not safe for
// concurrent use.
type Detector struct {
	every, grace time.Duration
	last         time.Time
	graceEnd     time.Time
	late         int // late ticks since the last check
}

// NewDetector returns a Detector for a tick with the given interval that starts now. After a stop,
// timeouts must not be checked for grace.
func NewDetector(every, grace time.Duration, now time.Time) *Detector {
	return &Detector{every: every, grace: grace, last: now}
}

// Tick records a tick. lost is the time since the last tick in which the process was stopped. check
// tells whether timeouts may be checked now.
func (d *Detector) Tick(now time.Time) (lost time.Duration, check bool) {
	lost = now.Sub(d.last) - d.every
	d.last = now
	switch {
	case lost > d.every+slack && d.late < maxLate:
		d.late++
		d.graceEnd = now.Add(d.grace)
		return lost, false
	case now.Before(d.graceEnd):
		return 0, false
	}
	d.late = 0
	return 0, true
}

// A Timer calls a function once after some time in which the process runs.
type Timer struct {
	f func()

	mu       sync.Mutex // guards the fields below
	timer    *time.Timer
	detector *Detector
	step     time.Duration
	left     time.Duration
	last     time.Time
	ended    bool
}

// AfterFunc returns a Timer that calls f in its own goroutine after the process has run for d.
func AfterFunc(d time.Duration, f func()) *Timer {
	now := time.Now()
	t := &Timer{f: f, step: min(max(d/steps, minStep), maxStep), left: d, last: now}
	t.detector = NewDetector(t.step, 0, now)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.timer = time.AfterFunc(t.step, t.tick)
	return t
}

func (t *Timer) tick() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.ended {
		return
	}
	now := time.Now()
	lost, check := t.detector.Tick(now)
	t.left -= now.Sub(t.last) - lost
	t.last = now
	if !check || t.left > 0 {
		t.timer.Reset(t.step)
		return
	}
	t.ended = true
	go t.f()
}

// Stop ends the timer. It returns false if the timer has called its function or was stopped.
func (t *Timer) Stop() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	active := !t.ended
	t.ended = true
	t.timer.Stop()
	return active
}

// timeoutContext returns DeadlineExceeded from Err after the timeout.
type timeoutContext struct {
	context.Context
	deadline time.Time
}

func (c timeoutContext) Deadline() (time.Time, bool) { return c.deadline, true }

func (c timeoutContext) Err() error {
	err := c.Context.Err()
	if err != nil && errors.Is(context.Cause(c.Context), context.DeadlineExceeded) {
		return context.DeadlineExceeded
	}
	return err
}

// WithTimeout is context.WithTimeout for time in which the process runs. Deadline returns the
// earliest end: a stop of the process delays the end. After the timeout, Err of a derived context
// is context.Canceled, and its context.Cause is context.DeadlineExceeded.
func WithTimeout(parent context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(parent)
	t := AfterFunc(d, func() { cancel(context.DeadlineExceeded) })
	deadline := time.Now().Add(d)
	if earlier, ok := parent.Deadline(); ok && earlier.Before(deadline) {
		deadline = earlier
	}
	return timeoutContext{ctx, deadline}, func() {
		t.Stop()
		cancel(context.Canceled)
	}
}
