package xprt

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/running"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/ledger"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/trace"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

const (
	// An interrupted call waits for its LOCAL_INVs for fenceMin, and fencePerByte for each byte
	// that may be in front of them on a link of 1 Mbit/s. Then the connection is dropped instead.
	fenceMin     = time.Second
	fencePerByte = 8 * time.Microsecond
)

// beginCall registers a call and reports true, unless the transport is closed.
func (t *Transport) beginCall() bool {
	t.status.Lock()
	defer t.status.Unlock()
	if t.status.closed {
		return false
	}
	t.calls.Add(1)
	return true
}

// Call performs one RPC. After Call has returned, also with an error, the server can no longer
// reach any memory of m. Safe for concurrent use.
//
// If ctx is a [sunrpc.CallKeeper] and has an ID of this transport for the call, Call is Repeat with
// the XID of this ID. Otherwise it is CallNew.
//
// Errors: *InterruptedError, *TimeoutError, *ServerError, *ProtocolError, ErrClosed, and those of
// sunrpc.ParseReply.
func (t *Transport) Call(ctx context.Context, m *sunrpc.Message) error {
	if id, ok := sunrpc.KeptCall(ctx, m); ok && id.Conn == t.cfg.Index {
		return t.Repeat(ctx, m, id.XID)
	}
	return t.CallNew(ctx, m)
}

// CallNew is Call for a call that no earlier process made. It does not call KeptCall of ctx.
func (t *Transport) CallNew(ctx context.Context, m *sunrpc.Message) error {
	return t.call(ctx, m, repeat{})
}

// Repeat is Call for a call that an earlier process made with this XID. It waits for the slot of
// the XID, and sends m with the same XID. The duplicate request cache of the server recognizes the
// call if m is the same message. Repeat is CallNew if the XID is not reserved, or was released. It
// does not call KeptCall of ctx.
func (t *Transport) Repeat(ctx context.Context, m *sunrpc.Message, xid uint32) error {
	return t.call(ctx, m, repeat{t.reserved.byXID[xid], xid})
}

func (t *Transport) call(ctx context.Context, m *sunrpc.Message, r repeat) error {
	if err := t.checkCall(m); err != nil {
		return err
	}
	if !t.beginCall() {
		return ErrClosed
	}
	defer t.calls.Done()
	startedAt := t.startCall()
	t.lastCall.Store(startedAt.running)
	s, err := t.takeSlot(ctx, m, &startedAt, r)
	if err == nil {
		err = t.run(ctx, s, m, startedAt)
		t.lastCall.Store(t.now())
	} else {
		t.observeWaiter(ctx, m, startedAt, err)
	}
	if err != nil {
		var interrupted *InterruptedError
		if errors.As(err, &interrupted) {
			t.stats.Interrupted.Add(1)
		}
	}
	return err
}

// A callStart is the time when a call started: for its description, and as returned by now.
type callStart struct {
	at      time.Time
	running int64
	waited  bool // for a slot
}

func (t *Transport) startCall() callStart {
	now := time.Now()
	return callStart{at: now, running: t.nowAt(ledger.At(now))}
}

// softExpired reports whether a call has exceeded the timeout of a soft mount. Only watch may call
// softExpired, because it first leaves out the time in which the process was stopped.
func (t *Transport) softExpired(startedAt callStart, now int64) bool {
	return t.cfg.Recovery != Hard && now-startedAt.running > int64(t.softTimeout())
}

// softTimeout returns the timeout of a call on a soft mount.
func (t *Transport) softTimeout() time.Duration {
	return t.cfg.Timeout * time.Duration(t.cfg.Retrans+1)
}

// takeSlot returns the slot of r, or a free slot for a new call. A call that waits for its reserved
// slot when the slot is released becomes a new call. takeSlot records in startedAt whether it
// waited.
func (t *Transport) takeSlot(ctx context.Context, m *sunrpc.Message, startedAt *callStart, r repeat) (*slot, error) {
	if r.slot != nil {
		s, err := t.waitSlot(ctx, m, startedAt, r.slot.reserved, t.reserved.released)
		if s != nil {
			s.setXID(r.xid)
		}
		if s != nil || err != nil {
			return s, err
		}
	}
	return t.waitSlot(ctx, m, startedAt, t.free, nil)
}

