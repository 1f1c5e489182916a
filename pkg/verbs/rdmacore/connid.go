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

	"github.com/nfsrdmad/nfsrdmad/internal/selfcheck"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/internal/base"
)

// Phases of connection set-up, as errors show them.
const (
	phaseResolveAddr  = "resolve address"
	phaseResolveRoute = "resolve route"
	phaseConnect      = verbs.PhaseConnect
	phaseAccept       = "accept"
	phaseReject       = "reject"
)

// maxPrivate is the largest private data in bytes. The connection manager keeps the length in one
// byte. The device's transport may accept less.
const maxPrivate = 255

// A connID is the common part of the ConnIDs of both sides.
type connID struct {
	*base.ConnID[qp]
	ch          *eventChannel
	c           *C.struct_rdma_cm_id
	dev         *device
	setupEvents chan *cmEvent // read by the set-up of the connection
	callMu      sync.Mutex    // held while the kernel connects or accepts, which may take long

	hasTurn     atomic.Bool   // this connection holds iwarpTurn (iwarpconnect.go)
	requestSent atomic.Bool   // the kernel has sent the peer a request
	answered    chan struct{} // closed by the first event after set-up began

	// Lock order: setup, then the lock of base.ConnID or qp.sq.
	setup struct {
		sync.Mutex
		ord         int  // depth of RDMA Reads of this side
		waiting     bool // Connect or Accept waits for the connection
		established bool // later events end the connection
		started     bool // Connect, Accept or Reject was called
	}
}

func newConnID(ch *eventChannel, remote netip.AddrPort) *connID {
	selfcheck.Track(selfcheck.ConnID, 1)
	// A set-up gets a few events, one after the other. If the kernel sends more events than the
	// channel holds, they may be lost.
	return &connID{ConnID: base.NewConnID[qp](Name, netip.AddrPort{}, remote), ch: ch,
		setupEvents: make(chan *cmEvent, 8), answered: make(chan struct{})}
}

// handle processes an event of the connection. The channel's goroutine calls it.
func (c *connID) handle(ev *cmEvent) {
	c.setup.Lock()
	q := c.QP()
	if c.setup.started {
		select {
		case <-c.answered:
		default:
			close(c.answered)
		}
	}
	switch ev.kind {
	case evTimewaitExit:
		c.setup.Unlock()
		return
	case evEstablished:
		if peer := c.Peer(); len(ev.private) > 0 || peer.ResponderResources == 0 && peer.InitiatorDepth == 0 {
			c.SetPeer(peerParam(ev))
		}
		if c.setup.waiting {
			c.setup.established = true
			if q != nil {
				q.start(c.setup.ord)
			}
		}
	case evDisconnected, evDeviceRemoval, evAddrChange:
		if ev.kind == evDeviceRemoval && c.dev != nil {
			go c.dev.context.remove(reasonEvent)
		}
		if q != nil && c.setup.established {
			q.disconnect(disconnectCause(ev.kind, ev.status), certain)
		}
	}
	c.setup.Unlock()
	select {
	case c.setupEvents <- ev:
	default:
	}
}

// peerParam returns the parameters that the peer sent. The connection manager exchanges the two
// depths: it returns the initiator depth of the peer as the responder resources of this side.
func peerParam(ev *cmEvent) verbs.ConnParam {
	return verbs.ConnParam{PrivateData: ev.private, ResponderResources: uint16(ev.initiatorDepth),
		InitiatorDepth: uint16(ev.responderResources)}
}

