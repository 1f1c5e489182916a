package control

import (
	"fmt"
	"net"
	"os"
	"sync"
)

// Bounds of the connections of users other than root and the user of the daemon, so that the members
// of the control group cannot use all file descriptors of the daemon.
const (
	// maxServed is the number of connections of one user that are served at a time. Requests on
	// further ones get an error.
	maxServed = 32
	// maxAccepted is the number of connections of one user at a time. Further ones are closed.
	maxAccepted = 2 * maxServed
	// maxOthers is the number of connections of all these users at a time. Further ones are closed.
	maxOthers = 256
)

// A peerConn is a connection that a [Listener] accepted.
type peerConn struct {
	net.Conn
	peer    peer
	refused error // for each request, if it is not nil
	once    sync.Once
	closed  func()
}

// Close closes the connection. Further calls do nothing.
func (c *peerConn) Close() (err error) {
	c.once.Do(func() {
		err = c.Conn.Close()
		c.closed()
	})
	return err
}

// connCounts counts the connections of users.
type connCounts struct {
	mu    sync.Mutex // guards the fields below
	byUID map[uint32]int
	all   int
}

// add counts a connection and returns the number of connections of its user. It counts no
// connection above maxAccepted and maxOthers, for which it returns more than maxAccepted.
func (c *connCounts) add(uid uint32) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.byUID == nil {
		c.byUID = make(map[uint32]int)
	}
	if c.byUID[uid] == maxAccepted || c.all == maxOthers {
		return maxAccepted + 1
	}
	c.all++
	c.byUID[uid]++
	return c.byUID[uid]
}

func (c *connCounts) remove(uid uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all--
	if c.byUID[uid]--; c.byUID[uid] == 0 {
		delete(c.byUID, uid)
	}
}

// Accept waits for a connection. It bounds the connections of users other than root and the user of
// this process: see maxServed, maxAccepted and maxOthers.
func (s *Listener) Accept() (net.Conn, error) {
	for {
		conn, err := s.Listener.Accept()
		if err != nil {
			return nil, err
		}
		p, err := peerOf(conn)
		if err != nil { // the peer has no rights
			conn.Close()
			continue
		}
		if isOwner(p.uid) {
			return &peerConn{Conn: conn, peer: p, closed: func() {}}, nil
		}
		n := s.conns.add(p.uid)
		if n > maxAccepted {
			conn.Close()
			continue
		}
		c := &peerConn{Conn: conn, peer: p, closed: func() { s.conns.remove(p.uid) }}
		if n > maxServed {
			c.refused = fmt.Errorf("uid %d has more than %d connections; try again later", p.uid, maxServed)
		}
		return c, nil
	}
}

// isOwner reports whether a user may use every verb: root and the user of this process.
func isOwner(uid uint32) bool { return uid == 0 || int(uid) == os.Geteuid() }
