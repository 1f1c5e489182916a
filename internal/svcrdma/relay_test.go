package svcrdma

import (
	"net"
	"net/netip"
	"sync"
	"testing"
)

// A relay stands between a client and the server and can stop either direction, as a client does
// that reads or answers nothing any more while its TCP connection lives.
type relay struct {
	addr     netip.AddrPort
	toClient gate
	toServer gate
}

// A gate lets octets pass until it is shut. With shutOn set it shuts the other gate before the next
// octets pass.
type gate struct {
	mu     sync.Mutex
	shut   bool  // guarded by mu, as shutOn
	shutOn *gate // guarded by mu
	opened *sync.Cond
}

func (g *gate) close() {
	g.mu.Lock()
	g.shut = true
	g.mu.Unlock()
}

func (g *gate) open() {
	g.mu.Lock()
	g.shut = false
	g.mu.Unlock()
	g.opened.Broadcast()
}

func (g *gate) shutAtNext(other *gate) {
	g.mu.Lock()
	g.shutOn = other
	g.mu.Unlock()
}

// pass is called with octets in hand.
func (g *gate) pass() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.shutOn != nil {
		g.shutOn.close()
		g.shutOn = nil
	}
	for g.shut {
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