// waitSlot waits for a slot from free. It returns nil without an error when released is closed.
func (t *Transport) waitSlot(ctx context.Context, m *sunrpc.Message, startedAt *callStart, free *slotList,
	released <-chan struct{}) (s *slot, err error) {
	if s = free.take(); s != nil {
		return s, nil
	}
	startedAt.waited = true
	w := t.waiters.add(ctx, m, *startedAt)
	defer t.waiters.remove(w)
	turn := free.wait(sunrpc.CredUID(m.Cred))
	select {
	case s = <-turn.Value:
	case <-released:
		return free.leave(turn), nil
	case <-w.expired:
		s = free.leave(turn)
	case <-ctx.Done():
		s, err = free.leave(turn), &InterruptedError{Cause: context.Cause(ctx)}
	case <-t.closing:
		s, err = free.leave(turn), ErrClosed
	}
	if err == nil && isClosed(w.expired) {
		err = t.softError(startedAt.at)
	}
	if err != nil && s != nil {
		s.putBack()
		s = nil
	}
	return s, err
}

// run performs a call on slot s. It ends the slot, or leaves it to the late reply.
func (t *Transport) run(ctx context.Context, s *slot, m *sunrpc.Message, startedAt callStart) error {
	panicking := true
	defer func() {
		if panicking {
			t.endPanicked(s)
		}
	}()
	err := t.perform(ctx, s, m, startedAt)
	panicking = false
	return err
}

// endPanicked ends a call whose goroutine panics. It first ends the connection and waits until the
// worker has taken it down, because the server may still reach the memory of the call.
func (t *Transport) endPanicked(s *slot) {
	t.send.RLock()
	cn := t.conn.Load()
	if cn != nil {
		cn.panicked.Store(true) // before the worker takes the connection down
	}
	t.send.RUnlock()
	if cn != nil {
		cn.fail(errPanic)
		<-cn.down
	}
	s.mu.Lock()
	ended := s.callerReturned // the late reply or the worker ends the slot
	s.mu.Unlock()
	if !ended {
		s.end()
	}
}

func (t *Transport) perform(ctx context.Context, s *slot, m *sunrpc.Message, startedAt callStart) error {
	s.begin(ctx, m, startedAt)
	sunrpc.KeepCall(ctx, m, sunrpc.CallID{Conn: t.cfg.Index, XID: m.XID})
	var pause time.Duration // before the next attempt if memory is short
	for {
		if err := t.waitCredit(ctx, s); err != nil {
			return t.finish(ctx, s, m, err)
		}
		sent, err := t.transmit(s)
		if err != nil {
			err = s.awaitFence(err)
			if !t.waitRetry(ctx, s, err, &pause) {
				s.mark(ledger.PhaseRegister)
				return t.finish(ctx, s, m, err)
			}
			continue
		}
		if !sent {
			continue
		}
		var ended Ended
		switch t.awaitReply(ctx, s, &ended) {
		case slotDone:
			s.verifyFenced()
			return t.finish(ctx, s, m, s.results(m))
		case slotLost: // send again on the next connection
		case slotAbandoned:
			t.trace.Add(trace.Event{Kind: trace.Interrupt, XID: m.XID})
			return t.observe(ctx, m, ended, &InterruptedError{Cause: context.Cause(ctx)})
		}
	}
}

// finish ends the slot of a call that its caller owns, and returns err.
func (t *Transport) finish(ctx context.Context, s *slot, m *sunrpc.Message, err error) error {
	s.mu.Lock()
	ended := s.ended(ledger.PhaseReturn)
	s.mu.Unlock()
	s.end()
	return t.observe(ctx, m, ended, err)
}

