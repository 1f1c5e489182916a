package daemon

import (
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// TestLimitedListener accepts a connection in the only place of a listener. The next one must wait
// until the first one is closed.
func TestLimitedListener(t *testing.T) {
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := &limitedListener{Listener: inner, slots: make(chan struct{}, 1), closed: make(chan struct{})}
	defer l.Close()
	for range 2 {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	first, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	var closed atomic.Bool
	time.AfterFunc(50*time.Millisecond, func() {
		closed.Store(true)
		first.Close()
	})
	second, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	second.Close()
	if !closed.Load() {
		t.Error("two connections accepted, want one at a time")
	}
}

// TestMetricsAfterIdleConnections opens more connections than the listener accepts. Requests must
// be served again when these connections end.
func TestMetricsAfterIdleConnections(t *testing.T) {
	kit.Long(t) // waits for the header timeout
	m := startMetrics("127.0.0.1:0", hclog.NewNullLogger(),
		http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") }))
	defer m.close()
	var idle []net.Conn
	for range maxScrapers + 10 {
		c, err := net.Dial("tcp", m.addr())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		idle = append(idle, c)
	}
	client := &http.Client{Timeout: time.Minute, Transport: &http.Transport{DisableKeepAlives: true}}
	r, err := client.Get("http://" + m.addr())
	if err != nil {
		t.Fatalf("request after %d idle connections: %v", len(idle), err)
	}
	r.Body.Close()
}
