package xprt

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/fair"
	"github.com/nfsrdmad/nfsrdmad/internal/selfcheck"
	"github.com/nfsrdmad/nfsrdmad/pkg/memreg"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/ledger"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/trace"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// A slotState is the state of one call.
//
//	      begin           post           reply             keys invalidated,
//	                                                       Send completed
//	idle ------> waiting -------> sent ---------> fencing ------------------> done ---> idle
//	                ^              |  |              |                         ^
//	                |              |  |              |   connection ended      |
//	  same XID      |              |  |              +-------------------------+
//	                +---- lost <---+  |
//	                   connection     | caller gave up
//	                   ended          v
//	                              abandoned ----------------------------------------> idle
//	                                 after all of: keys invalidated, Send completed, caller returned,
//	                                 late reply arrived, connection ended or call withdrawn
//
// A call that ends while it is waiting or lost becomes idle.
type slotState uint8

const (
	slotIdle      slotState = iota
	slotWaiting             // waits for a credit, or for room to post
	slotSent                // posted, no reply yet
	slotFencing             // the reply arrived; LOCAL_INVs or the Send are pending
	slotDone                // result or error is ready for the caller
	slotLost                // the connection ended before the reply
	slotAbandoned           // the caller gave up the posted call
)

// A slot carries one RPC at a time. New allocates it.
type slot struct {
	t        *Transport
	index    uint32
	ping     bool          // for keepalive calls only
	reserved *slotList     // the free list before ReleaseReserved; nil if no XID of it is reserved
	send     []byte        // inline send buffer
	wake     chan struct{} // capacity 1: the caller must look at the state again

	// Owned by the caller until the post, then by the completion handlers, then by the caller.
	mrs    memreg.List
	sendWR verbs.WorkRequest
	sge    [3]verbs.SGE // everything inline, or the parts before, of and after the data
	hdr    rpcrdma.Header
	single [1][]byte // one segment, for List.Map
	wchunk rpcrdma.Chunk
	rchunk rpcrdma.Chunk

	chain    *verbs.WorkRequest // as posted: registrations and Send; owned like mrs
	onFenced func(ok bool)      // allocated once, so that a call allocates no closure

	sqTaken   int          // places in the send queue for the LOCAL_INVs; owned like mrs
	invMark   int64        // mark of the LOCAL_INV chain in the send queue, 0 for none
	startedAt callStart    // start of the call; set before the slot is waiting
	user      uint32       // of the credential; set with startedAt, like payload
	payload   int          // bytes of the data of the call or of the reply
	writtenAt atomic.Int64 // ledger.Time of the last attempt to write the Send; 0 if unknown
	expired   atomic.Bool  // the call exceeded the timeout of a soft mount

	mu             sync.Mutex // guards the fields below
	times          ledger.Times
	freeList       *slotList // receives the slot when it becomes idle
	state          slotState
	xid            uint32
	repeats        bool // the call repeats a call of an earlier process, with repeatXID
	repeatXID      uint32
	msg            *sunrpc.Message // nil after the caller has returned
	conn           *conn           // connection of the last post
	sentAt         time.Time
	sentRunning    int64 // Transport.now at the last post
	sends          int   // posts of the current call, each on another connection
	outBytes       int   // bytes of the Send and of the read chunks at the last post
	err            error
	longCall       []byte // position-zero read chunk, from the pool
	longReply      []byte // reply chunk, from the pool
	longLen        int    // bytes of the reply in longReply, -1 if the reply came inline
	prog           uint32 // program, version and procedure, for Calls
	vers           uint32
	proc           uint32
	ctx            context.Context // of the caller, for Calls
	stalled        ledger.Phase    // waits for room in the send queue (PhaseSend) or for memory (PhaseRegister); else 0
	sendBusy       bool            // a signaled Send is pending: its buffers are in use
	sendMark       int64           // mark of that Send in the send queue
	fenced         bool            // all keys are invalidated
	callerReturned bool            // abandoned: the caller has returned
	withdrawn      bool            // abandoned: the provider took the call back before it was sent
	lateDone       bool            // abandoned: the late reply arrived, the connection ended, or withdrawn

	credit struct { // guarded by window.mu
		held, queued bool
		gen          uint64
		turn         fair.Entry[*slot] // in window.queue
	}
}

