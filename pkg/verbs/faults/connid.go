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

// A connID is the common part of activeID and connRequest.
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
		return nil, fmt.Errorf("faults: create QP: protection domain belongs to another device: %w",
			verbs.ErrInvalid)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, fmt.Errorf("faults: create QP: connection is closed: %w", verbs.ErrInvalid)
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

// Close drains and releases the connection. A concurrent second call waits in Drain and in the
// inner Close.
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

// end forbids new queue pairs and returns the existing one, or nil.
func (c *connID) end() *queuePair {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	return c.qp
}

type activeID struct {
	connID
	inner   verbs.ActiveID
	refused atomic.Bool // an earlier Connect failed by injection
}

var errConnectRepeated = errors.New("connect was already called")

func (a *activeID) Connect(ctx context.Context, param verbs.ConnParam) error {
	fail := func(kind verbs.ConnErrorKind, err error) error {
		return &verbs.ConnError{Kind: kind, Phase: "connect", Addr: a.RemoteAddr().String(), Err: err}
	}
	if a.refused.Load() {
		return fail(verbs.ConnLocal, errConnectRepeated)
	}
	if n, fires := a.p.event(connectFail); fires {
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

// Reject also closes the ConnID.
func (r *connRequest) Reject(privateData []byte) error {
	q := r.end()
	err := r.inner.Reject(privateData)
	if q != nil {
		q.Drain()
		q.release()
	}
	return err
}
