package daemon

import (
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/internal/testutil"
)

// TestMetricsBoundsConnections opens more connections than the listener accepts. Requests must be
// served again when these connections end.
func TestMetricsBoundsConnections(t *testing.T) {
	testutil.Long(t) // waits for the header timeout
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
