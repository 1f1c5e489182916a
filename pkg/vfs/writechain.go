package vfs

import (
	"cmp"
	"hash/maphash"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
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
	sum     uint64 // of the states that occurred an odd number of times
	last    stamp  // latest state
}

var chainSeed = maphash.MakeSeed()

// contentSum returns a hash of a state without the ctime, which renames and links also change.
func contentSum(s stamp) uint64 {
	s.ctime = nfs3.Time3{}
	return maphash.Comparable(chainSeed, s)
}

// chainWrite adds the reply to a WRITE.
func (ino *inode) chainWrite(wcc *nfs3.WccData) {
	ino.mu.Lock()
	defer ino.mu.Unlock()
	c := &ino.wb().chain
	if !c.active {
		known := stampOf(&ino.attr)
		*c = writeChain{active: true, unknown: !ino.known, sum: contentSum(known), last: known}
	}
	if !wcc.HasBefore || !wcc.HasAfter {
		c.unknown = true
	} else {
		c.sum ^= contentSum(stampOfWcc(&wcc.Before)) ^ contentSum(stampOf(&wcc.After))
	}
	if after := stampOf(&wcc.After); wcc.HasAfter && after.compare(c.last) > 0 {
		c.last = after
	}
}

// compare orders the states of a file that only grows.
func (s stamp) compare(t stamp) int {
	return cmp.Or(cmp.Compare(s.mtime.Sec, t.mtime.Sec), cmp.Compare(s.mtime.Nsec, t.mtime.Nsec),
		cmp.Compare(s.size, t.size))
}

// lastWritten returns the latest state in the replies to the WRITEs of the last chain.
func (ino *inode) lastWritten() stamp {
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
	ino.attr.Size, ino.attr.Mtime, ino.attr.Ctime = c.last.size, c.last.mtime, c.last.ctime
	if ino.pageStampValid {
		ino.pageStamp, ino.pageStampValid = c.last, c.unknown || c.sum == contentSum(c.last)
	}
}
