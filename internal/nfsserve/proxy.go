package nfsserve

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/internal/nfsd"
	"github.com/nfsrdmad/nfsrdmad/internal/rpctcp"
	"github.com/nfsrdmad/nfsrdmad/internal/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// maxRecord is the largest call or reply in bytes.
const maxRecord = nfsd.MaxRecord

// Bounds of the way to the backend.
const (
	dialTimeout  = 10 * time.Second
	connsPerPeer = 2               // TCP connections for each RDMA connection
	restTimeout  = 2 * time.Second // for the rest of a reply whose call has ended
	// octets of a reply that is too long to be passed on; what has more ends the connection
	maxSkip = 64 << 20
)

// A BackendError says why a call did not get its answer from the NFS server behind the RDMA port.
type BackendError struct {
	Addr string
	Op   string // "connect", "ask", "send call", "read reply"
	Err  error
}

func (e *BackendError) Error() string {
	return fmt.Sprintf("NFS server %s: %s: %v; is it running, and does it serve NFSv3 on that TCP port?", e.Addr,
		e.Op, e.Err)
}

// Unwrap returns the cause.
func (e *BackendError) Unwrap() error { return e.Err }

// checkBackend asks the server at addr for nothing (NULL), so that a wrong address is heard of at
// the start.
func checkBackend(ctx context.Context, addr string) error {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	c, err := rpctcp.Dial(ctx, addr, rpctcp.Options{})
	if err != nil {
		return &BackendError{Addr: addr, Op: "connect", Err: err}
	}
	defer c.Close()
	if err := nfs3.NewClient(c, nfs3.Options{}).Null(ctx, sunrpc.AppendAuthNone(nil)); err != nil {
		return &BackendError{Addr: addr, Op: "ask", Err: err}
	}
	return nil
}

// proxy passes calls to an RPC over TCP server. Each client connection has a few TCP connections of
// its own, so that the backend can tell clients apart by them and XIDs need not be changed. When
// one of them ends, the calls on it fail, the client's RDMA connection is dropped, and the client
// sends them again; a new TCP connection is made when the next call comes. It satisfies
// svcrdma.ConnHandler.
type proxy struct {
	addr string
	log  hclog.Logger

	mu    sync.Mutex
	peers map[netip.AddrPort]*backendPool // guarded by mu
}

func newProxy(addr string, log hclog.Logger) *proxy {
	return &proxy{addr: addr, log: log, peers: make(map[netip.AddrPort]*backendPool)}
}

// backendPool is the connections of one client connection.
type backendPool struct {
	mu    sync.Mutex
	conns [connsPerPeer]*backendConn // guarded by mu
	next  int                        // guarded by mu
}

// ServeRPC passes one call on.
func (p *proxy) ServeRPC(ctx context.Context, peer netip.AddrPort, call, reply []byte) ([]byte, error) {
	if len(call) < 4 {
		return nil, errors.New("call without an XID")
	}
	p.mu.Lock()
	pool := p.peers[peer]
	if pool == nil {
		pool = new(backendPool)
		p.peers[peer] = pool
	}
	p.mu.Unlock()
	b, err := p.conn(ctx, pool)
	if err != nil {
		if ctx.Err() == nil { // else the client has gone, which says nothing of the backend
			p.log.Error("call not passed on", "peer", peer, "error", err)
		}
		return nil, err
	}
	reply, err = b.call(ctx, call, reply)
	if err != nil && ctx.Err() == nil {
		p.log.Error("call not answered", "peer", peer, "error", err)
	}
	return reply, err
}

// ConnClosed ends the connections of a client that is gone.
func (p *proxy) ConnClosed(peer netip.AddrPort) {
	p.mu.Lock()
	pool := p.peers[peer]
	delete(p.peers, peer)
	p.mu.Unlock()
	if pool == nil {
		return
	}
	for _, b := range pool.conns {
		if b != nil {
			b.fail(net.ErrClosed)
			<-b.ended
		}
	}
}

// conn gives a connection that lives, in turn, dialing where there is none.
func (p *proxy) conn(ctx context.Context, pool *backendPool) (*backendConn, error) {
	pool.mu.Lock()
	i := pool.next
	pool.next = (i + 1) % connsPerPeer
	b := pool.conns[i]
	pool.mu.Unlock()
	if b != nil && b.alive() {
		return b, nil
	}
	d := net.Dialer{Timeout: dialTimeout}
	c, err := d.DialContext(ctx, "tcp", p.addr)
	if err != nil {
		return nil, &BackendError{Addr: p.addr, Op: "connect", Err: err}
	}
	fresh := newBackendConn(p.addr, c)
	pool.mu.Lock()
	if b := pool.conns[i]; b != nil && b.alive() { // another call was faster
		pool.mu.Unlock()
		fresh.fail(net.ErrClosed)
		<-fresh.ended
		return b, nil
	}
	pool.conns[i] = fresh
	pool.mu.Unlock()
	return fresh, nil
}

// A backendConn is one TCP connection to the backend with calls in flight on it, matched by XID.
type backendConn struct {
	addr  string
	conn  net.Conn
	write chan struct{} // the right to write, one token
	dead  chan struct{}
	ended chan struct{} // the reader is gone

	mu    sync.Mutex
	calls map[uint32]*pendingCall // guarded by mu
	err   error                   // guarded by mu
}

