package daemon

import (
	"net"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
)

// maxScrapers bounds the connections of the metrics listener. All local users can connect, and
// their connections must not take all file descriptors of the daemon.
const maxScrapers = 64

// A peer is a user of this host, or a remote address: an IPv4 address or an IPv6 network of 64
// bits.
type peer struct {
	local bool
	uid   uint32       // of a local peer
	addr  netip.Prefix // of a remote peer
}

// peerOf returns the peer of a TCP connection. A local peer whose user is not known counts as
// remote.
func peerOf(c net.Conn) peer {
	remote, ok := c.RemoteAddr().(*net.TCPAddr)
	own, ok2 := c.LocalAddr().(*net.TCPAddr)
	if !ok || !ok2 {
		return peer{}
	}
	client, server := remote.AddrPort(), own.AddrPort()
	if uid, err := socketUser(client, server); err == nil {
		return peer{local: true, uid: uid}
	}
	addr, bits := client.Addr().Unmap().WithZone(""), 64
	if addr.Is4() {
		bits = 32
	}
	network, _ := addr.Prefix(bits) // bits is valid for the family
	return peer{addr: network}
}

// A scrapeListener accepts connections and keeps a bounded number of them. A full listener closes a
// connection of the peer that has the most, so no peer can keep another one out. Its methods may be
// called concurrently.
type scrapeListener struct {
	net.Listener
	limit int

	mu    sync.Mutex // guards the fields below
	conns map[*scrapeConn]struct{}
	last  uint64 // number of the last connection
}

// A scrapeConn is a connection that a scrapeListener accepted.
type scrapeConn struct {
	net.Conn
	listener *scrapeListener
	peer     peer
	number   uint64
	busy     atomic.Bool // a request has arrived and has no reply yet
}

func limitScrapers(l net.Listener) *scrapeListener {
	return &scrapeListener{Listener: l, limit: maxScrapers, conns: make(map[*scrapeConn]struct{})}
}

// Accept waits for a connection that the listener admits.
func (l *scrapeListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		c := &scrapeConn{Conn: conn, listener: l, peer: peerOf(conn)}
		victim := l.admit(c)
		if victim != nil {
			victim.Close()
		}
		if victim != c {
			return c, nil
		}
	}
}

// admit adds a connection. It returns the connection that the caller must close, which may be c, or
// nil.
func (l *scrapeListener) admit(c *scrapeConn) (victim *scrapeConn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last++
	c.number = l.last
	if len(l.conns) >= l.limit {
		if victim = l.victim(c); victim == c {
			return c
		}
		delete(l.conns, victim)
	}
	l.conns[c] = struct{}{}
	return victim
}

// victim returns the connection to close for a new one: of the peers with the most connections, the
// oldest without a request, else the oldest. If the peer of c is among these peers, a connection
// with a request stays, and c is closed. Otherwise a peer could start any number of requests,
// because a request whose connection is closed takes time to end. mu is held.
func (l *scrapeListener) victim(c *scrapeConn) *scrapeConn {
	counts := map[peer]int{c.peer: 1}
	for other := range l.conns {
		counts[other.peer]++
	}
	most := 0
	for _, n := range counts {
		most = max(most, n)
	}
	own := counts[c.peer] == most
	victim, victimBusy := c, true
	for other := range l.conns {
		busy := other.busy.Load()
		if counts[other.peer] < most || busy && own {
			continue
		}
		if victim == c || victimBusy && !busy || victimBusy == busy && other.number < victim.number {
			victim, victimBusy = other, busy
		}
	}
	return victim
}

// Close closes the connection and removes it from the listener.
func (c *scrapeConn) Close() error {
	c.listener.mu.Lock()
	delete(c.listener.conns, c)
	c.listener.mu.Unlock()
	return c.Conn.Close()
}

// noteState is for [http.Server.ConnState].
func noteState(c net.Conn, state http.ConnState) {
	if s, ok := c.(*scrapeConn); ok {
		s.busy.Store(state == http.StateActive)
	}
}
