package nfsserve

import (
	"context"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc/rpctcp"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// waitRefused waits until no server listens on the address.
func waitRefused(t *testing.T, addr string) {
	t.Helper()
	kit.Eventually(t, "refused connection to "+addr, func() bool {
		c, err := net.Dial("tcp", addr)
		if err == nil {
			c.Close()
		}
		return err != nil
	})
}

// TestTCPStopSendsReplies stops a server while a call runs. The client gets the reply and then the
// end of the connection. The server does not execute a call that arrives after the stop.
func TestTCPStopSendsReplies(t *testing.T) {
	running, finish := make(chan struct{}, 2), make(chan struct{})
	stop, stopServer := context.WithCancel(t.Context())
	addr, ended := runTCP(t, stop, handlerFunc(func(call, reply []byte) ([]byte, error) {
		running <- struct{}{}
		<-finish
		return append(reply, call...), nil
	}))
	c, err := net.Dial("tcp", addr)
	kit.Must(t, err)
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(kit.Timeout))
	kit.Must(t, rpctcp.WriteRecord(c, []byte("first")))
	<-running
	stopServer()
	waitRefused(t, addr)
	kit.Must(t, rpctcp.WriteRecord(c, []byte("second")))
	close(finish)
	if reply, err := rpctcp.ReadRecord(c, nil, 100); err != nil || string(reply) != "first" {
		t.Errorf("reply of the running call: got %q, %v", reply, err)
	}
	if reply, err := rpctcp.ReadRecord(c, nil, 100); err != io.EOF {
		t.Errorf("after the reply: got %q, %v, want %v", reply, err, io.EOF)
	}
	c.Close()
	<-ended
	if len(running) > 0 {
		t.Error("the server executed a call that arrived after the stop")
	}
}

// A slowDeadlineConn is a connection whose SetReadDeadline takes long for a deadline in the past,
// or until a later call has returned.
type slowDeadlineConn struct {
	net.Conn
	mu    sync.Mutex
	past  []bool // whether the deadlines were in the past, in the order of their effect
	later chan struct{}
}

func (c *slowDeadlineConn) SetReadDeadline(at time.Time) error {
	past := at.Before(time.Now())
	if past {
		select {
		case <-c.later:
		case <-time.After(100 * time.Millisecond):
		}
	}
	c.mu.Lock()
	c.past = append(c.past, past)
	c.mu.Unlock()
	if !past {
		close(c.later)
	}
	return nil
}

// TestTCPStopKeepsDeadlineOfFinish stops a connection whose reader has just ended. The deadline
// that interrupts the reader must not replace the deadline for the client's last calls: unread
// calls would reset the connection, and the client could lose replies.
func TestTCPStopKeepsDeadlineOfFinish(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		peer, own := net.Pipe()
		defer peer.Close()
		c := &slowDeadlineConn{Conn: own, later: make(chan struct{})}
		srv := newTCPServer(quickHandler{}, hclog.NewNullLogger())
		stop, cancel := context.WithCancel(t.Context())
		cancel()
		(&tcpConn{tcpServer: srv, conn: c, client: &tcpClient{}}).serve(stop, t.Context())
		if want := []bool{true, false}; !slices.Equal(c.past, want) {
			t.Errorf("read deadlines in the past: got %v, want %v", c.past, want)
		}
	})
}

// A holdingBackend answers NULL calls at once and gives the others to the test.
type holdingBackend struct {
	*scripted
	held chan scriptedCall
}

func newHoldingBackend(t *testing.T) *holdingBackend {
	b := &holdingBackend{newScripted(t), make(chan scriptedCall, 64)}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case call := <-b.calls:
				if h, _, err := sunrpc.ParseCall(call.msg); err == nil && h.Proc == 0 {
					call.answer(t, "")
				} else {
					b.held <- call
				}
			case <-ctx.Done():
				return
			}
		}
	}()
	t.Cleanup(func() { cancel(); <-ended })
	return b
}

// serve runs a relay to the backend. At its end, the relay waits for its calls for the timeout.
func (b *holdingBackend) serve(t *testing.T, listen string, timeout time.Duration) *Server {
	t.Helper()
	s, err := Run(t.Context(), Config{Backend: b.Addr().String(), RDMAListen: listen,
		Provider: softiwarp.New(softiwarp.Config{}), drainTimeout: timeout})
	kit.Must(t, err)
	t.Cleanup(func() { s.Close() })
	return s
}

// A heldCall is a GETATTR that waits for its reply.
type heldCall chan error

// getAttr returns a function that starts a GETATTR over RDMA.
func getAttr(t *testing.T, addr netip.AddrPort) func() heldCall {
	t.Helper()
	x, err := xprt.New(xprt.Config{Provider: softiwarp.New(softiwarp.Config{}), Addr: addr,
		ReconnectMin: 10 * time.Millisecond, ReconnectMax: 100 * time.Millisecond})
	kit.Must(t, err)
	t.Cleanup(func() { x.Close() })
	ctx, cancel := context.WithTimeout(context.Background(), kit.Timeout)
	t.Cleanup(cancel)
	kit.Must(t, x.Connect(ctx))
	c := nfs3.NewClient(x)
	fh, _ := nfs3.NewFH([]byte("file"))
	return func() heldCall {
		result := make(heldCall, 1)
		go func() {
			var a nfs3.Attr
			result <- c.GetAttr(ctx, sunrpc.AppendAuthNone(nil), fh, &a)
		}()
		return result
	}
}

// stale is the body of a reply with NFS3ERR_STALE.
const stale = "\x00\x00\x00\x46"

func (c heldCall) check(t *testing.T, what string) {
	t.Helper()
	if err := <-c; nfs3.Errno(err) != syscall.ESTALE {
		t.Errorf("%s: got %v, want the reply of the backend", what, err)
	}
}

// TestRestartHandsCallsOver stops a server while a call runs, sends another call, and starts a new
// server on the same port. Each call must reach the backend once, and get its reply.
func TestRestartHandsCallsOver(t *testing.T) {
	b := newHoldingBackend(t)
	s := b.serve(t, "127.0.0.1:0", kit.Timeout)
	call := getAttr(t, s.RDMAAddr)
	first := call()
	running := <-b.held
	s.stop()
	waitRefused(t, s.RDMAAddr.String())
	second := call()
	running.answer(t, stale)
	first.check(t, "call that ran at the stop")
	if err := s.Wait(); err != nil {
		t.Error(err)
	}
	if len(b.held) > 0 {
		t.Error("the server executed a call that arrived after the stop")
	}
	b.serve(t, s.RDMAAddr.String(), kit.Timeout)
	later := <-b.held
	later.answer(t, stale)
	second.check(t, "call that the first server did not execute")
	if len(b.held) > 0 {
		t.Error("a call reached the backend twice")
	}
}

// TestStopIsBounded closes a server while its backend does not reply to a call.
func TestStopIsBounded(t *testing.T) {
	b := newHoldingBackend(t)
	s := b.serve(t, "127.0.0.1:0", 10*time.Millisecond)
	getAttr(t, s.RDMAAddr)()
	<-b.held
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}
