//go:build rdmacore && cgo && linux

package rdmacore

/*
#include "shim.h"
*/
import "C"

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"unsafe"

	"github.com/nfsrdmad/nfsrdmad/internal/leakcheck"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/internal/base"
)

// backlog is how many connection requests wait for Accept; more are rejected.
const backlog = 128

// A listener is a listening connection id.
type listener struct {
	p        *provider
	ch       *channel
	c        *C.struct_rdma_cm_id
	addr     netip.AddrPort
	requests chan *cmEvent
	lost     chan struct{} // closed when the device that it listens on is removed
	losing   sync.Once
	closed   chan struct{}
	once     sync.Once
	gone     chan struct{}
}

// Listen accepts connections on laddr.
func (p *provider) Listen(ctx context.Context, laddr netip.AddrPort) (verbs.Listener, error) {
	fail := func(err error) error { return fmt.Errorf("rdmacore: listen on %v: %w", laddr, err) }
	if err := ctx.Err(); err != nil {
		return nil, fail(err)
	}
	sa, err := sockaddr(laddr)
	if err != nil {
		return nil, fail(err)
	}
	defer freeC(sa)
	ch, err := openChannel()
	if err != nil {
		return nil, fail(err)
	}
	l := &listener{p: p, ch: ch, requests: make(chan *cmEvent, backlog), lost: make(chan struct{}),
		closed: make(chan struct{}), gone: make(chan struct{})}
	if l.c, err = ch.createID(l.handle); err != nil {
		ch.leave()
		return nil, fail(err)
	}
	if err := errnoOf(C.rc_listen(l.c, sa, backlog)); err != nil {
		ch.destroyID(l.c)
		ch.leave()
		return nil, fail(err)
	}
	l.addr = address(l.c, false)
	leakcheck.Track(leakcheck.Listener, 1)
	return l, nil
}

// handle takes an event of the listener, on the goroutine of the channel.
func (l *listener) handle(ev *cmEvent) {
	if ev.kind == evDeviceRemoval {
		l.lose()
	}
	if ev.kind != evConnectRequest {
		l.p.cfg.Logger.Warn("RDMA listener", "address", l.addr.String(), "event", ev.kind.String(), "status", ev.status)
		return
	}
	select {
	case l.requests <- ev:
	default:
		refuse(ev)
	}
}

// lose notes that nothing can come any more.
func (l *listener) lose() { l.losing.Do(func() { close(l.lost) }) }

// refuse rejects a request that nobody has taken.
func refuse(ev *cmEvent) {
	C.rc_reject(ev.id, nil, 0)
	C.rc_destroy_id(ev.id)
}

// Addr is the address, with its port.
func (l *listener) Addr() netip.AddrPort { return l.addr }

// Accept waits for the next connection request.
func (l *listener) Accept(ctx context.Context) (verbs.ConnRequest, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	for {
		select {
		case <-l.closed:
			return nil, net.ErrClosed
		default:
		}
		select {
		case ev := <-l.requests:
			r, err := l.request(ev)
			if err != nil {
				l.p.cfg.Logger.Warn("RDMA connection request", "listener", l.addr.String(), "error", err)
				continue
			}
			return r, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-l.lost:
			return nil, fmt.Errorf("rdmacore: listener on %v: its RDMA device was removed: listen again when it is back: %w", l.addr, syscall.ENODEV)
		case <-l.closed:
			return nil, net.ErrClosed
		}
	}
}

// request makes a ConnRequest of an event.
func (l *listener) request(ev *cmEvent) (*request, error) {
	ch, err := openChannel()
	if err != nil {
		refuse(ev)
		return nil, err
	}
	c := newConnID(ch, address(ev.id, true))
	c.c = ev.id
	c.SetPeer(peerParam(ev))
	ch.adopt(c.c, c.handle)
	if err := c.attach(l.p.cfg); err != nil {
		C.rc_reject(c.c, nil, 0)
		c.Close()
		return nil, err
	}
	return &request{connID: c}, nil
}

// Close stops listening, and rejects what nobody has accepted.
func (l *listener) Close() error {
	l.once.Do(func() {
		close(l.closed)
		l.ch.destroyID(l.c)
		for {
			select {
			case ev := <-l.requests:
				refuse(ev)
				continue
			default:
			}
			break
		}
		l.ch.leave()
		leakcheck.Track(leakcheck.Listener, -1)
		close(l.gone)
	})
	<-l.gone
	return nil
}

// A request is the accepting side's ConnID.
type request struct{ *connID }

// Accept makes the connection. The QP is ready before the peer can know, so that its first message
// can be answered.
func (r *request) Accept(ctx context.Context, param verbs.ConnParam) error {
	return r.handshake(ctx, phaseAccept, param, true, func(data unsafe.Pointer, n, ird, ord C.int) C.int {
		return C.rc_accept(r.c, data, n, ird, ord)
	})
}

// Reject refuses the request and closes the ConnID.
func (r *request) Reject(privateData []byte) error {
	r.mu.Lock()
	tried := r.tried
	r.tried = true
	r.mu.Unlock()
	select {
	case <-r.Done():
		return r.Fail(verbs.ConnLocal, phaseReject, base.ErrClosed)
	default:
	}
	if tried {
		return r.Fail(verbs.ConnLocal, phaseReject, base.ErrReused)
	}
	defer r.Close()
	if len(privateData) > maxPrivate {
		C.rc_reject(r.c, nil, 0)
		return r.Fail(verbs.ConnLocal, phaseReject, errors.New("there is too much private data"))
	}
	data := C.CBytes(privateData)
	defer freeC(data)
	if err := errnoOf(C.rc_reject(r.c, data, C.int(len(privateData)))); err != nil {
		C.rc_reject(r.c, nil, 0)
		return r.Fail(verbs.ConnLocal, phaseReject, explain(err))
	}
	return nil
}
