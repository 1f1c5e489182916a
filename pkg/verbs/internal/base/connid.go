package base

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// Causes of failed connection attempts that this side is responsible for.
var (
	ErrClosed = fmt.Errorf("the connection was closed by this side: %w", net.ErrClosed)
	ErrNoQP   = errors.New("no queue pair was created")
	ErrReused = errors.New("the ConnID was already used; create another")
)

// A ConnID is the part of verbs.ConnID that does not depend on the provider: the addresses, what
// the peer sent, the one queue pair, and the one Close. Q is the provider's queue pair. Providers
// embed it by pointer. A ConnID is safe for concurrent use.
type ConnID[Q any] struct {
	provider string // named in errors
	remote   netip.AddrPort
	closed   chan struct{} // closed by the first Close
	released chan struct{} // closed when the first Close has released everything
	once     sync.Once

	state struct {
		sync.Mutex
		local netip.AddrPort
		qp    *Q
		peer  verbs.ConnParam
	}
}

// NewConnID makes a ConnID. Either address may be incomplete; SetLocalAddr completes the local one.
func NewConnID[Q any](provider string, local, remote netip.AddrPort) *ConnID[Q] {
	c := &ConnID[Q]{provider: provider, remote: remote, closed: make(chan struct{}), released: make(chan struct{})}
	c.state.local = local
	return c
}

// RemoteAddr returns the peer's address.
func (c *ConnID[Q]) RemoteAddr() netip.AddrPort { return c.remote }

// LocalAddr returns this side's address. The port may be 0 until the connection exists.
func (c *ConnID[Q]) LocalAddr() netip.AddrPort {
	c.state.Lock()
	defer c.state.Unlock()
	return c.state.local
}

// SetLocalAddr sets this side's address.
func (c *ConnID[Q]) SetLocalAddr(a netip.AddrPort) {
	c.state.Lock()
	c.state.local = a
	c.state.Unlock()
}

// Peer returns the parameters that the peer sent.
func (c *ConnID[Q]) Peer() verbs.ConnParam {
	c.state.Lock()
	defer c.state.Unlock()
	return c.state.peer
}

// SetPeer sets the parameters that the peer sent.
func (c *ConnID[Q]) SetPeer(p verbs.ConnParam) {
	c.state.Lock()
	c.state.peer = p
	c.state.Unlock()
}

// QP returns the queue pair, nil when none was created.
func (c *ConnID[Q]) QP() *Q {
	c.state.Lock()
	defer c.state.Unlock()
	return c.state.qp
}

// MakeQP creates the queue pair with create, once. MakeQP fails with verbs.ErrInvalid when the
// ConnID is closed or has a queue pair.
func (c *ConnID[Q]) MakeQP(create func() (*Q, error)) (*Q, error) {
	c.state.Lock()
	defer c.state.Unlock()
	switch {
	case c.isClosed():
		return nil, fmt.Errorf("%s: create QP: the connection is closed: %w", c.provider, verbs.ErrInvalid)
	case c.state.qp != nil:
		return nil, fmt.Errorf("%s: create QP: the connection already has a QP: %w", c.provider, verbs.ErrInvalid)
	}
	q, err := create()
	if err != nil {
		return nil, err
	}
	c.state.qp = q
	return q, nil
}

// Done is closed when Close is called.
func (c *ConnID[Q]) Done() <-chan struct{} { return c.closed }

func (c *ConnID[Q]) isClosed() bool {
	select {
	case <-c.closed:
		return true
	default:
		return false
	}
}

// CloseOnce closes Done and calls release with the queue pair, which may be nil. Later calls wait
// until the first has returned. No queue pair can be created after CloseOnce.
func (c *ConnID[Q]) CloseOnce(release func(*Q)) {
	c.once.Do(func() {
		c.state.Lock()
		close(c.closed)
		q := c.state.qp
		c.state.Unlock()
		release(q)
		close(c.released)
	})
	<-c.released
}

// Fail returns the error of a connection attempt.
func (c *ConnID[Q]) Fail(kind verbs.ConnErrorKind, phase string, err error) *verbs.ConnError {
	return &verbs.ConnError{Kind: kind, Phase: phase, Addr: c.remote.String(), Err: err}
}
