//go:build rdmacore && cgo && linux

package rdmacore

/*
#include <stdlib.h>
#include "shim.h"
*/
import "C"

import (
	"context"
	"errors"
	"net/netip"
	"syscall"
	"time"
	"unsafe"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// resolveTimeout limits each step of Resolve. An earlier deadline of the context has priority.
const resolveTimeout = 5 * time.Second

// freeC frees memory of C. Tests call it, because a test file cannot use cgo.
func freeC(p unsafe.Pointer) { C.free(p) }

// An activeID is the ConnID of the connecting side.
type activeID struct{ *connID }

// Resolve finds the device and the route to raddr. It sends nothing to the RDMA port of the peer.
func (p *provider) Resolve(ctx context.Context, raddr netip.AddrPort) (verbs.ActiveID, error) {
	raddr = netip.AddrPortFrom(raddr.Addr().Unmap(), raddr.Port())
	fail := func(kind verbs.ConnErrorKind, phase string, err error) error {
		return &verbs.ConnError{Kind: kind, Phase: phase, Addr: raddr.String(), Err: err}
	}
	if err := ctx.Err(); err != nil {
		return nil, fail(ctxKind(err), phaseResolveAddr, err)
	}
	if !raddr.IsValid() || raddr.Port() == 0 {
		return nil, fail(verbs.ConnLocal, phaseResolveAddr, errors.New("address or port is missing"))
	}
	sa, err := sockaddr(raddr)
	if err != nil {
		return nil, fail(verbs.ConnLocal, phaseResolveAddr, err)
	}
	defer freeC(sa)
	ch, err := acquireChannel()
	if err != nil {
		return nil, fail(verbs.ConnLocal, phaseResolveAddr, err)
	}
	c := newConnID(ch, raddr)
	if c.c, err = ch.createID(c.handle); err != nil {
		c.Close()
		return nil, fail(verbs.ConnLocal, phaseResolveAddr, err)
	}
	if err := c.resolve(ctx, sa, p.cfg); err != nil {
		c.Close()
		return nil, err
	}
	return &activeID{c}, nil
}

// resolve resolves the address and the route, and then uses the device that the connection manager
// found.
func (c *connID) resolve(ctx context.Context, sa unsafe.Pointer, cfg Config) error {
	if err := errnoOf(C.rc_resolve_addr(c.c, sa, stepTimeout(ctx))); err != nil {
		kind := errnoKind(err)
		if kind == verbs.ConnLocal { // for example ENODEV: no RDMA device is on the route
			kind = verbs.ConnUnreachable
		}
		return c.Fail(kind, phaseResolveAddr, removalHint(err))
	}
	if err := c.await(ctx, phaseResolveAddr, evAddrResolved); err != nil {
		var e *verbs.ConnError
		if errors.As(err, &e) {
			e.Err = removalHint(e.Err)
		}
		return err
	}
	if err := errnoOf(C.rc_resolve_route(c.c, stepTimeout(ctx))); err != nil {
		return c.Fail(errnoKind(err), phaseResolveRoute, err)
	}
	if err := c.await(ctx, phaseResolveRoute, evRouteResolved); err != nil {
		return err
	}
	if err := c.useDevice(cfg); err != nil {
		return c.Fail(errnoKind(err), phaseResolveRoute, err)
	}
	if err := c.checkPort(); err != nil {
		return c.Fail(errnoKind(err), phaseResolveRoute, err)
	}
	return nil
}

// stepTimeout returns the timeout of one step in milliseconds: resolveTimeout, or what the context
// leaves.
func stepTimeout(ctx context.Context) C.int {
	left := resolveTimeout
	if end, ok := ctx.Deadline(); ok {
		left = max(min(left, time.Until(end)), time.Millisecond)
	}
	return C.int(left / time.Millisecond)
}

// Connect connects to the peer and waits until the connection is established.
func (a *activeID) Connect(ctx context.Context, param verbs.ConnParam) error {
	err := a.handshake(ctx, phaseConnect, param, false, func(data unsafe.Pointer, n, ird, ord C.int) C.int {
		if !a.acquireTurn(ctx) {
			return -C.int(syscall.ECANCELED) // Connect has returned or is about to
		}
		ret := C.rc_connect(a.c, data, n, ird, ord)
		if a.requestSent.Store(ret >= 0); ret < 0 {
			a.releaseTurn()
		}
		return ret
	})
	select {
	case <-a.answered:
		a.releaseTurn()
	default: // the attempt was given up; Close releases the turn
	}
	return err
}
