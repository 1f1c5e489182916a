package control

import (
	"context"
	"errors"
	"io"
	"net"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func TestMain(m *testing.M) { kit.Main(m) }

// TestConnectionsOfUserAreBounded connects as members of the group, who leave the connections open.
// Root and another member are not affected.
func TestConnectionsOfUserAreBounded(t *testing.T) {
	kit.NeedsRoot(t)
	const gid, uid, other = 5000, 1000, 1001
	l, g, path := groupListener(t, "5000")
	var accepted []*peerConn
	connect := func(uid int) net.Conn {
		t.Helper()
		c, err := dialAs(path, uid, gid, nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	accept := func(uid uint32, served bool) {
		t.Helper()
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		p := c.(*peerConn)
		if p.peer.uid != uid || (p.refused == nil) != served {
			t.Errorf("got a connection of uid %d, refused: %v; want uid %d, served: %v", p.peer.uid, p.refused, uid,
				served)
		}
		accepted = append(accepted, p)
	}
	for n := range maxAccepted {
		connect(uid)
		accept(uid, n < maxServed)
	}
	excess := connect(uid)
	for range 2 * maxAccepted {
		connect(0)
		accept(0, true) // also closes the connection before it
	}
	connect(other)
	accept(other, true)
	n, err := excess.Read(make([]byte, 1))
	if n != 0 || !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("connection above the limit: got %d bytes and error %v, want its end", n, err)
	}

	// The last maxServed+1 connections of the user stay open: one more is refused.
	for _, c := range accepted[:maxServed] {
		c.Close()
		c.Close() // counts once
	}
	serveGroup(t, l, g)
	member := clientAs(path, uid, gid, nil)
	_, err = member.List(context.Background())
	isError(t, err, CodeSystem, "control: list: uid 1000 has more than 32 connections; try again later")
	if _, err := clientAs(path, 0, 0, nil).List(context.Background()); err != nil {
		t.Errorf("root: got error %v, want none", err)
	}
	for _, c := range accepted {
		c.Close()
	}
	if _, err := member.List(context.Background()); err != nil {
		t.Errorf("after the connections ended: got error %v, want none", err)
	}
	l.conns.mu.Lock()
	defer l.conns.mu.Unlock()
	if len(l.conns.byUID) > 1 { // the last connection of the member may not have ended
		t.Errorf("counts: got %v, want none of users without connections", l.conns.byUID)
	}
}

// TestConnectionsOfGroupAreBounded connects as many members of the group, each within the limit of
// one user. Root can still connect, and members can when connections have ended.
func TestConnectionsOfGroupAreBounded(t *testing.T) {
	kit.NeedsRoot(t)
	l, _, path := groupListener(t, "5000")
	defer l.Close()
	defer l.Release()
	connect := func(uid int) net.Conn {
		t.Helper()
		c, err := dialAs(path, uid, 5000, nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	var accepted []net.Conn
	accept := func(uid uint32) {
		t.Helper()
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		if p := c.(*peerConn); p.peer.uid != uid {
			t.Fatalf("connection %d: got uid %d, want %d", len(accepted), p.peer.uid, uid)
		}
		accepted = append(accepted, c)
	}
	for n := range maxOthers {
		uid := 1000 + n/maxServed
		connect(uid)
		accept(uint32(uid))
	}
	excess := connect(3000)
	connect(0)
	accept(0) // also closes the connection before it
	if n, err := excess.Read(make([]byte, 1)); n != 0 || err == nil {
		t.Errorf("connection above the limit: got %d bytes and error %v, want its end", n, err)
	}
	accepted[0].Close()
	connect(3000)
	accept(3000)
	for _, c := range accepted {
		c.Close()
	}
	if n := l.conns.all; n != 0 {
		t.Errorf("connections at the end: got %d, want 0", n)
	}
}
