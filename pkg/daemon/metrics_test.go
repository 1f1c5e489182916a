package daemon

import (
	"bytes"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/mount"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// TestMetricsWithIdleConnections opens more connections than the listener keeps, and sends nothing
// on them. A request must get its reply although no timeout ends the connections.
func TestMetricsWithIdleConnections(t *testing.T) {
	m := newMetrics("127.0.0.1:0", hclog.NewNullLogger(),
		http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") }))
	m.server.ReadHeaderTimeout, m.server.ReadTimeout = time.Hour, time.Hour
	m.start()
	defer m.close()
	for range maxScrapers + 10 {
		c, err := net.Dial("tcp", m.addr())
		kit.Must(t, err)
		defer c.Close()
	}
	client := &http.Client{Timeout: kit.Timeout, Transport: &http.Transport{DisableKeepAlives: true}}
	r, err := client.Get("http://" + m.addr())
	kit.Must(t, err)
	r.Body.Close()
}

// TestMetricsNameTheHost sends requests as a page of another site would, whose name has got an
// address of this host. All paths must refuse them.
func TestMetricsNameTheHost(t *testing.T) {
	cfg := DefaultConfig()
	cfg.MetricsListen, cfg.MetricsHosts = "localhost:9620", "node1 Node1.example."
	d := &Daemon{cfg: cfg, table: mount.NewTable(mount.TableConfig{Log: hclog.NewNullLogger()})}
	defer func() { kit.Must(t, d.table.Close(t.Context())) }()
	h := d.metricsHandler()
	for host, want := range map[string]int{"localhost:9620": 200, "LOCALHOST": 200, "[::1]:9620": 200, "[fe80::1]": 200,
		"127.0.0.1": 200, "192.0.2.1:80": 200, "node1:9620": 200, "node1.example": 200, "NODE1.example.:9620": 200,
		"other.example:9620": 403, "other.example": 403, "127.0.0.1.other.example:9620": 403, "x.node1.example": 403,
		"": 403} {
		for _, path := range []string{"/metrics", "/healthz", "/", "/status.json", "/page.js"} {
			r := httptest.NewRequest("GET", path, nil)
			r.Host = host
			w := httptest.NewRecorder()
			if h.ServeHTTP(w, r); w.Code != want {
				t.Errorf("host %q: GET %s: got status %d, want %d", host, path, w.Code, want)
			}
		}
	}
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
