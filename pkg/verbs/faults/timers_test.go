package faults

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// TestTimersRunJobsAfterDelay checks that each job runs once, after its own delay.
func TestTimersRunJobsAfterDelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var jobs timers
		start := time.Now()
		ran := make(chan time.Duration, 2)
		for _, d := range []time.Duration{time.Hour, time.Minute} {
			jobs.after(d, func(draining bool) {
				if draining {
					t.Errorf("job after %v: got draining, want not draining", d)
				}
				ran <- time.Since(start)
			})
		}
		for _, want := range []time.Duration{time.Minute, time.Hour} {
			if got := <-ran; got != want {
				t.Errorf("job ran after %v, want %v", got, want)
			}
		}
		jobs.flush()
		if len(ran) != 0 {
			t.Error("flush ran a job again")
		}
	})
}

// TestTimersFlushRunsRemainingJobs checks that flush runs pending jobs in order, and waits for a
// job that is running.
func TestTimersFlushRunsRemainingJobs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var jobs timers
		start := time.Now()
		finished := false
		jobs.after(time.Second, func(bool) {
			time.Sleep(time.Second)
			finished = true
		})
		var order []int
		for i := range 3 {
			jobs.after(time.Hour, func(draining bool) {
				if !draining {
					t.Errorf("job %d: got not draining, want draining", i)
				}
				order = append(order, i)
			})
		}
		time.Sleep(1500 * time.Millisecond)
		jobs.flush()
		if !finished || time.Since(start) != 2*time.Second {
			t.Errorf("flush returned after %v, finished=%v; want 2s, true", time.Since(start), finished)
		}
		if want := []int{0, 1, 2}; !slices.Equal(order, want) {
			t.Errorf("order of jobs: got %v, want %v", order, want)
		}
	})
}
