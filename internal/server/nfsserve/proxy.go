package nfsserve

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/internal/resvport"
	"github.com/nfsrdmad/nfsrdmad/internal/server/nfsd"
	"github.com/nfsrdmad/nfsrdmad/internal/server/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc/rpctcp"
)

// maxRecord is the largest call or reply in bytes.
const maxRecord = nfsd.MaxRecord

// Limits of the connections to the backend.
const (
	dialTimeout  = 10 * time.Second
	connsPerPeer = 2 // TCP connections for each RDMA connection
)

// A BackendError says why the NFS server behind the relay did not reply to a call.
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

// checkBackend makes a NULL call to the server at addr, so that a wrong address is an error at the
// start.
func checkBackend(ctx context.Context, addr string) error {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	c, err := rpctcp.Dial(ctx, addr, rpctcp.Options{})
	if err != nil {
		return &BackendError{Addr: addr, Op: "connect", Err: err}
	}
	defer c.Close()
	if err := nfs3.NewClient(c).Null(ctx, sunrpc.AppendAuthNone(nil)); err != nil {
		return &BackendError{Addr: addr, Op: "ask", Err: err}
	}
	return nil
}

// A proxy relays calls to an RPC over TCP server. Each client connection has separate TCP
// connections, so that the backend can tell clients apart by them and the proxy can keep the XIDs.
// When a TCP connection ends, the calls on it fail, svcrdma ends the client's RDMA connection, and
// the client sends the calls again. The next call makes a new TCP connection. A proxy satisfies
// svcrdma.ConnHandler and is safe for concurrent use.
type proxy struct {
	addr  string
	ports *resvport.Rule
	log   hclog.Logger

	mu    sync.Mutex
	peers map[netip.AddrPort]*backendPool // guarded by mu
}

func newProxy(addr string, insecure bool, log hclog.Logger) *proxy {
	return &proxy{addr: addr, ports: resvport.NewRule(insecure, log), log: log,
		peers: make(map[netip.AddrPort]*backendPool)}
}

// A backendPool holds the TCP connections of one client connection.
type backendPool struct {
	mu    sync.Mutex
	conns [connsPerPeer]*rpctcp.Client // guarded by mu
	next  int                          // guarded by mu
}

// ServeRPC relays one call.
func (p *proxy) ServeRPC(ctx context.Context, peer netip.AddrPort, call, reply []byte) ([]byte, error) {
	if h, _, err := sunrpc.ParseCall(call); (err != nil || h.Proc != 0) && !p.ports.Permits(peer) {
		return sunrpc.AppendDeniedReply(reply, h.XID, sunrpc.AuthTooWeak), nil
	}
	p.mu.Lock()
	pool := p.peers[peer]
	if pool == nil {
		pool = new(backendPool)
		p.peers[peer] = pool
	}
	p.mu.Unlock()
	b, err := p.conn(ctx, pool, peer)
	if err != nil {
		if ctx.Err() == nil { // else the client has left, and the backend did nothing wrong
			p.log.Error("call not relayed", "peer", peer, "error", err)
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
		p.log.Error("no reply to a call", "peer", peer, "error", err)
	}
	return nil, err
}

// ConnClosed closes the TCP connections of a client connection that has ended.
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

// conn returns the next connection of the pool in turn, and connects if there is none. The source
// port is reserved only if the client's is: the backend can require one.
func (p *proxy) conn(ctx context.Context, pool *backendPool, peer netip.AddrPort) (*rpctcp.Client, error) {
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
	dial := resvport.DialAny
	if peer.Port() < resvport.Limit {
		dial = resvport.Dial
	}
	tcp, err := dial(dialCtx, p.addr)
	if err != nil {
		return nil, &BackendError{Addr: p.addr, Op: "connect", Err: err}
	}
	fresh := rpctcp.New(tcp, rpctcp.Options{MaxRecord: maxRecord, WriteTimeout: writeTimeout})
	pool.mu.Lock()
	if b := pool.conns[i]; b != nil && b.Err() == nil { // of a concurrent call
		pool.mu.Unlock()
		fresh.Close()
		return b, nil
	}
	pool.conns[i] = fresh
	pool.mu.Unlock()
	return fresh, nil
}
