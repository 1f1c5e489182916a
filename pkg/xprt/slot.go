package xprt

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/memreg"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// slotState is the state of one call.
//
//	idle -> waiting -> sent -> fencing -> done -> idle
//	           ^         |        |
//	           |         +-> lost (connection ended, no reply: again with the same XID)
//	           +--------------+
//	                     +-> abandoned (the caller gave up) -> idle, when fenced, left and answered
type slotState uint8

const (
	slotIdle      slotState = iota
	slotWaiting             // for a credit
	slotSent                // posted, no reply yet
	slotFencing             // the reply is here, keys are being invalidated
	slotDone                // result or error is ready for the caller
	slotLost                // the connection ended first
	slotAbandoned           // the caller gave up after it was sent
)

// A slot carries one RPC at a time. It is made once.
type slot struct {
	t     *Transport
	index uint32
	send  []byte        // inline send buffer
	wake  chan struct{} // capacity 1: something that the caller waits for may have happened
	mrs   memreg.List   // owned by the caller until the post, then by the completion handlers, then by the caller

	sendWR verbs.WorkRequest
	sge    [1]verbs.SGE
	hdr    rpcrdma.Header
	one    [1][]byte // a chunk of one piece, for List.Map
	wchunk rpcrdma.Chunk
	rchunk rpcrdma.Chunk

	// Made once, so that no call allocates a closure.
	onFenced    func(ok bool)
	onAbandoned func(ok bool)

	started time.Time   // when the caller came
	expired atomic.Bool // a soft mount's time is over

	mu        sync.Mutex
	state     slotState
	xid       uint32
	msg       *sunrpc.Message // nil once the caller has left
	conn      *conn           // that it was sent on
	sentAt    time.Time
	err       error
	longCall  []byte // PZRC, from the pool
	longReply []byte // reply chunk, from the pool
	longLen   int    // octets of the reply in longReply, -1 when it came inline
	fenced    bool   // abandoned: the memory is fenced
	left      bool   // abandoned: the caller has returned
	late      bool   // abandoned: the late reply has come, or never will

	// Guarded by window.mu.
	credit, queued bool
	creditGen      uint64
}

func newSlot(t *Transport, index uint32, xid uint32, send []byte) *slot {
	s := &slot{t: t, index: index, xid: xid, send: send, wake: make(chan struct{}, 1)}
	s.onFenced, s.onAbandoned = s.fencedDone, s.abandonedDone
	s.sendWR.Opcode, s.sendWR.Done = verbs.OpSend, t.sendDone
	verbs.Track(verbs.KindSlot, 1)
	return s
}

// signal tells the caller that something may have happened. It never blocks.
func (s *slot) signal() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// begin takes the slot for a new call with a new XID.
func (s *slot) begin(m *sunrpc.Message) {
	select {
	case <-s.wake:
	default:
	}
	s.expired.Store(false)
	s.started = time.Now()
	s.mu.Lock()
	s.xid += s.t.xidStep
	s.state, s.msg, s.err, s.conn = slotWaiting, m, nil, nil
	s.longLen = -1
	s.fenced, s.left, s.late = false, false, false
	m.XID = s.xid
	s.mu.Unlock()
}

// end gives the slot back. The caller must own it, its memory must be fenced.
func (s *slot) end() {
	s.t.window.leave(s)
	s.mu.Lock()
	s.state, s.msg, s.conn = slotIdle, nil, nil
	s.dropLong()
	s.mu.Unlock()
	s.t.free <- s
}

// dropLong gives the long buffers back. Called with mu held.
func (s *slot) dropLong() {
	if s.longCall != nil {
		s.t.long.Put(s.longCall)
		s.longCall = nil
	}
	if s.longReply != nil {
		s.t.long.Put(s.longReply)
		s.longReply = nil
	}
}

// fencedDone ends the call of a reply whose keys are dead. A flush is left to the worker: the
// memory is fenced only when the connection is gone.
func (s *slot) fencedDone(ok bool) {
	if !ok {
		return
	}
	s.mrs.Fenced()
	s.mu.Lock()
	s.state = slotDone
	s.mu.Unlock()
	s.signal()
}

func (s *slot) abandonedDone(ok bool) {
	if !ok {
		return
	}
	s.mrs.Fenced()
	s.mu.Lock()
	s.fenced = true
	s.mu.Unlock()
	s.signal()
}

// connectionEnded is called by the worker when the connection of the slot is gone and all its memory fenced.
func (s *slot) connectionEnded() {
	s.mrs.Reset()
	s.mu.Lock()
	switch s.state {
	case slotSent:
		s.state = slotLost
		s.dropLong()
	case slotFencing:
		s.state = slotDone
	case slotAbandoned:
		s.fenced, s.late = true, true
		if s.left {
			s.mu.Unlock()
			s.end()
			return
		}
	}
	s.mu.Unlock()
	s.signal()
}
