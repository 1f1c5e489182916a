package lab

import (
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"net/rpc"
	"net/rpc/jsonrpc"
	"sync"
	"testing"
	"time"
)

// remoteWait bounds the wait of a process in a guest for its host.
const remoteWait = time.Minute

// A remoteHost is this process's connection to its host. It is safe for concurrent use.
type remoteHost struct {
	rpc   *rpc.Client
	users int // guarded by sharedHost.mu; tests that use the connection
}

// sharedHost is the connection that all tests share. The last test that uses it closes it.
var sharedHost struct {
	mu sync.Mutex
	*remoteHost
}

// connectHost returns the connection to the host, for use until the test ends.
func connectHost(t testing.TB) *remoteHost {
	t.Helper()
	sharedHost.mu.Lock()
	defer sharedHost.mu.Unlock()
	if sharedHost.remoteHost == nil {
		conn, err := acceptHost()
		if err != nil {
			t.Fatalf("connect to the host's lab (%s is set): %v", RemoteEnv, err)
		}
		sharedHost.remoteHost = &remoteHost{rpc: jsonrpc.NewClient(conn)}
	}
	h := sharedHost.remoteHost
	h.users++
	t.Cleanup(func() {
		sharedHost.mu.Lock()
		defer sharedHost.mu.Unlock()
		if h.users--; h.users == 0 {
			h.rpc.Close()
			sharedHost.remoteHost = nil
		}
	})
	return h
}

// acceptHost waits for the host to connect.
func acceptHost() (net.Conn, error) {
	l, err := net.ListenTCP("tcp4", net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.IPv4Unspecified(), remotePort)))
	if err != nil {
		return nil, err
	}
	defer l.Close()
	l.SetDeadline(time.Now().Add(remoteWait))
	conn, err := l.Accept()
	if err != nil {
		return nil, err
	}
	if _, err := conn.Write([]byte(remoteHello)); err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// do sends a request to the host. The answer contains an error of the host's lab, or of the
// connection.
func (h *remoteHost) do(r remoteRequest) (a remoteAnswer) {
	var raw json.RawMessage
	err := h.rpc.Call(remoteMethod, pack(r), &raw)
	if err == nil {
		err = json.Unmarshal(raw, &a)
	}
	if err != nil {
		a.Err = packError(fmt.Errorf("request %s to the host's lab: %w", r.Op, err))
	}
	return a
}

// A remoteGuest identifies a guest, or a capture, that the host runs for this process.
type remoteGuest struct {
	host *remoteHost
	id   int
}

// do sends a request about this guest to the host.
func (g *remoteGuest) do(op remoteOp) error { return g.ask(remoteRequest{Op: op}).Err.unpack() }

func (g *remoteGuest) ask(r remoteRequest) remoteAnswer {
	r.ID = g.id
	return g.host.do(r)
}

// newRemote returns the Guest that an answer describes.
func newRemote(t testing.TB, h *remoteHost, o Options, a remoteAnswer) *Guest {
	return &Guest{t: t, opts: o, RDMA: a.RDMA, NFS: a.NFS, Mount: a.Mount, Portmap: a.Portmap, NLM: a.NLM,
		Linked: a.Linked, Release: a.Release, remote: &remoteGuest{h, a.ID}}
}

// RemoteServer returns the guest that the host passed to ServeRemote, for a process that runs in a
// guest. This guest does not end with the test.
func RemoteServer(t testing.TB) *Guest {
	t.Helper()
	h := connectHost(t)
	a := h.do(remoteRequest{Op: opServer})
	if err := a.Err.unpack(); err != nil {
		t.Fatal(err)
	}
	return newRemote(t, h, Options{Name: "server"}, a)
}

// startRemote is Start for a process in a guest.
func startRemote(t testing.TB, o Options) *Guest {
	t.Helper()
	h := connectHost(t)
	a := h.do(remoteRequest{Op: opStart, Options: o})
	for _, line := range a.Logs {
		t.Logf("%s", line)
	}
	if err := a.Err.unpack(); err != nil {
		t.Fatal(err)
	}
	g := newRemote(t, h, o.withDefaults(), a)
	t.Cleanup(func() {
		a := g.remote.ask(remoteRequest{Op: opEnd, Failed: t.Failed()})
		for _, line := range a.Logs {
			t.Logf("%s", line)
		}
		for _, line := range a.Errors {
			t.Errorf("%s", line)
		}
		if err := a.Err.unpack(); err != nil {
			t.Error(err)
		}
	})
	return g
}

// captureRemote is Guest.Capture for a process in a guest: the host records and reads the capture.
func (g *Guest) captureRemote(t testing.TB, name string) *Capture {
	t.Helper()
	a := g.remote.ask(remoteRequest{Op: opCapture, Name: name})
	for _, line := range a.Logs {
		t.Logf("%s", line)
	}
	if err := a.Err.unpack(); err != nil {
		t.Fatal(err)
	}
	c := &Capture{File: a.Text, remote: &remoteGuest{g.remote.host, a.ID}}
	t.Cleanup(func() { c.Stop() })
	return c
}
