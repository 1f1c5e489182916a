package softiwarp

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"sort"
	"sync"

	"github.com/nfsrdmad/nfsrdmad/internal/selfcheck"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// An STag is a 24-bit index and an 8-bit key that the consumer chooses.
const stagKeyBits = 8

// A stagTable maps STag indices to MRs. Indices come from a CSPRNG and are spread over the whole
// range (RFC 5040 §8.1.1 item 8, RFC 5042 §6.1.1).
type stagTable struct {
	mu struct { // guards its fields
		sync.RWMutex
		mrs map[uint32]*mr // by index
	}
}

// insert gives m a unique random index and a random first key.
func (t *stagTable) insert(m *mr) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.mu.mrs) >= maxMR {
		return fmt.Errorf("softiwarp: allocate MR: %d MRs are allocated, which is the limit: %w", len(t.mu.mrs),
			verbs.ErrNoResources)
	}
	for {
		var b [stagSize]byte
		rand.Read(b[:]) // never fails (crypto/rand)
		stag := binary.BigEndian.Uint32(b[:])
		index := stag >> stagKeyBits
		if _, taken := t.mu.mrs[index]; index == 0 || taken {
			continue
		}
		m.first = verbs.RKey(stag)
		t.mu.mrs[index] = m
		return nil
	}
}

func (t *stagTable) remove(m *mr) {
	t.mu.Lock()
	delete(t.mu.mrs, uint32(m.first)>>stagKeyBits)
	t.mu.Unlock()
}

// lookup returns the MR with the index of stag, or nil. The caller must check the key.
func (t *stagTable) lookup(stag uint32) *mr {
	t.mu.RLock()
	m := t.mu.mrs[stag>>stagKeyBits]
	t.mu.RUnlock()
	return m
}

// mrState of a fast-registration MR.
//
//	          FastReg
//	┌──────┐ ─────────────────────────────▶ ┌──────┐
//	│ free │                                │ valid│
//	└──┬───┘ ◀───────────────────────────── └──┬───┘
//	   │      LocalInv, Send With Invalidate   │
//	   │ Dereg                           Dereg │
//	   └────────────▶ ┌───────────┐ ◀──────────┘
//	                  │ destroyed │
//	                  └───────────┘
type mrState uint8

const (
	mrFree mrState = iota
	mrValid
	mrDestroyed
)

// An mr is a fast-registration memory region.
//
// The fence: each system call or copy that moves data between the socket and the memory is
// non-blocking and runs with mu held, after a comparison of gen. Every registration and every
// invalidation changes gen. After FastReg, LocalInv or Dereg has held mu once, the memory of the
// old registration is no longer accessed, and no caller has waited for a peer.
type mr struct {
	pd    *protectionDomain
	first verbs.RKey // the key as allocated; its index never changes
	depth int        // pages

	mu struct { // guards its fields
		sync.Mutex
		state  mrState
		gen    uint64
		stag   uint32
		access verbs.Access
		qp     *qp // the stream on which the registration is valid (RFC 5041 §8.2)
		iova   uint64
		length uint64
		segs   [][]byte
		starts []uint64 // offset of each segment within the registration; as long as segs
	}
}

// LKey returns 0, because local buffers need no key.
func (m *mr) LKey() uint32 { return 0 }

// RKey returns the key as allocated.
func (m *mr) RKey() verbs.RKey { return m.first }

// Dereg destroys the MR without waiting for the peer.
func (m *mr) Dereg() error {
	m.mu.Lock()
	if m.mu.state == mrDestroyed {
		m.mu.Unlock()
		return fmt.Errorf("softiwarp: deregister MR %#08x: already deregistered: %w", uint32(m.first), verbs.ErrInvalid)
	}
	m.clear(mrDestroyed)
	m.mu.Unlock()
	m.pd.dev.table.remove(m)
	m.pd.uses.Drop()
	selfcheck.Track(selfcheck.MR, -1)
	return nil
}

// clear ends a registration. The caller holds mu.
func (m *mr) clear(to mrState) {
	m.mu.state = to
	m.mu.gen++
	m.mu.qp, m.mu.segs = nil, nil
}

