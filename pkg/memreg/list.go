package memreg

import (
	"errors"
	"fmt"
	"unsafe"

	"github.com/nfsrdmad/nfsrdmad/internal/verify"
	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/trace"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// ErrTooManySegments: the memory needs more MRs than one chunk may have.
var ErrTooManySegments = errors.New("memreg: memory is too scattered for one chunk")

// ErrForeignMemory: the device cannot reach the memory, which did not come from membuf.Alloc.
var ErrForeignMemory = errors.New("memreg: memory for this RDMA device must come from membuf.Alloc")

// A List is the MRs of one RPC slot: those free, and those registered for the RPC at hand. It has
// no lock; it belongs to whoever owns the slot.
type List struct {
	pool       *Pool
	free       []*MR
	registered []*MR
	left       bool // the RPC at hand was given up: for the trace
}

// Use binds the list to a pool; not while it has MRs of another.
func (l *List) Use(p *Pool) {
	if l.pool == p {
		return
	}
	l.pool = p
	p.mu.Lock()
	p.lists = append(p.lists, l)
	p.mu.Unlock()
}

// reset forgets all MRs.
func (l *List) reset() {
	if l.pool != nil {
		l.pool.stats.free.Add(-int64(len(l.free)))
	}
	clear(l.free)
	clear(l.registered)
	l.free, l.registered, l.pool = l.free[:0], l.registered[:0], nil
}

// Registered is the MRs registered for the RPC, in the order of Map. Valid until the next call on
// l.
func (l *List) Registered() []*MR { return l.registered }

// Map prepares the registration of all of segs as one chunk: the server may write to it when
// writing is set and read from it when it is not (S6). It appends to Registered and returns how
// many MRs it took. On error nothing is added and no MR is lost (S22). No segment may be empty.
func (l *List) Map(segs [][]byte, writing bool, xid uint32) (int, error) {
	start := len(l.registered)
	if start == 0 {
		l.left = false
	}
	if l.pool.params.ArenasOnly {
		for _, seg := range segs {
			if membuf.ArenaOf(seg) == nil {
				l.pool.event(trace.MapErr, xid, len(segs))
				return 0, ErrForeignMemory
			}
		}
	}
	var pos cursor
	for pos.i < len(segs) {
		if len(l.registered)-start == l.pool.params.MaxSegs {
			l.unmapFrom(start)
			l.pool.event(trace.SGErr, xid, len(segs))
			return 0, ErrTooManySegments
		}
		m, err := l.get()
		if err != nil {
			l.unmapFrom(start)
			l.pool.event(trace.MapErr, xid, len(segs))
			return 0, err
		}
		m.fill(segs, &pos)
		if err := m.arm(writing, xid); err != nil {
			l.pool.stats.MapErrors.Add(1)
			l.release(m)
			l.unmapFrom(start)
			l.pool.event(trace.MapErr, xid, len(segs))
			return 0, err
		}
		l.registered = append(l.registered, m)
		if r := l.pool.hooks.Trace; r != nil {
			r.Add(trace.Event{Kind: trace.Map, N: uint16(len(m.segs)), XID: xid, MR: m.id, Handle: uint32(m.handle),
				A: uint64(m.length), B: m.iova})
		}
	}
	return len(l.registered) - start, nil
}

func (l *List) get() (*MR, error) {
	if n := len(l.free); n > 0 {
		m := l.free[n-1]
		l.free = l.free[:n-1]
		l.pool.stats.free.Add(-1)
		return m, nil
	}
	m, err := l.pool.newMR(l)
	if err != nil {
		l.pool.stats.MapErrors.Add(1)
	}
	return m, err
}

// put gives an MR back that e made invalid.
func (l *List) put(m *MR, e event) {
	if verify.On() && m.home != l {
		verify.Failf("MR %d is given to a list that is not its own", m.id)
	}
	m.move(e)
	l.release(m)
}

// release puts an MR that is invalid onto the free list.
func (l *List) release(m *MR) {
	clear(m.segs)
	m.segs = m.segs[:0]
	l.free = append(l.free, m)
	l.pool.stats.free.Add(1)
}

// unmapFrom gives MRs that were mapped but never posted back as they are (S19).
func (l *List) unmapFrom(start int) {
	for _, m := range l.registered[start:] {
		if verify.On() && m.posted {
			verify.Failf("MR %d was posted and is given back as unsent", m.id)
		}
		m.event(trace.Unmap, 0)
		if m.perIO != nil && m.perIO.Unregister() != nil { // the key may be alive
			m.move(evFailLI)
			l.pool.recycle(m)
			continue
		}
		l.put(m, evUnsent)
	}
	clear(l.registered[start:])
	l.registered = l.registered[:start]
}

// Unmap gives everything that was mapped and not posted back, after a failed marshal (S19).
func (l *List) Unmap() { l.unmapFrom(0) }

// cursor is a place in a list of segments.
type cursor struct {
	i   int // segment
	off int // octet in it
}

func offsetInPage(b []byte, page int) int {
	return int(uintptr(unsafe.Pointer(unsafe.SliceData(b))) & uintptr(page-1))
}

func follows(a, b []byte) bool {
	return uintptr(unsafe.Pointer(unsafe.SliceData(a)))+uintptr(len(a)) == uintptr(unsafe.Pointer(unsafe.SliceData(b)))
}

// fill takes segments from pos for as long as one MR can hold them: up to the depth in pages, and
// on a device without gaps only while each seam lies on a page boundary, if it takes pages at all,
// or inside contiguous memory (S3).
func (m *MR) fill(segs [][]byte, pos *cursor) {
	p := &m.pool.params
	m.segs, m.length = m.segs[:0], 0
	pages, tail := 0, 0 // pages used; octets of the last page that are used
	for pos.i < len(segs) {
		seg := segs[pos.i][pos.off:]
		start := offsetInPage(seg, p.PageSize)
		joined := len(m.segs) > 0 && follows(m.segs[len(m.segs)-1], seg)
		if len(m.segs) > 0 && !joined && !p.Gaps && (p.OnePiece || start != 0 || tail != p.PageSize) {
			return
		}
		room := (p.Depth - pages) * p.PageSize
		if joined {
			room += p.PageSize - tail
		} else {
			room -= start
		}
		if room <= 0 {
			return
		}
		n := min(len(seg), room)
		m.segs = append(m.segs, seg[:n:n])
		m.length += uint32(n)
		if joined {
			pages += (tail + n - 1) / p.PageSize
			tail = (tail+n-1)%p.PageSize + 1
		} else {
			pages += (start + n + p.PageSize - 1) / p.PageSize
			tail = (start+n-1)%p.PageSize + 1
		}
		if n < len(seg) {
			pos.off += n
			return
		}
		pos.i, pos.off = pos.i+1, 0
	}
}

// arm gives the MR its key, address and rights, and marks it as one that the server may reach. On
// error it is as before.
func (m *MR) arm(writing bool, xid uint32) error {
	m.iova = uint64(uintptr(unsafe.Pointer(unsafe.SliceData(m.segs[0]))))
	if m.pool.params.ChosenIOVA {
		m.iova = uint64(xid)<<32 | m.iova&0xffffffff // S5
		if m.iova&0xffffffff+uint64(m.length) > 1<<32 {
			m.iova &^= 0xffff0000 // stay inside the XID's 4 GiB
		}
	}
	m.reg.Access = verbs.AccessRemoteRead
	if writing {
		m.reg.Access = verbs.AccessRemoteWrite | verbs.AccessLocalWrite
	}
	if m.perIO != nil {
		// The segments follow one another: OnePiece.
		handle, err := m.perIO.Register(m.reg.Access, unsafe.Slice(unsafe.SliceData(m.segs[0]), m.length))
		if err != nil {
			return fmt.Errorf("register %d octets: %w", m.length, err)
		}
		m.handle = handle
	} else {
		m.handle = m.vmr.RKey().WithKey(m.deck.deal())
	}
	m.reg.NewKey, m.reg.IOVA, m.reg.Segs = m.handle.Key(), m.iova, m.segs
	m.xid, m.posted, m.onFenced = xid, false, nil
	m.move(evMap)
	return nil
}

// Chain puts the registrations in front of last and returns the head of the chain, in the order of
// Map (S7), and how many requests stand before last.
func (l *List) Chain(last *verbs.WorkRequest) (head *verbs.WorkRequest, n int) {
	head = last
	for i := len(l.registered) - 1; i >= 0; i-- {
		m := l.registered[i]
		m.posted = true
		m.event(trace.FastReg, 0)
		m.reg.Next, m.reg.Signaled = head, false
		head = &m.reg
	}
	return head, len(l.registered)
}

// RemoteInvalidated takes the MR that the server's Send With Invalidate named off the registered
// ones (S11). It reports false when the key is none of this RPC's: the server broke the protocol.
func (l *List) RemoteInvalidated(key verbs.RKey) bool {
	for i, m := range l.registered {
		if m.handle == key {
			l.registered = append(l.registered[:i], l.registered[i+1:]...)
			l.pool.stats.RemoteInv.Add(1)
			m.event(trace.RemInv, 0)
			l.put(m, evRemoteInv)
			return true
		}
	}
	return false
}

// Abandon notes that the caller of the RPC has given up, before Invalidate.
func (l *List) Abandon() { l.left = true }

// Invalidate posts LOCAL_INVs for all registered MRs as one chain with the last one signaled (S9,
// S10). fenced is called at most once: with true when all keys are dead (at once, when there were
// none), with false when the chain was flushed; it may be called before Invalidate returns. With
// true, the caller of fenced must call Fenced before the slot is used again. On false, and on an
// error, the memory is fenced by the end of the connection only, and the caller must bring that
// about: MRs whose LOCAL_INV could not be posted are destroyed at once, those whose could are
// waited for by Recover (S14, S15).
func (l *List) Invalidate(qp verbs.QP, fenced func(ok bool)) error {
	n := len(l.registered)
	if n == 0 {
		fenced(true)
		return nil
	}
	var head *verbs.WorkRequest
	for i := n - 1; i >= 0; i-- {
		m := l.registered[i]
		m.event(trace.LocalInv, 0)
		m.inv.Next, m.inv.Signaled, m.inv.InvalidateRKey = head, head == nil, m.handle
		m.onFenced = nil
		head = &m.inv
	}
	// Once posted the list belongs to the completion handler.
	p, xid := l.pool, l.registered[0].xid
	l.registered[n-1].onFenced = fenced
	p.stats.LocalInvNeeded.Add(uint64(n))
	bad, err := qp.PostSend(head)
	if err == nil {
		p.event(trace.PostLinv, xid, n)
		return nil
	}
	// The last one was not posted, so nobody else has the list.
	posted := 0
	for posted < n && &l.registered[posted].inv != bad {
		posted++
	}
	p.event(trace.PostLinvErr, xid, posted)
	p.stats.LocalInvNeeded.Add(-uint64(n - posted))
	for _, m := range l.registered[posted:] {
		m.onFenced = nil
		m.move(evFailLI)
		p.recycle(m)
	}
	clear(l.registered[posted:])
	l.registered = l.registered[:posted]
	return fmt.Errorf("post LOCAL_INV: %w", err)
}

// Fenced puts the MRs of a chain that was invalidated back on the free list.
func (l *List) Fenced() {
	for _, m := range l.registered {
		l.put(m, evInvalidated)
	}
	clear(l.registered)
	l.registered = l.registered[:0]
}

// recover empties the registered MRs after a connection: each is made anew, or dropped.
func (l *List) recover() {
	for _, m := range l.registered {
		if l.pool.recover(m) {
			l.put(m, evRecovered)
		}
	}
	clear(l.registered)
	l.registered = l.registered[:0]
}
