package main

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	trace "go.opentelemetry.io/proto/otlp/trace/v1"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/collector"
)

// traced starts a daemon with flags, which mounts the export of the embedded server, reads and
// writes files there, and unmounts it. It returns the environment, the address of the server, and
// the mount point.
func traced(t *testing.T, flags ...string) (w *testEnv, rdma, dir string) {
	t.Helper()
	w = newTestEnv(t)
	w.stop(t, w.daemon)
	w.startDaemonWith(t, flags...)
	export := w.mkdir(t, "served")
	data := kit.RandomBytes(1, 300_000)
	if err := os.WriteFile(filepath.Join(export, "secret"), data, 0o644); err != nil {
		t.Fatal(err)
	}
	rdma, tcp, _ := serve(t, export, "--log-level", "warn")
	dir = w.mkdir(t, "mnt")
	nfsrdmad(t, "mount", "--control-socket", w.socket, "127.0.0.1:/", dir, "-o", ports(t, rdma, tcp)).succeeds(t)
	if b, err := os.ReadFile(filepath.Join(dir, "secret")); err != nil || !bytes.Equal(b, data) {
		t.Errorf("read: got %d bytes and error %v, want those of the server", len(b), err)
	}
	if err := os.WriteFile(filepath.Join(dir, "written"), data, 0o644); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "missing")); !os.IsNotExist(err) {
		t.Errorf("stat of a missing file: got %v", err)
	}
	nfsrdmad(t, "umount", "--control-socket", w.socket, dir).succeeds(t)
	if b, err := os.ReadFile(filepath.Join(export, "written")); err != nil || !bytes.Equal(b, data) {
		t.Errorf("written file on the server: got %d bytes and error %v", len(b), err)
	}
	return w, rdma, dir
}

// TestTraces traces all requests of a mount.
func TestTraces(t *testing.T) {
	c := collector.Start(t)
	began := time.Now()
	w, rdma, dir := traced(t, "--metrics-listen", "127.0.0.1:0", "--otlp-endpoint", c.URL, "--otlp-ratio", "1")
	w.stop(t, w.daemon)
	ended := time.Now()

	spans := c.Spans()
	byID := make(map[string]*collector.Span)
	for i := range spans {
		byID[spans[i].ID] = &spans[i]
	}
	children := make(map[string][]*collector.Span)
	found := make(map[string]*collector.Span)
	for i := range spans {
		s := &spans[i]
		if s.Start.Before(began) || s.End.After(ended) || s.End.Before(s.Start) {
			t.Errorf("%s: got %v to %v, want times of the test", s.Name, s.Start, s.End)
		}
		found[s.Name] = s
		if s.Parent == "" {
			continue
		}
		p := byID[s.Parent]
		if p == nil || p.Trace != s.Trace || s.Start.Before(p.Start) || s.End.After(p.End) {
			t.Fatalf("%+v: got parent %+v, want one of the same trace that includes it", s, p)
		}
		children[p.ID] = append(children[p.ID], s)
	}
	for i := range spans {
		checkSpan(t, &spans[i], children[spans[i].ID], rdma, dir)
	}
	checkTrace(t, spans, children)
	for _, want := range []string{"fuse/lookup", "fuse/open", "fuse/read", "fuse/write", "fuse/create", "nfs/LOOKUP",
		"nfs/READ", "nfs/WRITE", "nfs/CREATE", "queue", "reply", "send", "server", "return"} {
		if found[want] == nil {
			t.Errorf("got %d spans without %s", len(spans), want)
		}
	}
	if all := fmt.Sprint(spans); strings.Contains(all, "secret") || strings.Contains(all, "written") ||
		strings.Contains(all, "missing") {
		t.Errorf("got %s, want no names of files", all)
	}
	if n := strings.Count(w.log.String(), "dropped"); n != 0 {
		t.Errorf("got log %s, want no dropped spans", w.log)
	}
}

