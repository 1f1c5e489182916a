package xprt

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/internal/leakcheck"
	"github.com/nfsrdmad/nfsrdmad/internal/running"
	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/memreg"
	"github.com/nfsrdmad/nfsrdmad/pkg/stats"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/trace"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// A Recovery selects what happens to a call that the server does not answer (nfs(5)).
type Recovery uint8

// Recovery modes.
const (
	Hard    Recovery = iota // retry forever
	Soft                    // EIO after Timeout × (Retrans + 1)
	SoftErr                 // ETIMEDOUT after the same time
)

// Defaults and limits of Config.
const (
	DefaultSlots       = 128
	MinSlots           = memreg.MinSlots
	MaxSlots           = 1024
	DefaultInlineBytes = 4096
	MinInlineBytes     = 1024  // RFC 8797 §4
	MaxInlineBytes     = 65536 // RFC 8797 §4 allows 256 KiB, but each slot has its buffers
	DefaultTimeout     = 60 * time.Second
	DefaultKeepAlive   = 10 * time.Second
	DefaultIdleTimeout = 5 * time.Minute
	DefaultTraceEvents = 1024

	// recvSlack is the smallest size of a Receive buffer in bytes. Stock Linux servers send longer
	// messages than they announce.
	recvSlack = 16 << 10
	// longBytes is the size in bytes of the buffers for long calls and replies.
	longBytes = 1<<20 + 16<<10
	// An interrupted call waits for its LOCAL_INVs for fenceMin, and fencePerByte for each byte
	// that may be in front of them on a link of 1 Mbit/s. Then the connection is dropped instead.
	fenceMin     = time.Second
	fencePerByte = 8 * time.Microsecond
)

// A Config configures a Transport. Zero fields select the defaults.
type Config struct {
	Provider verbs.Provider
	Addr     netip.AddrPort
	Index    uint32 // index of the transport in its mount, for sunrpc.CallID
	Slots    int    // RPCs in flight, and the credits requested; MinSlots to MaxSlots
	// InlineBytes is the inline threshold in both directions, a multiple of 1024 from
	// MinInlineBytes to MaxInlineBytes.
	InlineBytes int
	// Timeout is the time for one attempt of a call. A call that exceeds it ends the connection.
	// Retrans is the number of further attempts on soft mounts.
	Timeout  time.Duration
	Retrans  int
	Recovery Recovery
	// WritePad offers room for the XDR pad after write chunks, for old servers that write it (S20).
	WritePad bool
	// ConnectTimeout is the time for one attempt to connect. The pause between attempts is
	// ReconnectMin at first and doubles up to ReconnectMax.
	ConnectTimeout             time.Duration
	ReconnectMin, ReconnectMax time.Duration
	// NudgeAfter is the time after which a missing first reply causes a nudge, an RDMA Write of
	// zero bytes. Stock siw may leave the first FPDU unread until more data arrives.
	NudgeAfter time.Duration
	// KeepAlive is the idle time before a keepalive NULL call, and then the timeout of that call,
	// after which the connection is dropped. A negative value disables keepalive calls.
	KeepAlive time.Duration
	// IdleTimeout is the time without a call after which the connection is closed. The next call
	// makes a new one. A negative value keeps the connection.
	IdleTimeout time.Duration
	// TraceEvents is the size of the ring of trace events; 0 turns tracing off.
	TraceEvents int
	// Reserved has the XIDs of calls of an earlier process on this connection, for Repeat. Their
	// slots carry no other calls before ReleaseReserved. At most half of Slots is reserved, for the
	// XIDs that come first. New ignores and logs the other XIDs, and those of slots that do not
	// exist. Several XIDs may have one slot.
	Reserved []uint32
	Logger   hclog.Logger // default: no logs
}

