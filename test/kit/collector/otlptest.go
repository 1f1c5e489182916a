// Package collector is a collector of traces for tests: it decodes the requests of OTLP/HTTP.
package collector

import (
	"encoding/pem"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	common "go.opentelemetry.io/proto/otlp/common/v1"
	trace "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"
)

// A Span is a span that the Collector has received.
type Span struct {
	ID, Parent, Trace string // Parent is "" for a root span
	Name              string
	Kind              trace.Span_SpanKind
	Start, End        time.Time
	Attributes        map[string]any // string, int64 or float64
	Resource          map[string]any
	Failed            bool // the status is an error
}

// A Collector receives spans at URL. Its methods may be called concurrently.
type Collector struct {
	URL string

	mu       sync.Mutex
	spans    []Span
	requests int
}

// Start starts a Collector that ends with the test.
func Start(t testing.TB) *Collector {
	t.Helper()
	c := &Collector{}
	s := httptest.NewServer(c.handler(t))
	t.Cleanup(s.Close)
	c.URL = s.URL
	return c
}

// StartTLS starts a Collector with TLS. The file roots has its certificate.
func StartTLS(t testing.TB) (c *Collector, roots string) {
	t.Helper()
	c = &Collector{}
	s := httptest.NewTLSServer(c.handler(t))
	t.Cleanup(s.Close)
	c.URL, roots = s.URL, filepath.Join(t.TempDir(), "roots.pem")
	cert := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
	if err := os.WriteFile(roots, cert, 0o600); err != nil {
		t.Fatal(err)
	}
	return c, roots
}

func (c *Collector) handler(t testing.TB) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.requests++
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return // of a client that has stopped
		}
		var m collector.ExportTraceServiceRequest
		if err := proto.Unmarshal(body, &m); err != nil || r.Method != http.MethodPost ||
			r.URL.Path != "/v1/traces" || r.Header.Get("Content-Type") != "application/x-protobuf" {
			t.Errorf("request to the collector: got %s %s of %q, decoded with error %v", r.Method, r.URL,
				r.Header.Get("Content-Type"), err)
			http.Error(w, "invalid request", http.StatusBadRequest)
			return
		}
		c.add(&m)
		reply, err := proto.Marshal(&collector.ExportTraceServiceResponse{})
		if err != nil {
			t.Error(err)
		}
		w.Header().Set("Content-Type", "application/x-protobuf")
		_, _ = w.Write(reply)
	}
}

// add adds the spans of a request. The caller holds mu.
func (c *Collector) add(m *collector.ExportTraceServiceRequest) {
	for _, r := range m.GetResourceSpans() {
		resource := values(r.GetResource().GetAttributes())
		for _, scope := range r.GetScopeSpans() {
			for _, s := range scope.GetSpans() {
				c.spans = append(c.spans, Span{ID: string(s.GetSpanId()), Parent: string(s.GetParentSpanId()),
					Trace: string(s.GetTraceId()), Name: s.GetName(), Kind: s.GetKind(),
					Start:      time.Unix(0, int64(s.GetStartTimeUnixNano())),
					End:        time.Unix(0, int64(s.GetEndTimeUnixNano())),
					Attributes: values(s.GetAttributes()), Resource: resource,
					Failed: s.GetStatus().GetCode() == trace.Status_STATUS_CODE_ERROR})
			}
		}
	}
}

func values(attributes []*common.KeyValue) map[string]any {
	m := make(map[string]any)
	for _, a := range attributes {
		switch v := a.GetValue().GetValue().(type) {
		case *common.AnyValue_StringValue:
			m[a.GetKey()] = v.StringValue
		case *common.AnyValue_IntValue:
			m[a.GetKey()] = v.IntValue
		case *common.AnyValue_DoubleValue:
			m[a.GetKey()] = v.DoubleValue
		}
	}
	return m
}

// Spans returns the spans that have arrived.
func (c *Collector) Spans() []Span {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]Span(nil), c.spans...)
}

// Requests returns the number of requests that have arrived.
func (c *Collector) Requests() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.requests
}
