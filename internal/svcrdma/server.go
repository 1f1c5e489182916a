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

// A Handler executes RPC calls. It is called from many goroutines at once.
type Handler interface {
	// ServeRPC executes the unreduced call message of peer and appends the unreduced reply message
	// to reply, which has length zero and room for Config.MaxMessage octets; using that room saves
	// a copy. call is valid during the call only. A reply that is longer, and an error that wraps
	// [ErrReplySize], is answered with ERR_CHUNK, so that the client gives the call up. Any other
	// error drops the connection, so that the client sends the call again on a new one. ctx ends
	// after Config.CallTimeout; ServeRPC must return soon after, because the connection is not
	// released before. ctx of a call that is not idempotent outlives its connection, so that its
	// outcome can be kept for the replay.
	ServeRPC(ctx context.Context, peer netip.AddrPort, call, reply []byte) ([]byte, error)
}

// ErrReplySize is what a Handler says of a reply that it knows and cannot hand over, because it is
// longer than Config.MaxMessage: sending the call again would not change it (RFC 8166 §4.5.3).
var ErrReplySize = errors.New("the reply is longer than a message may be")

// A ConnHandler is a Handler that wants to know when a connection has ended and none of its calls
// is running any more.
type ConnHandler interface {
	Handler
	ConnClosed(peer netip.AddrPort)
}

// HandlerFunc is a function as a Handler.
type HandlerFunc func(ctx context.Context, peer netip.AddrPort, call, reply []byte) ([]byte, error)

// ServeRPC calls f.
func (f HandlerFunc) ServeRPC(ctx context.Context, peer netip.AddrPort, call, reply []byte) ([]byte, error) {
	return f(ctx, peer, call, reply)
}

// Verdict is what a fault hook makes of a reply.
type Verdict uint8

// Verdicts.
const (
	Send       Verdict = iota
	Drop               // the reply is never sent
	Disconnect         // the connection ends instead
)

// Hooks inject faults, for tests. The zero value does nothing.
type Hooks struct {
	// Reply sees each reply header just before it is encoded, after the RDMA Writes were planned,
	// and may change it.
	Reply func(h *rpcrdma.Header) Verdict
}

// Config of a server. The zero value of each field gives its default.
type Config struct {
	// Credits granted to each client: its calls in progress at a time, 1..1024. Default 64.
	Credits int
	// InlineBytes is the inline threshold offered, both ways: 1024..65536, in steps of 1024.
	// Default 4096.
	InlineBytes int
	// RemoteInv offers Send With Invalidate: used for calls all of whose segments carry one handle
	// (RFC 8797 §4.1).
	RemoteInv bool
	// MaxMessage is the largest unreduced call or reply in octets. Default 1 MiB and 64 KiB.
	MaxMessage int
	// ReadDepth is the most RDMA Reads outstanding on a connection (ORD). A power of two, at most
	// 128. Default 16.
	ReadDepth int
	// AlwaysReplyChunk uses an offered Reply chunk even where the reply fits inline, as the Linux
	// server does. RFC 8166 §3.5.3 leaves the choice.
	AlwaysReplyChunk bool
	// MaxConns is the most connections at a time; others are rejected. One client address has at
	// most half of them, so that it cannot lock out the others. Default 128.
	MaxConns int
	// CachedReplies is the size of the duplicate request cache. Default 4096.
	CachedReplies int
	// MessageMemory bounds in octets the unreduced messages of all connections together; calls wait
	// for it. A call needs MaxMessage for its reply, and as much again if it has Read chunks. At
	// least twice MaxMessage. Default 512 MiB.
	MessageMemory int

	// IdleTimeout ends a connection on which no call is made for so long, in an orderly way.
	// Default 12 minutes, as the Linux server does at the latest: a client that wants to keep a
	// connection makes a NULL call now and then.
	IdleTimeout time.Duration
	// TransferTimeout ends a connection whose client does not answer the RDMA Reads of one call, or
	// does not take one reply, for so long. Default 5 minutes: with every credit in use, 64 MiB go
	// over the link in that time.
	TransferTimeout time.Duration
	// CallTimeout bounds the execution of a call by the Handler, and its wait for memory. When it
	// passes, the context that the Handler was given ends, and the connection with it, so that the
	// client sends the call again. What the Handler's server made of the first try is not known
	// then, and the second is executed like a new call. Default 5 minutes.
	CallTimeout time.Duration

	// Allow lists the client addresses that may connect; empty means all.
	Allow []netip.Prefix

	Handler Handler
	Logger  hclog.Logger
	Hooks   Hooks
	// Stats, if not nil, is counted into.
	Stats *Stats
}

// Stats counts what a server did. All fields only grow, but for Connections.
type Stats struct {
	Connections                                atomic.Int64
	Calls, CachedCalls, Discarded              atomic.Uint64
	ReadBytes, WrittenBytes                    atomic.Uint64
	ReplyChunks, RemoteInvalidates, RDMAErrors atomic.Uint64
}

