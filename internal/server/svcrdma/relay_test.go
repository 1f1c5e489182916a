package svcrdma

import (
	"net/netip"
	"sync"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// A relay can stop each direction between clients and the server, to simulate a client that no
// longer reads or sends while its TCP connection stays open.
type relay struct {
	*kit.Relay
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
func (g *gate) pass(int) {
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
	r := &relay{}
	for _, g := range []*gate{&r.toClient, &r.toServer} {
		g.opened = sync.NewCond(&g.mu)
	}
	r.Relay = kit.StartRelay(t, server.String(), kit.RelayOptions{ToServer: r.toServer.pass,
		ToClient: r.toClient.pass})
	t.Cleanup(func() {
		r.toClient.open()
		r.toServer.open()
	})
	return r
}
