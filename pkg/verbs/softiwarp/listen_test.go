package softiwarp

import (
	"errors"
	"net"
	"os"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// TestPendingConnectionsAreBounded opens connections that send no request or are not accepted. The
// listener keeps maxPending of them. A further one replaces one that has sent no request; otherwise
// it is closed. An Accept makes room for another one.
func TestPendingConnectionsAreBounded(t *testing.T) {
	dial := func(t *testing.T, l verbs.Listener, send []byte) *net.TCPConn {
		t.Helper()
		c, err := net.Dial("tcp", l.Addr().String())
		kit.Must(t, err)
		t.Cleanup(func() { c.Close() })
		c.Write(send)
		return c.(*net.TCPConn)
	}
	ended := func(c *net.TCPConn) {
		t.Helper()
		c.SetReadDeadline(time.Now().Add(kit.Timeout))
		if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("connection above the limit: got %v, want its end", err)
		}
	}
	request := (&mpaFrame{enhanced: true, rev: mpaRev2, ird: 1}).append(nil)
	for name, send := range map[string][]byte{"silent": nil, "not accepted": request} {
		t.Run(name, func(t *testing.T) {
			vl, err := New(Config{RequestTimeout: time.Hour}).Listen(testContext(t), loopback)
			kit.Must(t, err)
			defer vl.Close()
			l := vl.(*listener)
			first := dial(t, l, send)
			for range maxPending - 1 {
				dial(t, l, send)
			}
			kit.Eventually(t, "full listener", func() bool { return len(l.slots) == maxPending })
			if send == nil {
				dial(t, l, nil)
				ended(first)
				return
			}
			kit.Eventually(t, "read requests", func() bool { return len(l.ready) == maxPending })
			ended(dial(t, l, send))
			for range maxPending {
				r, err := l.Accept(testContext(t))
				kit.Must(t, err)
				r.Close()
			}
			kit.Eventually(t, "empty listener", func() bool { return len(l.slots) == 0 })
			dial(t, l, request)
			r, err := l.Accept(testContext(t))
			kit.Must(t, err)
			r.Close()
		})
	}
}
