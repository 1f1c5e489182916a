package xprt

import (
	"context"
	"errors"
	"io"
	"sync/atomic"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/pace"
	"github.com/nfsrdmad/nfsrdmad/internal/running"
	"github.com/nfsrdmad/nfsrdmad/internal/selfcheck"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/trace"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

const (
	// historyEvents is the number of trace events that are logged when a connection fails.
	// historyPause is the shortest pause between these logs.
	historyEvents = 32
	historyPause  = 10 * time.Second
)

// connectWorker owns the connection. It installs cn, waits for its end, takes it down, and makes
// the next one, until the transport is closed.
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
	back := newBackOff(&t.cfg)
	for {
		t.install(cn)
		select {
		case <-cn.ended:
			// No call may use the lost connection during the wait for the cause.
			t.ready.Store(false)
			t.window.reset(0, false)
			cn.waitCause(t.closing)
		case <-t.closing:
		}
		use := cn.usefulness(t.cfg.ReconnectMin)
		t.uninstall(cn)
		if isClosed(t.closing) {
			return
		}
		t.rateAddress(cn, use)
		var pause time.Duration
		switch {
		case errors.Is(cn.err, errIdle):
			t.log.Debug("closed idle connection", "server", t.Address())
			if !t.waitWanted() {
				return
			}
			back.attempts = 0
		case errors.Is(cn.err, errReturn):
			t.log.Debug("connect to the preferred address again", "server", t.Address(), "preferred", t.Preferred())
			back.attempts = 0
		default:
			t.log.Warn("connection lost", "server", t.Address(), "error", cn.err)
			t.logHistory(cn.err)
			pause = back.afterLoss(use, localFault(cn.err))
		}
		if cn = t.reconnect(ctx, back, pause); cn == nil {
			return
		}
	}
}

// waitWanted waits until a call needs a connection. It reports false if the transport is closed
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

// firstPause bounds the random pause before the first attempt after a connection that worked. All
// clients of a server lose their connections at the same moment when it restarts. This pause keeps
// them from connecting within the same millisecond, and delays the client of a single lost
// connection by half of it on average.
const firstPause = 250 * time.Millisecond

// A backOff computes the pause before an attempt to connect: random, at most ReconnectMin at first
// and growing up to ReconnectMax. There is no pause before each of several addresses was tried.
type backOff struct {
	pace.Backoff
	addresses int // of the server
	attempts  int // that failed since the last pause
}

func newBackOff(c *Config) *backOff {
	return &backOff{Backoff: pace.Backoff{Min: c.ReconnectMin, Max: c.ReconnectMax},
		addresses: len(c.Servers.all)}
}

// next returns the pause after an attempt that failed.
func (b *backOff) next() time.Duration {
	if b.attempts++; b.attempts < b.addresses {
		return 0
	}
	b.attempts = 0
	return b.Next()
}

// progressCalls is the number of answered calls after which a connection has made progress.
const progressCalls = 16

// A usefulness says what a connection achieved.
type usefulness uint8

const (
	// the server sent no reply
	useNone usefulness = iota
	// the server replied, and the connection ended before it made progress
	useAlive
	// the server replied to progressCalls calls, or replied and the connection lasted minLife
	useProgress
)

// afterLoss returns the pause after the loss of a connection. It is at most firstPause after a
// connection that made progress, and also before the first attempt if the server replied or the
// fault is local. A connection that is lost again and again without progress is made again after
// growing pauses.
func (b *backOff) afterLoss(use usefulness, local bool) time.Duration {
	first := b.UpTo(min(firstPause, b.Min))
	if use == useProgress {
		b.Reset()
		b.attempts = 0
		return first
	}
	isFirst := b.First()
	pause := b.next()
	if isFirst && (local || use == useAlive) {
		return min(pause, first)
	}
	return pause
}

// reconnect retries until there is a connection. It returns nil if the transport is closed first.
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
		cn, err := t.dial(ctx, false)
		if err == nil {
			return cn
		}
		if ctx.Err() != nil {
			return nil
		}
		pause = back.next()
		t.setState(StateDisconnected, err)
		t.recordEvent("connect failed", err)
		t.log.Warn("reconnect failed", "server", t.Address(), "error", err, "next", pause)
	}
}

// install makes cn the current connection, with one credit.
func (t *Transport) install(cn *conn) {
	t.send.Lock()
	t.verifyTakingDown()
	cn.installedAt = t.now()
	cn.lastReceived.Store(cn.installedAt)
	t.conn.Store(cn)
	if t.cfg.WritePad {
		if err := cn.registerPad(); err != nil {
			cn.fail(&postError{"write pad registration", err})
		}
	}
	for _, s := range t.slots {
		s.connectionBegan()
	}
	t.send.Unlock()
	t.stats.Connects.Add(1)
	t.setState(StateConnected, nil)
	if len(t.cfg.Servers.all) > 1 {
		t.recordEvent("connected to "+t.Address().String(), nil)
	} else {
		t.recordEvent("connected", nil)
	}
	t.trace.Add(trace.Event{Kind: trace.Connect})
	t.log.Info("connected", "server", t.Address(), "device", cn.dev.Attrs().Name, "inline_send", cn.inlineSend,
		"inline_recv", cn.inlineRecv, "slots", cn.params.Slots)
	t.window.reset(1, t.cfg.KeepAlive > 0)
	if t.cfg.KeepAlive > 0 {
		t.startPing(cn)
	}
}