func (c *Config) fill() error {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	def(&c.Timeout, DefaultTimeout)
	def(&c.ConnectTimeout, 60*time.Second)
	def(&c.ReconnectMin, 5*time.Second)
	def(&c.ReconnectMax, 60*time.Second)
	def(&c.NudgeAfter, 100*time.Millisecond)
	def(&c.KeepAlive, DefaultKeepAlive)
	def(&c.IdleTimeout, DefaultIdleTimeout)
	if c.Slots == 0 {
		c.Slots = DefaultSlots
	}
	if c.InlineBytes == 0 {
		c.InlineBytes = DefaultInlineBytes
	}
	if c.Logger == nil {
		c.Logger = hclog.NewNullLogger()
	}
	if c.Slots < MinSlots || c.Slots > MaxSlots {
		return fmt.Errorf("xprt: slots=%d is out of range; choose %d to %d", c.Slots, MinSlots, MaxSlots)
	}
	if c.InlineBytes < MinInlineBytes || c.InlineBytes > MaxInlineBytes || c.InlineBytes%1024 != 0 {
		return fmt.Errorf("xprt: inline=%d is invalid; choose a multiple of 1024 from %d to %d",
			c.InlineBytes, MinInlineBytes, MaxInlineBytes)
	}
	return nil
}

// A Transport carries RPCs to one server over one connection at a time. Safe for concurrent use.
//
//	                         Connect
//	     +------------------------------------------+
//	     |                                          v
//	disconnected --------> connecting --------> connected
//	     ^       pause over  |  ^                 |  |
//	     |                   |  |  a call waits   |  |
//	     |       failed      |  +---- idle <------+  |
//	     +-------------------+         no calls      |
//	     +-------------------------------------------+
//	             lost
//
// Close leads from any state to closed.
type Transport struct {
	cfg    Config
	log    hclog.Logger
	stats  counters
	mrs    memreg.Counters
	trace  *trace.Ring // nil if tracing is off
	window window
	slots  []*slot // the last one is for keepalive calls
	free   chan *slot
	arena  []byte // send buffers of the slots
	long   *membuf.Pool
	epoch  time.Time
	// stopped is the time in nanoseconds in which the process was stopped (SIGSTOP). Only watch
	// changes it.
	stopped atomic.Int64

	pingSlot chan *slot
	reserved reserved
	lastCall atomic.Int64 // start or end of the last call, as returned by now
	waiters  waiters

	xidMask, xidStep uint32
	payload          atomic.Int64 // largest payload in bytes; 0 before the first connection

	send sync.RWMutex         // see the package comment
	conn atomic.Pointer[conn] // set with send held for writing, cleared with status held

	// Owned by Connect, and then by the worker.
	adapter       *adapter
	padList       memreg.List // the write-pad MR (S20)
	historyLogged time.Time

	closing   chan struct{}
	closeOnce sync.Once
	workers   sync.WaitGroup
	calls     sync.WaitGroup

	status struct {
		sync.Mutex
		closed  bool      // new calls fail
		running bool      // the worker was started
		state   string    // one of the State constants
		since   time.Time // when state changed
		lastErr error
		ended   qpTotals // counters of closed queue pairs
		history []ConnEvent
	}
}

// States of a transport.
const (
	StateConnected    = stats.Connected
	StateConnecting   = "connecting"
	StateDisconnected = "disconnected"
	StateIdle         = "idle" // closed until the next call
	StateClosed       = "closed"
)

