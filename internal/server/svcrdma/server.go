package svcrdma

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// A Handler executes RPC calls. It must be safe for concurrent use.
type Handler interface {
	// ServeRPC executes the unreduced call of peer and returns the unreduced reply. reply has
	// length zero and a capacity of Config.MaxMessage bytes; a reply in this memory saves a copy.
	// call is valid only until ServeRPC returns.
	//
	// A reply of more than Config.MaxMessage bytes, or an error that wraps [ErrReplySize], results
	// in ERR_CHUNK, and the client ends the call. Any other error closes the connection, and the
	// client sends the call again on a new connection.
	//
	// ctx ends after Config.CallTimeout. ServeRPC must return soon after the end of ctx, because
	// the server releases the connection only after ServeRPC has returned. The ctx of a
	// non-idempotent call does not end with the connection, so that the reply can be cached for a
	// retransmission.
	ServeRPC(ctx context.Context, peer netip.AddrPort, call, reply []byte) ([]byte, error)
}

// ErrReplySize is returned by a Handler for a reply of more than Config.MaxMessage bytes. A
// retransmission of the call would have the same result (RFC 8166 §4.5.3).
var ErrReplySize = errors.New("reply exceeds the maximum message size")

// A ConnHandler is a Handler that is notified of the end of connections.
type ConnHandler interface {
	Handler
	// ConnClosed runs after the last call of the connection has returned.
	ConnClosed(peer netip.AddrPort)
}

// HandlerFunc is an adapter to use a function as a Handler.
type HandlerFunc func(ctx context.Context, peer netip.AddrPort, call, reply []byte) ([]byte, error)

// ServeRPC calls f.
func (f HandlerFunc) ServeRPC(ctx context.Context, peer netip.AddrPort, call, reply []byte) ([]byte, error) {
	return f(ctx, peer, call, reply)
}

// Verdict is the decision of a fault hook about a reply.
type Verdict uint8

// Verdicts.
const (
	Send       Verdict = iota
	Drop               // do not send the reply
	Disconnect         // close the connection instead
)

// Hooks inject faults for tests. The zero value has no effect.
type Hooks struct {
	// Reply runs for each reply header after the RDMA Writes were planned and before the header is
	// encoded. It may change the header.
	Reply func(h *rpcrdma.Header) Verdict
}

// Config of a server. The zero value of a field selects the default.
type Config struct {
	// Credits is the number of concurrent calls of each client, 1 to 1024. Default 64.
	Credits int
	// InlineBytes is the offered inline threshold in both directions: a multiple of 1024 from 1024
	// to
	// 65536. Default 4096.
	InlineBytes int
	// RemoteInv offers Send With Invalidate. The server uses it for a call whose segments all have
	// the same handle (RFC 8797 §4.1).
	RemoteInv bool
	// MaxMessage is the maximum size of an unreduced call or reply in bytes. Default 1 MiB + 64
	// KiB.
	MaxMessage int
	// ReadDepth is the maximum number of outstanding RDMA Reads of a connection (ORD): a power of
	// two, at most 128. Default 16.
	ReadDepth int
	// AlwaysReplyChunk uses an offered Reply chunk even if the reply fits inline, as the Linux
	// server does. RFC 8166 §3.5.3 permits both.
	AlwaysReplyChunk bool
	// MaxConns is the maximum number of connections. The server rejects others. One client address
	// can use at most half of them. Default 128.
	MaxConns int
	// CachedReplies is the maximum number of replies in the duplicate request cache, of which one
	// client address can use half. Each needs about 500 bytes. A client that does not notice the
	// loss of one of its connections for 3 s, and makes 2,000 calls a second on its other
	// connections, needs 6,000. Default 65536.
	CachedReplies int
	// MessageMemory limits the memory for the unreduced messages of all connections, in bytes. One
	// client address gets at most half of it, and the next one at most half of the rest. Calls wait
	// for memory. A call needs MaxMessage bytes for its reply, and as much again if it
	// has Read chunks. The minimum is twice MaxMessage. Default 512 MiB.
	MessageMemory int

	// IdleTimeout closes a connection without calls. A client can keep the connection with NULL
	// calls. Default 12 minutes, the maximum of the Linux server.
	IdleTimeout time.Duration
	// TransferTimeout closes a connection whose client does not answer the RDMA Reads of a call, or
	// does not accept a reply. Default 5 minutes: with all credits in use, 64 MiB pass in this
	// time.
	TransferTimeout time.Duration
	// CallTimeout limits the execution of a call by the Handler and the wait for memory. When it
	// expires, the context of the Handler ends and the connection closes. The client then sends the
	// call again, and the server executes it like a new call. Default 5 minutes.
	CallTimeout time.Duration
	// DrainTimeout limits the time from the end of Serve's context to the end of the connections.
	// In this time the server sends the replies of the calls in progress. It executes no other
	// calls: their clients send them again on the next connection. Default 0.
	DrainTimeout time.Duration
	// Draining, if not nil, is called once, when the server executes no further calls and before it
	// waits for those in progress.
	Draining func()

	// Allow lists the client addresses that may connect; empty means all.
	Allow []netip.Prefix

	Handler Handler
	Logger  hclog.Logger
	Hooks   Hooks
	// Stats, if not nil, receives the counters.
	Stats *Stats
}