// checkSpan checks a span and its children.
func checkSpan(t *testing.T, s *collector.Span, children []*collector.Span, rdma, dir string) {
	t.Helper()
	a := s.Attributes
	var phases, rpcs int
	sum := 0.0 // of the attributes
	for key, v := range a {
		if strings.HasPrefix(key, "nfsrdmad.phase.") {
			sum += v.(float64)
		}
	}
	for _, c := range children {
		if c.Kind == trace.Span_SPAN_KIND_CLIENT {
			rpcs++
			continue
		}
		phases++
		if got, want := c.End.Sub(c.Start).Seconds(), a["nfsrdmad.phase."+c.Name]; got != want {
			t.Errorf("phase %s of %s: got %v s, want %v", c.Name, s.Name, got, want)
		}
	}
	host, port, err := net.SplitHostPort(rdma)
	if err != nil {
		t.Fatal(err)
	}
	if s.Resource["service.name"] != "nfsrdmad" {
		t.Errorf("%s: got resource %v, want the service", s.Name, s.Resource)
	}
	if s.Kind == trace.Span_SPAN_KIND_INTERNAL {
		if s.Parent == "" || len(children) > 0 {
			t.Errorf("phase %+v: got %d children, want none, and a parent", s, len(children))
		}
		return
	}
	if d := sum - s.End.Sub(s.Start).Seconds(); d > 1e-9 || d < -1e-9 || phases == 0 {
		t.Errorf("phases of %+v: got the sum %v of %d, want the length of the span", s, sum, phases)
	}
	if a["nfsrdmad.mount.dir"] != dir || a["server.address"] != host || fmt.Sprint(a["server.port"]) != port {
		t.Errorf("%s: got %v, want the mount at %s of %s", s.Name, a, dir, rdma)
	}
	switch {
	case s.Kind == trace.Span_SPAN_KIND_SERVER:
		if s.Parent != "" || !strings.HasPrefix(s.Name, "fuse/") || int64(rpcs) != a["nfsrdmad.fuse.rpcs"] {
			t.Errorf("request %+v: got %d RPCs, want a root with all its RPCs", s, rpcs)
		}
		checkOwner(t, s)
	case a["rpc.system.name"] != "onc_rpc" || a["rpc.method"] != s.Name || a["nfsrdmad.rpc.xid"] == "" ||
		a["network.peer.address"] != host || fmt.Sprint(a["network.peer.port"]) != port ||
		a["nfsrdmad.rpc.connection"] != int64(0) || a["nfsrdmad.rpc.slot"].(int64) < 0 ||
		a["nfsrdmad.rpc.sends"] != int64(1) || rpcs != 0 || a["nfsrdmad.phase.server"] == nil ||
		(s.Parent == "") != (a["nfsrdmad.owner.type"] != nil):
		t.Errorf("RPC: got %+v", s)
	}
}

// checkOwner checks that this process, or the kernel, made a request.
func checkOwner(t *testing.T, s *collector.Span) {
	t.Helper()
	a := s.Attributes
	switch a["nfsrdmad.owner.type"] {
	case "kernel":
	case "process":
		if a["nfsrdmad.owner.uid"] == int64(os.Getuid()) && a["nfsrdmad.owner.pid"] != nil {
			return
		}
		fallthrough
	default:
		t.Errorf("owner of %s: got %v", s.Name, a)
	}
}

// checkTrace checks the bytes, the errors and the processes of the requests.
func checkTrace(t *testing.T, spans []collector.Span, children map[string][]*collector.Span) {
	t.Helper()
	var read, written, received, sent, missing, own int64
	for i := range spans {
		s := &spans[i]
		a := s.Attributes
		switch s.Name {
		case "fuse/read":
			read += a["nfsrdmad.fuse.bytes"].(int64)
		case "fuse/write":
			written += a["nfsrdmad.fuse.bytes"].(int64)
		case "fuse/lookup":
			if a["error.type"] == "ENOENT" && !s.Failed && len(children[s.ID]) > 0 {
				missing++
			}
			if a["nfsrdmad.owner.pid"] == int64(os.Getpid()) {
				own++
			}
		case "nfs/READ":
			received += a["nfsrdmad.rpc.results.size"].(int64)
			if a["rpc.response.status_code"] != "NFS3_OK" {
				t.Errorf("READ: got %+v, want success", s)
			}
		case "nfs/WRITE":
			sent += a["nfsrdmad.rpc.args.size"].(int64)
		}
	}
	if read < 300_000 || written != 300_000 || received < 300_000 || sent < 300_000 {
		t.Errorf("got %d bytes read and %d written by requests, %d received and %d sent by RPCs, want 300,000 or more",
			read, written, received, sent)
	}
	if missing == 0 || own == 0 {
		t.Errorf("got %d lookups of missing names and %d of this process, want some", missing, own)
	}
}

