package nfsserve

import (
	"context"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc/rpctcp"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// handlerFunc is a tcpHandler whose calls all wait.
type handlerFunc func(call, reply []byte) ([]byte, error)

func (f handlerFunc) ServeRPC(_ context.Context, _ netip.AddrPort, call, reply []byte) ([]byte, error) {
	return f(call, reply)
}

func (f handlerFunc) TryServe(netip.AddrPort, []byte, []byte) ([]byte, bool) { return nil, false }

// echo replies to each call with the call.
var echo = handlerFunc(func(call, reply []byte) ([]byte, error) { return append(reply, call...), nil })

// runTCP serves a TCP port until stop ends. ended is closed when the server has ended.
func runTCP(t *testing.T, stop context.Context, h tcpHandler) (addr string, ended chan struct{}) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	kit.Must(t, err)
	ended = make(chan struct{})
	go func() {
		defer close(ended)
		newTCPServer(h, hclog.NewNullLogger()).run(stop, context.Background(), l)
	}()
	return l.Addr().String(), ended
}

// A pipeListener accepts pipes, so that a server runs under testing/synctest.
type pipeListener struct {
	conns  chan net.Conn
	closed chan struct{}
}

// A pipeConn is the server's end of a pipe.
type pipeConn struct {
	net.Conn
	from byte // of the address of the client
}

func (c pipeConn) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.IPv4(192, 0, 2, c.from)} }

func (l *pipeListener) dial(from byte) net.Conn {
	client, server := net.Pipe()
	l.conns <- pipeConn{server, from}
	return client
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *pipeListener) Close() error { close(l.closed); return nil }

func (*pipeListener) Addr() net.Addr { return &net.TCPAddr{} }

// pipes runs a server whose connections are pipes, until the end of the test.
func pipes(t *testing.T, h tcpHandler) *pipeListener {
	l := &pipeListener{conns: make(chan net.Conn), closed: make(chan struct{})}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		newTCPServer(h, hclog.NewNullLogger()).run(ctx, ctx, l)
	}()
	t.Cleanup(func() { cancel(); <-ended })
	return l
}

// At most callsAtOnce calls are in progress, whatever the number of connections; the others wait.
func TestTCPCallsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const conns = callsAtOnce/callsPerConn + 8
		var running atomic.Int64
		hold := make(chan struct{})
		l := pipes(t, handlerFunc(func(call, reply []byte) ([]byte, error) {
			running.Add(1)
			<-hold
			running.Add(-1)
			return append(reply, call...), nil
		}))
		var clients sync.WaitGroup
		for i := range conns {
			c := l.dial(byte(i % 2)) // two addresses, because one may use only half of the places
			defer c.Close()
			clients.Go(func() {
				for range callsPerConn {
					if err := rpctcp.WriteRecord(c, []byte("call")); err != nil {
						t.Error(err)
					}
				}
			})
			clients.Go(func() {
				for range callsPerConn {
					if reply, err := rpctcp.ReadRecord(c, nil, 100); err != nil || string(reply) != "call" {
						t.Errorf("%q, %v", reply, err)
					}
				}
			})
		}
		synctest.Wait()
		if n := running.Load(); n < callsAtOnce/2 || n > callsAtOnce {
			t.Errorf("%d calls at once, want from %d to %d", n, callsAtOnce/2, callsAtOnce)
		}
		close(hold)
		clients.Wait()
	})
}

// quickHandler answers each call at once with one MiB.
type quickHandler struct{ handlerFunc }

func (quickHandler) TryServe(_ netip.AddrPort, _, reply []byte) ([]byte, bool) {
	return append(reply, make([]byte, 1<<20)...), true
}

// An idle connection does not keep the memory of its last reply.
func TestIdleConnectionsKeepNoReplies(t *testing.T) {
	const conns = 64
	ctx, cancel := context.WithCancel(t.Context())
	addr, ended := runTCP(t, ctx, quickHandler{})
	defer func() { cancel(); <-ended }()
	buf := make([]byte, 2<<20)
	for range conns {
		c, err := net.Dial("tcp", addr)
		kit.Must(t, err)
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(kit.Timeout))
		kit.Must(t, rpctcp.WriteRecord(c, []byte("call")))
		if buf, err = rpctcp.ReadRecord(c, buf, len(buf)+2<<20); err != nil {
			t.Fatal(err)
		}
	}
	var mem runtime.MemStats
	for range 3 { // a sync.Pool keeps what it has during one collection
		runtime.GC()
	}
	runtime.ReadMemStats(&mem)
	if mem.HeapAlloc > conns/2<<20 {
		t.Errorf("memory with %d idle connections: got %d MiB, want less than %d", conns, mem.HeapAlloc>>20, conns/2)
	}
}
