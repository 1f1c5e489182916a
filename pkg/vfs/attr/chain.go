package vfs

import (
	"cmp"
	"hash/maphash"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
)

// Several WRITEs of a file are in flight at the same time. The server executes them in any order,
// and the replies arrive in any order. Without changes by other clients, the states before and
// after the WRITEs form one chain from the state that the client knew to the last state. A
// writeChain checks this with a sum over all states: in one chain each inner state occurs twice.

// A writeChain is the WRITEs of a file from the first reply until none is in flight. It is guarded
// by inode.mu.
type writeChain struct {
	active bool
	// unknown is true when a reply had no attributes from before or after the WRITE. A change by
	// another client can then not be seen, as in Linux's NFS client.
	unknown bool
	sum     uint64    // of the states that occurred an odd number of times
	last    nfs.Stamp // latest state
}

var chainSeed = maphash.MakeSeed()

// contentSum returns a hash of a state without the ctime, which renames and links also change.
func contentSum(s nfs.Stamp) uint64 {
	s.Ctime = nfs.Time{}
	return maphash.Comparable(chainSeed, s)
}

// chainWrite adds the reply to a WRITE.
func (ino *inode) chainWrite(wcc *nfs.Change) {
	ino.mu.Lock()
	defer ino.mu.Unlock()
	c := &ino.wb().chain
	if !c.active {
		known := ino.attr.Stamp()
		*c = writeChain{active: true, unknown: !ino.known, sum: contentSum(known), last: known}
	}
	if !wcc.HasBefore || !wcc.HasAfter {
		c.unknown = true
	} else {
		c.sum ^= contentSum(wcc.Before) ^ contentSum(wcc.After.Stamp())
	}
	if after := wcc.After.Stamp(); wcc.HasAfter && compare(after, c.last) > 0 {
		c.last = after
	}
}

// compare orders the states of a file that only grows.
func compare(s, t nfs.Stamp) int {
	return cmp.Or(cmp.Compare(s.Mtime.Sec, t.Mtime.Sec), cmp.Compare(s.Mtime.Nsec, t.Mtime.Nsec),
		cmp.Compare(s.Size, t.Size))
}

// lastWritten returns the latest state in the replies to the WRITEs of the last chain.
func (ino *inode) lastWritten() nfs.Stamp {
	ino.mu.Lock()
	defer ino.mu.Unlock()
	return ino.wb().chain.last
}

// endChain ends the chain after the last reply. The last state becomes the state that the client
// knows. Cached pages become stale when another client has changed the file in between. The caller
// holds ino.mu.
func (ino *inode) endChain() {
	c := &ino.wb().chain
	if !c.active {
		return
	}
	c.active = false
	ino.attr.Size, ino.attr.Mtime, ino.attr.Ctime = c.last.Size, c.last.Mtime, c.last.Ctime
	if ino.pageStampValid {
		ino.pageStamp, ino.pageStampValid = c.last, c.unknown || c.sum == contentSum(c.last)
	}
}
