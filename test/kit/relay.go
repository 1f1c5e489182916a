package kit

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/resvport"
)

// RelayOptions configures a Relay. The zero value forwards everything at once.
type RelayOptions struct {
	// ToServer and ToClient are called before the relay forwards n bytes of a connection in that
	// direction. They may wait. They must return before the relay stops at the end of the test. Use
	// a cleanup function for this, and register it after StartRelay.
	ToServer, ToClient func(n int)
	// ClientBuffer is the size of the receive buffer for data of a client, in bytes; 0 is the
	// kernel's default.
	ClientBuffer int
}

// A Relay forwards TCP connections to a server until the test ends. One goroutine at a time may
// call Start, Stop and Reset.
type Relay struct {
	t    testing.TB
	to   string
	opts RelayOptions
	addr netip.AddrPort
	work sync.WaitGroup

	mu    sync.Mutex
	ln    net.Listener // nil while the relay is stopped
	conns []net.Conn
}

// relayBuffer is the largest number of bytes that a relay forwards at once.
const relayBuffer = 64 << 10

// StartRelay starts a relay to the server at the address to.
func StartRelay(t testing.TB, to string, opts RelayOptions) *Relay {
	t.Helper()
	r := &Relay{t: t, to: to, opts: opts, addr: netip.MustParseAddrPort("127.0.0.1:0")}
	r.Start()
	r.addr = r.ln.Addr().(*net.TCPAddr).AddrPort()
	t.Cleanup(r.Stop)
	return r
}

// Addr returns the address for clients.
func (r *Relay) Addr() netip.AddrPort { return r.addr }

// Start starts a stopped relay again, at the same address.
func (r *Relay) Start() {
	r.t.Helper()
	ln, err := net.Listen("tcp", r.addr.String())
	if err != nil {
		r.t.Fatal(err)
	}
	r.mu.Lock()
	r.ln = ln
	r.mu.Unlock()
	r.work.Go(func() { r.accept(ln) })
}

// Stop closes all connections and refuses new ones. It does nothing if the relay is stopped.
func (r *Relay) Stop() { r.stop(func(c net.Conn) { c.Close() }) }

// Reset is Stop, but resets the connections.
func (r *Relay) Reset() {
	r.stop(func(c net.Conn) {
		_ = c.(*net.TCPConn).SetLinger(0)
		c.Close()
	})
}

func (r *Relay) stop(end func(net.Conn)) {
	r.mu.Lock()
	ln, conns := r.ln, r.conns
	r.ln, r.conns = nil, nil
	r.mu.Unlock()
	if ln == nil {
		return
	}
	ln.Close()
	for _, c := range conns {
		end(c)
	}
	r.work.Wait()
}

func (r *Relay) accept(ln net.Listener) {
	for {
		client, err := ln.Accept()
		if err != nil {
			return
		}
		if n := r.opts.ClientBuffer; n > 0 {
			if err := client.(*net.TCPConn).SetReadBuffer(n); err != nil {
				r.t.Errorf("set the receive buffer of the relay: %v", err)
			}
		}
		server, err := resvport.Dial(context.Background(), r.to) // as the clients
		if err != nil {
			client.Close()
			continue
		}
		r.mu.Lock()
		r.conns = append(r.conns, client, server)
		if r.ln != ln { // Stop did not see the connection
			client.Close()
			server.Close()
		}
		r.mu.Unlock()
		r.work.Go(func() { forward(server, client, r.opts.ToServer) })
		r.work.Go(func() { forward(client, server, r.opts.ToClient) })
	}
}

// forward copies one direction of a connection, and then closes both ends. It does not use io.Copy,
// which copies through pipes that the runtime keeps open and that Main would report.
func forward(to, from net.Conn, before func(n int)) {
	defer to.Close()
	defer from.Close()
	buf := make([]byte, relayBuffer)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			if before != nil {
				before(n)
			}
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}
