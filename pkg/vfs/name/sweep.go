package name

import (
	"maps"

	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/attr"
)

// room reports whether the table has room for another name of a directory: fewer names than limit. It
// first removes expired names of the directory when it has many, and names of any directories when
// the table is full. The caller holds d.mu.
func (t *Table) room(d *Dir, limit int64) bool {
	if es := d.entries; len(es.names) >= max(es.sweepAt, minSweep) {
		t.sweep(d, attr.Now())
	}
	if t.count.Load() < limit {
		return true
	}
	t.makeRoom(d, limit)
	return t.count.Load() < limit
}

// sweep removes expired names of a directory. The caller holds d.mu.
func (t *Table) sweep(d *Dir, at attr.Instant) {
	es := d.entries
	before := len(es.names)
	maps.DeleteFunc(es.names, func(_ string, e entry) bool { return at >= e.expires && at >= e.kernel })
	left := len(es.names)
	t.count.Add(int64(left - before))
	es.sweepAt = 2 * left
	switch {
	case left == 0 && before > 0:
		t.dropNames(d)
	case left < before/shrinkBelow:
		es.names = smaller(es.names)
	}
}

// shrinkBelow is the part of its names below which a map is copied: the maps of Go keep the memory for
// the largest number of elements that they had.
const shrinkBelow = 8

// makeRoom removes expired names of some directories other than d, or else any name of theirs that the
// kernel does not have. The caller holds d.mu.
func (t *Table) makeRoom(d *Dir, limit int64) {
	others := make([]*Dir, 0, sweepDirs)
	t.mu.Lock()
	for other := range t.dirs { // in random order
		if other != d && len(others) < sweepDirs {
			others = append(others, other)
		}
	}
	t.mu.Unlock()
	at := attr.Now()
	for _, other := range append(others, d) {
		if other != d && !other.mu.TryLock() { // two directories are never locked in turn
			continue
		}
		t.loseNames(other, at)
		if other != d {
			other.mu.Unlock()
		}
		if t.count.Load() < limit {
			return
		}
	}
}

// loseNames removes expired names of a directory, or one name that the kernel does not have. The caller
// holds d.mu.
func (t *Table) loseNames(d *Dir, at attr.Instant) {
	if d.entries == nil {
		return
	}
	before := len(d.entries.names)
	if t.sweep(d, at); len(d.entries.names) < before {
		return
	}
	tried := 0
	for name, e := range d.entries.names {
		if at >= e.kernel {
			t.remove(d, name)
			return
		}
		if tried++; tried == sweepDirs {
			return
		}
	}
}

// Sweep removes the names of all directories that are expired at a time.
func (t *Table) Sweep(at attr.Instant) {
	t.mu.Lock()
	dirs := make([]*Dir, 0, len(t.dirs))
	for d := range t.dirs {
		dirs = append(dirs, d)
	}
	t.mu.Unlock()
	for _, d := range dirs {
		d.mu.Lock()
		if d.entries != nil {
			t.sweep(d, at)
		}
		d.mu.Unlock()
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.dirs = smaller(t.dirs)
}

// smaller returns a copy of a map without the memory of deleted elements.
func smaller[K comparable, V any](m map[K]V) map[K]V {
	s := make(map[K]V, len(m))
	maps.Copy(s, m)
	return s
}
