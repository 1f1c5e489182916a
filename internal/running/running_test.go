package running

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// TestDetector gives ticks at certain times to a Detector with an interval and a grace of 1 s.
func TestDetector(t *testing.T) {
	const s = time.Second
	for _, tt := range []struct {
		name  string
		ticks []time.Duration // times after the start
		lost  []time.Duration
		check []bool
	}{
		{"on time", []time.Duration{s, 2 * s, 3 * s}, []time.Duration{0, 0, 0}, []bool{true, true, true}},
		{"a little late", []time.Duration{s, 3 * s, 4 * s}, []time.Duration{0, 0, 0}, []bool{true, true, true}},
		{"stopped", []time.Duration{s, 62 * s, 62*s + s/2, 63 * s}, []time.Duration{0, 60 * s, 0, 0},
			[]bool{true, false, false, true}},
		{"stopped twice", []time.Duration{10 * s, 20 * s, 21 * s}, []time.Duration{9 * s, 9 * s, 0},
			[]bool{false, false, true}},
	} {
		start := time.Now()
		d := NewDetector(s, s, start)
		for i, at := range tt.ticks {
			if lost, check := d.Tick(start.Add(at)); lost != tt.lost[i] || check != tt.check[i] {
				t.Errorf("%s: tick at %v: got %v, %v, want %v, %v", tt.name, at, lost, check, tt.lost[i], tt.check[i])
			}
		}
	}
}

// A host that is always overloaded delays all ticks. Timeouts must pass nevertheless.
func TestDetectorBoundsLateTicks(t *testing.T) {
	now := time.Now()
	d := NewDetector(time.Second, time.Second, now)
	checks := 0
	for range 10 * (maxLate + 1) {
		now = now.Add(time.Hour)
		if _, check := d.Tick(now); check {
			checks++
		}
	}
	if checks != 10 {
		t.Errorf("checks in %d late ticks: got %d, want 10", 10*(maxLate+1), checks)
	}
}

func TestTimerFiresOnce(t *testing.T) {
	for _, d := range []time.Duration{0, time.Microsecond, 10 * time.Millisecond, time.Second, time.Minute} {
		synctest.Test(t, func(t *testing.T) {
			start, fired := time.Now(), make(chan time.Duration, 2)
			AfterFunc(d, func() { fired <- time.Since(start) })
			if got := <-fired; got < d || got > d+maxStep {
				t.Errorf("timer of %v: fired after %v", d, got)
			}
			stopped := AfterFunc(d+time.Second, func() { fired <- 0 })
			if !stopped.Stop() || stopped.Stop() {
				t.Errorf("timer of %v: got a wrong result of Stop", d)
			}
			time.Sleep(time.Hour)
			if len(fired) != 0 {
				t.Errorf("timer of %v: fired twice, or after Stop", d)
			}
		})
	}
}

// TestTimerLeavesOutStop moves the start of the current interval into the past, as a stop of the
// process does.
func TestTimerLeavesOutStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const d = 10 * time.Second
		start, fired := time.Now(), make(chan time.Duration, 1)
		timer := AfterFunc(d, func() { fired <- time.Since(start) })
		time.Sleep(d - maxStep/2) // the last interval has begun
		timer.mu.Lock()
		timer.last = timer.last.Add(-time.Hour)
		timer.detector.last = timer.detector.last.Add(-time.Hour)
		timer.mu.Unlock()
		if got := <-fired; got < d+maxStep || got > d+2*maxStep {
			t.Errorf("timer of %v with a stop in its last interval: fired after %v, want one more interval", d, got)
		}
	})
}

func TestWithTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := WithTimeout(t.Context(), time.Minute)
		defer cancel()
		derived, cancelDerived := context.WithCancel(ctx)
		defer cancelDerived()
		start := time.Now()
		<-ctx.Done()
		if cause := context.Cause(derived); !errors.Is(derived.Err(), context.Canceled) ||
			!errors.Is(cause, context.DeadlineExceeded) {
			t.Errorf("derived context: got %v, caused by %v", derived.Err(), cause)
		}
		if time.Since(start) != time.Minute || !errors.Is(ctx.Err(), context.DeadlineExceeded) {
			t.Errorf("end of the context: after %v with %v, want after 1m with %v", time.Since(start), ctx.Err(),
				context.DeadlineExceeded)
		}
		ctx, cancel = WithTimeout(t.Context(), time.Minute)
		cancel()
		if !errors.Is(ctx.Err(), context.Canceled) {
			t.Errorf("canceled context: got %v, want %v", ctx.Err(), context.Canceled)
		}
	})
}
