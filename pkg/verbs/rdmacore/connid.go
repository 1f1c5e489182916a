//go:build rdmacore && cgo && linux

package rdmacore

/*
#include <string.h>
#include "shim.h"
*/
import "C"

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"github.com/nfsrdmad/nfsrdmad/internal/leakcheck"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/internal/base"
)

// Phases of connection set-up, as errors name them.
const (
	phaseResolveAddr  = "resolve address"
	phaseResolveRoute = "resolve route"
	phaseConnect      = "connect"
	phaseAccept       = "accept"
	phaseReject       = "reject"
)

// maxPrivate is how much private data the connection managers' octet can tell; the device's
// transport may take less.
const maxPrivate = 255

// A connID is what both sides' ConnIDs have in common.
type connID struct {
	*base.ConnID[qp]
	ch    *channel
	c     *C.struct_rdma_cm_id
	dev   *device
	steps chan *cmEvent // what set-up waits for
	call  sync.Mutex    // held while the kernel connects or accepts, which may take long

	turn     atomic.Bool   // it is this connection's turn to connect (connectturn.go)
	asked    atomic.Bool   // the kernel has sent the peer a request
	answered chan struct{} // closed when it is known what became of it

	mu      sync.Mutex // before the lock of ConnID
	ord     int        // guarded by mu, as all below: what this side asked for
	wanted  bool       // somebody waits for the connection to be made
	settled bool       // it was made, or was not: what comes now is its end
	tried   bool
}

func newConnID(ch *channel, remote netip.AddrPort) *connID {
	leakcheck.Track(leakcheck.ConnID, 1)
	// Set-up takes a handful of events, one after the other; more would be the kernel's error and
	// may be lost.
	return &connID{ConnID: base.NewConnID[qp](Name, netip.AddrPort{}, remote), ch: ch,
		steps: make(chan *cmEvent, 8), answered: make(chan struct{})}
}

// handle takes an event of the connection, on the goroutine of the channel.
func (c *connID) handle(ev *cmEvent) {
	c.mu.Lock()
	q := c.QP()
	if c.tried {
		select {
		case <-c.answered:
		default:
			close(c.answered)
		}
	}
	switch ev.kind {
	case evTimewaitExit:
		c.mu.Unlock()
		return
	case evEstablished:
		if peer := c.Peer(); len(ev.private) > 0 || peer.ResponderResources == 0 && peer.InitiatorDepth == 0 {
			c.SetPeer(peerParam(ev))
		}
		if c.wanted {
			c.settled = true
			if q != nil {
				q.start(c.ord)
			}
		}
	case evDisconnected, evDeviceRemoval, evAddrChange:
		if ev.kind == evDeviceRemoval && c.dev != nil {
			go c.dev.context.remove(reasonEvent)
		}
		if q != nil && c.settled {
			q.lost(ending(ev.kind, ev.status), certain)
		}
	}
	c.mu.Unlock()
	select {
	case c.steps <- ev:
	default:
	}
}

// peerParam is what the peer said. The connection manager turns depths round: what it calls
// responder resources is what this side may give the peer, which is what the peer asked for as
// initiator.
func peerParam(ev *cmEvent) verbs.ConnParam {
	return verbs.ConnParam{PrivateData: ev.private, ResponderResources: uint16(ev.initiatorDepth),
		InitiatorDepth: uint16(ev.responderResources)}
}

// await waits for an event of kind want; any other is a failure.
func (c *connID) await(ctx context.Context, phase string, want eventKind) error {
	select {
	case ev := <-c.steps:
		if ev.kind == want {
			return nil
		}
		kind, err := failure(ev.kind, ev.status)
		e := c.Fail(kind, phase, err)
		if kind == verbs.ConnRejected {
			e.PrivateData = ev.private
		}
		return e
	case <-ctx.Done():
		return c.Fail(ctxKind(ctx.Err()), phase, ctx.Err())
	case <-c.removed():
		return c.Fail(verbs.ConnUnreachable, phase, &RemovedError{Device: c.dev.attrs.Name})
	case <-c.Done():
		return c.Fail(verbs.ConnLocal, phase, base.ErrClosed)
	}
}

