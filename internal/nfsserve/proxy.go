package nfsserve

import (
	"context"
	"errors"
	"fmt"
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
	connsPerPeer = 2 // TCP connections for each RDMA connection
)

// A BackendError says why a call did not get its answer from the NFS server behind the RDMA port.
type BackendError struct {
	Addr string
	Op   string // "connect", "ask", "call"
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
	conns [connsPerPeer]*rpctcp.Client // guarded by mu
	next  int                          // guarded by mu
}

// ServeRPC passes one call on.
func (p *proxy) ServeRPC(ctx context.Context, peer netip.AddrPort, call, reply []byte) ([]byte, error) {
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
	reply, err = b.Forward(ctx, call, reply)
	if err == nil {
		return reply, nil
	}
	err = &BackendError{Addr: p.addr, Op: "call", Err: err}
	var long *rpctcp.SizeError
	if errors.As(err, &long) {
		err = fmt.Errorf("%w: %w", svcrdma.ErrReplySize, err)
	}
	if ctx.Err() == nil {
		p.log.Error("call not answered", "peer", peer, "error", err)
	}
	return nil, err
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
			b.Close()
		}
	}
}

// conn gives a connection that lives, in turn, dialing where there is none.
func (p *proxy) conn(ctx context.Context, pool *backendPool) (*rpctcp.Client, error) {
	pool.mu.Lock()
	i := pool.next
	pool.next = (i + 1) % connsPerPeer
	b := pool.conns[i]
	pool.mu.Unlock()
	if b != nil && b.Err() == nil {
		return b, nil
	}
	dialCtx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	fresh, err := rpctcp.Dial(dialCtx, p.addr, rpctcp.Options{MaxRecord: maxRecord, WriteTimeout: writeTimeout})
	if err != nil {
		return nil, &BackendError{Addr: p.addr, Op: "connect", Err: err}
	}
	pool.mu.Lock()
	if b := pool.conns[i]; b != nil && b.Err() == nil { // another call was faster
		pool.mu.Unlock()
		fresh.Close()
		return b, nil
	}
	pool.conns[i] = fresh
	pool.mu.Unlock()
	return fresh, nil
}
