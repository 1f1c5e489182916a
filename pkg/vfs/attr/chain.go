package attr

import (
	"cmp"
	"hash/maphash"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
)

// Several WRITEs of a file are in flight at the same time. The server executes them in any order,
// and the replies arrive in any order. Without changes by other clients, the states before and
// after the WRITEs form one chain from the state that the client knew to the last state. A Chain
// checks this with a sum over all states: in one chain each inner state occurs twice.

// A Chain is the WRITEs of a file from the first reply until none is in flight. The State of the file
// guards it. Its zero value is ready for use.
type Chain struct {
	active bool
	// unknown is true when a reply had no attributes from before or after the WRITE. A change by
	// another client can then not be seen, as in Linux's NFS client.
	unknown bool
	sum     uint64    // of the states that occurred an odd number of times
	last    nfs.Stamp // latest state
}

var chainSeed = maphash.MakeSeed()

// stampSum returns a hash of a state.
func stampSum(s nfs.Stamp) uint64 { return maphash.Comparable(chainSeed, s) }

// contentSum returns a hash of a state without the ctime, which renames and links also change.
func contentSum(s nfs.Stamp) uint64 {
	s.Ctime = nfs.Time{}
	return stampSum(s)
}

// compare orders the states of a file that only grows.
func compare(s, t nfs.Stamp) int {
	return cmp.Or(cmp.Compare(s.Mtime.Sec, t.Mtime.Sec), cmp.Compare(s.Mtime.Nsec, t.Mtime.Nsec),
		cmp.Compare(s.Size, t.Size))
}

// Wrote adds the reply to a WRITE to a chain.
func (s *State) Wrote(c *Chain, ch *nfs.Change) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !c.active {
		known := s.attr.Stamp()
		*c = Chain{active: true, unknown: !s.known, sum: contentSum(known), last: known}
	}
	if !ch.HasBefore || !ch.HasAfter {
		c.unknown = true
	} else {
		c.sum ^= contentSum(ch.Before) ^ contentSum(ch.After.Stamp())
	}
	if after := ch.After.Stamp(); ch.HasAfter && compare(after, c.last) > 0 {
		c.last = after
	}
}

// endChain ends the chain after the last reply. The last state becomes the state that the client
// knows. Pages become outdated when another client has changed the file in between. The caller holds
// mu.
func (s *State) endChain(c *Chain) {
	if !c.active {
		return
	}
	c.active = false
	s.attr.Size, s.attr.Mtime, s.attr.Ctime = c.last.Size, c.last.Mtime, c.last.Ctime
	if s.pagesKnown {
		s.setPages(c.last)
		s.pagesKnown = c.unknown || c.sum == contentSum(c.last)
	}
}

// BeginWrite counts an extent of written data that the server does not have.
func (s *State) BeginWrite() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pending++
}

// PendingWrites returns the number of extents that the server does not have.
func (s *State) PendingWrites() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return int(s.pending)
}

// Extend records that a file was written up to end.
func (c *Cache) Extend(s *State, end uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.size, s.valid = max(s.size, end), false
	s.change = c.Tick()
}

// RestoreWrite is BeginWrite for data up to end that an earlier process has left.
func (s *State) RestoreWrite(end uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pending++
	s.size, s.sizeUnknown = max(s.size, end), true
}

// EndWrite ends BeginWrite, with the reply to the last call for the extent, which was sent at start.
// failed means that there is none. EndWrite stores the attributes of the reply only when no other
// extent is pending and no other reply arrived in between. The server may execute the calls in
// another order than it answers them.
func (c *Cache) EndWrite(s *State, chain *Chain, ch *nfs.Change, start uint64, failed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pending--
	alone := s.pending == 0
	if alone {
		s.endChain(chain)
	} else {
		s.change = c.Tick() // Update refuses replies to earlier calls
	}
	switch {
	case failed, alone && ch.After.Stamp() != chain.last:
		c.invalidate(s) // a WRITE with an earlier reply was executed later
	case alone:
		c.changed(s, ch, start, false)
	}
}

// Truncated records the size that a SETATTR of this mount has set.
func (s *State) Truncated(size uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.size = size
}

// Rejected records that the server rejected written data: the size and the attributes are unknown.
func (c *Cache) Rejected(s *State) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sizeUnknown = true
	c.invalidate(s)
}
