package xprt

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/verify"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/trace"
)

const (
	// storyEvents is how many trace events are written out when a connection dies of an error,
	// storyPause how often at most.
	storyEvents = 32
	storyPause  = 10 * time.Second
)

// connectWorker owns the connection: it puts cn up, waits for its end, takes it down, and makes the
// next, until the transport is closed.
func (t *Transport) connectWorker(cn *conn) {
	defer t.workers.Done()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		select {
		case <-t.closing:
			cancel()
		case <-ctx.Done():
		}
	}()
	var back backOff
	for {
		t.install(cn)
		select {
		case <-cn.dead:
			// while the reason is on its way no call shall go to a connection that is lost
			t.window.reset(0, false)
			cn.learnCause(t.closing)
		case <-t.closing:
		}
		use := cn.use(t.cfg.ReconnectMin)
		t.uninstall(cn)
		if isClosed(t.closing) {
			return
		}
		var pause time.Duration
		if errors.Is(cn.err, errIdle) { // no loss
			t.log.Debug("connection was idle", "server", t.cfg.Addr)
			if !t.waitWanted() {
				return
			}
		} else {
			t.log.Warn("connection lost", "server", t.cfg.Addr, "error", cn.err)
			t.tellStory(cn.err)
			pause = back.afterLoss(&t.cfg, use, ours(cn.err))
		}
		if cn = t.reconnect(ctx, &back, pause); cn == nil {
			return
		}
	}
}

