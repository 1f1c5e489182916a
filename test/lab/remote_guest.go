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

// remoteWait is how long a process in a guest waits for its host.
const remoteWait = time.Minute

// A remoteHost is the connection of this process to its host. Safe for concurrent use.
type remoteHost struct {
	rpc   *rpc.Client
	users int // guarded by theHost.mu
}

// theHost is there while a test uses it: nothing is left of it at the end of the tests.
var theHost struct {
	mu sync.Mutex
	*remoteHost
}

// useHost connects to the host until the test ends.
func useHost(t testing.TB) *remoteHost {
	t.Helper()
	theHost.mu.Lock()
	defer theHost.mu.Unlock()
	if theHost.remoteHost == nil {
		conn, err := awaitHost()
		if err != nil {
			t.Fatalf("this process is to use its host's lab (%s is set): %v", RemoteEnv, err)
		}
		theHost.remoteHost = &remoteHost{rpc: jsonrpc.NewClient(conn)}
	}
	h := theHost.remoteHost
	h.users++
	t.Cleanup(func() {
		theHost.mu.Lock()
		defer theHost.mu.Unlock()
		if h.users--; h.users == 0 {
			h.rpc.Close()
			theHost.remoteHost = nil
		}
	})
	return h
}

// awaitHost waits for the host.
func awaitHost() (net.Conn, error) {
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

// do asks the host. An error of the host's lab is in the answer; the connection's own is none that
// a test can go on with.
func (h *remoteHost) do(r remoteRequest) (a remoteAnswer) {
	var raw json.RawMessage
	err := h.rpc.Call(remoteMethod, pack(r), &raw)
	if err == nil {
		err = json.Unmarshal(raw, &a)
	}
	if err != nil {
		a.Err = packError(fmt.Errorf("the host's lab, asked to %s: %w", r.Op, err))
	}
	return a
}

// A remoteGuest is what a Guest is to a process that only asks its host for it.
type remoteGuest struct {
	host *remoteHost
	id   int
}

// do asks the host for something of this guest.
func (g *remoteGuest) do(op remoteOp) error { return g.ask(remoteRequest{Op: op}).Err.unpack() }

func (g *remoteGuest) ask(r remoteRequest) remoteAnswer {
	r.ID = g.id
	return g.host.do(r)
}

// newRemote makes the Guest of an answer.
func newRemote(t testing.TB, h *remoteHost, o Options, a remoteAnswer) *Guest {
	return &Guest{t: t, opts: o, RDMA: a.RDMA, NFS: a.NFS, Mount: a.Mount, Portmap: a.Portmap, Linked: a.Linked,
		Release: a.Release, remote: &remoteGuest{h, a.ID}}
}

// Borrow is the guest that the host's Lend was given, for a process that runs in a guest itself. It
// goes on after the test.
func Borrow(t testing.TB) *Guest {
	t.Helper()
	h := useHost(t)
	a := h.do(remoteRequest{Op: opServer})
	if err := a.Err.unpack(); err != nil {
		t.Fatal(err)
	}
	return newRemote(t, h, Options{Name: "server"}, a)
}

// startRemote is Start for a process in a guest.
func startRemote(t testing.TB, o Options) *Guest {
	t.Helper()
	h := useHost(t)
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

// captureRemote is Guest.Capture for a process in a guest: the host records, and reads.
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