func newSlot(t *Transport, index uint32, xid uint32, send []byte) *slot {
	s := &slot{t: t, index: index, xid: xid, freeList: t.free, send: send, wake: make(chan struct{}, 1)}
	s.onFenced = s.fencedDone
	s.sendWR.Opcode, s.sendWR.Done, s.sendWR.OnWrite = verbs.OpSend, s.sendDone, s.onWrite
	s.credit.turn.Value = s
	selfcheck.Track(selfcheck.Slot, 1)
	return s
}

// mark ends phase p of the call now.
func (s *slot) mark(p ledger.Phase) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.times.Mark(p, ledger.Now())
}

// phase returns the phase of a call that waits. The caller holds mu.
func (s *slot) phase(connected bool) ledger.Phase {
	switch s.state {
	case slotWaiting, slotLost:
		switch {
		case s.stalled != 0:
			return s.stalled
		case connected:
			return ledger.PhaseCredit
		}
		return ledger.PhaseReconnect
	case slotSent:
		return ledger.PhaseServer
	case slotDone:
		return ledger.PhaseReturn
	}
	if s.fenced && s.sendBusy {
		return ledger.PhaseSend
	}
	return ledger.PhaseInvalidation
}

// wakeCaller makes the caller look at the state again. It never blocks.
func (s *slot) wakeCaller() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// begin assigns the slot to a call and chooses its XID: that of setXID, or the next one.
func (s *slot) begin(ctx context.Context, m *sunrpc.Message, startedAt callStart) {
	select {
	case <-s.wake:
	default:
	}
	s.expired.Store(false) // watch sets it
	s.mu.Lock()
	s.startedAt = startedAt
	s.user, s.payload = sunrpc.CredUID(m.Cred), max(len(m.ArgData), m.ResultRoom())
	s.times.Begin(ledger.At(startedAt.at))
	if startedAt.waited {
		s.times.Mark(ledger.PhaseSlot, ledger.Now())
	}
	s.xid += s.t.xidStep
	if s.repeats {
		s.xid = s.repeatXID
	}
	s.state, s.msg, s.err, s.conn, s.ctx = slotWaiting, m, nil, nil, ctx
	s.prog, s.vers, s.proc = m.Prog, m.Vers, m.Proc
	s.longLen, s.sends = -1, 0
	s.stalled, s.fenced, s.callerReturned, s.withdrawn, s.lateDone = 0, false, false, false, false
	m.XID = s.xid
	s.mu.Unlock()
}

// end returns the slot to its free list. The caller must own the slot, and the memory of the call
// must be fenced.
func (s *slot) end() {
	s.t.window.leave(s)
	s.clear()
}

// clear makes the slot idle and puts it into its free list. It holds mu until then, see release.
//
// After a repeated call, the slot gets a random XID. The XIDs that follow that of the call may
// belong to later calls of the earlier process, and the server would answer them from its cache.
func (s *slot) clear() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.t.trace.Add(trace.Event{Kind: trace.Done, XID: s.xid, A: uint64(time.Since(s.startedAt.at))})
	if selfcheck.On() && (s.sendBusy || (s.state == slotDone || s.state == slotAbandoned) && !s.fenced) {
		selfcheck.Failf("RPC %#x ends in state %d before its memory is free: keys invalidated %v, Send pending %v",
			s.xid, s.state, s.fenced, s.sendBusy)
	}
	s.state, s.msg, s.conn, s.ctx = slotIdle, nil, nil, nil
	s.releaseLong()
	if s.repeats {
		s.repeats, s.xid = false, s.t.randomXID(s.index)
	}
	s.freeList.put(s)
}

// putBack returns a slot that was taken for a call that did not begin.
func (s *slot) putBack() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.freeList.put(s)
}

// releaseLong returns the long buffers to their pool. The caller holds mu.
func (s *slot) releaseLong() {
	if s.longCall != nil {
		s.t.long.Put(s.longCall)
		s.longCall = nil
	}
	if s.longReply != nil {
		s.t.long.Put(s.longReply)
		s.longReply = nil
	}
}

// onWrite is OnWrite of the Send.
func (s *slot) onWrite() { s.writtenAt.Store(int64(ledger.Now())) }

// markWritten ends the phase of the send queue at the time at which the Send was written, or at
// limit if that is earlier. It does nothing if the time is unknown. The caller holds mu.
func (s *slot) markWritten(limit ledger.Time) (known bool) {
	at := s.writtenAt.Load()
	if at != 0 {
		s.times.Mark(ledger.PhaseSend, min(ledger.Time(at), limit))
	}
	return at != 0
}

