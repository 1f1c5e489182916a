package xprt

import (
	"context"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/internal/leakcheck"
	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/memreg"
	"github.com/nfsrdmad/nfsrdmad/pkg/stats"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/trace"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// Recovery says what becomes of a call that the server does not answer (nfs(5)).
type Recovery uint8

// Recovery modes.
const (
	Hard    Recovery = iota // wait for as long as it takes
	Soft                    // EIO after Timeout × (Retrans + 1)
	SoftErr                 // ETIMEDOUT after the same
)

// Defaults, and limits that Config is held to.
const (
	DefaultSlots       = 128
	MaxSlots           = 1024
	DefaultInlineBytes = 4096
	MinInlineBytes     = 1024
	MaxInlineBytes     = 65536
	DefaultTimeout     = 60 * time.Second
	DefaultKeepAlive   = 10 * time.Second
	DefaultIdleTimeout = 5 * time.Minute
	DefaultTraceEvents = 1024

	// recvSlack is the least size of a Receive buffer in octets: stock Linux servers send messages
	// longer than they promised.
	recvSlack = 16 << 10
	// longBytes is the size of the buffers for long calls and replies in octets.
	longBytes = 1<<20 + 16<<10
	// fenceTimeout is how long an interrupted call waits for its LOCAL_INV before the connection is
	// dropped instead.
	fenceTimeout = time.Second
)

// A Config says how to reach one server. Zero fields take their defaults.
type Config struct {
	Provider verbs.Provider
	Addr     netip.AddrPort
	Slots    int // RPCs at a time; the credits asked for
	// InlineBytes is the inline threshold offered in both directions, a multiple of 1024.
	InlineBytes int
	// Timeout for one try of a call; a call that takes longer ends the connection. Retrans is the
	// tries after the first on soft mounts.
	Timeout  time.Duration
	Retrans  int
	Recovery Recovery
	// WritePad offers room for the XDR pad behind write chunks, for old servers that write it
	// (S20).
	WritePad bool
	// ConnectTimeout bounds one attempt to connect; ReconnectMin doubles up to ReconnectMax between
	// attempts.
	ConnectTimeout             time.Duration
	ReconnectMin, ReconnectMax time.Duration
	// NudgeAfter is how long the first reply of a connection may take before the server is nudged
	// by a zero-length RDMA Write: a stock siw can leave the first FPDU unread until more octets
	// come.
	NudgeAfter time.Duration
	// KeepAlive is the silence after which the server is asked for a sign of life, and the wait for
	// it after which the connection is dropped. Negative: never.
	KeepAlive time.Duration
	// IdleTimeout is how long a connection is kept without a call; the next call makes a new one.
	// Negative: for ever.
	IdleTimeout time.Duration
	// TraceEvents is the size of the ring of trace events; 0 is none.
	TraceEvents int
	Logger      hclog.Logger
	Name        string // of the mount, for logs
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
	if c.Slots < memreg.MinSlots || c.Slots > MaxSlots {
		return fmt.Errorf("xprt: slots=%d is out of range %d to %d", c.Slots, memreg.MinSlots, MaxSlots)
	}
	if c.InlineBytes < MinInlineBytes || c.InlineBytes > MaxInlineBytes || c.InlineBytes%1024 != 0 {
		return fmt.Errorf("xprt: inline=%d is not a multiple of 1024 from %d to %d", c.InlineBytes, MinInlineBytes,
			MaxInlineBytes)
	}
	return nil
}

// A Transport carries RPCs to one server over one connection at a time. Safe for concurrent use.
type Transport struct {
	cfg    Config
	log    hclog.Logger
	stats  counters
	mrs    memreg.Counters
	trace  *trace.Ring // nil: off
	window window
	slots  []*slot // the last one is for liveness calls
	free   chan *slot
	arena  []byte // the slots' send buffers
	long   *membuf.Pool
	epoch  time.Time

	pingSlot chan *slot
	lastCall atomic.Int64 // when the last call began or ended, in nanoseconds after epoch
	waiters  waiters      // calls that wait for a slot

	xidMask, xidStep uint32
	payload          atomic.Int64 // largest payload in octets, after the first connection

	send sync.RWMutex         // see doc.go
	conn atomic.Pointer[conn] // replaced with send held for writing, taken away with stateMu held

	// Owned by whoever connects: Connect, and then the worker.
	adapter   *adapter
	padList   memreg.List // the write-pad MR (S20)
	storyTold time.Time

	closing   chan struct{}
	closeOnce sync.Once
	workers   sync.WaitGroup
	calls     sync.WaitGroup

	stateMu sync.Mutex
	closed  bool        // guarded by stateMu: no call begins any more
	running bool        // guarded by stateMu
	state   string      // guarded by stateMu
	since   time.Time   // guarded by stateMu
	lastErr error       // guarded by stateMu
	ended   qpTotals    // guarded by stateMu
	story   []ConnEvent // guarded by stateMu
}

// States of a transport.
const (
	StateConnected    = stats.Connected
	StateConnecting   = "connecting"
	StateDisconnected = "disconnected"
	StateIdle         = "idle" // until the next call
	StateClosed       = "closed"
)

// New makes a transport; nothing is sent before Connect. Close it in the end.
func New(cfg Config) (*Transport, error) {
	if err := cfg.fill(); err != nil {
		return nil, err
	}
	t := &Transport{cfg: cfg, log: cfg.Logger, closing: make(chan struct{}), state: StateDisconnected,
		since: time.Now(), epoch: time.Now()}
	t.trace = trace.NewRing(cfg.TraceEvents, func(s uint8) string { return verbs.Status(s).String() })
	t.window.wanted = make(chan struct{}, 1)
	n := cfg.Slots + 1
	arena, err := membuf.Alloc(n * cfg.InlineBytes)
	if err != nil {
		return nil, fmt.Errorf("xprt: send buffers: %w", err)
	}
	t.arena = arena
	t.long = membuf.NewPool(longBytes, 2*cfg.Slots)
	t.free, t.pingSlot = make(chan *slot, cfg.Slots), make(chan *slot, 1)
	t.xidStep = 1 << bits.Len32(uint32(n-1))
	t.xidMask = t.xidStep - 1
	for i := range n {
		xid := rand.Uint32()&^t.xidMask | uint32(i)
		s := newSlot(t, uint32(i), xid, arena[i*cfg.InlineBytes:(i+1)*cfg.InlineBytes:(i+1)*cfg.InlineBytes])
		if i == cfg.Slots {
			s.ping, s.home = true, t.pingSlot
		}
		t.slots = append(t.slots, s)
		s.home <- s
	}
	return t, nil
}

// Connect makes the first connection, so that its error reaches whoever mounts, and starts the
// worker that makes all later ones. It may be tried again after an error, by one goroutine at a
// time, and not beside Close.
func (t *Transport) Connect(ctx context.Context) error {
	cn, err := t.dial(ctx)
	if err != nil {
		t.dropAdapter()
		t.setState(StateDisconnected, err)
		return err
	}
	t.stateMu.Lock()
	start := !t.closed && !t.running
	if start {
		t.running = true
		t.workers.Add(2)
	}
	t.stateMu.Unlock()
	if !start {
		t.release(cn)
		t.dropAdapter()
		return ErrClosed
	}
	go t.connectWorker(cn)
	go t.watch()
	return nil
}

// MaxPayload is the largest ArgData or ResultData in octets that the device conveys (S18). Known
// after Connect.
func (t *Transport) MaxPayload() int { return int(t.payload.Load()) }

// Close ends all calls with ErrClosed, fences their memory, and releases everything. Idempotent.
func (t *Transport) Close() error {
	t.stateMu.Lock()
	t.closed = true
	t.stateMu.Unlock()
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
	t.stateMu.Lock()
	defer t.stateMu.Unlock()
	if t.state != state {
		t.state, t.since = state, time.Now()
	}
	if err != nil {
		t.lastErr = err
	}
}

// enterCall counts a call in, unless the transport is closed.
func (t *Transport) enterCall() bool {
	t.stateMu.Lock()
	defer t.stateMu.Unlock()
	if t.closed {
		return false
	}
	t.calls.Add(1)
	return true
}

// Call performs one RPC. When it returns, whatever the outcome, the server can no longer reach any
// memory of m. Errors: *InterruptedError, *TimeoutError, *ServerError, *ProtocolError, ErrClosed,
// and those of sunrpc.ParseReply.
func (t *Transport) Call(ctx context.Context, m *sunrpc.Message) error {
	if err := t.checkCall(m); err != nil {
		return err
	}
	if !t.enterCall() {
		return ErrClosed
	}
	defer t.calls.Done()
	t.lastCall.Store(t.now())
	came := time.Now()
	s, err := t.takeSlot(ctx, m, came)
	if err == nil {
		err = t.run(ctx, s, m, came)
		t.lastCall.Store(t.now())
	}
	if _, given := err.(*InterruptedError); given {
		t.stats.interrupts.Add(1)
	}
	return err
}

// now is the time in nanoseconds after the epoch.
func (t *Transport) now() int64 { return int64(time.Since(t.epoch)) }

// tooLong reports whether a call that came then has waited for longer than the mount allows.
func (t *Transport) tooLong(came, now time.Time) bool {
	return t.cfg.Recovery != Hard && now.Sub(came) > t.softTime()
}

// softTime is how long a call of a soft mount may take.
func (t *Transport) softTime() time.Duration { return t.cfg.Timeout * time.Duration(t.cfg.Retrans+1) }

func (t *Transport) takeSlot(ctx context.Context, m *sunrpc.Message, came time.Time) (*slot, error) {
	select {
	case s := <-t.free:
		return s, nil
	default:
	}
	w := t.waiters.add(ctx, m, came)
	defer t.waiters.remove(w)
	var over <-chan time.Time
	if t.cfg.Recovery != Hard {
		timer := time.NewTimer(t.softTime())
		defer timer.Stop()
		over = timer.C
	}
	select {
	case s := <-t.free:
		return s, nil
	case <-over:
		return nil, t.softError(came)
	case <-ctx.Done():
		return nil, &InterruptedError{Cause: context.Cause(ctx)}
	case <-t.closing:
		return nil, ErrClosed
	}
}

// run performs a call that came then on slot s, which it ends, or leaves to the late reply.
func (t *Transport) run(ctx context.Context, s *slot, m *sunrpc.Message, came time.Time) error {
	s.begin(ctx, m, came)
	var pause time.Duration // before the next try, when memory was short
	for {
		if err := t.waitCredit(ctx, s); err != nil {
			s.end()
			return err
		}
		sent, err := t.transmit(s)
		switch e := err.(type) {
		case nil:
		case *shortageError:
			if pause == 0 {
				t.log.Warn("no memory to send an RPC: it is tried until there is some; fewer slots= need less",
					"error", e.error, "server", t.cfg.Addr)
			}
			pause = min(max(2*pause, marshalRetry), marshalRetryMax)
			t.window.leave(s)
			timer := time.NewTimer(pause)
			t.waitRoom(ctx, s, timer.C, nil, nil)
			timer.Stop()
			continue
		case *queueFullError:
			t.waitRoom(ctx, s, nil, e.room, e.dead)
			continue
		default:
			s.end()
			return err
		}
		if !sent {
			continue
		}
		switch t.awaitReply(ctx, s) {
		case slotDone:
			s.checkFenced()
			err := s.results(m)
			s.end()
			return err
		case slotLost: // once more
		case slotAbandoned:
			t.trace.Add(trace.Event{Kind: trace.Interrupt, XID: m.XID})
			return &InterruptedError{Cause: context.Cause(ctx)}
		}
	}
}

// waitRoom waits until a call that could not be posted is to be tried again, or to end.
func (t *Transport) waitRoom(ctx context.Context, s *slot, timer <-chan time.Time, room, dead <-chan struct{}) {
	s.setNoRoom(true)
	defer s.setNoRoom(false)
	select {
	case <-timer:
	case <-room:
	case <-dead:
	case <-s.wake: // the time of a soft mount is over, perhaps
	case <-ctx.Done():
	case <-t.closing:
	}
}

func (t *Transport) checkCall(m *sunrpc.Message) error {
	if n := max(len(m.ArgData), len(m.ResultData)); n > t.MaxPayload() && t.MaxPayload() > 0 {
		return &ProtocolError{Reason: fmt.Sprintf("payload of %d octets exceeds the device's %d", n, t.MaxPayload())}
	}
	if m.ArgDataPos < 0 || m.ArgDataPos > len(m.Args) || m.ArgDataPos%4 != 0 || m.MaxResult < 0 {
		return &ProtocolError{Reason: "malformed message: the data does not lie inside the arguments"}
	}
	return nil
}

// waitCredit returns nil when s holds a credit of a connection.
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
		return t.softError(s.started)
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

func (t *Transport) softError(came time.Time) error {
	e := &TimeoutError{Server: t.cfg.Addr.String(), After: time.Since(came), Errno: syscall.EIO}
	if t.cfg.Recovery == SoftErr {
		e.Errno = syscall.ETIMEDOUT
	}
	t.stateMu.Lock()
	if t.lastErr != nil {
		e.Last = t.lastErr.Error()
	}
	t.stateMu.Unlock()
	return e
}

// awaitReply returns slotDone, slotLost, or, when the caller gave up and its memory is fenced,
// slotAbandoned: then the slot is no longer the caller's.
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

// interrupt fences a call that its caller gives up (S21).
func (t *Transport) interrupt(s *slot) slotState {
	t.send.RLock()
	s.mu.Lock()
	cn, st := s.conn, s.state
	if st == slotSent {
		s.state, s.msg = slotAbandoned, nil
	}
	s.mu.Unlock()
	switch st {
	case slotSent:
		s.mrs.Abandon()
		if err := s.invalidate(cn); err != nil {
			cn.fail(err)
		}
	case slotDone, slotFencing:
	default: // lost: nothing is on its way
		t.send.RUnlock()
		s.end()
		return slotAbandoned
	}
	t.send.RUnlock()

	timer := time.NewTimer(fenceTimeout)
	defer timer.Stop()
	for {
		if st, ok := s.leave(); ok {
			return st
		}
		select {
		case <-s.wake:
		case <-timer.C:
			cn.fail(&ProtocolError{Reason: fmt.Sprintf("LOCAL_INV did not complete within %v", fenceTimeout)})
		}
	}
}

// leave reports whether an interrupted call may return: it was answered after all, or it is fenced.
func (s *slot) leave() (slotState, bool) {
	s.mu.Lock()
	if s.state == slotDone {
		s.mu.Unlock()
		return slotDone, true
	}
	if s.state != slotAbandoned || !s.fenced || s.sendBusy {
		s.mu.Unlock()
		return 0, false
	}
	s.left = true
	late := s.late
	s.mu.Unlock()
	if late {
		s.end()
	}
	return slotAbandoned, true
}
