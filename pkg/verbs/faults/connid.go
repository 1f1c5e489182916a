package faults

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// A connID is what both sides' ConnIDs have in common.
type connID struct {
	p     *Provider
	inner verbs.ConnID
	dev   device

	mu     sync.Mutex
	qp     *queuePair // guarded by mu
	closed bool       // guarded by mu
}

func newConnID(p *Provider, inner verbs.ConnID) connID {
	return connID{p: p, inner: inner, dev: device{p: p, inner: inner.Device()}}
}

func (c *connID) Device() verbs.Device       { return c.dev }
func (c *connID) LocalAddr() netip.AddrPort  { return c.inner.LocalAddr() }
func (c *connID) RemoteAddr() netip.AddrPort { return c.inner.RemoteAddr() }
func (c *connID) Peer() verbs.ConnParam      { return c.inner.Peer() }

func (c *connID) CreateQP(pd verbs.PD, attr verbs.QPInitAttr) (verbs.QP, error) {
	domain, ok := pd.(*protectionDomain)
	if !ok {
		return nil, fmt.Errorf("faults: create QP: the protection domain belongs to another device: %w",
			verbs.ErrInvalid)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, fmt.Errorf("faults: create QP: the connection was closed: %w", verbs.ErrInvalid)
	}
	q, err := newQP(c.p, domain, attr, func(inner verbs.QPInitAttr) (verbs.QP, error) {
		return c.inner.CreateQP(domain.inner, inner)
	})
	if err != nil {
		return nil, err
	}
	c.qp = q
	return q, nil
}

// Close drains and releases. Later callers wait for the first inside Drain and the inner Close.
func (c *connID) Close() error {
	q := c.end()
	if q != nil {
		q.Drain()
	}
	err := c.inner.Close()
	if q != nil {
		q.release()
	}
	return err
}

// end allows no queue pair from now on, and returns the one there is.
func (c *connID) end() *queuePair {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	return c.qp
}

type activeID struct {
	connID
	inner   verbs.ActiveID
	refused atomic.Bool // a Connect was made to fail
}

var errTwice = errors.New("it was tried before")

func (a *activeID) Connect(ctx context.Context, param verbs.ConnParam) error {
	fail := func(kind verbs.ConnErrorKind, err error) error {
		return &verbs.ConnError{Kind: kind, Phase: "connect", Addr: a.RemoteAddr().String(), Err: err}
	}
	if a.refused.Load() {
		return fail(verbs.ConnLocal, errTwice)
	}
	if n, strikes := a.p.event(connectFail); strikes {
		a.refused.Store(true)
		a.p.count(connectFail, n)
		return fail(verbs.ConnUnreachable, injectedError(connectFail, n, syscall.ECONNREFUSED))
	}
	return a.inner.Connect(ctx, param)
}

type connRequest struct {
	connID
	inner verbs.ConnRequest
}

func (r *connRequest) Accept(ctx context.Context, param verbs.ConnParam) error {
	return r.inner.Accept(ctx, param)
}

// Reject closes the ConnID as well.
func (r *connRequest) Reject(privateData []byte) error {
	q := r.end()
	err := r.inner.Reject(privateData)
	if q != nil {
		q.Drain()
		q.release()
	}
	return err
}