// Stats holds the counters of a server. All fields except Connections only increase.
type Stats struct {
	Connections                                atomic.Int64
	Calls, CachedCalls, Discarded              atomic.Uint64
	ReadBytes, WrittenBytes                    atomic.Uint64
	ReplyChunks, RemoteInvalidates, RDMAErrors atomic.Uint64
}

// Defaults of Config for the options of a server.
const (
	DefaultMaxConns      = 128
	DefaultMessageMemory = 512 << 20 // bytes
)

// Limits and other defaults of Config.
const (
	defaultCredits    = 64
	maxCredits        = 1024
	defaultInline     = 4096
	maxInline         = 65536
	defaultMaxMessage = 1<<20 + 64<<10
	defaultReadDepth  = 16
	maxReadDepth      = 128
	defaultCached     = 1 << 16
	defaultIdle       = 12 * time.Minute
	defaultTransfer   = 5 * time.Minute
	defaultCall       = 5 * time.Minute
	acceptTimeout     = 10 * time.Second
	acceptPause       = 50 * time.Millisecond
)

func (c *Config) complete() error {
	def := func(p *int, v int) {
		if *p == 0 {
			*p = v
		}
	}
	def(&c.Credits, defaultCredits)
	def(&c.InlineBytes, defaultInline)
	def(&c.MaxMessage, defaultMaxMessage)
	def(&c.ReadDepth, defaultReadDepth)
	def(&c.MaxConns, DefaultMaxConns)
	def(&c.CachedReplies, defaultCached)
	def(&c.MessageMemory, max(DefaultMessageMemory, 2*c.MaxMessage))
	defTime := func(p *time.Duration, v time.Duration) {
		if *p == 0 {
			*p = v
		}
	}
	defTime(&c.IdleTimeout, defaultIdle)
	defTime(&c.TransferTimeout, defaultTransfer)
	defTime(&c.CallTimeout, defaultCall)
	if c.Logger == nil {
		c.Logger = hclog.NewNullLogger()
	}
	if c.Stats == nil {
		c.Stats = new(Stats)
	}
	switch {
	case c.Handler == nil:
		return errors.New("svcrdma: Config.Handler is missing")
	case c.Credits < 1 || c.Credits > maxCredits:
		return fmt.Errorf("svcrdma: %d credits: must be 1 to %d", c.Credits, maxCredits)
	case c.InlineBytes < rpcrdma.DefaultInline || c.InlineBytes > maxInline || c.InlineBytes%1024 != 0:
		return fmt.Errorf("svcrdma: inline threshold of %d bytes: must be a multiple of 1024 from %d to %d",
			c.InlineBytes, rpcrdma.DefaultInline, maxInline)
	case c.MaxMessage < c.InlineBytes:
		return fmt.Errorf("svcrdma: MaxMessage of %d bytes: must be at least the inline threshold of %d", c.MaxMessage,
			c.InlineBytes)
	case c.ReadDepth < 1 || c.ReadDepth > maxReadDepth || c.ReadDepth&(c.ReadDepth-1) != 0:
		return fmt.Errorf("svcrdma: read depth of %d: must be a power of two from 1 to %d", c.ReadDepth, maxReadDepth)
	case c.MaxConns < 1 || c.CachedReplies < 1:
		return errors.New("svcrdma: MaxConns and CachedReplies must be positive")
	case c.MessageMemory < 2*c.MaxMessage:
		return fmt.Errorf("svcrdma: MessageMemory of %d bytes: must be at least twice MaxMessage of %d",
			c.MessageMemory,
			c.MaxMessage)
	case c.IdleTimeout < 0 || c.TransferTimeout < 0 || c.CallTimeout < 0 || c.DrainTimeout < 0:
		return errors.New("svcrdma: timeouts must not be negative")
	}
	return nil
}

// allows reports whether a client address may connect.
func (c *Config) allows(a netip.Addr) bool {
	return len(c.Allow) == 0 || slices.ContainsFunc(c.Allow, func(p netip.Prefix) bool {
		return p.Contains(a.WithZone(""))
	})
}

type server struct {
	cfg        Config
	drc        *drc
	fatal      *fatalCalls
	mem        *memBudget
	conns      *connCount
	inProgress callCount
	log        hclog.Logger
}

