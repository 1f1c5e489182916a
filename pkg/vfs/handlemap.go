package vfs

import (
	"hash/maphash"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
)

// A handleMap finds nodes by file handle. Its keys are hashes: a map with handles as keys would need
// five times the memory. Nodes with the same hash form a list. The zero value is an empty map.
type handleMap struct {
	nodes map[uint64]*inode
	limit uint64 // of the hashes, for tests; 0: none
}

var handleSeed = maphash.MakeSeed()

func (m *handleMap) hash(fh *nfs.Handle) uint64 {
	h := maphash.Comparable(handleSeed, *fh)
	if m.limit > 0 {
		h %= m.limit
	}
	return h
}

// get returns the node with the handle, or nil.
func (m *handleMap) get(fh nfs.Handle) *inode {
	for ino := m.nodes[m.hash(&fh)]; ino != nil; ino = ino.sameHash {
		if ino.fh == fh {
			return ino
		}
	}
	return nil
}

// has reports whether the map contains ino.
func (m *handleMap) has(ino *inode) bool { return m.get(ino.fh) == ino }

// put adds a node in place of another one with its handle.
func (m *handleMap) put(ino *inode) {
	if other := m.get(ino.fh); other != nil {
		m.remove(other)
	}
	if m.nodes == nil {
		m.nodes = make(map[uint64]*inode)
	}
	hash := m.hash(&ino.fh)
	ino.sameHash = m.nodes[hash]
	m.nodes[hash] = ino
}

// remove removes ino, if the map contains it.
func (m *handleMap) remove(ino *inode) {
	if !m.has(ino) {
		return
	}
	hash := m.hash(&ino.fh)
	first := m.nodes[hash]
	if first != ino {
		before := first
		for before.sameHash != ino {
			before = before.sameHash
		}
		before.sameHash = ino.sameHash
	} else if ino.sameHash == nil {
		delete(m.nodes, hash)
	} else {
		m.nodes[hash] = ino.sameHash
	}
	ino.sameHash = nil
}

// shrink returns the memory of removed nodes.
func (m *handleMap) shrink() { m.nodes = smaller(m.nodes) }
