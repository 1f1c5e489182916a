package vfs

import (
	"maps"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/attr"
)

// The kernel can forget most of its nodes at once, when memory is short or when a program has ended
// that used many files. The maps of Go keep the memory for the largest number of elements that they
// had. When the inode table has become far emptier than it was, a goroutine copies the remaining
// elements to smaller maps. It also removes expired names. The daemon returns the memory to the kernel
// when it is idle.
const (
	// minShrink is the number of nodes that a table must have had.
	minShrink = 8 << 10
	// shrinkBelow is the part of its largest size below which the table is copied.
	shrinkBelow = 8
	// shrinkDelay is the time before the copy, in which the kernel forgets more nodes.
	shrinkDelay = time.Second
	// The names of the forgotten nodes expire later. shrinkPasses with shrinkInterval between them
	// last longer than DefaultOptions caches names.
	shrinkPasses   = 5
	shrinkInterval = 15 * time.Second
)

// shrinkIfEmpty starts shrink when the table has become far emptier. The caller holds mu.
func (t *inodeTable) shrinkIfEmpty() {
	if t.peak >= minShrink && len(t.byID) < t.peak/shrinkBelow && !t.shrinking {
		t.shrinking = true
		t.shrink()
	}
}

// shrinkTables returns the memory of forgotten nodes and expired names.
func (fs *FS) shrinkTables() {
	t := &fs.inodes
	t.mu.Lock()
	limit := t.peak / shrinkBelow
	t.mu.Unlock()
	defer func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.shrinking = false
	}()
	wait := shrinkDelay
	for range shrinkPasses {
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-fs.closed:
			timer.Stop()
			return
		case <-fs.aborted:
			timer.Stop()
			return
		}
		if !fs.copyTables(limit, attr.Now()) {
			return
		}
		wait = shrinkInterval
	}
}

// copyTables copies the maps and removes expired names. It returns false, and copies nothing, when
// the table has limit nodes or more. Requests wait meanwhile, so the time is bounded by limit and by
// the bound of names.
func (fs *FS) copyTables(limit int, at attr.Instant) bool {
	t := &fs.inodes
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.byID) >= limit {
		return false // the kernel uses many nodes again
	}
	t.byID = smaller(t.byID)
	t.byFH.shrink()
	t.peak = len(t.byID)
	fs.names.Sweep(at)
	return true
}

// smaller returns a copy of a map without the memory of deleted elements.
func smaller[K comparable, V any](m map[K]V) map[K]V {
	s := make(map[K]V, len(m))
	maps.Copy(s, m)
	return s
}