// Serve serves connections of l until ctx ends or l is closed. It then waits for the calls in
// progress, at most Config.DrainTimeout, and ends all connections. It returns after all resources
// are released. The caller closes l. The error is nil after the end of ctx and after the close of
// l.
func Serve(ctx context.Context, l verbs.Listener, cfg Config) error {
	if err := cfg.complete(); err != nil {
		return err
	}
	s := &server{cfg: cfg, drc: newDRC(cfg.CachedReplies), fatal: newFatalCalls(),
		mem: newMemBudget(cfg.MessageMemory / cfg.MaxMessage), conns: newConnCount(cfg.MaxConns), log: cfg.Logger}
	s.inProgress.ended = make(chan struct{}, 1)
	connCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var conns sync.WaitGroup
	defer conns.Wait()
	defer cancel()
	defer func() {
		s.inProgress.draining.Store(true)
		if cfg.Draining != nil {
			cfg.Draining()
		}
		s.inProgress.wait(cfg.DrainTimeout)
	}()
	for {
		req, err := l.Accept(ctx)
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return nil
			}
			s.log.Warn("accept failed", "listener", l.Addr(), "error", err)
			select { // a shortage of descriptors or memory may be temporary
			case <-time.After(acceptPause):
			case <-ctx.Done():
			}
			continue
		}
		client := req.RemoteAddr().Addr().Unmap()
		if !s.cfg.allows(client) {
			s.log.Warn("connection refused: address is not allowed", "peer", req.RemoteAddr())
			conns.Go(func() { _ = req.Reject(nil) })
			continue
		}
		if !s.conns.admit(client) && !(s.endSilent(client) && s.conns.admit(client)) {
			s.log.Warn("connection refused: too many connections", "peer", req.RemoteAddr(), "limit", s.conns.max,
				"limit_of_a_client", s.conns.maxOwn)
			conns.Go(func() { _ = req.Reject(nil) })
			continue
		}
		conns.Go(func() {
			leave := sync.OnceFunc(func() { s.conns.leave(client) })
			defer leave()
			s.serveConn(connCtx, req, leave)
		})
	}
}

// silentGrace is the minimum age at which endSilent ends a connection.
const silentGrace = 2 * time.Second

// endSilent ends the oldest connection without any call, so that a full server can admit client. If
// client has reached its share, endSilent ends a connection of client. It returns false if it finds
// no connection.
func (s *server) endSilent(client netip.Addr) bool {
	ownOnly := s.conns.shareUsed(client)
	var oldest *conn
	s.mem.mu.Lock()
	for c := range s.mem.mu.conns {
		if !c.called.Load() && c.ctx.Err() == nil && c.age() > silentGrace && (!ownOnly || c.addr == client) &&
			(oldest == nil || c.startedAt.Before(oldest.startedAt)) {
			oldest = c
		}
	}
	s.mem.mu.Unlock()
	if oldest == nil {
		return false
	}
	oldest.cancel(errSilent)
	oldest.leave()
	return true
}

// A callCount counts the calls in progress of all connections.
type callCount struct {
	n        atomic.Int64
	draining atomic.Bool
	ended    chan struct{} // capacity 1: n became zero while draining
}

// begin counts a call. It returns false if the server executes no more calls.
func (c *callCount) begin() bool {
	c.n.Add(1) // before the check, so that drain sees each call that passes the check
	if c.draining.Load() {
		c.end()
		return false
	}
	return true
}

func (c *callCount) end() {
	if c.n.Add(-1) == 0 && c.draining.Load() {
		select {
		case c.ended <- struct{}{}:
		default:
		}
	}
}

// wait waits for the calls in progress until the timeout. draining is set, so no further call
// begins.
func (c *callCount) wait(timeout time.Duration) {
	expired := time.After(timeout)
	for c.n.Load() > 0 {
		select {
		case <-c.ended:
		case <-expired:
			return
		}
	}
}

// A connCount limits the number of connections in total and per client address.
type connCount struct {
	max, maxOwn int

	mu struct { // guards its fields
		sync.Mutex
		all int
		own map[netip.Addr]int // by client; no value is zero
	}
}

func newConnCount(limit int) *connCount {
	c := &connCount{max: limit, maxOwn: (limit + 1) / 2}
	c.mu.own = make(map[netip.Addr]int)
	return c
}

// admit counts a connection and returns true, or returns false at a limit.
func (c *connCount) admit(client netip.Addr) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.all >= c.max || c.mu.own[client] >= c.maxOwn {
		return false
	}
	c.mu.all++
	c.mu.own[client]++
	return true
}

// shareUsed reports whether a client address has reached its limit.
func (c *connCount) shareUsed(client netip.Addr) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.own[client] >= c.maxOwn
}

func (c *connCount) leave(client netip.Addr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.all--
	if c.mu.own[client]--; c.mu.own[client] == 0 {
		delete(c.mu.own, client)
	}
}
