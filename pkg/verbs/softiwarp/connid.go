package softiwarp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/selfcheck"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/internal/base"
)

// A connID is the common part of the ConnIDs of both sides.
type connID struct {
	*base.ConnID[qp]
	dev   *device
	holds atomic.Int32 // references: one of Close, one of a running attempt
}

func newConnID(d *device, local, remote netip.AddrPort) connID {
	selfcheck.Track(selfcheck.ConnID, 1)
	return connID{ConnID: base.NewConnID[qp](Name, local, remote), dev: d}
}

// Device returns the soft RNIC.
func (c *connID) Device() verbs.Device { return c.dev }

// CreateQP creates the queue pair.
func (c *connID) CreateQP(pd verbs.PD, attr verbs.QPInitAttr) (verbs.QP, error) {
	q, err := c.MakeQP(func() (*qp, error) { return newQP(c.dev, pd, attr) })
	if err != nil {
		return nil, err
	}
	return q, nil
}

// hold and release count references. When the last reference is released, the leak check no longer
// counts the ConnID.
func (c *connID) hold() { c.holds.Add(1) }

func (c *connID) release() {
	if c.holds.Add(-1) == 0 {
		selfcheck.Track(selfcheck.ConnID, -1)
	}
}

// close releases the ConnID and its queue pair once, after drop, which may be nil.
func (c *connID) close(drop func(*qp)) {
	c.CloseOnce(func(q *qp) {
		if drop != nil {
			drop(q)
		}
		if q != nil {
			q.destroy()
		}
		c.release()
	})
}

// Phases of connection set-up, as errors name them.
const (
	phaseResolve     = "resolve route"
	phaseQueue       = "wait for another connect to the same address"
	phaseConnect     = verbs.PhaseConnect
	phaseSendRequest = "send MPA request"
	phaseReadReply   = "read MPA reply"
	phaseCheckReply  = "check MPA reply"
	phaseSendReply   = "send MPA reply"
	phaseStart       = "start queue pair"
)

var errDataTooLong = fmt.Errorf("private data is longer than %d bytes", maxULPData)

// ioKind classifies an error of a handshake phase.
func ioKind(err error) verbs.ConnErrorKind {
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded):
		return verbs.ConnTimeout
	case errors.Is(err, context.Canceled), errors.Is(err, net.ErrClosed):
		return verbs.ConnLocal
	}
	return verbs.ConnProtocol
}

// dialKind classifies a failed TCP handshake.
func dialKind(err error) verbs.ConnErrorKind {
	var ne net.Error
	switch {
	case errors.As(err, &ne) && ne.Timeout(), errors.Is(err, context.DeadlineExceeded):
		return verbs.ConnTimeout
	case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE), errors.Is(err, syscall.ENOMEM),
		errors.Is(err, syscall.ENOBUFS), errors.Is(err, syscall.EADDRNOTAVAIL), errors.Is(err, context.Canceled):
		return verbs.ConnLocal
	}
	return verbs.ConnUnreachable
}

// tuneListener is tuneSocket for a net.ListenConfig. Connections inherit the buffers of their
// listener.
func (d *device) tuneListener(_, _ string, c syscall.RawConn) error {
	return c.Control(func(fd uintptr) { d.tuneSocket(int(fd)) })
}

// tuneSocket requests large buffers before the handshake fixes the window scale. A process that may
// not force the size keeps the kernel's auto-tuning, which reaches larger sizes than SO_RCVBUF of
// an unprivileged process.
func (d *device) tuneSocket(fd int) {
	size := d.cfg.SocketBuffer
	if size == 0 {
		size = defaultSocketBuffer
	}
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, size) == nil {
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, size)
		return
	}
	if d.cfg.SocketBuffer != 0 {
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, size)
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, size)
	}
}

func addrPort(a net.Addr) netip.AddrPort {
	if t, ok := a.(*net.TCPAddr); ok {
		ap := t.AddrPort()
		return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
	}
	return netip.AddrPort{}
}
