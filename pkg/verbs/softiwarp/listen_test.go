package softiwarp

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// TestPendingConnectionsAreBounded opens connections that send no request or are not accepted. The
// listener keeps maxPending of them and closes further ones. The listener accepts new ones after a
// timeout or an Accept.
func TestPendingConnectionsAreBounded(t *testing.T) {
	dial := func(t *testing.T, l verbs.Listener, send []byte) *net.TCPConn {
		t.Helper()
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		c.Write(send)
		return c.(*net.TCPConn)
	}
	ended := func(c *net.TCPConn, within time.Duration) bool {
		c.SetReadDeadline(time.Now().Add(within))
		_, err := c.Read(make([]byte, 1))
		ne, ok := err.(net.Error)
		return err != nil && !(ok && ne.Timeout())
	}
	request := (&mpaFrame{enhanced: true, rev: mpaRev2, ird: 1}).append(nil)
	for name, send := range map[string][]byte{"silent": nil, "not accepted": request} {
		t.Run(name, func(t *testing.T) {
			vl, err := New(Config{RequestTimeout: 2 * time.Second}).Listen(testContext(t), loopback)
			if err != nil {
				t.Fatal(err)
			}
			defer vl.Close()
			l := vl.(*listener)
			var first *net.TCPConn
			for i := range maxPending {
				c := dial(t, l, send)
				if i == 0 {
					first = c
				}
			}
			eventually(t, "maxPending connections are pending", func() bool { return len(l.slots) == maxPending })
			if send != nil {
				eventually(t, "all requests are read", func() bool { return len(l.ready) == maxPending })
			}
			next := dial(t, l, send)
			if send == nil {
				if !ended(first, testTimeout) {
					t.Error("the oldest connection without a request is open, want it replaced by a later one")
				}
				if !ended(next, testTimeout) {
					t.Error("a connection without a request is open after RequestTimeout")
				}
			} else {
				if !ended(next, testTimeout) {
					t.Errorf("connection %d is open, want it closed", maxPending+1)
				}
				if ended(first, 10*time.Millisecond) {
					t.Error("a connection with a request was closed because of a later one")
				}
				r, err := l.Accept(context.Background())
				if err != nil {
					t.Fatal(err)
				}
				r.Close()
			}
			eventually(t, "fewer than maxPending connections are pending",
				func() bool { return len(l.slots) < maxPending })
			c := dial(t, l, request)
			if send == nil {
				r, err := l.Accept(testContext(t))
				if err != nil {
					t.Fatal(err)
				}
				r.Close()
			}
			if send != nil && ended(c, 10*time.Millisecond) {
				t.Error("a connection within the limit was closed")
			}
		})
	}
}
