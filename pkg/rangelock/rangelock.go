// Package rangelock keeps the byte-range locks of one file, with the semantics of fcntl(2): the
// locks of one owner do not conflict, a new lock replaces what the owner had in its range, and
// adjacent locks of one mode merge if they were set through one open file.
//
// The package decides conflicts. It does not wait and has no lock: the caller serializes the calls
// of one [Table].
package rangelock

import (
	"math"
	"slices"
	"sort"
)

// MaxOffset is the last byte that a lock can contain. A lock that ends there has no end: it also
// contains all data that is appended later.
const MaxOffset = math.MaxInt64

// A Lock is a lock of the bytes Start to End, both included.
type Lock[O comparable] struct {
	Start, End uint64 // Start <= End <= MaxOffset
	Exclusive  bool
	Owner      O
	PID        uint32 // of the process that set the lock; only for information
	// Open is the number of the open file through which the lock was set. It decides no conflict.
	// The new lock that replaces another one has its own number.
	Open uint64
}

func (l *Lock[O]) overlaps(start, end uint64) bool { return l.Start <= end && start <= l.End }

// A Table holds the locks of one file, ordered by Start. Its zero value is empty.
type Table[O comparable] struct {
	locks []Lock[O]
}

// Len returns the number of locks.
func (t *Table[O]) Len() int { return len(t.locks) }

// All returns a copy of the locks.
func (t *Table[O]) All() []Lock[O] { return slices.Clone(t.locks) }

// Conflict returns the first lock of another owner that excludes l, or nil.
func (t *Table[O]) Conflict(l *Lock[O]) *Lock[O] {
	for i := range t.locks {
		have := &t.locks[i]
		if have.Owner != l.Owner && (have.Exclusive || l.Exclusive) && have.overlaps(l.Start, l.End) {
			found := *have
			return &found
		}
	}
	return nil
}

// Set adds l, which must not conflict. It replaces the owner's locks in the range of l.
func (t *Table[O]) Set(l Lock[O]) {
	t.cut(l.Owner, l.Start, l.End)
	whole := l
	t.locks = slices.DeleteFunc(t.locks, func(have Lock[O]) bool {
		if have.Owner != l.Owner || have.Exclusive != l.Exclusive || have.Open != l.Open ||
			have.End+1 != l.Start && l.End+1 != have.Start {
			return false
		}
		whole.Start, whole.End = min(whole.Start, have.Start), max(whole.End, have.End)
		return true
	})
	t.insert(whole)
}

// Clear removes the owner's locks from start to end. It reports whether there was one.
func (t *Table[O]) Clear(owner O, start, end uint64) bool {
	if !t.Owns(owner, start, end) {
		return false
	}
	t.cut(owner, start, end)
	return true
}

// cut removes the owner's locks from start to end.
func (t *Table[O]) cut(owner O, start, end uint64) {
	var outside []Lock[O]
	t.locks = slices.DeleteFunc(t.locks, func(have Lock[O]) bool {
		if have.Owner != owner || !have.overlaps(start, end) {
			return false
		}
		outside = appendOutside(outside, have, start, end)
		return true
	})
	for _, l := range outside {
		t.insert(l)
	}
}

// insert puts a lock behind the other locks that do not start after it.
func (t *Table[O]) insert(l Lock[O]) {
	i := sort.Search(len(t.locks), func(i int) bool { return t.locks[i].Start > l.Start })
	t.locks = slices.Insert(t.locks, i, l)
}

// Splits reports whether Clear would split one of the owner's locks, so that Len grows.
func (t *Table[O]) Splits(owner O, start, end uint64) bool {
	for i := range t.locks {
		if have := &t.locks[i]; have.Owner == owner && have.Start < start && have.End > end {
			return true
		}
	}
	return false
}

// appendOutside appends the parts of l before start and after end.
func appendOutside[O comparable](to []Lock[O], l Lock[O], start, end uint64) []Lock[O] {
	if !l.overlaps(start, end) {
		return append(to, l)
	}
	if l.Start < start {
		left := l
		left.End = start - 1
		to = append(to, left)
	}
	if l.End > end {
		right := l
		right.Start = end + 1
		to = append(to, right)
	}
	return to
}

// Owns reports whether the owner has a lock in the range.
func (t *Table[O]) Owns(owner O, start, end uint64) bool {
	for i := range t.locks {
		if t.locks[i].Owner == owner && t.locks[i].overlaps(start, end) {
			return true
		}
	}
	return false
}

// Owned returns the parts of the owner's locks from start to end, in order.
func (t *Table[O]) Owned(owner O, start, end uint64) []Lock[O] {
	var parts []Lock[O]
	for _, l := range t.locks {
		if l.Owner == owner && l.overlaps(start, end) {
			l.Start, l.End = max(l.Start, start), min(l.End, end)
			parts = append(parts, l)
		}
	}
	return parts
}

// Holds reports whether the owner holds every byte of l in the mode of l or a stronger one.
func (t *Table[O]) Holds(l *Lock[O]) bool {
	next := l.Start
	for _, part := range t.Owned(l.Owner, l.Start, l.End) {
		if part.Start > next || l.Exclusive && !part.Exclusive {
			return false
		}
		if part.End == l.End {
			return true
		}
		next = part.End + 1
	}
	return false
}
