package daemon

import (
	"bytes"
	"io"
	"net"
	"net/http"
	"strings"
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
	m := newMetrics("127.0.0.1:0", hclog.NewNullLogger(),
		http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") }))
	m.server.ReadHeaderTimeout, m.server.ReadTimeout = 100*time.Millisecond, 100*time.Millisecond
	m.start()
	defer m.close()
	for range maxScrapers + 10 {
		c, err := net.Dial("tcp", m.addr())
		kit.Must(t, err)
		defer c.Close()
	}
	client := &http.Client{Timeout: kit.Timeout, Transport: &http.Transport{DisableKeepAlives: true}}
	kit.Eventually(t, "reply after idle connections", func() bool { // the header timeout can end a request
		r, err := client.Get("http://" + m.addr())
		if err == nil {
			r.Body.Close()
		}
		return err == nil
	})
}

// TestMetricsAddressInUse listens at an address that another process uses. The problem must be
// visible, and end when the address is free.
func TestMetricsAddressInUse(t *testing.T) {
	other, err := net.Listen("tcp", kit.FreePort(t).String())
	kit.Must(t, err)
	defer other.Close()
	address := other.Addr().String()
	var log bytes.Buffer
	m := startMetrics(address, hclog.New(&hclog.LoggerOptions{Output: &log}), http.NotFoundHandler())
	for _, want := range []string{address, "in use", "metrics_listen"} {
		if p := m.problem(); !strings.Contains(p, want) || m.addr() != "" {
			t.Errorf("got problem %q and address %q, want %q and no address", p, m.addr(), want)
		}
	}
	other.Close()
	kit.Eventually(t, "listener", func() bool { return m.addr() == address && m.problem() == "" })
	m.close() // the log is complete
	for _, want := range []string{"metrics are not available", "metrics are available"} {
		if n := strings.Count(log.String(), want); n != 1 {
			t.Errorf("log lines with %q: got %d, want 1: %s", want, n, &log)
		}
	}
}
