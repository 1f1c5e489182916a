package xprt

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/leakcheck"
	"github.com/nfsrdmad/nfsrdmad/pkg/memreg"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/trace"
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
	slotIdle    slotState = iota
	slotWaiting           // for a credit
	slotSent              // posted, no reply yet
	// the reply is here, keys are being invalidated, or the Send still has the buffers
	slotFencing
	slotDone      // result or error is ready for the caller
	slotLost      // the connection ended first
	slotAbandoned // the caller gave up after it was sent
)

// A slot carries one RPC at a time. It is made once.
type slot struct {
	t     *Transport
	index uint32
	ping  bool          // for liveness calls alone
	home  chan *slot    // where it goes when it is free
	send  []byte        // inline send buffer
	wake  chan struct{} // capacity 1: something that the caller waits for may have happened
	// owned by the caller until the post, then by the completion handlers, then by the caller
	mrs memreg.List

	sendWR verbs.WorkRequest
	sge    [3]verbs.SGE // all inline; or before the data, the data, behind the data
	hdr    rpcrdma.Header
	one    [1][]byte // a chunk of one piece, for List.Map
	wchunk rpcrdma.Chunk
	rchunk rpcrdma.Chunk

	onFenced func(ok bool) // made once, so that no call allocates a closure

	taken   int         // places taken on the send queue; owned like mrs
	invMark int64       // of the LOCAL_INV chain on the send queue, 0 for none
	started time.Time   // when the caller came; set before the slot is waiting
	expired atomic.Bool // a soft mount's time is over

	mu        sync.Mutex
	state     slotState
	xid       uint32
	msg       *sunrpc.Message // nil once the caller has left
	conn      *conn           // that it was sent on
	sentAt    time.Time
	sends     int // of the call at hand that were posted, each on another connection
	err       error
	longCall  []byte // PZRC, from the pool
	longReply []byte // reply chunk, from the pool
	longLen   int    // octets of the reply in longReply, -1 when it came inline
	prog      uint32 // the procedure, for those who ask
	vers      uint32
	proc      uint32
	ctx       context.Context // of the caller, for those who ask whose call it is
	noRoom    bool            // waits for a place on the send queue, or for memory
	// its Send is signaled and has not completed: send and the data are in use
	sendBusy bool
	sendMark int64 // of that Send on the send queue
	fenced   bool  // its keys are dead
	left     bool  // abandoned: the caller has returned
	late     bool  // abandoned: the late reply has come, or never will

	// Guarded by window.mu.
	credit, queued bool
	creditGen      uint64
}

func newSlot(t *Transport, index uint32, xid uint32, send []byte) *slot {
	s := &slot{t: t, index: index, xid: xid, home: t.free, send: send, wake: make(chan struct{}, 1)}
	s.onFenced = s.fencedDone
	s.sendWR.Opcode, s.sendWR.Done = verbs.OpSend, s.sendDone
	leakcheck.Track(leakcheck.Slot, 1)
	return s
}

// signal tells the caller that something may have happened. It never blocks.
func (s *slot) signal() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// begin takes the slot for a new call, which came then, with a new XID.
func (s *slot) begin(ctx context.Context, m *sunrpc.Message, came time.Time) {
	select {
	case <-s.wake:
	default:
	}
	s.expired.Store(s.t.tooLong(came, time.Now()))
	s.mu.Lock()
	s.started = came
	s.xid += s.t.xidStep
	s.state, s.msg, s.err, s.conn, s.ctx = slotWaiting, m, nil, nil, ctx
	s.prog, s.vers, s.proc = m.Prog, m.Vers, m.Proc
	s.longLen, s.sends = -1, 0
	s.noRoom, s.fenced, s.left, s.late = false, false, false, false
	m.XID = s.xid
	s.mu.Unlock()
}

// end gives the slot back. The caller must own it, its memory must be fenced.
func (s *slot) end() {
	s.t.window.leave(s)
	s.mu.Lock()
	s.t.trace.Add(trace.Event{Kind: trace.Done, XID: s.xid, A: uint64(time.Since(s.started))})
	s.state, s.msg, s.conn, s.ctx = slotIdle, nil, nil, nil
	s.dropLong()
	s.mu.Unlock()
	s.home <- s
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

// sendDone handles the completion of the slot's Send: when it was signaled, or when it failed.
func (s *slot) sendDone(wc *verbs.WorkCompletion) {
	s.mu.Lock()
	s.t.trace.Add(trace.Event{Kind: trace.WCSend, XID: s.xid, Status: uint8(wc.Status)})
	if wc.Status != verbs.StatusSuccess {
		s.mu.Unlock()
		s.t.completionError("send", wc)
		return
	}
	if s.conn != nil && s.conn.qp == wc.QP {
		s.conn.sq.retire(s.sendMark)
	}
	s.sendBusy = false
	s.maybeDone()
	s.mu.Unlock()
}

// maybeDone ends an answered call, or lets an abandoned one go, when its keys are dead and its Send
// has let go of the buffers. Called with mu held.
func (s *slot) maybeDone() {
	if !s.fenced || s.sendBusy {
		return
	}
	if s.state == slotFencing {
		s.state = slotDone
	}
	s.signal()
}

// fencedDone goes on with a call, answered or abandoned, whose keys are dead. A flush is left to
// the worker: the memory is fenced only when the connection is gone.
func (s *slot) fencedDone(ok bool) {
	if !ok {
		return
	}
	s.mrs.Fenced()
	s.mu.Lock()
	if s.invMark != 0 && s.conn != nil {
		s.conn.sq.retire(s.invMark)
	}
	s.fenced = true
	if s.sendBusy && s.state == slotFencing {
		s.t.stats.replyWaits.Add(1)
	}
	s.maybeDone()
	s.mu.Unlock()
}

// invalidate posts the LOCAL_INVs of the call, and gives the places on the send queue back that it
// does not need.
func (s *slot) invalidate(cn *conn) error {
	n := len(s.mrs.Registered())
	cn.sq.giveBack(s.taken - n)
	s.taken, s.invMark = 0, 0
	if n > 0 {
		s.invMark = cn.sq.mark(n)
	}
	if err := s.mrs.Invalidate(cn.qp, s.onFenced); err != nil {
		return &postError{"LOCAL_INV", err}
	}
	cn.sq.posted.Add(int64(n))
	return nil
}

// connectionEnded is called by the worker when the connection of the slot is gone and all its
// memory fenced.
func (s *slot) connectionEnded() {
	s.taken = 0
	s.mu.Lock()
	s.sendBusy = false
	switch s.state {
	case slotSent:
		s.state = slotLost
		s.dropLong()
	case slotFencing:
		s.state, s.fenced = slotDone, true
	case slotAbandoned:
		ends := s.left && !s.late // with both set before, whoever set the second is about to end it
		s.fenced, s.late = true, true
		if ends {
			s.mu.Unlock()
			s.end()
			return
		}
	}
	s.mu.Unlock()
	s.signal()
}