// removed is closed when the device is gone; nil while none is known.
func (c *connID) removed() <-chan struct{} {
	if c.dev == nil {
		return nil
	}
	return c.dev.context.removed
}

func ctxKind(err error) verbs.ConnErrorKind {
	if errors.Is(err, context.DeadlineExceeded) {
		return verbs.ConnTimeout
	}
	return verbs.ConnLocal
}

// attach takes the device that the connection manager has found.
func (c *connID) attach(cfg Config) error {
	if c.c.verbs == nil {
		return errors.New("the route goes through no RDMA device")
	}
	d, err := deviceOf(c.c.verbs, cfg)
	if err != nil {
		return err
	}
	if cfg.Device != "" && cfg.Device != d.attrs.Name {
		return fmt.Errorf("the route goes through the RDMA device %s, and device=%s was asked for", d.attrs.Name,
			cfg.Device)
	}
	if err := d.enter(); err != nil {
		return err
	}
	c.mu.Lock()
	c.dev = d
	c.mu.Unlock()
	c.SetLocalAddr(address(c.c, false))
	return nil
}

// checkPort refuses a port that is known to be down: a connection could only time out, and rxe's
// connection manager does not get over a message that it could not send.
func (c *connID) checkPort() error {
	port := C.rc_port(c.c)
	if err := c.dev.context.use(); err != nil {
		return err
	}
	defer c.dev.context.done()
	if C.rc_port_state(c.dev.ctx, port) != C.IBV_PORT_DOWN {
		return nil
	}
	return fmt.Errorf("port %d of RDMA device %s is down: check its cable and \"ip link\": %w", int(port),
		c.dev.attrs.Name, syscall.ENETDOWN)
}

// Device returns the device that reaches the peer.
func (c *connID) Device() verbs.Device { return c.dev }

// CreateQP creates the queue pair.
func (c *connID) CreateQP(pd verbs.PD, attr verbs.QPInitAttr) (verbs.QP, error) {
	q, err := c.MakeQP(func() (*qp, error) { return newQP(c, pd, attr) })
	if err != nil {
		return nil, err
	}
	return q, nil
}

// timedOut explains that the peer did not answer a request to connect.
func (c *connID) timedOut(err error) error {
	if !c.dev.rxe || !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return fmt.Errorf("%w: no answer; after its link or address was away for a moment rxe may make no connections any more: \"rdma link delete %s\", and add it again", err, c.dev.attrs.Name)
}

// handshake makes the connection by call, and waits for it to stand.
func (c *connID) handshake(ctx context.Context, phase string, param verbs.ConnParam, early bool,
	call func(data unsafe.Pointer, n, ird, ord C.int) C.int) error {
	c.mu.Lock()
	q := c.QP()
	switch {
	case c.tried:
		c.mu.Unlock()
		return c.Fail(verbs.ConnLocal, phase, base.ErrReused)
	case q == nil:
		c.mu.Unlock()
		return c.Fail(verbs.ConnLocal, phase, base.ErrNoQP)
	case len(param.PrivateData) > maxPrivate:
		c.mu.Unlock()
		return c.Fail(verbs.ConnLocal, phase, fmt.Errorf("%d octets of private data, at most %d are possible",
			len(param.PrivateData), maxPrivate))
	}
	c.tried, c.wanted = true, true
	ird, ord := min(int(param.ResponderResources), c.dev.attrs.MaxQPRdAtom), min(int(param.InitiatorDepth),
		c.dev.attrs.MaxQPInitRdAtom)
	c.ord = ord
	c.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return c.Fail(ctxKind(err), phase, err)
	}
	result := make(chan error, 1)
	go func() {
		c.call.Lock()
		defer c.call.Unlock()
		select {
		case <-c.Done():
			result <- base.ErrClosed
			return
		case <-c.removed():
			result <- &RemovedError{Device: c.dev.attrs.Name}
			return
		default:
		}
		if early {
			q.start(ord)
		}
		data := C.CBytes(param.PrivateData)
		err := errnoOf(call(data, C.int(len(param.PrivateData)), C.int(ird), C.int(ord)))
		freeC(data)
		result <- err
	}()
	err := c.settle(ctx, phase, result)
	c.mu.Lock()
	c.wanted = false
	made := c.settled
	if err != nil && !made && early {
		q.unstart()
	}
	c.mu.Unlock()
	return err
}