// Defaults of Config that matter to whoever runs a server.
const (
	DefaultMaxConns      = 128
	DefaultMessageMemory = 512 << 20 // octets
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
	defaultCached     = 4096
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
		return fmt.Errorf("svcrdma: inline threshold of %d octets: must be a multiple of 1024 from %d to %d",
			c.InlineBytes, rpcrdma.DefaultInline, maxInline)
	case c.MaxMessage < c.InlineBytes:
		return fmt.Errorf("svcrdma: largest message of %d octets is below the inline threshold of %d", c.MaxMessage,
			c.InlineBytes)
	case c.ReadDepth < 1 || c.ReadDepth > maxReadDepth || c.ReadDepth&(c.ReadDepth-1) != 0:
		return fmt.Errorf("svcrdma: read depth of %d: must be a power of two from 1 to %d", c.ReadDepth, maxReadDepth)
	case c.MaxConns < 1 || c.CachedReplies < 1:
		return errors.New("svcrdma: MaxConns and CachedReplies must be positive")
	case c.MessageMemory < 2*c.MaxMessage:
		return fmt.Errorf("svcrdma: %d octets for messages: a call may need two of %d octets", c.MessageMemory,
			c.MaxMessage)
	case c.IdleTimeout < 0 || c.TransferTimeout < 0 || c.CallTimeout < 0:
		return errors.New("svcrdma: time limits must be positive")
	}
	return nil
}

// allows tells whether a client address may connect.
func (c *Config) allows(a netip.Addr) bool {
	return len(c.Allow) == 0 || slices.ContainsFunc(c.Allow, func(p netip.Prefix) bool {
		return p.Contains(a.WithZone(""))
	})
}

type server struct {
	cfg   Config
	drc   *drc
	fatal *fatalCalls
	mem   *memBudget
	conns *connCount
	log   hclog.Logger
}

// Serve answers connections of l until ctx ends or l is closed, and returns after every connection
// has ended and everything that it used was released. l stays the caller's to close. The error is
// nil for those two ends.
func Serve(ctx context.Context, l verbs.Listener, cfg Config) error {
	if err := cfg.complete(); err != nil {
		return err
	}
	s := &server{cfg: cfg, drc: newDRC(cfg.CachedReplies), fatal: newFatalCalls(),
		mem: newMemBudget(cfg.MessageMemory / cfg.MaxMessage), conns: newConnCount(cfg.MaxConns), log: cfg.Logger}
	ctx, cancel := context.WithCancel(ctx)
	var conns sync.WaitGroup
	defer conns.Wait()
	defer cancel()
	for {
		req, err := l.Accept(ctx)
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return nil
			}
			s.log.Warn("accept failed", "listener", l.Addr(), "error", err)
			select { // descriptors or memory may come back
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
			s.log.Warn("connection refused: too many", "peer", req.RemoteAddr(), "limit", s.conns.max,
				"limit_of_a_client", s.conns.maxOwn)
			conns.Go(func() { _ = req.Reject(nil) })
			continue
		}
		conns.Go(func() {
			leave := sync.OnceFunc(func() { s.conns.leave(client) })
			defer leave()
			s.serveConn(ctx, req, leave)
		})
	}
}

// silentGrace is how long a connection without a call is safe from being ended for a new one.
const silentGrace = 2 * time.Second

// endSilent ends a connection on which no call was ever made, so that a full server has room for
// client: the oldest one of the same address where that has its share, else the oldest of all. It
// returns false when there is none.
func (s *server) endSilent(client netip.Addr) bool {
	ownOnly := s.conns.shareUsed(client)
	var victim *conn
	s.mem.mu.Lock()
	for c := range s.mem.conns {
		if !c.called.Load() && c.ctx.Err() == nil && c.age() > silentGrace && (!ownOnly || c.addr == client) &&
			(victim == nil || c.born.Before(victim.born)) {
			victim = c
		}
	}
	s.mem.mu.Unlock()
	if victim == nil {
		return false
	}
	victim.cancel(errSilent)
	victim.leave()
	return true
}

// A connCount bounds the connections, of all clients and of each.
type connCount struct {
	max, maxOwn int

	mu  sync.Mutex
	all int                // guarded by mu
	own map[netip.Addr]int // guarded by mu; none is zero
}

func newConnCount(limit int) *connCount {
	return &connCount{max: limit, maxOwn: (limit + 1) / 2, own: make(map[netip.Addr]int)}
}

// admit counts a connection, unless there are too many.
func (c *connCount) admit(client netip.Addr) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.all >= c.max || c.own[client] >= c.maxOwn {
		return false
	}
	c.all++
	c.own[client]++
	return true
}

// shareUsed tells whether one client address has all the connections that it may have.
func (c *connCount) shareUsed(client netip.Addr) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.own[client] >= c.maxOwn
}

func (c *connCount) leave(client netip.Addr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all--
	if c.own[client]--; c.own[client] == 0 {
		delete(c.own, client)
	}
}
