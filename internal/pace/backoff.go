package pace

import (
	"math/rand/v2"
	"time"
)

// DefaultGrowth is the factor by which the limit of a pause grows.
const DefaultGrowth = 1.5

// shortest is the part of the limit that the shortest pause has: 1/5.
const shortest = 5

// A Backoff computes random pauses between attempts of one client that fail, so that the attempts
// of many clients that failed at the same moment do not come at the same moment again. It is not
// safe for concurrent use.
//
// A pause is a random time between a fifth of a limit and the limit. The limit grows with each
// pause. This is full jitter of Amazon's "Exponential Backoff And Jitter" with a shortest pause.
// Decorrelated jitter of the same article is not used: at its largest pause, most clients wait for
// exactly this time. The limit grows by 1.5, not by 2. The pauses are then on average not longer
// than those of a doubled pause without jitter, because a random pause is on average shorter than
// its limit.
type Backoff struct {
	Min, Max time.Duration  // limits of the first pause, and of all pauses
	Growth   float64        // of the limit with each pause; 0 means DefaultGrowth
	Random   func() float64 // from 0 to 1, without 1; nil means math/rand/v2
	limit    time.Duration  // of the last pause; 0 for none
}

// Next returns the next pause: at most Min at first, and at most Max.
func (b *Backoff) Next() time.Duration {
	growth := b.Growth
	if growth == 0 {
		growth = DefaultGrowth
	}
	b.limit = min(max(time.Duration(growth*float64(b.limit)), b.Min), b.Max)
	return b.limit - b.UpTo(b.limit-b.limit/shortest)
}

// Reset makes the next pause the first one.
func (b *Backoff) Reset() { b.limit = 0 }

// First reports whether the next pause is the first one.
func (b *Backoff) First() bool { return b.limit == 0 }

// UpTo returns a random time from 0 to limit. It changes no pause.
func (b *Backoff) UpTo(limit time.Duration) time.Duration {
	random := b.Random
	if random == nil {
		random = rand.Float64
	}
	return time.Duration(random() * float64(limit))
}
