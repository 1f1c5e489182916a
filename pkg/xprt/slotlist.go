package xprt

import (
	"sync"

	"github.com/nfsrdmad/nfsrdmad/internal/fair"
)

// A slotList holds idle slots, or the calls that wait for one. A slot that becomes idle goes to the
// next of these calls, and no later call can take it. The users have turns, see fair.Queue.
type slotList struct {
	idle chan *slot // empty while a call waits; has room for all slots of the list

	mu      sync.Mutex // held while idle receives a slot
	waiting fair.Queue[chan *slot]
}

// A turn is a call that waits for a slot. Its channel has room for the slot.
type turn = fair.Entry[chan *slot]

func newSlotList(slots int) *slotList { return &slotList{idle: make(chan *slot, slots)} }

// take returns an idle slot, or nil.
func (l *slotList) take() *slot {
	select {
	case s := <-l.idle:
		return s
	default:
		return nil
	}
}

// put adds a slot that is idle. It never blocks.
func (l *slotList) put(s *slot) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if e := l.waiting.Take(); e != nil {
		e.Value <- s
	} else {
		l.idle <- s
	}
}

// wait adds a call of a user. Its turn receives a slot, unless leave removes it before.
func (l *slotList) wait(user uint32) *turn {
	e := &turn{Value: make(chan *slot, 1)}
	l.mu.Lock()
	defer l.mu.Unlock()
	if s := l.take(); s != nil {
		e.Value <- s
	} else {
		l.waiting.Add(e, user)
	}
	return e
}

// leave removes a call that no longer waits. It returns the slot that has arrived meanwhile, or nil.
func (l *slotList) leave(e *turn) *slot {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !e.Queued() {
		return <-e.Value
	}
	l.waiting.Remove(e)
	return nil
}