// register makes the MR valid on q. register returns false unless the MR is free.
func (m *mr) register(q *qp, stag uint32, access verbs.Access, iova uint64, segs [][]byte) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.mu.state != mrFree {
		return false
	}
	m.mu.starts = m.mu.starts[:0]
	var off uint64
	for _, s := range segs {
		m.mu.starts = append(m.mu.starts, off)
		off += uint64(len(s))
	}
	m.mu.state = mrValid
	m.mu.gen++
	m.mu.stag, m.mu.access, m.mu.qp, m.mu.iova, m.mu.length, m.mu.segs = stag, access, q, iova, off, segs
	return true
}

// invalidateLocal executes a LocalInv and reports whether it succeeded. A LocalInv of a free MR
// succeeds, as in ibverbs.
func (m *mr) invalidateLocal(q *qp, stag uint32) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.pd != q.pd || m.mu.state == mrDestroyed:
		return false
	case m.mu.state == mrFree:
		return true
	case m.mu.stag != stag || m.mu.qp != q:
		return false
	}
	m.clear(mrFree)
	return true
}

// invalidateRemote executes the invalidation of a Send With Invalidate. invalidateRemote returns
// false unless stag is valid on this stream (RFC 5040 §5.3, §7.2).
func (m *mr) invalidateRemote(q *qp, stag uint32) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.mu.state != mrValid || m.mu.stag != stag || m.pd != q.pd || m.mu.qp != q {
		return false
	}
	m.clear(mrFree)
	return true
}

// A denial is the reason for which a tagged access is refused.
type denial uint8

const (
	granted denial = iota
	denyInvalid
	denyOtherStream
	denyAccess
	denyBounds
	denyWrap
)

// placementCode returns the Terminate for a refused RDMA Write. Without the access right the STag
// is invalid for placement (RFC 5041 §7.1).
func (d denial) placementCode() termCode {
	switch d {
	case denyOtherStream:
		return termTaggedOtherStream
	case denyBounds:
		return termTaggedBounds
	case denyWrap:
		return termTaggedWrap
	}
	return termTaggedInvalidSTag
}

// fetchCode returns the Terminate for a refused RDMA Read Request (RFC 5040 §7.2).
func (d denial) fetchCode() termCode {
	switch d {
	case denyOtherStream:
		return termReadOtherStream
	case denyAccess:
		return termReadAccess
	case denyBounds:
		return termReadBounds
	case denyWrap:
		return termReadWrap
	}
	return termReadInvalidSTag
}

// A grant permits access to a part of one registration while the registration's gen equals gen.
type grant struct {
	mr  *mr
	gen uint64
	off uint64 // within the registration
}

// access checks an access of the peer to [to, to+n), n > 0, and returns a grant for it.
func (q *qp) access(stag uint32, to uint64, n uint64, want verbs.Access) (grant, denial) {
	m := q.dev.table.lookup(stag)
	if m == nil {
		return grant{}, denyInvalid
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.mu.state != mrValid || m.mu.stag != stag:
		return grant{}, denyInvalid
	case m.pd != q.pd || m.mu.qp != q:
		return grant{}, denyOtherStream
	case m.mu.access&want == 0:
		return grant{}, denyAccess
	case to+n < to:
		return grant{}, denyWrap
	case to < m.mu.iova || to-m.mu.iova > m.mu.length || n > m.mu.length-(to-m.mu.iova):
		return grant{}, denyBounds
	}
	return grant{mr: m, gen: m.mu.gen, off: to - m.mu.iova}, granted
}

// find returns the index of the segment that contains offset off, and the offset inside the
// segment. The caller holds mu.
func (m *mr) find(off uint64) (seg int, in int) {
	seg = sort.Search(len(m.mu.starts), func(i int) bool { return m.mu.starts[i] > off }) - 1
	return seg, int(off - m.mu.starts[seg])
}

// copyIn copies p to offset off. The caller holds mu and has checked gen.
func (m *mr) copyIn(off uint64, p []byte) {
	seg, in := m.find(off)
	for len(p) > 0 {
		n := copy(m.mu.segs[seg][in:], p)
		p = p[n:]
		seg, in = seg+1, 0
	}
}