// await waits for an event of kind want. Any other event is an error.
func (c *connID) await(ctx context.Context, phase string, want eventKind) error {
	select {
	case ev := <-c.setupEvents:
		if ev.kind == want {
			return nil
		}
		kind, err := setupError(ev.kind, ev.status)
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

// removed returns the channel that is closed when the device is removed. It returns nil while the
// device is unknown.
func (c *connID) removed() <-chan struct{} {
	if c.dev == nil {
		return nil
	}
	return c.dev.context.removed
}

// ctxKind returns the kind of a connection error for the error of a context.
func ctxKind(err error) verbs.ConnErrorKind {
	if errors.Is(err, context.DeadlineExceeded) {
		return verbs.ConnTimeout
	}
	return verbs.ConnLocal
}

// useDevice makes c a user of the device that the connection manager found.
func (c *connID) useDevice(cfg Config) error {
	if c.c.verbs == nil {
		return errors.New("route uses no RDMA device")
	}
	d, err := deviceOf(c.c.verbs, cfg)
	if err != nil {
		return err
	}
	if cfg.Device != "" && cfg.Device != d.attrs.Name {
		return fmt.Errorf("route uses RDMA device %s; device=%s is configured", d.attrs.Name, cfg.Device)
	}
	if err := d.addUser(); err != nil {
		return err
	}
	c.setup.Lock()
	c.dev = d
	c.setup.Unlock()
	c.SetLocalAddr(address(c.c, false))
	return nil
}

// checkPort returns an error if the port of the device is down. A connection attempt could only
// time out. Also, rxe's connection manager does not recover from a message that it could not send.
func (c *connID) checkPort() error {
	port := C.rc_port(c.c)
	if err := c.dev.context.acquire(); err != nil {
		return err
	}
	defer c.dev.context.release()
	if C.rc_port_state(c.dev.ctx, port) != C.IBV_PORT_DOWN {
		return nil
	}
	return fmt.Errorf("port %d of RDMA device %s is down: %w; check its cable and \"ip link\"", int(port),
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

// explainTimeout adds a hint to the error when the peer did not answer a connect over rxe.
func (c *connID) explainTimeout(err error) error {
	if !c.dev.rxe || !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	// After one failed message, rxe's connection manager does not work until the device is deleted
	// and added again.
	return fmt.Errorf("%w: peer did not answer; after an outage of the rxe device's link or address, "+
		"run \"rdma link delete %s\" and add the device again", err, c.dev.attrs.Name)
}

// handshake makes the connection with call and waits until it is established. startQPFirst makes
// the QP ready before the call.
func (c *connID) handshake(ctx context.Context, phase string, param verbs.ConnParam, startQPFirst bool,
	call func(data unsafe.Pointer, n, ird, ord C.int) C.int) error {
	c.setup.Lock()
	q := c.QP()
	switch {
	case c.setup.started:
		c.setup.Unlock()
		return c.Fail(verbs.ConnLocal, phase, base.ErrReused)
	case q == nil:
		c.setup.Unlock()
		return c.Fail(verbs.ConnLocal, phase, base.ErrNoQP)
	case len(param.PrivateData) > maxPrivate:
		c.setup.Unlock()
		return c.Fail(verbs.ConnLocal, phase, fmt.Errorf("private data has %d bytes, want at most %d",
			len(param.PrivateData), maxPrivate))
	}
	c.setup.started, c.setup.waiting = true, true
	ird := min(int(param.ResponderResources), c.dev.attrs.MaxQPRdAtom)
	ord := min(int(param.InitiatorDepth), c.dev.attrs.MaxQPInitRdAtom)
	c.setup.ord = ord
	c.setup.Unlock()
	if err := ctx.Err(); err != nil {
		return c.Fail(ctxKind(err), phase, err)
	}
	result := make(chan error, 1)
	go func() {
		c.callMu.Lock()
		defer c.callMu.Unlock()
		select {
		case <-c.Done():
			result <- base.ErrClosed
			return
		case <-c.removed():
			result <- &RemovedError{Device: c.dev.attrs.Name}
			return
		default:
		}
		if startQPFirst {
			q.start(ord)
		}
		data := C.CBytes(param.PrivateData)
		err := errnoOf(call(data, C.int(len(param.PrivateData)), C.int(ird), C.int(ord)))
		freeC(data)
		result <- err
	}()
	err := c.awaitEstablished(ctx, phase, result)
	c.setup.Lock()
	c.setup.waiting = false
	if err != nil && !c.setup.established && startQPFirst {
		q.undoStart()
	}
	c.setup.Unlock()
	return err
}

// awaitEstablished waits for the result of the kernel's call and then for the connection.
func (c *connID) awaitEstablished(ctx context.Context, phase string, result chan error) error {
	select {
	case err := <-result:
		if err != nil {
			return c.Fail(errnoKind(err), phase, explainErrno(err))
		}
	case <-ctx.Done():
		return c.Fail(ctxKind(ctx.Err()), phase, ctx.Err())
	case <-c.Done():
		return c.Fail(verbs.ConnLocal, phase, base.ErrClosed)
	}
	err := c.await(ctx, phase, evEstablished)
	var e *verbs.ConnError
	if errors.As(err, &e) {
		e.Err = c.explainTimeout(e.Err)
	}
	return err
}

// explainErrno adds a hint to an errno of the connection manager.
func explainErrno(err error) error {
	if errors.Is(err, syscall.EINVAL) {
		return fmt.Errorf("%w; private data may be too long for the transport (InfiniBand and RoCE take 56 bytes)", err)
	}
	return err
}

// Close ends the connection and releases the ConnID. It waits until every handler of the QP has
// returned and until the kernel's call has returned.
func (c *connID) Close() error {
	c.CloseOnce(func(q *qp) {
		c.callMu.Lock() // waits until the kernel's call has returned
		c.awaitAnswer()
		if q != nil {
			q.destroy()
		}
		if c.c != nil {
			c.ch.destroyID(c.c)
		}
		c.callMu.Unlock()
		c.releaseTurn()
		if c.dev != nil {
			c.dev.removeUser()
		}
		c.ch.release()
		selfcheck.Track(selfcheck.ConnID, -1)
	})
	return nil
}

// address returns the local or the peer's address of a connection id.
func address(id *C.struct_rdma_cm_id, peer bool) netip.AddrPort {
	var raw syscall.RawSockaddrInet6 // is also large enough for IPv4
	var which C.int
	if peer {
		which = 1
	}
	C.rc_address(id, which, unsafe.Pointer(&raw))
	return addressIn(unsafe.Pointer(&raw))
}

// addressIn reads a struct sockaddr_in or sockaddr_in6. p must point to a buffer of the larger
// size.
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

// sockaddr returns a as a struct sockaddr_in or sockaddr_in6 in C memory. The caller must free it.
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
		return nil, errors.New("address is missing")
	}
	return C.CBytes(b[:]), nil
}
