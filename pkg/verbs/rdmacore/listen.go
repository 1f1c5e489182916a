//go:build rdmacore && cgo && linux

package rdmacore

/*
#include "shim.h"
*/
import "C"

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"unsafe"

	"github.com/nfsrdmad/nfsrdmad/internal/selfcheck"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/internal/base"
)

// backlog is the number of connection requests that may wait for Accept. Further ones are rejected.
const backlog = 128

// A listener is a listening connection id.
type listener struct {
	p        *provider
	ch       *eventChannel
	c        *C.struct_rdma_cm_id
	addr     netip.AddrPort
	requests chan *cmEvent
	closed   chan struct{} // closed when Close begins
	once     sync.Once
	done     chan struct{} // closed when Close is complete

	deviceRemoved chan struct{} // closed when the device of the address is removed
	removal       sync.Once
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
	ch, err := acquireChannel()
	if err != nil {
		return nil, fail(err)
	}
	l := &listener{p: p, ch: ch, requests: make(chan *cmEvent, backlog),
		closed: make(chan struct{}), done: make(chan struct{}), deviceRemoved: make(chan struct{})}
	if l.c, err = ch.createID(l.handle); err != nil {
		ch.release()
		return nil, fail(err)
	}
	if err := errnoOf(C.rc_listen(l.c, sa, backlog)); err != nil {
		ch.destroyID(l.c)
		ch.release()
		return nil, fail(err)
	}
	l.addr = address(l.c, false)
	selfcheck.Track(selfcheck.Listener, 1)
	return l, nil
}

// handle processes an event of the listener. The channel's goroutine calls it.
func (l *listener) handle(ev *cmEvent) {
	if ev.kind == evDeviceRemoval {
		l.removal.Do(func() { close(l.deviceRemoved) })
	}
	if ev.kind != evConnectRequest {
		l.p.cfg.Logger.Warn("RDMA listener event", "address", l.addr.String(), "event", ev.kind.String(),
			"status", ev.status)
		return
	}
	select {
	case l.requests <- ev:
	default:
		rejectRequest(ev)
	}
}

// rejectRequest rejects a request that has no ConnID.
func rejectRequest(ev *cmEvent) {
	C.rc_reject(ev.id, nil, 0)
	C.rc_destroy_id(ev.id)
}

// Addr returns the address with its port.
func (l *listener) Addr() netip.AddrPort { return l.addr }

// Accept waits for the next connection request. It returns net.ErrClosed after Close, and an error
// that wraps ENODEV after the device was removed.
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
				l.p.cfg.Logger.Warn("accept RDMA connection request", "listener", l.addr.String(), "error", err)
				continue
			}
			return r, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-l.deviceRemoved:
			return nil, fmt.Errorf("rdmacore: accept on %v: RDMA device was removed: %w; "+
				"listen again when the device is back", l.addr, syscall.ENODEV)
		case <-l.closed:
			return nil, net.ErrClosed
		}
	}
}

// request makes a ConnID for a connect request.
func (l *listener) request(ev *cmEvent) (*request, error) {
	ch, err := acquireChannel()
	if err != nil {
		rejectRequest(ev)
		return nil, err
	}
	c := newConnID(ch, address(ev.id, true))
	c.c = ev.id
	c.SetPeer(peerParam(ev))
	ch.setHandler(c.c, c.handle)
	if err := c.useDevice(l.p.cfg); err != nil {
		C.rc_reject(c.c, nil, 0)
		c.Close()
		return nil, err
	}
	return &request{connID: c}, nil
}

// Close stops listening and rejects the requests that wait for Accept. Later calls wait for the
// first one.
func (l *listener) Close() error {
	l.once.Do(func() {
		close(l.closed)
		l.ch.destroyID(l.c)
		for {
			select {
			case ev := <-l.requests:
				rejectRequest(ev)
				continue
			default:
			}
			break
		}
		l.ch.release()
		selfcheck.Track(selfcheck.Listener, -1)
		close(l.done)
	})
	<-l.done
	return nil
}

// A request is the ConnID of the accepting side.
type request struct{ *connID }

// Accept accepts the request and waits until the connection is established. The QP is ready before
// the peer can send, because the first message may need a reply.
func (r *request) Accept(ctx context.Context, param verbs.ConnParam) error {
	return r.handshake(ctx, phaseAccept, param, true, func(data unsafe.Pointer, n, ird, ord C.int) C.int {
		return C.rc_accept(r.c, data, n, ird, ord)
	})
}

// Reject rejects the request and closes the ConnID.
func (r *request) Reject(privateData []byte) error {
	r.setup.Lock()
	started := r.setup.started
	r.setup.started = true
	r.setup.Unlock()
	select {
	case <-r.Done():
		return r.Fail(verbs.ConnLocal, phaseReject, base.ErrClosed)
	default:
	}
	if started {
		return r.Fail(verbs.ConnLocal, phaseReject, base.ErrReused)
	}
	defer r.Close()
	if len(privateData) > maxPrivate {
		C.rc_reject(r.c, nil, 0)
		return r.Fail(verbs.ConnLocal, phaseReject, fmt.Errorf("private data has %d bytes, want at most %d",
			len(privateData), maxPrivate))
	}
	data := C.CBytes(privateData)
	defer freeC(data)
	if err := errnoOf(C.rc_reject(r.c, data, C.int(len(privateData)))); err != nil {
		C.rc_reject(r.c, nil, 0)
		return r.Fail(verbs.ConnLocal, phaseReject, explainErrno(err))
	}
	return nil
}