// settle waits for the call and then for the connection.
func (c *connID) settle(ctx context.Context, phase string, result chan error) error {
	select {
	case err := <-result:
		if err != nil {
			return c.Fail(errnoKind(err), phase, explain(err))
		}
	case <-ctx.Done():
		return c.Fail(ctxKind(ctx.Err()), phase, ctx.Err())
	case <-c.Done():
		return c.Fail(verbs.ConnLocal, phase, base.ErrClosed)
	}
	err := c.await(ctx, phase, evEstablished)
	var e *verbs.ConnError
	if errors.As(err, &e) {
		e.Err = c.timedOut(e.Err)
	}
	return err
}

// explain adds what a bare errno of the connection manager does not say.
func explain(err error) error {
	if errors.Is(err, syscall.EINVAL) {
		return fmt.Errorf("%w: is there more private data than the device's transport takes (56 octets on InfiniBand and RoCE)?", err)
	}
	return err
}

// Close ends the connection and releases the ConnID.
func (c *connID) Close() error {
	c.CloseOnce(func(q *qp) {
		c.call.Lock() // the kernel must have returned
		c.linger()
		if q != nil {
			q.destroy()
		}
		if c.c != nil {
			c.ch.destroyID(c.c)
		}
		c.call.Unlock()
		c.releaseTurn()
		if c.dev != nil {
			c.dev.leave()
		}
		c.ch.leave()
		leakcheck.Track(leakcheck.ConnID, -1)
	})
	return nil
}

// address reads an address of a connection id.
func address(id *C.struct_rdma_cm_id, peer bool) netip.AddrPort {
	var raw syscall.RawSockaddrInet6 // the larger of the two
	var which C.int
	if peer {
		which = 1
	}
	C.rc_address(id, which, unsafe.Pointer(&raw))
	return addressIn(unsafe.Pointer(&raw))
}

// addressIn reads a struct sockaddr_in or sockaddr_in6 in room for either.
func addressIn(p unsafe.Pointer) netip.AddrPort {
	raw := *(*syscall.RawSockaddrInet6)(p)
	b := (*[unsafe.Sizeof(raw)]byte)(unsafe.Pointer(&raw))
	port := binary.BigEndian.Uint16(b[2:])
	switch raw.Family {
	case syscall.AF_INET:
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:8])), port)
	case syscall.AF_INET6:
		a := netip.AddrFrom16(raw.Addr)
		if raw.Scope_id != 0 {
			a = a.WithZone(strconv.Itoa(int(raw.Scope_id)))
		}
		return netip.AddrPortFrom(a.Unmap(), port)
	}
	return netip.AddrPort{}
}

// sockaddr is an address as the system has it. The result is C's memory.
func sockaddr(a netip.AddrPort) (unsafe.Pointer, error) {
	var raw syscall.RawSockaddrInet6
	b := (*[unsafe.Sizeof(raw)]byte)(unsafe.Pointer(&raw))
	ip := a.Addr().Unmap()
	binary.BigEndian.PutUint16(b[2:], a.Port())
	switch {
	case ip.Is4():
		raw.Family = syscall.AF_INET
		ip4 := ip.As4()
		copy(b[4:], ip4[:])
	case ip.Is6():
		raw.Family = syscall.AF_INET6
		raw.Addr = ip.As16()
		if z := ip.Zone(); z != "" {
			if n, err := strconv.Atoi(z); err == nil {
				raw.Scope_id = uint32(n)
			} else if i, err := net.InterfaceByName(z); err == nil {
				raw.Scope_id = uint32(i.Index)
			} else {
				return nil, fmt.Errorf("zone %s: %w", z, err)
			}
		}
	default:
		return nil, errors.New("not an address")
	}
	return C.CBytes(b[:]), nil
}