// New returns a transport without a connection. Call Connect next, and Close at the end.
func New(cfg Config) (*Transport, error) {
	if err := cfg.fill(); err != nil {
		return nil, err
	}
	t := &Transport{cfg: cfg, log: cfg.Logger, closing: make(chan struct{}), epoch: time.Now()}
	t.status.state, t.status.since = StateDisconnected, t.epoch
	t.trace = trace.NewRing(cfg.TraceEvents, func(s uint8) string { return verbs.Status(s).String() })
	t.window.wanted = make(chan struct{}, 1)
	n := cfg.Slots + 1
	arena, err := membuf.Alloc(n * cfg.InlineBytes)
	if err != nil {
		return nil, fmt.Errorf("xprt: allocate send buffers: %w", err)
	}
	t.arena = arena
	t.long = membuf.NewPool(longBytes, 2*cfg.Slots)
	t.free, t.pingSlot = make(chan *slot, cfg.Slots), make(chan *slot, 1)
	t.xidStep = 1 << bits.Len32(uint32(n-1))
	t.xidMask = t.xidStep - 1
	for i := range n {
		xid := t.randomXID(uint32(i))
		s := newSlot(t, uint32(i), xid, arena[i*cfg.InlineBytes:(i+1)*cfg.InlineBytes:(i+1)*cfg.InlineBytes])
		if i == cfg.Slots {
			s.ping, s.freeList = true, t.pingSlot
		}
		t.slots = append(t.slots, s)
	}
	t.reserve(cfg.Reserved)
	for _, s := range t.slots {
		s.freeList <- s
	}
	return t, nil
}

// Connect makes the first connection and starts the worker, which makes all later ones. It returns
// the error of the first attempt, so that a mount fails at once. After an error Connect may be
// called again, by one goroutine at a time, and not concurrently with Close.
func (t *Transport) Connect(ctx context.Context) error {
	cn, err := t.dial(ctx)
	if err != nil {
		t.dropAdapter()
		t.setState(StateDisconnected, err)
		return err
	}
	t.status.Lock()
	start := !t.status.closed && !t.status.running
	if start {
		t.status.running = true
		t.workers.Add(2)
	}
	t.status.Unlock()
	if !start {
		t.closeConn(cn)
		t.dropAdapter()
		return ErrClosed
	}
	go t.connectWorker(cn)
	go t.watch()
	return nil
}

// MaxPayload returns the largest ArgData or ResultData in bytes that the device conveys (S18), or 0
// before the first connection.
func (t *Transport) MaxPayload() int { return int(t.payload.Load()) }

// Close ends all calls with ErrClosed, fences their memory, and releases all resources. It may be
// called repeatedly.
func (t *Transport) Close() error {
	t.status.Lock()
	t.status.closed = true
	t.status.Unlock()
	t.closeOnce.Do(func() {
		close(t.closing)
		t.workers.Wait()
		t.calls.Wait()
		t.dropAdapter()
		for range t.slots {
			leakcheck.Track(leakcheck.Slot, -1)
		}
		t.long.Close()
		membuf.Free(t.arena)
		t.setState(StateClosed, nil)
	})
	return nil
}

func (t *Transport) setState(state string, err error) {
	t.status.Lock()
	defer t.status.Unlock()
	if t.status.state != state {
		t.status.state, t.status.since = state, time.Now()
	}
	if err != nil {
		t.status.lastErr = err
	}
}

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
	t.lastCall.Store(t.now())
	startedAt := t.startCall()
	s, err := t.takeSlot(ctx, m, startedAt, r)
	if err == nil {
		err = t.run(ctx, s, m, startedAt)
		t.lastCall.Store(t.now())
	}
	if err != nil {
		var interrupted *InterruptedError
		if errors.As(err, &interrupted) {
			t.stats.interrupts.Add(1)
		}
	}
	return err
}

// now returns the nanoseconds after epoch in which the process ran. Timeouts use this time. When
// watch finds that the process was stopped, the value falls by the length of the stop.
func (t *Transport) now() int64 { return int64(time.Since(t.epoch)) - t.stopped.Load() }

// A callStart is the time when a call started: for its description, and as returned by now.
type callStart struct {
	at      time.Time
	running int64
}

