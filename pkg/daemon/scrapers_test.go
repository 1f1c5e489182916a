package daemon

import (
	"net"
	"net/netip"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// TestScrapersShareConnections connects to a full listener. Each character of open is a connection
// of the peer with that letter, from the oldest to the newest; a capital letter is one with a
// request.
func TestScrapersShareConnections(t *testing.T) {
	for _, tt := range []struct{ open, connect, want string }{
		{"aaa", "a", "aaaa"},  // below the limit
		{"aaaa", "b", "aaab"}, // the oldest
		{"aaaa", "a", "aaaa"},
		{"AaAA", "b", "AAAb"},
		{"AAAA", "b", "AAAb"}, // a peer with less is admitted in any case
		{"AAAA", "a", "AAAA"}, // a peer with the most ends no request
		{"AABB", "a", "AABB"},
		{"bAAA", "a", "bAAA"}, // takes nothing from a peer with less
		{"AABB", "c", "ABBc"},
		{"abcd", "e", "bcde"},
		{"ABcD", "e", "ABDe"},
		{"ABCD", "e", "ABCD"},
	} {
		l := limitScrapers(nil)
		l.limit = 4
		admit := func(letter rune) *scrapeConn {
			c := &scrapeConn{listener: l, peer: peer{local: true, uid: uint32(letter | 0x20)}}
			c.busy.Store(letter < 'a')
			l.admit(c)
			return c
		}
		var all []*scrapeConn
		for _, letter := range tt.open + tt.connect {
			all = append(all, admit(letter))
		}
		var got strings.Builder
		for i, letter := range tt.open + tt.connect {
			if _, ok := l.conns[all[i]]; ok {
				got.WriteRune(letter)
			}
		}
		if got.String() != tt.want {
			t.Errorf("%s connects to a listener with %s: got %s, want %s", tt.connect, tt.open, &got, tt.want)
		}
	}
}

// TestPeerIsUser connects as another user, to addresses of both families.
func TestPeerIsUser(t *testing.T) {
	kit.NeedsRoot(t)
	const uid = 4711
	for _, address := range []string{"127.0.0.1:0", "[::1]:0", "[::ffff:127.0.0.1]:0"} {
		l, err := net.Listen("tcp", address)
		kit.Must(t, err)
		defer l.Close()
		dialed := make(chan error, 1)
		go func() {
			runtime.LockOSThread() // until the thread ends
			_, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uid, uid, uid)
			c, err := net.Dial("tcp", l.Addr().String())
			if err == nil {
				defer c.Close()
				_, err = c.Read(make([]byte, 1)) // until the test has looked at the connection
			}
			if errno != 0 {
				err = errno
			}
			dialed <- err
		}()
		c, err := l.Accept()
		kit.Must(t, err)
		if got, want := peerOf(c), (peer{local: true, uid: uid}); got != want {
			t.Errorf("%s: got peer %+v, want %+v", address, got, want)
		}
		_, _ = c.Write([]byte("x"))
		kit.Must(t, <-dialed)
		c.Close()
	}
	other, own := netip.MustParseAddrPort("192.0.2.1:9"), netip.MustParseAddrPort("127.0.0.1:9")
	if _, err := socketUser(other, own); err == nil {
		t.Error("user of a socket of another host: got no error")
	}
}

// TestPeerIsNetwork checks the peers of other hosts.
func TestPeerIsNetwork(t *testing.T) {
	for from, want := range map[string]string{"192.0.2.1": "192.0.2.1/32", "::ffff:192.0.2.1": "192.0.2.1/32",
		"2001:db8:1:2:3::4": "2001:db8:1:2::/64", "fe80::1%eth0": "fe80::/64"} {
		c := addrConn{remote: net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(from), 9))}
		if got := peerOf(c); got != (peer{addr: netip.MustParsePrefix(want)}) {
			t.Errorf("%s: got %+v, want %s", from, got, want)
		}
	}
}

// An addrConn has only addresses.
type addrConn struct {
	net.Conn
	remote *net.TCPAddr
}

func (c addrConn) RemoteAddr() net.Addr { return c.remote }
func (c addrConn) LocalAddr() net.Addr  { return &net.TCPAddr{IP: net.IPv6loopback, Port: 9620} }
