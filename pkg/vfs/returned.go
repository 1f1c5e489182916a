package vfs

import (
	"hash/maphash"
	"slices"
	"sync/atomic"
)

const (
	// maxReturned bounds the names that an open directory remembers.
	maxReturned = 1 << 20
	// maxReturnedAll bounds the names that all open directories of an FS remember, beyond
	// returnedStep for each.
	maxReturnedAll = 1 << 22
	// returnedStep is the unit by which the number of names of a directory grows.
	returnedStep = 1 << 10
)

var nameSeed = maphash.MakeSeed()

func nameHash(name string) uint64 { return maphash.String(nameSeed, name) }

// returnedNames are hashes of the names that the reader of an open directory got, in order. A hash
// has 64 bits and a secret seed, so that two names of a directory have different hashes. Its zero
// value knows that the reader got no name. It is guarded by dirHandle.mu.
type returnedNames struct {
	hashes []uint64
	// partial means that the reader got further names before the first one.
	partial bool
	room    int           // for hashes, beyond returnedStep; counts in all
	all     *atomic.Int64 // room of all directories of the FS; nil after free
}

// add records a name that the reader got. If there is no room, add forgets the older names.
func (n *returnedNames) add(name string) {
	if len(n.hashes) == returnedStep+n.room && !n.grow() {
		kept := copy(n.hashes, n.hashes[len(n.hashes)-len(n.hashes)/2:])
		n.hashes, n.partial = n.hashes[:kept], true
	}
	n.hashes = append(n.hashes, nameHash(name))
}

func (n *returnedNames) grow() bool {
	if n.all == nil || returnedStep+n.room >= maxReturned {
		return false
	}
	if n.all.Add(returnedStep) > maxReturnedAll {
		n.all.Add(-returnedStep)
		return false
	}
	n.room += returnedStep
	return true
}

// reset forgets all names. partial means that the reader got names nevertheless.
func (n *returnedNames) reset(partial bool) { n.hashes, n.partial = n.hashes[:0], partial }

// cutAfter forgets the names behind name: the reader did not get them.
func (n *returnedNames) cutAfter(name string) {
	hash := nameHash(name)
	for i, h := range slices.Backward(n.hashes) {
		if h == hash {
			n.hashes = n.hashes[:i+1]
			return
		}
	}
	n.reset(true)
}

// sorted returns the set of the names, for contains.
func (n *returnedNames) sorted() nameSet {
	set := slices.Clone(n.hashes)
	slices.Sort(set)
	return set
}

// order returns the places of the last names, from 1 on.
func (n *returnedNames) order() map[uint64]int {
	last := n.hashes[max(0, len(n.hashes)-2*returnedStep):]
	order := make(map[uint64]int, len(last))
	for i, h := range last {
		order[h] = i + 1
	}
	return order
}

// free releases the room. Later names get none.
func (n *returnedNames) free() {
	if n.all != nil {
		n.all.Add(-int64(n.room))
	}
	n.all, n.room, n.hashes = nil, 0, nil
}

// A nameSet is a sorted set of hashes of names.
type nameSet []uint64

func (s nameSet) contains(name string) bool {
	if len(s) == 0 {
		return false
	}
	_, found := slices.BinarySearch(s, nameHash(name))
	return found
}