// ended describes a call that ends now, in phase p. The caller holds mu.
func (s *slot) ended(p ledger.Phase) Ended {
	s.times.Mark(p, ledger.Now())
	return Ended{XID: s.xid, Slot: int(s.index), Sends: s.sends, Times: s.times}
}

// observe calls Config.Observe for a call that has ended with err, and returns err.
func (t *Transport) observe(ctx context.Context, m *sunrpc.Message, ended Ended, err error) error {
	if t.cfg.Observe != nil {
		ended.Prog, ended.Vers, ended.Proc, ended.Err, ended.Message = m.Prog, m.Vers, m.Proc, err, m
		t.cfg.Observe(ctx, ended)
	}
	return err
}

// observeWaiter is observe for a call that got no slot.
func (t *Transport) observeWaiter(ctx context.Context, m *sunrpc.Message, startedAt callStart, err error) {
	ended := Ended{Slot: -1}
	ended.Times.Begin(ledger.At(startedAt.at))
	ended.Times.Mark(ledger.PhaseSlot, ledger.Now())
	_ = t.observe(ctx, m, ended, err)
}

// waitRetry waits until a call that could not be posted may be retried, or must end. It reports
// false if err is final. pause is the last pause for lack of memory.
func (t *Transport) waitRetry(ctx context.Context, s *slot, err error, pause *time.Duration) bool {
	var short *shortageError
	var full *queueFullError
	switch {
	case errors.As(err, &full):
		t.waitRoom(ctx, s, ledger.PhaseSend, nil, full.room, full.connEnded)
	case errors.As(err, &short):
		if *pause == 0 {
			t.log.Warn("no memory to send RPC, retrying; reduce slots= to need less", "error", short.error,
				"server", t.Address())
		}
		*pause = min(max(2**pause, marshalRetry), marshalRetryMax)
		t.window.leave(s)
		timer := time.NewTimer(*pause)
		defer timer.Stop()
		t.waitRoom(ctx, s, ledger.PhaseRegister, timer.C, nil, nil)
	default:
		return false
	}
	return true
}

// waitRoom waits, in phase p, for one of the channels, or for an event that may end the call.
func (t *Transport) waitRoom(ctx context.Context, s *slot, p ledger.Phase, timer <-chan time.Time,
	room, connEnded <-chan struct{}) {
	s.stall(p)
	defer s.resume()
	select {
	case <-timer:
	case <-room:
	case <-connEnded:
	case <-s.wake: // a soft mount may have expired
	case <-ctx.Done():
	case <-t.closing:
	}
}

func (t *Transport) checkCall(m *sunrpc.Message) error {
	if n := max(len(m.ArgData), m.ResultRoom()); n > t.MaxPayload() && t.MaxPayload() > 0 {
		return &ProtocolError{Reason: fmt.Sprintf("payload of %d bytes exceeds the limit of the device, %d", n,
			t.MaxPayload())}
	}
	if m.ArgDataPos < 0 || m.ArgDataPos > len(m.Args) || m.ArgDataPos%4 != 0 || m.MaxResult < 0 {
		return &ProtocolError{Reason: "malformed message: position of the data is outside the arguments"}
	}
	return nil
}

// waitCredit waits for a credit and returns nil when s holds one.
func (t *Transport) waitCredit(ctx context.Context, s *slot) error {
	waited := false
	defer func() {
		if waited {
			t.markWaiting(s)
		}
	}()
	for !s.expired.Load() && !t.window.enter(s) {
		waited = true
		select {
		case <-s.wake:
		case <-ctx.Done():
			return &InterruptedError{Cause: context.Cause(ctx)}
		case <-t.closing:
			return ErrClosed
		}
	}
	if s.expired.Load() {
		return t.softError(s.startedAt.at)
	}
	select {
	case <-t.closing:
		return ErrClosed
	case <-ctx.Done():
		return &InterruptedError{Cause: context.Cause(ctx)}
	default:
		return nil
	}
}