// uninstall takes the connection down. No call is marshaled while it holds the send lock. It wakes
// the calls only after it has drained the queues and replaced every MR that was in use. Each call
// then finds its memory fenced (S16).
func (t *Transport) uninstall(cn *conn) {
	t.window.reset(0, false)
	t.send.Lock()
	defer t.send.Unlock()
	t.verifyTakingDown()
	cn.fail(ErrClosed)
	switch {
	case errors.Is(cn.err, errIdle):
		t.setState(StateIdle, nil)
		t.recordEvent("closed while idle", nil)
	case errors.Is(cn.err, errReturn):
		t.setState(StateConnecting, nil)
		t.recordEvent("closed to return to the preferred address", nil)
	default:
		t.setState(StateDisconnected, cn.err)
		t.recordEvent("disconnected", cn.err)
	}
	t.trace.Add(trace.Event{Kind: trace.Disconnect})
	t.closeConn(cn)
	t.recoverMRs(cn)
	for _, s := range t.slots {
		s.connectionEnded()
	}
	close(cn.down)
}

// logHistory logs the last trace events of a connection that failed.
func (t *Transport) logHistory(err error) {
	if errors.Is(err, io.EOF) || errors.Is(err, ErrClosed) || t.trace == nil ||
		time.Since(t.historyLogged) < historyPause {
		return
	}
	t.historyLogged = time.Now()
	for _, e := range t.trace.Last(historyEvents) {
		t.log.Info("trace event before connection loss", "trace", t.trace.Text(&e))
	}
}

// watch ends connections whose calls exceed their timeout, whose server is dead, or which are idle.
// It also ends calls that exceed the timeout of a soft mount.
func (t *Transport) watch() {
	defer t.workers.Done()
	every := t.checkInterval()
	tick := time.NewTicker(every)
	defer tick.Stop()
	stops := running.NewDetector(every, stopGrace, time.Now())
	for {
		select {
		case <-t.closing:
			return
		case <-tick.C:
		}
		t.check(stops, time.Now())
	}
}

// checkInterval returns the interval at which watch checks the timeouts: at most half of the
// shortest reply timeout and a quarter of the other timeouts, within 1 ms and 1 s.
func (t *Transport) checkInterval() time.Duration {
	every := t.replyTimeout(2) / 2
	if t.cfg.KeepAlive > 0 {
		every = min(every, t.cfg.KeepAlive/4)
	}
	if t.cfg.IdleTimeout > 0 {
		every = min(every, t.cfg.IdleTimeout/4)
	}
	return min(max(every, time.Millisecond), time.Second)
}

// check checks the timeouts, unless stops reports a stop of the process.
func (t *Transport) check(stops *running.Detector, now time.Time) {
	lost, check := stops.Tick(now)
	if lost > 0 {
		t.stopped.Add(int64(lost))
		t.log.Info("process was stopped; timeouts leave out this time", "time", lost, "server", t.Address())
	}
	t.noFuture()
	if check {
		t.checkTimeouts()
	}
}

// noFuture moves times that were taken between a stop of the process and its detection back to the
// current time. Otherwise the timeouts that begin at these times would last longer by the stop.
func (t *Transport) noFuture() {
	now := t.now()
	for _, s := range t.slots {
		s.mu.Lock()
		s.sentRunning, s.startedAt.running = min(s.sentRunning, now), min(s.startedAt.running, now)
		s.mu.Unlock()
	}
	t.waiters.noFuture(now)
	limit := func(at *atomic.Int64) {
		if v := at.Load(); v > now {
			at.CompareAndSwap(v, now)
		}
	}
	limit(&t.lastCall)
	if cn := t.conn.Load(); cn != nil {
		limit(&cn.lastReceived)
	}
}

// stopGrace is the time after a stop of the process in which no call and no connection times out.
// In this time the replies that arrived during the stop are handled.
const stopGrace = time.Second

func (t *Transport) checkTimeouts() {
	now := t.now()
	// The waiters come first: a call that ends gives its slot to one of them.
	t.waiters.expire(func(startedAt callStart) bool { return t.softExpired(startedAt, now) })
	for _, s := range t.slots {
		t.checkSlot(s, now)
	}
	t.checkConnection()
}

