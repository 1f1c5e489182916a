package memreg

import (
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"github.com/nfsrdmad/nfsrdmad/internal/selfcheck"
	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/trace"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// ErrTooManySegments reports that the memory needs more MRs than one chunk may have.
var ErrTooManySegments = errors.New("memreg: memory is too scattered for one chunk")

// ErrForeignMemory reports memory that the device cannot reach because it is not from membuf.Alloc.
var ErrForeignMemory = errors.New("memreg: memory for this RDMA device must come from membuf.Alloc")

// A List holds the MRs of one RPC slot: the free ones, and those that are registered for the
// current RPC. It belongs to the owner of the slot, except that other slots take free MRs when the
// device has no more. Call Use before any other method.
type List struct {
	pool       *Pool
	registered []*MR
	abandoned  bool  // the caller gave up the current RPC; only trace events depend on it
	unmapErr   error // of an MR that was not posted; Unmap returns it

	free struct { // the MR that was released last is at the end
		sync.Mutex // no other lock is taken while it is held
		mrs        []*MR
	}
}

// Use adds the list to a pool. The list must not have MRs of another pool.
func (l *List) Use(p *Pool) {
	if l.pool == p {
		return
	}
	l.pool = p
	p.addList(l)
}

// reset removes all MRs and the pool.
func (l *List) reset() {
	if l.pool == nil {
		return
	}
	for l.popFree() != nil {
	}
	clear(l.registered)
	l.registered, l.unmapErr, l.pool = l.registered[:0], nil, nil
}

// Registered returns the MRs that are registered for the RPC, in the order of Map. The result is
// valid until the next call on l.
func (l *List) Registered() []*MR { return l.registered }

// Map prepares the registration of all segments as one chunk and appends the MRs to Registered. It
// returns how many MRs it added. The server may write to the chunk if writing is true, and read
// from it otherwise (S6). On error Map adds nothing and loses no MR (S22). The caller must then
// call Unmap. No segment may be empty.
//
// Errors: ErrTooManySegments, ErrForeignMemory, and the errors of the provider.
func (l *List) Map(segs [][]byte, writing bool, xid uint32) (int, error) {
	start := len(l.registered)
	if start == 0 {
		l.abandoned = false
	}
	if err := l.mapSegments(segs, writing, xid); err != nil {
		l.unmapFrom(start)
		kind := trace.MapErr
		if errors.Is(err, ErrTooManySegments) {
			kind = trace.SGErr
		}
		l.pool.event(kind, xid, len(segs))
		return 0, err
	}
	return len(l.registered) - start, nil
}

func (l *List) mapSegments(segs [][]byte, writing bool, xid uint32) error {
	if l.pool.params.ArenasOnly {
		for _, seg := range segs {
			if membuf.ArenaOf(seg) == nil {
				return ErrForeignMemory
			}
		}
	}
	if pd, ok := l.pool.pd.(verbs.PreparingPD); ok {
		for _, seg := range segs {
			if err := pd.Prepare(seg); err != nil {
				l.pool.stats.MapErrors.Add(1)
				return err
			}
		}
	}
	var pos cursor
	for n := 0; pos.i < len(segs); n++ {
		if n == l.pool.params.MaxSegs {
			return ErrTooManySegments
		}
		m, err := l.takeFree()
		if err != nil {
			l.pool.stats.MapErrors.Add(1)
			return err
		}
		m.fill(segs, &pos)
		if err := m.prepare(writing, xid); err != nil {
			l.pool.stats.MapErrors.Add(1)
			l.release(m)
			return err
		}
		l.registered = append(l.registered, m)
		m.mapped = true
		if r := l.pool.hooks.Trace; r != nil {
			r.Add(trace.Event{Kind: trace.Map, N: uint16(len(m.segs)), XID: xid, MR: m.id, Handle: uint32(m.handle),
				A: uint64(m.length), B: m.iova})
		}
	}
	return nil
}

// takeFree returns a free MR of the list. If there is none, it allocates one. If the device has no
// more, it takes a free MR of another list.
func (l *List) takeFree() (*MR, error) {
	if m := l.popFree(); m != nil {
		return m, nil
	}
	m, err := l.pool.newMR(l)
	if err == nil {
		return m, nil
	}
	if m = l.pool.popFree(); m == nil {
		return nil, err
	}
	m.list = l
	return m, nil
}

// popFree removes the free MR that was released last. It returns nil if no MR is free. The order
// keeps few MRs in use, and the others free for other slots; keyHistory does not depend on it.
func (l *List) popFree() *MR {
	l.free.Lock()
	defer l.free.Unlock()
	n := len(l.free.mrs) - 1
	if n < 0 {
		return nil
	}
	m := l.free.mrs[n]
	l.free.mrs[n] = nil
	l.free.mrs = l.free.mrs[:n]
	l.pool.stats.free.Add(-1)
	return m
}

// releaseAfter applies e, which invalidates m, and puts m onto the free list.
func (l *List) releaseAfter(m *MR, e event) {
	if selfcheck.On() && m.list != l {
		selfcheck.Failf("MR %d is released to the list of another slot", m.id)
	}
	m.apply(e)
	l.release(m)
}

// release puts an INVALID MR onto the free list.
func (l *List) release(m *MR) {
	m.unmapped()
	clear(m.segs)
	m.segs = m.segs[:0]
	l.free.Lock()
	l.free.mrs = append(l.free.mrs, m)
	l.free.Unlock()
	l.pool.stats.free.Add(1)
}

// unmapFrom releases the MRs from index start on, which were mapped but not posted (S19).
func (l *List) unmapFrom(start int) {
	for _, m := range l.registered[start:] {
		if selfcheck.On() && m.posted {
			selfcheck.Failf("MR %d was posted, but is released as not posted", m.id)
		}
		if m.perIO != nil {
			if err := m.perIO.Unregister(); err != nil {
				l.unmapErr = fmt.Errorf("unregister MR %d: %w", m.id, err)
				m.apply(evFailLI)
				l.pool.recycle(m)
				continue
			}
		}
		l.releaseAfter(m, evUnmap)
	}
	clear(l.registered[start:])
	l.registered = l.registered[:start]
}

// Unmap releases all MRs that were mapped and not posted, after a failed marshal (S19). After an
// error, the server may still reach the memory with a key of this or a failed Map. Only the end of
// the connection fences the memory, and the caller must end it.
func (l *List) Unmap() error {
	l.unmapFrom(0)
	err := l.unmapErr
	l.unmapErr = nil
	return err
}

// A cursor is a position in a list of segments.
type cursor struct {
	i   int // index of the segment
	off int // offset in the segment in bytes
}

func offsetInPage(b []byte, page int) int {
	return int(uintptr(unsafe.Pointer(unsafe.SliceData(b))) & uintptr(page-1))
}

// adjacent reports whether b begins where a ends.
func adjacent(a, b []byte) bool {
	return uintptr(unsafe.Pointer(unsafe.SliceData(a)))+uintptr(len(a)) == uintptr(unsafe.Pointer(unsafe.SliceData(b)))
}

// fill adds segments from pos on to m while m can hold them, and advances pos (S3). The depth of
// the MR in pages is the limit. Adjacent segments always join. A device with gaps joins all
// segments, and a device with page lists joins segments that meet at page boundaries.
func (m *MR) fill(segs [][]byte, pos *cursor) {
	p := &m.pool.params
	m.segs, m.length = m.segs[:0], 0
	pages, tail := 0, 0 // pages used, bytes used of the last page
	for pos.i < len(segs) {
		seg := segs[pos.i][pos.off:]
		start := offsetInPage(seg, p.PageSize)
		joined := len(m.segs) > 0 && adjacent(m.segs[len(m.segs)-1], seg)
		if len(m.segs) > 0 && !joined && !p.Gaps && (p.Contiguous || start != 0 || tail != p.PageSize) {
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

// prepare sets the key, address and access rights of the MR, and marks it VALID. On error the MR
// stays INVALID.
func (m *MR) prepare(writing bool, xid uint32) error {
	m.iova = uint64(uintptr(unsafe.Pointer(unsafe.SliceData(m.segs[0]))))
	if m.pool.params.ChosenIOVA {
		m.iova = xidAddress(xid, m.iova, m.length)
	}
	m.reg.Access = verbs.AccessRemoteRead
	if writing {
		m.reg.Access = verbs.AccessRemoteWrite | verbs.AccessLocalWrite
	}
	if m.perIO != nil {
		// The segments are adjacent, because the device maps only contiguous memory.
		handle, err := m.perIO.Register(m.reg.Access, unsafe.Slice(unsafe.SliceData(m.segs[0]), m.length))
		if err != nil {
			return fmt.Errorf("register %d bytes: %w", m.length, err)
		}
		m.handle = handle
	} else {
		m.handle = m.vmr.RKey().WithKey(m.keys.next())
	}
	m.reg.NewKey, m.reg.IOVA, m.reg.Segs = m.handle.Key(), m.iova, m.segs
	m.xid, m.posted, m.onFenced = xid, false, nil
	m.apply(evMap)
	return nil
}

// xidAddress returns the address that carries xid in its upper half (S5). Its lower half is that of
// addr, unless the range of length bytes would then cross into the next XID.
func xidAddress(xid uint32, addr uint64, length uint32) uint64 {
	low := addr & 0xffffffff
	if low+uint64(length) > 1<<32 {
		low &= 0xffff
	}
	return uint64(xid)<<32 | low
}

// Chain puts the registrations in front of last, in the order of Map (S7). It returns the head of
// the chain and the number of requests before last.
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

// RemoteInvalidated releases the MR whose key the server's Send With Invalidate named (S11). It
// reports false if no registered MR has the key: the server then violated the protocol.
func (l *List) RemoteInvalidated(key verbs.RKey) bool {
	for i, m := range l.registered {
		if m.handle == key {
			l.registered = append(l.registered[:i], l.registered[i+1:]...)
			l.pool.stats.RemoteInvalidations.Add(1)
			m.event(trace.RemInv, 0)
			l.releaseAfter(m, evRemoteInv)
			return true
		}
	}
	return false
}

// Abandon records that the caller gave up the RPC. Call it before Invalidate.
func (l *List) Abandon() { l.abandoned = true }

// Invalidate posts LOCAL_INVs for all registered MRs as one chain whose last request is signaled
// (S9, S10). It calls fenced at most once, perhaps before it returns:
//
//   - with true after all keys are invalidated, immediately if no MR is registered. The owner must
//     then call Fenced before it uses the slot again;
//   - with false if the chain was flushed.
//
// After false, or an error, only the end of the connection fences the memory, and the caller must
// end it. MRs whose LOCAL_INV could not be posted are destroyed at once (S14). Recover handles the
// others (S15).
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
	// The list belongs to the completion handler once the chain is posted.
	p, xid := l.pool, l.registered[0].xid
	l.registered[n-1].onFenced = fenced
	p.stats.LocalInvNeeded.Add(uint64(n))
	bad, err := qp.PostSend(head)
	if err == nil {
		p.event(trace.PostLinv, xid, n)
		return nil
	}
	// The last LOCAL_INV was not posted, so the list still belongs to the caller.
	posted := 0
	for posted < n && &l.registered[posted].inv != bad {
		posted++
	}
	p.event(trace.PostLinvErr, xid, posted)
	p.stats.LocalInvNeeded.Add(-uint64(n - posted))
	for _, m := range l.registered[posted:] {
		m.onFenced = nil
		m.apply(evFailLI)
		p.recycle(m)
	}
	clear(l.registered[posted:])
	l.registered = l.registered[:posted]
	return fmt.Errorf("post LOCAL_INV: %w", err)
}

// Fenced puts the MRs of a completed LOCAL_INV chain back onto the free list.
func (l *List) Fenced() {
	for _, m := range l.registered {
		l.releaseAfter(m, evInvalidated)
	}
	clear(l.registered)
	l.registered = l.registered[:0]
}

// recover replaces or drops every registered MR after the end of a connection.
func (l *List) recover() {
	l.unmapErr = nil
	for _, m := range l.registered {
		if l.pool.recover(m) {
			l.releaseAfter(m, evRecovered)
		}
	}
	clear(l.registered)
	l.registered = l.registered[:0]
}