// TestTracesUntilUnmount stops a daemon that has dirty data.
func TestTracesUntilUnmount(t *testing.T) {
	c := collector.Start(t)
	w := newTestEnv(t)
	w.stop(t, w.daemon)
	w.startDaemonWith(t, "--metrics-listen", "", "--otlp-endpoint", c.URL, "--otlp-ratio", "1")
	dir := w.mkdir(t, "mnt")
	w.mount(t, dir).succeeds(t)
	data := kit.RandomBytes(2, 100_000)
	writeDirty(t, filepath.Join(dir, "dirty"), data)
	w.stop(t, w.daemon)
	w.wantOnServer(t, "dirty", data)
	for _, s := range c.Spans() {
		if s.Name == "nfs/WRITE" {
			return
		}
	}
	t.Errorf("got %d spans without nfs/WRITE: %s", len(c.Spans()), w.log)
}

// TestTracesOverTLS exports to a collector whose certificate is among the roots of the system.
func TestTracesOverTLS(t *testing.T) {
	c, roots := collector.StartTLS(t)
	t.Setenv("SSL_CERT_FILE", roots)
	w, _, _ := traced(t, "--metrics-listen", "127.0.0.1:0", "--otlp-endpoint", c.URL, "--otlp-ratio", "1")
	w.stop(t, w.daemon)
	if len(c.Spans()) == 0 {
		t.Errorf("got no spans: %s", w.log)
	}
}

// TestTracesWithoutCollector traces with a collector that refuses connections, and with one that
// never answers. The mount works, the daemon counts the spans, and it stops.
func TestTracesWithoutCollector(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { silent.Close() })
	for name, address := range map[string]string{"refuses": kit.ClosedPort(t).String(),
		"never answers": silent.Addr().String()} {
		t.Run(name, func(t *testing.T) {
			metrics := kit.FreePort(t).String()
			w, _, _ := traced(t, "--metrics-listen", metrics, "--otlp-endpoint", "http://"+address, "--otlp-ratio", "1")
			const series = `nfsrdmad_otlp_spans_dropped_total{reason="collector"}`
			for end := time.Now().Add(limit); scrape(t, metrics)[series] == 0; time.Sleep(50 * time.Millisecond) {
				if time.Now().After(end) {
					t.Fatalf("got no dropped spans: %s", w.log)
				}
			}
			if n := scrape(t, metrics)["nfsrdmad_otlp_spans_exported_total"]; n != 0 {
				t.Errorf("exported spans: got %v, want 0", n)
			}
			w.stop(t, w.daemon) // also while the collector does not answer
			if n := strings.Count(w.log.String(), "spans of traces dropped"); n != 1 ||
				!strings.Contains(w.log.String(), address) {
				t.Errorf("log lines about dropped spans: got %d, want 1 with the address: %s", n, w.log)
			}
		})
	}
}

// TestNoTracesByDefault sets the environment variables of other exporters.
func TestNoTracesByDefault(t *testing.T) {
	c := collector.Start(t)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", c.URL)
	t.Setenv("OTEL_TRACES_SAMPLER", "always_on")
	metrics := kit.FreePort(t).String()
	w, _, _ := traced(t, "--metrics-listen", metrics)
	for name := range scrape(t, metrics) {
		if strings.Contains(name, "otlp") {
			t.Errorf("got metric %s, want none of traces", name)
		}
	}
	w.stop(t, w.daemon)
	if n := c.Requests(); n != 0 {
		t.Errorf("requests to the collector: got %d, want 0", n)
	}
}
