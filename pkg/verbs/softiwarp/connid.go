package softiwarp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/leakcheck"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// A connID is what both sides' ConnIDs have in common.
type connID struct {
	dev    *device
	remote netip.AddrPort
	closed chan struct{} // closed by the first Close
	gone   chan struct{} // closed when everything is released
	once   sync.Once
	holds  atomic.Int32 // Close and a connection attempt each keep the ConnID tracked

	mu    sync.Mutex
	local netip.AddrPort // guarded by mu, as all below
	qp    *qp
	peer  verbs.ConnParam
}

func newConnID(d *device, local, remote netip.AddrPort) connID {
	leakcheck.Track(leakcheck.ConnID, 1)
	return connID{dev: d, local: local, remote: remote, closed: make(chan struct{}), gone: make(chan struct{})}
}

// Device returns the soft RNIC.
func (c *connID) Device() verbs.Device { return c.dev }

// CreateQP makes the queue pair.
func (c *connID) CreateQP(pd verbs.PD, attr verbs.QPInitAttr) (verbs.QP, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case <-c.closed:
		return nil, fmt.Errorf("softiwarp: create QP: the connection was closed: %w", verbs.ErrInvalid)
	default:
	}
	if c.qp != nil {
		return nil, fmt.Errorf("softiwarp: create QP: the connection has one: %w", verbs.ErrInvalid)
	}
	q, err := newQP(c.dev, pd, attr)
	if err != nil {
		return nil, err
	}
	c.qp = q
	return q, nil
}

// LocalAddr is this side's address; its port is 0 until the TCP connection exists.
func (c *connID) LocalAddr() netip.AddrPort {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.local
}

// RemoteAddr is the peer's address.
func (c *connID) RemoteAddr() netip.AddrPort { return c.remote }

// Peer is what the peer said.
func (c *connID) Peer() verbs.ConnParam {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.peer
}

// hold and release keep the ConnID in the leak count.
func (c *connID) hold() { c.holds.Add(1) }

func (c *connID) release() {
	if c.holds.Add(-1) == 0 {
		leakcheck.Track(leakcheck.ConnID, -1)
	}
}

// close releases everything once; later callers wait for the first.
func (c *connID) close(drop func()) {
	c.once.Do(func() {
		c.mu.Lock()
		close(c.closed)
		q := c.qp
		c.mu.Unlock()
		if drop != nil {
			drop()
		}
		if q != nil {
			q.destroy()
		}
		c.release()
		close(c.gone)
	})
	<-c.gone
}

func (c *connID) fail(kind verbs.ConnErrorKind, phase string, err error) *verbs.ConnError {
	return &verbs.ConnError{Kind: kind, Phase: phase, Addr: c.remote.String(), Err: err}
}

// Phases of connection set-up, as errors name them.
const (
	phaseResolve     = "resolve route"
	phaseQueue       = "wait for another connect to the same address"
	phaseConnect     = "connect"
	phaseSendRequest = "send MPA request"
	phaseReadReply   = "read MPA reply"
	phaseCheckReply  = "check MPA reply"
	phaseSendReply   = "send MPA reply"
	phaseStart       = "start queue pair"
)

var (
	errClosed      = fmt.Errorf("the connection was closed by this side: %w", net.ErrClosed)
	errNoQP        = errors.New("no queue pair was created")
	errTwice       = errors.New("it was tried before")
	errDataTooLong = fmt.Errorf("private data is longer than %d octets", maxULPData)
)

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

// tuneListener is tuneSocket for a net.ListenConfig: connections inherit what their listener has.
func (d *device) tuneListener(_, _ string, c syscall.RawConn) error {
	return c.Control(func(fd uintptr) { d.tuneSocket(int(fd)) })
}

// tuneSocket asks for deep buffers before the handshake fixes the window scale. A process that may
// not force them keeps the kernel's auto-tuning, which goes further than an ordinary user's
// SO_RCVBUF.
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
