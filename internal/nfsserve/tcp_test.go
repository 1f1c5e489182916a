package nfsserve

import (
	"context"
	"net"
	"net/netip"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/internal/rpctcp"
)

// handlerFunc is a tcpHandler whose calls all wait.
type handlerFunc func(call, reply []byte) ([]byte, error)

func (f handlerFunc) ServeRPC(_ context.Context, _ netip.AddrPort, call, reply []byte) ([]byte, error) {
	return f(call, reply)
}

func (f handlerFunc) TryServe(netip.AddrPort, []byte, []byte) ([]byte, bool) { return nil, false }

// At most callsAtOnce calls are in progress, whatever the number of connections; the others wait.
func TestTCPCallsAtOnce(t *testing.T) {
	const conns = callsAtOnce/callsPerConn + 8
	var running, most, served atomic.Int64
	hold := make(chan struct{})
	srv := newTCPServer(handlerFunc(func(call, reply []byte) ([]byte, error) {
		now := running.Add(1)
		for old := most.Load(); now > old && !most.CompareAndSwap(old, now); old = most.Load() {
		}
		<-hold
		running.Add(-1)
		served.Add(1)
		return append(reply, call...), nil
	}), hclog.NewNullLogger())
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); srv.run(ctx, ctx, l) }()
	defer func() { cancel(); <-ended }()
	var clients []net.Conn
	for i := range conns {
		// Two addresses, because one may use only half of the room.
		from := &net.TCPAddr{IP: net.IPv4(127, 0, 0, byte(1+i%2))}
		c, err := (&net.Dialer{LocalAddr: from}).Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		clients = append(clients, c)
		for range callsPerConn {
			if err := rpctcp.WriteRecord(c, []byte("call")); err != nil {
				t.Fatal(err)
			}
		}
	}
	for deadline := time.Now().Add(testTimeout); running.Load() < callsAtOnce && time.Now().Before(deadline); {
		time.Sleep(time.Millisecond)
	}
	time.Sleep(100 * time.Millisecond) // time for calls beyond the limit
	if n := running.Load(); n != callsAtOnce {
		t.Errorf("%d calls at once, want %d", n, callsAtOnce)
	}
	close(hold)
	for _, c := range clients {
		_ = c.SetReadDeadline(time.Now().Add(testTimeout))
		for range callsPerConn {
			if reply, err := rpctcp.ReadRecord(c, nil, 100); err != nil || string(reply) != "call" {
				t.Fatalf("%q, %v", reply, err)
			}
		}
	}
	if most.Load() > callsAtOnce || served.Load() != conns*callsPerConn {
		t.Errorf("%d calls at once, %d served", most.Load(), served.Load())
	}
}

// quickHandler answers each call at once with one MiB.
type quickHandler struct{ handlerFunc }

func (quickHandler) TryServe(_ netip.AddrPort, _, reply []byte) ([]byte, bool) {
	return append(reply, make([]byte, 1<<20)...), true
}

// An idle connection does not keep the memory of its last reply.
func TestIdleConnectionsKeepNoReplies(t *testing.T) {
	const conns = 64
	srv := newTCPServer(quickHandler{}, hclog.NewNullLogger())
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); srv.run(ctx, ctx, l) }()
	defer func() { cancel(); <-ended }()
	buf := make([]byte, 2<<20)
	for range conns {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(testTimeout))
		if err := rpctcp.WriteRecord(c, []byte("call")); err != nil {
			t.Fatal(err)
		}
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
