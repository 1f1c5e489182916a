package nfs

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// TestBusyDelayDoubles checks the delays before retries, and that the end of the context ends a
// delay.
func TestBusyDelayDoubles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var n atomic.Uint64
		p := BusyPolicy{Retries: &n}
		busy := &Error{Status: ErrJukebox}
		for try, want := range []time.Duration{
			100 * time.Millisecond,
			200 * time.Millisecond,
			400 * time.Millisecond,
			800 * time.Millisecond,
			1600 * time.Millisecond,
			3200 * time.Millisecond,
			5 * time.Second,
			5 * time.Second,
		} {
			start := time.Now()
			if !p.Retry(t.Context(), busy, try) || time.Since(start) != want {
				t.Errorf("retry %d: got a delay of %v, want %v", try, time.Since(start), want)
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		start := time.Now()
		if p.Retry(ctx, busy, 100) || time.Since(start) != time.Second {
			t.Errorf("delay with a deadline of 1s: got %v, want 1s and no retry", time.Since(start))
		}
		if p.Retry(t.Context(), &Error{Status: ErrIO}, 0) || p.Retry(t.Context(), nil, 0) {
			t.Error("retry without NFS3ERR_JUKEBOX: got true, want false")
		}
	})
}

// TestBusyTimeout checks that the delays of one call stay below Timeout.
func TestBusyTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var n atomic.Uint64
		p := BusyPolicy{Timeout: 700 * time.Millisecond, Retries: &n}
		start := time.Now()
		for try := 0; p.Retry(t.Context(), &Error{Status: ErrJukebox}, try); try++ {
		}
		if d := time.Since(start); d != 700*time.Millisecond || n.Load() != 3 { // 100 + 200 + 400 ms
			t.Errorf("delays: got %v with %d retries, want 700ms with 3", d, n.Load())
		}
	})
}
