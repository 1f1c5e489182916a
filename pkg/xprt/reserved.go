package xprt

import (
	"math/rand/v2"
	"sync"
)

// reserved holds the slots for the calls of an earlier process. These calls are repeated with their
// XIDs, so each of them needs the slot of its XID. Until ReleaseReserved, an idle reserved slot is
// in slot.reserved instead of the free list.
type reserved struct {
	slots    []*slot
	byXID    map[uint32]*slot
	released chan struct{} // closed by ReleaseReserved
	release  sync.Once
}

// A repeat is the reserved slot and the XID of a call that repeats a call of an earlier process.
// The slot of a new call is nil.
type repeat struct {
	slot *slot
	xid  uint32
}

// reserve reserves the slots of xids, at most half of all slots. New calls it before the slots are
// in the free list.
func (t *Transport) reserve(xids []uint32) {
	r := &t.reserved
	r.released = make(chan struct{})
	if len(xids) == 0 {
		return
	}
	r.byXID = make(map[uint32]*slot)
	ignored := 0
	for _, xid := range xids {
		s := t.slotOf(xid)
		if s == nil || s.ping || s.reserved == nil && len(r.slots) == t.cfg.Slots/2 {
			ignored++
			continue
		}
		if s.reserved == nil {
			s.reserved = newSlotList(1)
			s.freeList = s.reserved
			r.slots = append(r.slots, s)
		}
		r.byXID[xid] = s
	}
	if ignored > 0 {
		t.log.Warn("cannot repeat all calls of the earlier process with their XIDs; the server may execute them again",
			"calls", len(xids), "affected", ignored, "slots", t.cfg.Slots, "server", t.Address())
	}
}

// ReleaseReserved ends the reservation of Config.Reserved. All reserved slots go to the free list;
// a slot that is in use goes there when its call ends. From then on, Repeat makes new calls, also
// if it is already waiting for a slot. Call ReleaseReserved after all calls of the earlier process
// have been repeated. Safe for concurrent use; calls after the first do nothing.
func (t *Transport) ReleaseReserved() {
	t.reserved.release.Do(func() {
		close(t.reserved.released)
		for _, s := range t.reserved.slots {
			s.release()
		}
	})
}

// release makes a reserved slot a normal one. The lock orders release before or after the end of
// the call, so that the slot reaches the free list once.
func (s *slot) release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.freeList = s.t.free
	if s.reserved.take() != nil { // otherwise end puts it into the free list
		s.freeList.put(s)
	}
}

// idleReserved returns how many reserved slots are not in use.
func (r *reserved) idleReserved() (n int) {
	for _, s := range r.slots {
		n += len(s.reserved.idle)
	}
	return n
}

// setXID makes the next call on s use xid. The caller owns the slot.
func (s *slot) setXID(xid uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.repeats, s.repeatXID = true, xid
}

// randomXID returns an XID of slot i.
func (t *Transport) randomXID(i uint32) uint32 { return rand.Uint32()&^t.xidMask | i }
