package pace

import (
	"math/rand/v2"
	"testing"
	"time"
)

// almostOne is the largest value of a random source.
const almostOne = 1 - 1.0/(1<<53)

// TestPausesStayBetweenBounds checks the longest and the shortest pause after each failure.
func TestPausesStayBetweenBounds(t *testing.T) {
	longest := Backoff{Min: 8 * time.Second, Max: 20 * time.Second, Random: func() float64 { return 0 }}
	least := longest
	least.Random = func() float64 { return almostOne }
	for round := range 2 {
		for i, want := range []time.Duration{8, 12, 18, 20, 20} {
			want *= time.Second
			if first := longest.First(); first != (i == 0) {
				t.Errorf("before pause %d: got first %v", i, first)
			}
			if got := longest.Next(); got != want {
				t.Errorf("round %d, longest pause %d: got %v, want %v", round, i, got, want)
			}
			if got := least.Next(); got < want/5 || got > want/5+time.Microsecond {
				t.Errorf("round %d, shortest pause %d: got %v, want %v", round, i, got, want/5)
			}
		}
		longest.Reset()
		least.Reset()
	}
}

// TestPausesOfClientsDiffer checks that the pauses of many clients are spread evenly, with the
// source of random numbers that a program uses.
func TestPausesOfClientsDiffer(t *testing.T) {
	const clients, parts = 4000, 8
	var counts [parts]int
	for range clients {
		b := Backoff{Min: time.Second, Max: time.Minute}
		counts[int((b.Next()-200*time.Millisecond)*parts/(800*time.Millisecond))]++
	}
	for i, n := range counts { // 500 each, with a standard deviation of 21
		if n < 350 || n > 650 {
			t.Errorf("part %d of %d: got %d of %d pauses, want about %d", i, parts, n, clients, clients/parts)
		}
	}
}

// TestRandomPausesAreNotLonger checks that clients do not recover later, on average, than with the
// pauses of a client of Linux: 5 s that double up to 60 s, without jitter.
func TestRandomPausesAreNotLonger(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	mean := func(outage time.Duration, b Backoff) (late time.Duration) {
		const samples = 4000
		for range samples {
			b.Reset()
			length, at := time.Duration(float64(outage)*random.Float64()), time.Duration(0)
			for at < length {
				at += b.Next()
			}
			late += (at - length) / samples
		}
		return late
	}
	for _, outage := range []time.Duration{2, 5, 15, 35, 75, 135, 600} {
		outage *= time.Second
		got := mean(outage, Backoff{Min: 5 * time.Second, Max: time.Minute, Random: random.Float64})
		double := mean(outage, Backoff{Min: 5 * time.Second, Max: time.Minute, Growth: 2,
			Random: func() float64 { return 0 }})
		if got > double*11/10 {
			t.Errorf("outages up to %v: got recovery %v after their end, want at most %v", outage, got, double)
		}
		t.Logf("outages up to %v: recovery %v after their end, without jitter %v", outage, got, double)
	}
}