// A pendingCall waits for its reply. Whoever takes it off the table owns reply until done is sent
// to.
type pendingCall struct {
	reply []byte
	done  chan error
}

func newBackendConn(addr string, c net.Conn) *backendConn {
	b := &backendConn{addr: addr, conn: c, write: make(chan struct{}, 1), dead: make(chan struct{}),
		ended: make(chan struct{}),
		calls: make(map[uint32]*pendingCall)}
	go b.read()
	return b
}

func (b *backendConn) alive() bool {
	select {
	case <-b.dead:
		return false
	default:
		return true
	}
}

// errPartOfReply: the backend began a reply and did not end it.
var errPartOfReply = errors.New("the rest of a reply does not come")

// errBusyXID: the client uses one XID for two calls at a time.
var errBusyXID = errors.New("a call with the same XID is running")

func (b *backendConn) call(ctx context.Context, call, reply []byte) ([]byte, error) {
	xid := binary.BigEndian.Uint32(call)
	p := &pendingCall{reply: reply, done: make(chan error, 1)}
	if err := b.enter(xid, p); err != nil {
		return nil, err
	}
	select {
	case b.write <- struct{}{}:
	case <-ctx.Done():
		return nil, b.abandon(xid, p, ctx.Err())
	case <-b.dead:
		return nil, <-p.done
	}
	_ = b.conn.SetWriteDeadline(time.Now().Add(writeTimeout))
	err := rpctcp.WriteRecord(b.conn, call)
	<-b.write
	if err != nil {
		b.fail(&BackendError{Addr: b.addr, Op: "send call", Err: err})
	}
	select {
	case err = <-p.done:
	case <-ctx.Done():
		return nil, b.abandon(xid, p, ctx.Err())
	}
	if err != nil {
		return nil, err
	}
	return p.reply, nil
}

func (b *backendConn) enter(xid uint32, p *pendingCall) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.err != nil:
		return b.err
	case b.calls[xid] != nil:
		return &BackendError{Addr: b.addr, Op: "send call", Err: errBusyXID}
	}
	b.calls[xid] = p
	return nil
}

// abandon ends a call. Where its reply is being read into its buffer, that is waited for; a backend
// that stops within a reply loses the connection.
func (b *backendConn) abandon(xid uint32, p *pendingCall, err error) error {
	if b.leave(xid) != nil {
		return err
	}
	late := time.NewTimer(restTimeout)
	defer late.Stop()
	select {
	case <-p.done:
	case <-late.C:
		b.fail(&BackendError{Addr: b.addr, Op: "read reply", Err: errPartOfReply})
		<-p.done // the reader's, whose connection is closed
	}
	return err
}

func (b *backendConn) leave(xid uint32) *pendingCall {
	b.mu.Lock()
	defer b.mu.Unlock()
	p := b.calls[xid]
	delete(b.calls, xid)
	return p
}

// fail ends the connection and every call on it.
func (b *backendConn) fail(err error) {
	b.mu.Lock()
	if b.err != nil {
		b.mu.Unlock()
		return
	}
	b.err = err
	calls := b.calls
	b.calls = nil
	close(b.dead)
	b.mu.Unlock()
	b.conn.Close()
	for _, p := range calls {
		p.done <- err
	}
}

// read hands each reply to its call. A reply that nobody waits for is read and forgotten.
func (b *backendConn) read() {
	defer close(b.ended)
	r := bufio.NewReaderSize(b.conn, readBuffer)
	var stray []byte
	for {
		// The mark and the XID come first, so that the rest can be read straight into the call's
		// own buffer.
		head, err := r.Peek(rpctcp.MarkSize + sunrpc.SizeUint32)
		if err != nil {
			b.fail(&BackendError{Addr: b.addr, Op: "read reply", Err: err})
			return
		}
		var p *pendingCall
		// legal, and made by nobody: the XID itself is cut
		inParts := rpctcp.FragmentSize(head) < sunrpc.SizeUint32
		if !inParts {
			p = b.leave(binary.BigEndian.Uint32(head[rpctcp.MarkSize:]))
		}
		if p == nil {
			stray, err = rpctcp.ReadRecord(r, stray, maxRecord)
		} else {
			p.reply, err = rpctcp.ReadRecord(r, p.reply, maxRecord)
		}
		if inParts && err == nil && len(stray) >= sunrpc.SizeUint32 {
			if p = b.leave(binary.BigEndian.Uint32(stray)); p != nil {
				p.reply = append(p.reply[:0], stray...)
			}
		}
		var long *rpctcp.SizeError
		// the backend would say the same again: the call ends, the connection goes on
		if errors.As(err, &long) {
			if p != nil {
				p.done <- fmt.Errorf("%w: %w", svcrdma.ErrReplySize, &BackendError{Addr: b.addr, Op: "read reply",
					Err: err})
				p = nil
			}
			err = long.Skip(r, maxSkip)
		}
		if err != nil {
			err = &BackendError{Addr: b.addr, Op: "read reply", Err: err}
			b.fail(err)
		}
		if p != nil {
			p.done <- err
		}
		if err != nil {
			return
		}
	}
}
