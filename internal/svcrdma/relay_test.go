package svcrdma

import (
	"net"
	"net/netip"
	"sync"
	"testing"
)

// A relay forwards the TCP connections between clients and the server. It can stop each direction,
// to simulate a client that no longer reads or sends while its TCP connection stays open.
type relay struct {
	addr     netip.AddrPort
	toClient gate
	toServer gate
}

// A gate forwards data until it is closed.
type gate struct {
	mu        sync.Mutex // guards the fields below
	closed    bool
	closeNext *gate      // closed before this gate forwards the next data
	opened    *sync.Cond // signaled by open
}

func (g *gate) close() {
	g.mu.Lock()
	g.closed = true
	g.mu.Unlock()
}

func (g *gate) open() {
	g.mu.Lock()
	g.closed = false
	g.mu.Unlock()
	g.opened.Broadcast()
}

// closeAtNext closes other before g forwards the next data.
func (g *gate) closeAtNext(other *gate) {
	g.mu.Lock()
	g.closeNext = other
	g.mu.Unlock()
}

// pass waits until the gate is open.
func (g *gate) pass() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closeNext != nil {
		g.closeNext.close()
		g.closeNext = nil
	}
	for g.closed {
		g.opened.Wait()
	}
}

func startRelay(t *testing.T, server netip.AddrPort) *relay {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	r := &relay{addr: ln.Addr().(*net.TCPAddr).AddrPort()}
	for _, g := range []*gate{&r.toClient, &r.toServer} {
		g.opened = sync.NewCond(&g.mu)
	}
	var all sync.WaitGroup
	var mu sync.Mutex
	var conns []net.Conn
	forward := func(to, from net.Conn, g *gate) {
		defer to.Close()
		defer from.Close()
		buf := make([]byte, 64<<10)
		for {
			n, err := from.Read(buf)
			if n > 0 {
				g.pass()
				if _, err := to.Write(buf[:n]); err != nil {
					return
				}
			}
			if err != nil {
				return
			}
		}
	}
	all.Go(func() {
		for {
			client, err := ln.Accept()
			if err != nil {
				return
			}
			srv, err := net.Dial("tcp", server.String())
			if err != nil {
				client.Close()
				continue
			}
			mu.Lock()
			conns = append(conns, client, srv)
			mu.Unlock()
			all.Go(func() { forward(srv, client, &r.toServer) })
			all.Go(func() { forward(client, srv, &r.toClient) })
		}
	})
	t.Cleanup(func() {
		ln.Close()
		r.toClient.open()
		r.toServer.open()
		mu.Lock()
		for _, c := range conns {
			c.Close()
		}
		mu.Unlock()
		all.Wait()
	})
	return r
}
