package base

import "math/bits"

// A Ring is a queue of at most limit entries. Positions are free-running counters that wrap: Head
// is the position of the oldest entry, and Tail is that of the next one. The caller provides
// locking.
type Ring[T any] struct {
	Head, Tail uint32
	slots      []T // its size is a power of two
	limit      int
}

// NewRing makes an empty ring of at most limit entries.
func NewRing[T any](limit int) Ring[T] {
	return Ring[T]{slots: make([]T, ringSize(limit)), limit: limit}
}

// ringSize returns the smallest power of two that is at least n, and at least 1.
func ringSize(n int) int {
	if n <= 1 {
		return 1
	}
	return 1 << bits.Len(uint(n-1))
}

// Len returns the number of entries.
func (r *Ring[T]) Len() int { return int(r.Tail - r.Head) }

// Full reports whether the ring has limit entries.
func (r *Ring[T]) Full() bool { return r.Len() >= r.limit }

// At returns the slot of position pos.
func (r *Ring[T]) At(pos uint32) *T { return &r.slots[pos&uint32(len(r.slots)-1)] }

// Slots returns all slots, in no particular order.
func (r *Ring[T]) Slots() []T { return r.slots }

// Push appends an entry and returns its position. The ring must not be full.
func (r *Ring[T]) Push(e T) (pos uint32) {
	pos = r.Tail
	*r.At(pos) = e
	r.Tail++
	return pos
}