// waitWanted waits until a call needs a connection. It reports false when the transport is closed
// first.
func (t *Transport) waitWanted() bool {
	select {
	case <-t.window.wanted:
		return true
	case <-t.closing:
		return false
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// A backOff is the pause before an attempt to connect: from ReconnectMin, doubled up to
// ReconnectMax.
type backOff struct{ last time.Duration }

func (b *backOff) next(c *Config) time.Duration {
	b.last = min(max(2*b.last, c.ReconnectMin), c.ReconnectMax)
	return b.last
}

// A usefulness is what a connection was good for.
type usefulness uint8

const (
	useNone usefulness = iota // it answered nothing
	// it answered liveness calls, and did not stand for long: the next call may have killed it
	useAlive
	useCalls // it answered a call, or stood for a while
)

// afterLoss is the pause after the loss of a connection: none when it had been of use, and none,
// the first time, when the server was alive at least, or the loss was of this side's making.
func (b *backOff) afterLoss(c *Config, use usefulness, ours bool) time.Duration {
	if use == useCalls {
		b.last = 0
		return 0
	}
	first := b.last == 0
	pause := b.next(c)
	if first && (ours || use == useAlive) {
		return 0
	}
	return pause
}

// reconnect tries until there is a connection, or the transport is closed (nil).
func (t *Transport) reconnect(ctx context.Context, back *backOff, pause time.Duration) *conn {
	for {
		if pause > 0 {
			timer := time.NewTimer(pause)
			select {
			case <-timer.C:
			case <-ctx.Done():
				timer.Stop()
				return nil
			}
		}
		t.setState(StateConnecting, nil)
		cn, err := t.dial(ctx)
		if err == nil {
			return cn
		}
		if ctx.Err() != nil {
			return nil
		}
		pause = back.next(&t.cfg)
		t.setState(StateDisconnected, err)
		t.note("connect failed", err)
		t.log.Warn("reconnect failed", "server", t.cfg.Addr, "error", err, "next", pause)
	}
}

// install puts a new connection up, with one credit.
func (t *Transport) install(cn *conn) {
	t.send.Lock()
	cn.installed = t.now()
	cn.lastHeard.Store(cn.installed)
	t.conn.Store(cn)
	if t.cfg.WritePad {
		if err := cn.registerPad(); err != nil {
			cn.fail(&postError{"write-pad registration", err})
		}
	}
	t.send.Unlock()
	t.stats.connects.Add(1)
	t.setState(StateConnected, nil)
	t.note("connected", nil)
	t.trace.Add(trace.Event{Kind: trace.Connect})
	t.log.Info("connected", "server", t.cfg.Addr, "device", cn.dev.Attrs().Name, "inline_send", cn.inlineSend,
		"inline_recv", cn.inlineRecv, "slots", cn.params.Slots)
	t.window.reset(1, t.cfg.KeepAlive > 0)
	if t.cfg.KeepAlive > 0 {
		t.startPing(cn)
	}
}

// uninstall takes the connection down. With the send lock held for writing no call is being
// marshaled; the queues are drained, and every MR that was in use is made anew, before any call
// hears of it, so each finds its memory fenced (S16).
func (t *Transport) uninstall(cn *conn) {
	t.window.reset(0, false)
	t.send.Lock()
	defer t.send.Unlock()
	cn.fail(ErrClosed)
	if errors.Is(cn.err, errIdle) {
		t.setState(StateIdle, nil)
		t.note("closed, as it was idle", nil)
	} else {
		t.setState(StateDisconnected, cn.err)
		t.note("disconnected", cn.err)
	}
	t.trace.Add(trace.Event{Kind: trace.Disconnect})
	t.release(cn)
	t.settle(cn)
	for _, s := range t.slots {
		s.connectionEnded()
	}
}

// tellStory writes the last events of a connection that died of an error to the log.
func (t *Transport) tellStory(err error) {
	if errors.Is(err, io.EOF) || errors.Is(err, ErrClosed) || t.trace == nil || time.Since(t.storyTold) < storyPause {
		return
	}
	t.storyTold = time.Now()
	for _, e := range t.trace.Last(storyEvents) {
		t.log.Info("before the connection was lost", "trace", t.trace.Text(&e))
	}
}

// watch ends connections whose calls wait too long or whose server is dead or not needed, and the
// calls of soft mounts whose time is over.
func (t *Transport) watch() {
	defer t.workers.Done()
	every := t.patience(2) / 2
	if t.cfg.KeepAlive > 0 {
		every = min(every, t.cfg.KeepAlive/4)
	}
	if t.cfg.IdleTimeout > 0 {
		every = min(every, t.cfg.IdleTimeout/4)
	}
	tick := time.NewTicker(min(max(every, time.Millisecond), time.Second))
	defer tick.Stop()
	for {
		select {
		case <-t.closing:
			return
		case now := <-tick.C:
			for _, s := range t.slots {
				t.checkSlot(s, now)
			}
			t.checkConnection()
		}
	}
}

func (t *Transport) checkSlot(s *slot, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch s.state {
	case slotSent, slotFencing, slotAbandoned:
		if waited := now.Sub(s.sentAt); waited > t.patience(s.sends) && s.conn != nil && !s.late &&
			!isClosed(s.conn.dead) {
			t.stats.timeouts.Add(1)
			t.trace.Add(trace.Event{Kind: trace.Timeout, XID: s.xid})
			s.conn.fail(&TimeoutError{Server: t.cfg.Addr.String(), After: waited})
		}
	}
	if s.state != slotIdle && t.tooLong(s.started, now) {
		s.expired.Store(true)
		s.signal()
	}
}

// replayPatience is how long the first replay of a call may take, in one hundredths of the timeout:
// see patience.
const replayPatience = 8

// patience is how long a call that was sent so many times may go without an answer before its
// connection is given up. A server that still executes the first copy of a call discards the second
// (knfsd does), and will never answer it; the call is not to wait for a whole timeout then.
func (t *Transport) patience(sends int) time.Duration {
	if sends <= 1 {
		return t.cfg.Timeout
	}
	d := t.cfg.Timeout * replayPatience / 100
	for ; sends > 2 && d < t.cfg.Timeout; sends-- {
		d *= 2
	}
	return min(d, t.cfg.Timeout)
}

// checkConnection looks after the liveness of the connection: after KeepAlive of silence the server
// is asked by a NULL call, whose silence for as long again ends the connection; when no call was
// made for IdleTimeout the connection is closed, until the next.
func (t *Transport) checkConnection() {
	gen := t.window.generation()
	cn := t.conn.Load()
	if cn == nil {
		return
	}
	now := t.now()
	if idle := t.cfg.IdleTimeout; idle > 0 && now-t.lastCall.Load() > int64(idle) && t.window.closeIfUnused(gen) {
		cn.fail(errIdle)
		return
	}
	silent := time.Duration(now - cn.lastHeard.Load())
	if t.cfg.KeepAlive <= 0 || silent < t.cfg.KeepAlive {
		return
	}
	if cn.pinging.Load() == 0 {
		t.startPing(cn)
		return
	}
	// One is under way. Only what was sent can be answered: without a credit for it the calls' own
	// timeout decides.
	s := t.slots[t.cfg.Slots]
	s.mu.Lock()
	asked := s.state == slotSent && s.conn == cn
	waited := time.Since(s.sentAt)
	s.mu.Unlock()
	if asked && waited > t.cfg.KeepAlive && silent >= waited {
		cn.fail(&TimeoutError{Server: t.cfg.Addr.String(), After: silent})
	}
}

// The procedure that asks a server whether it is there: NULL of NFSv3.
const (
	pingProgram = 100003
	pingVersion = 3
)

// startPing asks the server of cn for a sign of life. It is also the first call of every
// connection: a server that takes connections and answers nothing is found out by it, and it brings
// the credits that all other calls wait for.
func (t *Transport) startPing(cn *conn) {
	if !t.enterCall() {
		return
	}
	cn.pinging.Add(1)
	go t.ping(cn)
}

func (t *Transport) ping(cn *conn) {
	defer t.calls.Done()
	defer cn.pinging.Add(-1)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	stop := make(chan struct{})
	defer close(stop)
	go func() { // a ping is of its connection alone
		select {
		case <-cn.dead:
		case <-t.closing:
		case <-stop:
		}
		cancel()
	}()
	var s *slot
	select {
	case s = <-t.pingSlot:
	case <-ctx.Done():
		return
	}
	t.stats.pings.Add(1)
	m := sunrpc.Message{Prog: pingProgram, Vers: pingVersion, Cred: sunrpc.AppendAuthNone(nil)}
	t.trace.Add(trace.Event{Kind: trace.Ping})
	if err := t.run(ctx, s, &m, time.Now()); err != nil {
		t.log.Debug("liveness call failed", "server", t.cfg.Addr, "error", err)
	}
}

// checkFenced holds an ended call to the promise that its keys are dead.
func (s *slot) checkFenced() {
	if !verify.On() {
		return
	}
	s.t.send.RLock()
	defer s.t.send.RUnlock()
	if n := len(s.mrs.Registered()); n > 0 {
		verify.Failf("RPC %#x ends with %d keys alive", s.xid, n)
	}
}
