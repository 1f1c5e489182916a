package xprt

import (
	"context"
	"fmt"
	"math/bits"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/internal/selfcheck"
	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/memreg"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/ledger"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/trace"
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
)

// A Config configures a Transport. Zero fields select the defaults.
type Config struct {
	Provider verbs.Provider
	Addr     netip.AddrPort
	// Servers are the addresses of a server that has several. Addr is then ignored. An attempt to
	// connect that fails continues with the next address.
	Servers *Addresses
	Index   uint32 // index of the transport in its mount, for sunrpc.CallID and the preferred address
	Slots   int    // RPCs in flight, and the credits requested; MinSlots to MaxSlots
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
	// ConnectTimeout is the time for one attempt to connect. The pause between attempts is random.
	// Its limit is ReconnectMin at first and grows up to ReconnectMax (pace.Backoff).
	ConnectTimeout             time.Duration
	ReconnectMin, ReconnectMax time.Duration
	// ConnectLimits bound the rate of connects of all transports that share them; nil for none.
	ConnectLimits *ConnectLimits
	// Admitted: the caller has waited for ConnectLimits, for the first attempt of Connect at the
	// preferred address. The caller does so for all transports of a mount together.
	Admitted bool
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
	// Observe, if not nil, is called for each call that has ended, keepalive calls included, before
	// the call returns. It runs on the goroutine of the caller and must not block.
	Observe func(ctx context.Context, c Ended)
	Logger  hclog.Logger // default: no logs
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
	if c.Servers == nil {
		c.Servers = NewAddresses(c.Addr)
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
	stats  Counters[atomic.Uint64]
	mrs    memreg.Counters
	trace  *trace.Ring // nil if tracing is off
	window window
	slots  []*slot // the last one is for keepalive calls
	// waitsForTurn is set while the transport waits for Config.ConnectLimits.
	waitsForTurn atomic.Bool
	free         *slotList
	arena        []byte // send buffers of the slots
	long         *membuf.Pool
	epoch        time.Time
	connectNanos atomic.Int64 // nanoseconds spent connecting
	// stopped is the time in nanoseconds in which the process was stopped (SIGSTOP). Only watch
	// changes it.
	stopped atomic.Int64

	pingSlot *slotList
	reserved reserved
	lastCall atomic.Int64 // start or end of the last call, as returned by now
	waiters  waiters

	xidMask, xidStep uint32
	payload          atomic.Int64 // largest payload in bytes; 0 before the first connection
	address          atomic.Int32 // index of the address of the connection or of the last attempt
	ready            atomic.Bool  // see Ready
	link             atomic.Pointer[Link]

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
	StateConnected    = "connected"
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
	t.free, t.pingSlot = newSlotList(cfg.Slots), newSlotList(1)
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
		s.freeList.put(s)
	}
	return t, nil
}

// Connect makes the first connection and starts the worker, which makes all later ones. It tries
// each address once and returns the error of the first attempt, so that a mount fails at once.
// After an error Connect may be called again, by one goroutine at a time, and not concurrently with
// Close.
func (t *Transport) Connect(ctx context.Context) error {
	cn, err := t.dial(ctx, t.cfg.Admitted)
	for n := 1; err != nil && ctx.Err() == nil && n < len(t.cfg.Servers.all); n++ {
		t.recordEvent("connect failed", err)
		var next error
		if cn, next = t.dial(ctx, false); next == nil {
			err = nil
		}
	}
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
			selfcheck.Track(selfcheck.Slot, -1)
		}
		t.long.Close()
		membuf.Free(t.arena)
		t.setState(StateClosed, nil)
	})
	return nil
}

// Ready reports whether a new call does not have to wait for a server that does not answer: the
// transport is connected, or it is idle and connects for the call. Safe for concurrent use.
func (t *Transport) Ready() bool { return t.ready.Load() }

func (t *Transport) setState(state string, err error) {
	t.status.Lock()
	defer t.status.Unlock()
	if t.status.state != state {
		t.status.state, t.status.since = state, time.Now()
	}
	t.ready.Store(state == StateConnected || state == StateIdle)
	if err != nil {
		t.status.lastErr = err
	}
}

// now returns the nanoseconds after epoch in which the process ran. Timeouts use this time. When
// watch finds that the process was stopped, the value falls by the length of the stop.
func (t *Transport) now() int64 { return t.nowAt(ledger.Now()) }

// nowAt returns what now returns at the given time.
func (t *Transport) nowAt(now ledger.Time) int64 {
	return int64(now-ledger.At(t.epoch)) - t.stopped.Load()
}