func (t *Transport) startCall() callStart { return callStart{time.Now(), t.now()} }

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
// slot when the slot is released becomes a new call.
func (t *Transport) takeSlot(ctx context.Context, m *sunrpc.Message, startedAt callStart, r repeat) (*slot, error) {
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
func (t *Transport) waitSlot(ctx context.Context, m *sunrpc.Message, startedAt callStart, free <-chan *slot,
	released <-chan struct{}) (*slot, error) {
	select {
	case s := <-free:
		return s, nil
	default:
	}
	w := t.waiters.add(ctx, m, startedAt)
	defer t.waiters.remove(w)
	select {
	case s := <-free:
		return s, nil
	case <-released:
		return nil, nil
	case <-w.expired:
		return nil, t.softError(startedAt.at)
	case <-ctx.Done():
		return nil, &InterruptedError{Cause: context.Cause(ctx)}
	case <-t.closing:
		return nil, ErrClosed
	}
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
			s.end()
			return err
		}
		sent, err := t.transmit(s)
		if err != nil {
			err = s.awaitFence(err)
			if !t.waitRetry(ctx, s, err, &pause) {
				s.end()
				return err
			}
			continue
		}
		if !sent {
			continue
		}
		switch t.awaitReply(ctx, s) {
		case slotDone:
			s.verifyFenced()
			err := s.results(m)
			s.end()
			return err
		case slotLost: // send again on the next connection
		case slotAbandoned:
			t.trace.Add(trace.Event{Kind: trace.Interrupt, XID: m.XID})
			return &InterruptedError{Cause: context.Cause(ctx)}
		}
	}
}

// waitRetry waits until a call that could not be posted may be retried, or must end. It reports
// false if err is final. pause is the last pause for lack of memory.
func (t *Transport) waitRetry(ctx context.Context, s *slot, err error, pause *time.Duration) bool {
	var short *shortageError
	var full *queueFullError
	switch {
	case errors.As(err, &full):
		t.waitRoom(ctx, s, nil, full.room, full.connEnded)
	case errors.As(err, &short):
		if *pause == 0 {
			t.log.Warn("no memory to send RPC, retrying; reduce slots= to need less", "error", short.error,
				"server", t.cfg.Addr)
		}
		*pause = min(max(2**pause, marshalRetry), marshalRetryMax)
		t.window.leave(s)
		timer := time.NewTimer(*pause)
		defer timer.Stop()
		t.waitRoom(ctx, s, timer.C, nil, nil)
	default:
		return false
	}
	return true
}

// waitRoom waits for one of the channels, or for an event that may end the call.
func (t *Transport) waitRoom(ctx context.Context, s *slot, timer <-chan time.Time, room, connEnded <-chan struct{}) {
	s.setNoRoom(true)
	defer s.setNoRoom(false)
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
	if n := max(len(m.ArgData), len(m.ResultData)); n > t.MaxPayload() && t.MaxPayload() > 0 {
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
	for !s.expired.Load() && !t.window.enter(s) {
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

func (t *Transport) softError(startedAt time.Time) error {
	e := &TimeoutError{Server: t.cfg.Addr.String(), After: time.Since(startedAt), Errno: syscall.EIO}
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
// slotAbandoned, the memory of the call is fenced, and the caller must not use the slot.
func (t *Transport) awaitReply(ctx context.Context, s *slot) slotState {
	for {
		select {
		case <-s.wake:
		case <-ctx.Done():
			return t.interrupt(s)
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
func (t *Transport) interrupt(s *slot) slotState {
	cn := t.abandon(s)
	if cn == nil { // lost: nothing is in flight
		s.end()
		return slotAbandoned
	}
	timeout := t.fenceTimeout()
	timer := running.AfterFunc(timeout, func() {
		cn.fail(&ProtocolError{Reason: fmt.Sprintf("LOCAL_INV did not complete within %v", timeout)})
	})
	defer timer.Stop()
	for {
		if st, ok := s.tryReturn(); ok {
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
// answered, was withdrawn, or its memory is fenced.
func (s *slot) tryReturn() (slotState, bool) {
	s.mu.Lock()
	if s.state == slotDone {
		s.mu.Unlock()
		return slotDone, true
	}
	if s.state != slotAbandoned || !s.withdrawn && (!s.fenced || s.sendBusy) {
		s.mu.Unlock()
		return 0, false
	}
	s.callerReturned = true
	ends := s.over()
	s.mu.Unlock()
	if ends {
		s.end()
	}
	return slotAbandoned, true
}