// markWaiting ends the phase of a call that waits for a credit or for a connection.
func (t *Transport) markWaiting(s *slot) {
	connected := t.conn.Load() != nil
	s.mu.Lock()
	defer s.mu.Unlock()
	s.times.Mark(s.phase(connected), ledger.Now())
}

func (t *Transport) softError(startedAt time.Time) error {
	e := &TimeoutError{Server: t.Address().String(), After: time.Since(startedAt), Errno: syscall.EIO}
	if t.cfg.Recovery == SoftErr {
		e.Errno = syscall.ETIMEDOUT
	}
	t.status.Lock()
	if t.status.lastErr != nil {
		e.Last = t.status.lastErr.Error()
	}
	t.status.Unlock()
	return e
}

// awaitReply waits for the outcome of a posted call: slotDone, slotLost, or slotAbandoned. After
// slotAbandoned, the memory of the call is fenced, the caller must not use the slot, and ended
// describes the call.
func (t *Transport) awaitReply(ctx context.Context, s *slot, ended *Ended) slotState {
	for {
		select {
		case <-s.wake:
		case <-ctx.Done():
			return t.interrupt(s, ended)
		}
		s.mu.Lock()
		st := s.state
		if st == slotLost {
			s.state = slotWaiting
		}
		s.mu.Unlock()
		if st == slotDone || st == slotLost {
			return st
		}
	}
}

// interrupt fences a call that its caller has canceled (S21).
func (t *Transport) interrupt(s *slot, ended *Ended) slotState {
	cn := t.abandon(s)
	if cn == nil { // lost: nothing is in flight
		s.mu.Lock()
		*ended = s.ended(ledger.PhaseReconnect)
		s.mu.Unlock()
		s.end()
		return slotAbandoned
	}
	timeout := t.fenceTimeout()
	timer := running.AfterFunc(timeout, func() {
		cn.fail(&ProtocolError{Reason: fmt.Sprintf("LOCAL_INV did not complete within %v", timeout)})
	})
	defer timer.Stop()
	for {
		if st, ok := s.tryReturn(ended); ok {
			return st
		}
		<-s.wake
	}
}

// fenceTimeout returns how long an interrupted call may wait for its LOCAL_INVs. They wait in the
// send queue behind the data of earlier calls. The time is at most that of a reply.
func (t *Transport) fenceTimeout() time.Duration {
	bytes := 0
	for _, s := range t.slots {
		bytes += s.unanswered()
	}
	return min(fenceMin+time.Duration(bytes)*fencePerByte, t.cfg.Timeout)
}

// abandon starts to fence a call, unless its reply has done so. It returns the connection of the
// call, or nil if the connection has ended.
func (t *Transport) abandon(s *slot) *conn {
	t.send.RLock()
	defer t.send.RUnlock()
	t.verifySending()
	s.mu.Lock()
	cn, st := s.conn, s.state
	if st == slotSent {
		s.state, s.msg = slotAbandoned, nil
	}
	s.mu.Unlock()
	switch st {
	case slotSent:
		s.mrs.Abandon()
		s.withdraw(cn)
		s.markAbandoned()
		if err := s.invalidate(cn); err != nil {
			cn.fail(err)
		}
	case slotDone, slotFencing:
	default:
		return nil
	}
	return cn
}

// tryReturn reports whether the caller of an interrupted call may return, because the call was
// answered, was withdrawn, or its memory is fenced. If it was not answered, tryReturn describes it
// in ended.
func (s *slot) tryReturn(ended *Ended) (slotState, bool) {
	s.mu.Lock()
	if s.state == slotDone {
		s.mu.Unlock()
		return slotDone, true
	}
	if s.state != slotAbandoned || !s.withdrawn && (!s.fenced || s.sendBusy) {
		s.mu.Unlock()
		return 0, false
	}
	*ended = s.ended(s.phase(true))
	s.callerReturned = true
	ends := s.over()
	s.mu.Unlock()
	if ends {
		s.end()
	}
	return slotAbandoned, true
}
