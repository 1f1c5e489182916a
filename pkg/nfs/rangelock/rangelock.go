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
//
// The locks of one owner do not overlap. Those of several owners can, so that the order by Start is
// not that by End: reach makes searches for a range short nevertheless, unless a lock with a small
// Start overlaps most of the others.
type Table[O comparable] struct {
	locks []Lock[O]
	reach []uint64 // the largest End of the locks up to and including this one
	owned map[O]int
}

// Len returns the number of locks.
func (t *Table[O]) Len() int { return len(t.locks) }

// All returns a copy of the locks.
func (t *Table[O]) All() []Lock[O] { return slices.Clone(t.locks) }

// Has reports whether the owner has a lock.
func (t *Table[O]) Has(owner O) bool { return t.owned[owner] > 0 }

// near returns the range of the indices of the locks that may overlap the bytes start to end.
func (t *Table[O]) near(start, end uint64) (from, to int) {
	from, _ = slices.BinarySearch(t.reach, start)
	to = sort.Search(len(t.locks), func(i int) bool { return t.locks[i].Start > end })
	return from, max(from, to)
}

// Conflict returns the first lock of another owner that excludes l, or nil.
func (t *Table[O]) Conflict(l *Lock[O]) *Lock[O] {
	if len(t.locks) == t.owned[l.Owner] {
		return nil
	}
	from, to := t.near(l.Start, l.End)
	for i := from; i < to; i++ {
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
	whole := l
	var parts, apart []Lock[O]
	for _, have := range t.take(l.Owner, before(l.Start), l.End+1) {
		parts = appendOutside(parts, have, l.Start, l.End)
	}
	for _, part := range parts {
		if part.Exclusive != l.Exclusive || part.Open != l.Open {
			apart = append(apart, part)
			continue
		}
		whole.Start, whole.End = min(whole.Start, part.Start), max(whole.End, part.End)
	}
	t.insert(append(apart, whole)...)
}

// Clear removes the owner's locks from start to end. It reports whether there was one.
func (t *Table[O]) Clear(owner O, start, end uint64) bool {
	var outside []Lock[O]
	taken := t.take(owner, start, end)
	for _, have := range taken {
		outside = appendOutside(outside, have, start, end)
	}
	t.insert(outside...)
	return len(taken) > 0
}

// before returns the byte before start, or start if there is none.
func before(start uint64) uint64 { return max(start, 1) - 1 }

// take removes the owner's locks that overlap the bytes start to end, and returns them in order.
func (t *Table[O]) take(owner O, start, end uint64) (taken []Lock[O]) {
	if !t.Has(owner) {
		return nil
	}
	from, to := t.near(start, end)
	kept := from
	for i := from; i < to; i++ {
		if have := t.locks[i]; have.Owner == owner && have.overlaps(start, end) {
			taken = append(taken, have)
			continue
		}
		t.locks[kept] = t.locks[i]
		kept++
	}
	if len(taken) == 0 {
		return nil
	}
	t.locks = slices.Delete(t.locks, kept, to)
	t.count(owner, -len(taken))
	t.reached(from)
	return taken
}

// insert puts each lock behind the other locks that do not start after it.
func (t *Table[O]) insert(locks ...Lock[O]) {
	for _, l := range locks {
		i := sort.Search(len(t.locks), func(i int) bool { return t.locks[i].Start > l.Start })
		t.locks = slices.Insert(t.locks, i, l)
		t.count(l.Owner, 1)
		t.reached(i)
	}
}

// count changes the number of locks of an owner.
func (t *Table[O]) count(owner O, n int) {
	if t.owned == nil {
		t.owned = make(map[O]int)
	}
	if t.owned[owner] += n; t.owned[owner] == 0 {
		delete(t.owned, owner)
	}
}

// reached updates reach after a change of the locks from index i on.
func (t *Table[O]) reached(i int) {
	t.reach = t.reach[:i]
	var end uint64
	if i > 0 {
		end = t.reach[i-1]
	}
	for j := i; j < len(t.locks); j++ {
		end = max(end, t.locks[j].End)
		t.reach = append(t.reach, end)
	}
}

// of calls f for each lock of the owner that overlaps the bytes start to end, in order, until f
// returns false.
func (t *Table[O]) of(owner O, start, end uint64, f func(*Lock[O]) bool) {
	if !t.Has(owner) {
		return
	}
	from, to := t.near(start, end)
	for i := from; i < to; i++ {
		if have := &t.locks[i]; have.Owner == owner && have.overlaps(start, end) && !f(have) {
			return
		}
	}
}

// Splits reports whether Clear would split one of the owner's locks, so that Len grows.
func (t *Table[O]) Splits(owner O, start, end uint64) (splits bool) {
	t.of(owner, start, end, func(have *Lock[O]) bool {
		splits = have.Start < start && have.End > end
		return !splits
	})
	return splits
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
func (t *Table[O]) Owns(owner O, start, end uint64) (owns bool) {
	t.of(owner, start, end, func(*Lock[O]) bool {
		owns = true
		return false
	})
	return owns
}

// Owned returns the parts of the owner's locks from start to end, in order.
func (t *Table[O]) Owned(owner O, start, end uint64) (parts []Lock[O]) {
	t.of(owner, start, end, func(have *Lock[O]) bool {
		part := *have
		part.Start, part.End = max(part.Start, start), min(part.End, end)
		parts = append(parts, part)
		return true
	})
	return parts
}

// Touching returns the owner's locks that overlap the bytes start to end or are adjacent to them,
// in order. A Set and a Clear of these bytes change no other lock of the owner.
func (t *Table[O]) Touching(owner O, start, end uint64) (locks []Lock[O]) {
	t.of(owner, before(start), end+1, func(have *Lock[O]) bool {
		locks = append(locks, *have)
		return true
	})
	return locks
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