// markAnswered ends the phase of a posted call that was answered, given up or lost at now. The
// caller holds mu.
func (s *slot) markAnswered(now ledger.Time) {
	s.markWritten(now)
	s.times.Mark(ledger.PhaseServer, now)
}

// markAbandoned ends the phase of a posted call that its caller gives up: PhaseSend if the call was
// withdrawn.
func (s *slot) markAbandoned() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if now := ledger.Now(); s.withdrawn {
		s.times.Mark(ledger.PhaseSend, now)
	} else {
		s.markAnswered(now)
	}
}

// sendDone handles the completion of a Send that was signaled or failed.
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
	if s.fenced { // the call waited only for its Send
		s.times.Mark(ledger.PhaseSend, ledger.Now())
	}
	ends := s.finishIfReady()
	s.mu.Unlock()
	if ends {
		s.end()
	}
}

// finishIfReady finishes an answered call after its keys are invalidated and its Send has
// completed. It wakes the caller of an answered or abandoned call. It reports whether the caller of
// finishIfReady must end the slot, after it has released mu, which it holds.
func (s *slot) finishIfReady() (ends bool) {
	if !s.fenced || s.sendBusy {
		return false
	}
	if s.state == slotFencing {
		s.state = slotDone
	}
	if s.over() {
		return true
	}
	s.wakeCaller()
	return false
}

// over reports whether the slot of an abandoned call can end. The goroutine that makes it true ends
// the slot. The caller holds mu.
func (s *slot) over() bool {
	return s.state == slotAbandoned && s.fenced && !s.sendBusy && s.callerReturned && s.lateDone
}

// fencedDone handles the end of the LOCAL_INV chain of an answered or abandoned call. It ignores a
// flush: the memory is fenced only when the connection has ended, and the worker handles that.
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
	if s.invMark != 0 {
		s.times.Mark(ledger.PhaseInvalidation, ledger.Now())
	} else {
		s.times.Mark(ledger.PhaseCompletion, ledger.Now())
	}
	if s.sendBusy && s.state == slotFencing {
		s.t.stats.ReplyWaitsForSend.Add(1)
	}
	ends := s.finishIfReady()
	s.mu.Unlock()
	if ends {
		s.end()
	}
}

// withdraw takes an abandoned call back if it is not on the wire yet and the provider can. The
// server then never receives the call, does not count it, and reaches none of its memory.
func (s *slot) withdraw(cn *conn) {
	qp, ok := cn.qp.(verbs.WithdrawingQP)
	if !ok || !qp.Withdraw(s.chain) {
		return
	}
	s.mu.Lock()
	s.withdrawn, s.lateDone = true, true
	s.mu.Unlock()
	s.t.window.leave(s)
}

// invalidate posts the LOCAL_INVs of the call, and returns the places in the send queue that they
// do not need.
func (s *slot) invalidate(cn *conn) error {
	n := len(s.mrs.Registered())
	cn.sq.giveBack(s.sqTaken - n)
	s.sqTaken, s.invMark = 0, 0
	if n > 0 {
		s.mark(ledger.PhaseCompletion)
		s.invMark = cn.sq.begin(n)
	}
	if err := s.mrs.Invalidate(cn.qp, s.onFenced); err != nil {
		return &postError{"LOCAL_INV", err}
	}
	cn.sq.end(n)
	return nil
}

// unanswered returns how many bytes of a posted call this side may still have to send.
func (s *slot) unanswered() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state == slotSent || s.state == slotAbandoned && !s.lateDone {
		return s.outBytes
	}
	return 0
}

// connectionBegan ends the wait of a call for a connection.
func (s *slot) connectionBegan() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state == slotWaiting || s.state == slotLost {
		s.times.Mark(s.phase(false), ledger.Now())
	}
}

// connectionEnded updates the call after its connection was closed and all its memory fenced. The
// worker calls it.
func (s *slot) connectionEnded() {
	s.sqTaken = 0
	s.mu.Lock()
	over := s.over() // the goroutine that made it true ends the slot
	now := ledger.Now()
	if s.state != slotSent {
		s.times.Mark(s.phase(true), now)
	}
	s.sendBusy = false
	switch s.state {
	case slotSent:
		s.markAnswered(now)
		s.state = slotLost
		s.releaseLong()
	case slotFencing:
		s.state, s.fenced = slotDone, true
	case slotAbandoned:
		s.fenced, s.lateDone = true, true
		if s.over() && !over {
			s.mu.Unlock()
			s.end()
			return
		}
	}
	s.mu.Unlock()
	s.wakeCaller()
}