func (t *Transport) checkSlot(s *slot, now int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch s.state {
	case slotSent, slotFencing, slotAbandoned:
		if waited := time.Duration(now - s.sentRunning); waited > t.replyTimeout(s.sends) && s.conn != nil &&
			!s.lateDone && !isClosed(s.conn.ended) {
			t.stats.Timeouts.Add(1)
			t.trace.Add(trace.Event{Kind: trace.Timeout, XID: s.xid})
			s.conn.fail(&TimeoutError{Server: t.Address().String(), After: waited})
		}
	}
	if s.state != slotIdle && t.softExpired(s.startedAt, now) {
		s.expired.Store(true)
		s.wakeCaller()
	}
}

// The timeout of the first replay of a call is replayTimeoutPercent of Config.Timeout, and at least
// minReplayTimeout if Config.Timeout is not shorter. A server that has just started may need some
// time for the replays of many calls. A stock siw server can lose its listener when connections end
// soon after their start.
const (
	replayTimeoutPercent = 8
	minReplayTimeout     = 2 * time.Second
)

// replyTimeout returns how long a call that was sent the given number of times may wait for a reply
// before its connection is dropped. The timeout of the first replay is short. Each further replay
// doubles it, up to Config.Timeout. A server that still executes the first copy of a call discards
// the replay and never answers it (knfsd does).
func (t *Transport) replyTimeout(sends int) time.Duration {
	if sends <= 1 {
		return t.cfg.Timeout
	}
	d := max(t.cfg.Timeout*replayTimeoutPercent/100, minReplayTimeout)
	for ; sends > 2 && d < t.cfg.Timeout; sends-- {
		d *= 2
	}
	return min(d, t.cfg.Timeout)
}

// checkConnection sends a keepalive NULL call when no message has arrived for KeepAlive. It ends
// the connection when no message arrives for KeepAlive after that call. It closes the connection
// after IdleTimeout without a call, and earlier to return to the preferred address.
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
	if t.mayReturn(now) && t.window.closeIfUnused(gen) {
		cn.fail(errReturn)
		return
	}
	silent := time.Duration(now - cn.lastReceived.Load())
	if t.cfg.KeepAlive <= 0 || silent < t.cfg.KeepAlive {
		return
	}
	if cn.pingsInFlight.Load() == 0 {
		t.startPing(cn)
		return
	}
	// A keepalive call is pending. If it was not sent for lack of a credit, only the timeouts of
	// the other calls apply.
	s := t.slots[t.cfg.Slots]
	s.mu.Lock()
	sent := s.state == slotSent && s.conn == cn
	waited := time.Duration(now - s.sentRunning)
	s.mu.Unlock()
	if sent && waited > t.cfg.KeepAlive && silent >= waited {
		cn.fail(&TimeoutError{Server: t.Address().String(), After: silent})
	}
}

// The keepalive call is NULL of NFSv3.
const (
	pingProgram = 100003
	pingVersion = 3
)

// startPing sends a keepalive call. The first call of every connection is a keepalive call: it
// detects a server that accepts connections and does not reply, and its reply grants the credits
// for all other calls.
func (t *Transport) startPing(cn *conn) {
	if !t.beginCall() {
		return
	}
	cn.pingsInFlight.Add(1)
	go t.ping(cn)
}

func (t *Transport) ping(cn *conn) {
	defer t.calls.Done()
	defer cn.pingsInFlight.Add(-1)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	stop := make(chan struct{})
	defer close(stop)
	go func() { // the ping ends with its connection
		select {
		case <-cn.ended:
		case <-t.closing:
		case <-stop:
		}
		cancel()
	}()
	var s *slot
	turn := t.pingSlot.wait(0)
	select {
	case s = <-turn.Value:
	case <-ctx.Done():
		if s = t.pingSlot.leave(turn); s != nil {
			s.putBack()
		}
		return
	}
	t.stats.KeepAlives.Add(1)
	m := sunrpc.Message{Prog: pingProgram, Vers: pingVersion, Cred: sunrpc.AppendAuthNone(nil)}
	t.trace.Add(trace.Event{Kind: trace.Ping})
	if err := t.run(ctx, s, &m, t.startCall()); err != nil {
		t.log.Debug("keepalive call failed", "server", t.Address(), "error", err)
	}
}

// verifyFenced checks that an ended call has no valid keys, if the invariant checks are on.
func (s *slot) verifyFenced() {
	if !selfcheck.On() {
		return
	}
	s.t.send.RLock()
	defer s.t.send.RUnlock()
	if n := len(s.mrs.Registered()); n > 0 {
		selfcheck.Failf("RPC %#x ends with %d registered MRs", s.xid, n)
	}
}

// verifySending checks that the caller, which maps or unmaps, holds the send lock, if the invariant
// checks are on (S16).
func (t *Transport) verifySending() {
	if selfcheck.On() && t.send.TryLock() {
		t.send.Unlock()
		selfcheck.Failf("memory is mapped or unmapped without the send lock")
	}
}

// verifyTakingDown checks that the worker holds the send lock for writing, if the invariant checks
// are on (S16).
func (t *Transport) verifyTakingDown() {
	if selfcheck.On() && t.send.TryRLock() {
		t.send.RUnlock()
		selfcheck.Failf("a connection is changed without the send lock")
	}
}
