package otlp

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"
	trace "go.opentelemetry.io/proto/otlp/trace/v1"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/ledger"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/collector"
)

func TestMain(m *testing.M) { kit.Main(m) }

// start returns an Exporter that samples everything, and its log, which is complete after Close.
func start(t *testing.T, endpoint string) (*Exporter, *bytes.Buffer) {
	t.Helper()
	log := &bytes.Buffer{}
	x, err := New(Config{Endpoint: endpoint, Ratio: 1, Version: "7", Log: hclog.New(&hclog.LoggerOptions{Output: log})})
	if err != nil {
		t.Fatal(err)
	}
	return x, log
}

// flushTimeout is that of Close in these tests. No collector uses it up.
const flushTimeout = kit.Timeout

var testMount = &Mount{Dir: "/mnt/\xff", Server: "nas", Port: 20049, Process: func(thread uint32) uint32 {
	return thread + 1000
}}

// request returns a request of 1000 ns with an RPC from 200 to 900 ns.
func request(x *Exporter) *Operation {
	begin := ledger.Now()
	c := Call{ProgramName: "nfs", ProcName: "LOOKUP", Vers: 3, Proc: 3, XID: 0xabc, Slot: 5, Connection: 2, Sends: 3,
		Peer: netip.MustParseAddrPort("192.0.2.1:20049"), ArgBytes: 40, ResultBytes: 50, Status: "NFS3ERR_IO",
		Result: Result{"NFS3ERR_IO", true}}
	c.Times.Begin(begin + 200)
	c.Times.Mark(ledger.PhaseCredit, begin+300)
	c.Times.Mark(ledger.PhaseServer, begin+600)
	c.Times.Mark(ledger.PhaseSend, begin+800) // the order of a call that was sent again
	c.Times.Mark(ledger.PhaseServer, begin+900)
	r := &Request{Name: "lookup", Owner: Owner{control.OwnerProcess, 7, 8}, Bytes: 9, Calls: 1,
		Result: Result{"ENOENT", false}}
	r.Times.Begin(begin + 100)
	r.Times.Received(begin)
	r.Times.Add(&c.Times)
	r.Times.Mark(ledger.PhaseLocal, begin+950)
	r.Times.Mark(ledger.PhaseReply, begin+1000)
	o := x.Sample(testMount)
	o.AddCall(&c)
	o.Request = r
	return o
}

// TestSpansOfRequest also sets environment variables of the SDK, which have no effect.
func TestSpansOfRequest(t *testing.T) {
	c := collector.Start(t)
	for name, v := range map[string]string{"OTEL_RESOURCE_ATTRIBUTES": "color=red", "OTEL_TRACES_SAMPLER": "always_off",
		"OTEL_EXPORTER_OTLP_ENDPOINT": "http://192.0.2.7", "OTEL_EXPORTER_OTLP_HEADERS": "Content-Type=x",
		"OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "1", "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": "gzip"} {
		t.Setenv(name, v)
	}
	x, log := start(t, c.URL+"/")
	if v, ok := os.LookupEnv("OTEL_RESOURCE_ATTRIBUTES"); ok {
		t.Errorf("OTEL_RESOURCE_ATTRIBUTES: got %q, want none", v)
	}
	x.Export(request(x))
	x.Close(flushTimeout)
	spans := make(map[string]collector.Span)
	for _, s := range c.Spans() {
		if _, twice := spans[s.Name]; twice {
			t.Errorf("got two spans %s", s.Name)
		}
		spans[s.Name] = s
	}
	root, rpc := spans["fuse/lookup"], spans["nfs/LOOKUP"]
	for _, want := range []struct {
		name, parent string
		kind         trace.Span_SpanKind
		start, end   time.Duration
		failed       bool
	}{
		{"fuse/lookup", "", trace.Span_SPAN_KIND_SERVER, 0, 1000, false},
		{"queue", root.ID, trace.Span_SPAN_KIND_INTERNAL, 0, 100, false},
		{"nfs/LOOKUP", root.ID, trace.Span_SPAN_KIND_CLIENT, 200, 900, true},
		{"credit", rpc.ID, trace.Span_SPAN_KIND_INTERNAL, 200, 300, false},
		{"send", rpc.ID, trace.Span_SPAN_KIND_INTERNAL, 300, 500, false},
		{"server", rpc.ID, trace.Span_SPAN_KIND_INTERNAL, 500, 900, false},
		{"reply", root.ID, trace.Span_SPAN_KIND_INTERNAL, 950, 1000, false},
	} {
		s := spans[want.name]
		if s.Parent != want.parent || s.Trace != root.Trace || s.Kind != want.kind || s.Failed != want.failed ||
			s.Start.Sub(root.Start) != want.start || s.End.Sub(root.Start) != want.end {
			t.Errorf("span %s: got %+v, want %+v", want.name, s, want)
		}
		delete(spans, want.name)
	}
	if len(spans) != 0 {
		t.Errorf("got more spans: %v", spans)
	}
	if age := time.Since(root.End); age.Abs() > time.Hour {
		t.Errorf("end: got %v, want a moment ago", root.End)
	}
	wantAttributes(t, root, map[string]any{"nfsrdmad.mount.dir": "/mnt/\uFFFD", "server.address": "nas",
		"server.port": int64(20049), "nfsrdmad.owner.type": "process", "nfsrdmad.owner.uid": int64(8),
		"nfsrdmad.owner.pid": int64(1007), "nfsrdmad.fuse.operation": "lookup", "nfsrdmad.fuse.bytes": int64(9),
		"nfsrdmad.fuse.rpcs": int64(1), "error.type": "ENOENT", "nfsrdmad.phase.queue": 100e-9,
		"nfsrdmad.phase.local": 150e-9, "nfsrdmad.phase.credit": 100e-9, "nfsrdmad.phase.send": 200e-9,
		"nfsrdmad.phase.server": 400e-9, "nfsrdmad.phase.reply": 50e-9})
	wantAttributes(t, rpc, map[string]any{"nfsrdmad.mount.dir": "/mnt/\uFFFD", "server.address": "nas",
		"server.port": int64(20049), "rpc.system.name": "onc_rpc", "rpc.method": "nfs/LOOKUP",
		"onc_rpc.program.name": "nfs", "onc_rpc.version": int64(3), "onc_rpc.procedure.name": "LOOKUP",
		"onc_rpc.procedure.number": int64(3), "network.peer.address": "192.0.2.1",
		"network.peer.port": int64(20049), "nfsrdmad.rpc.connection": int64(2), "nfsrdmad.rpc.sends": int64(3),
		"nfsrdmad.rpc.args.size": int64(40), "nfsrdmad.rpc.results.size": int64(50), "nfsrdmad.rpc.slot": int64(5),
		"nfsrdmad.rpc.xid": "0xabc", "rpc.response.status_code": "NFS3ERR_IO", "error.type": "NFS3ERR_IO",
		"nfsrdmad.phase.credit": 100e-9, "nfsrdmad.phase.send": 200e-9, "nfsrdmad.phase.server": 400e-9})
	if r := root.Resource; r["service.name"] != "nfsrdmad" || r["service.version"] != "7" || r["color"] != nil {
		t.Errorf("resource: got %v", r)
	}
	if n := countsOf(x); n != (counts{exported: 7}) || log.Len() != 0 {
		t.Errorf("got counters %+v and log %q, want 7 exported spans", n, log)
	}
}

// counts are the counts of spans by their fate.
type counts struct{ exported, queue, collector uint64 }

func countsOf(x *Exporter) counts {
	return counts{x.exported.Load(), x.droppedFull.Load(), x.droppedSend.Load()}
}

func wantAttributes(t *testing.T, s collector.Span, want map[string]any) {
	t.Helper()
	if got, want := fmt.Sprint(s.Attributes), fmt.Sprint(want); got != want {
		t.Errorf("attributes of %s: got\n%s\nwant\n%s", s.Name, got, want)
	}
}

// TestCallsOfRequestAreBounded adds more RPCs than become spans.
func TestCallsOfRequestAreBounded(t *testing.T) {
	c := collector.Start(t)
	x, _ := start(t, c.URL)
	o := request(x)
	for range 2 * maxCalls {
		o.AddCall(&Call{Slot: -1})
	}
	want := o.spans()
	x.Export(o)
	x.Close(flushTimeout)
	if got := uint64(len(c.Spans())); got != want || len(o.calls) != maxCalls {
		t.Errorf("got %d RPCs and %d spans, want %d and %d", len(o.calls), got, maxCalls, want)
	}
}

// TestRefusedSpansAreDropped exports to servers that do not accept the spans.
func TestRefusedSpansAreDropped(t *testing.T) {
	redirected := collector.Start(t)
	handle := func(status int, header, value, body string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set(header, value)
			w.WriteHeader(status)
			fmt.Fprint(w, body)
		}
	}
	serve := func(start func(http.Handler) *httptest.Server, h http.HandlerFunc) string {
		s := start(h)
		s.Config.ErrorLog = hclog.NewNullLogger().StandardLogger(nil)
		t.Cleanup(s.Close)
		return s.URL
	}
	accept := handle(http.StatusOK, "X", "", "")
	for _, tt := range []struct{ name, endpoint, want string }{
		{"refused", "http://" + kit.ClosedPort(t).String(), "connection refused"},
		{"not a collector", serve(httptest.NewServer, handle(http.StatusNotFound, "X", "", "no\nsuch page")),
			"404 Not Found (body: no such page)"},
		{"busy", serve(httptest.NewServer, handle(http.StatusServiceUnavailable, "Retry-After", "3600", "")), "empty"},
		{"redirect", serve(httptest.NewServer, handle(http.StatusTemporaryRedirect, "Location",
			redirected.URL+"/v1/traces", "")), "307"},
		{"unknown certificate", serve(httptest.NewTLSServer, accept), "x509"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			x, log := start(t, tt.endpoint)
			o := request(x)
			want := counts{collector: o.spans()}
			x.Export(o)
			x.Close(flushTimeout)
			if n := countsOf(x); n != want {
				t.Errorf("got %+v, want %+v", n, want)
			}
			if s := log.String(); strings.Count(s, "\n") != 1 || !strings.Contains(s, tt.want) ||
				!strings.Contains(s, tt.endpoint) {
				t.Errorf("log: got %q, want one line with the endpoint and %q", s, tt.want)
			}
		})
	}
	if n := redirected.Requests(); n != 0 {
		t.Errorf("requests after the redirect: got %d, want 0", n)
	}
}

// TestWarningsAreBounded reports the results of requests to a collector.
func TestWarningsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		x := &Exporter{endpoint: "http://c", log: hclog.New(&hclog.LoggerOptions{Output: &log})}
		expect := func(what, line string) {
			t.Helper()
			if got := log.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, line) {
				t.Errorf("%s: got log %q, want one line with %q", what, got, line)
			}
			log.Reset()
		}
		x.report(nil) // logs nothing
		x.report(errors.New("broken"))
		expect("first failure", "broken")
		for range 30 {
			time.Sleep(warnInterval / 31)
			x.report(errors.New("broken"))
			x.report(nil)
		}
		expect("failures and successes in a minute", "accepts spans again")
		time.Sleep(warnInterval)
		x.report(errors.New("broken again"))
		expect("failure after a minute", "broken again")
		log.Reset()
		x.droppedFull.Add(1)
		time.Sleep(warnInterval)
		x.report(nil)
		expect("full queue", "reduce otlp_ratio")
	})
}

// startPiped is start for a bubble of synctest. Each connection to the collector is a pipe, whose
// other end goes to collect.
func startPiped(t *testing.T, collect func(net.Conn)) (*Exporter, *bytes.Buffer) {
	t.Helper()
	x, log := start(t, "http://192.0.2.1:4318")
	x.http.DialContext = func(context.Context, string, string) (net.Conn, error) {
		ours, theirs := net.Pipe()
		go collect(theirs)
		return ours, nil
	}
	return x, log
}

// answer accepts the spans of all requests on a connection.
func answer(c net.Conn) {
	defer c.Close()
	for in := bufio.NewReader(c); ; {
		r, err := http.ReadRequest(in)
		if err != nil {
			return
		}
		_, _ = io.Copy(io.Discard, r.Body)
		fmt.Fprint(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
	}
}

// ignore reads requests and does not answer.
func ignore(c net.Conn) {
	defer c.Close()
	_, _ = io.Copy(io.Discard, c)
}

// TestBatchesAreSent sends small batches after batchDelay, and large ones at once.
func TestBatchesAreSent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x, _ := startPiped(t, answer)
		defer x.Close(flushTimeout)
		var want uint64
		for range 2 {
			time.Sleep(2 * batchDelay)
			o := request(x)
			n := o.spans()
			x.Export(o)
			time.Sleep(batchDelay - 1)
			if got := x.exported.Load(); got != want {
				t.Errorf("before the delay: got %d exported spans, want %d", got, want)
			}
			want += n
			time.Sleep(time.Nanosecond)
			synctest.Wait()
			if got := x.exported.Load(); got != want {
				t.Errorf("after the delay: got %d exported spans, want %d", got, want)
			}
		}
		for range batchSpans {
			x.Export(request(x))
		}
		synctest.Wait()
		if got := x.exported.Load(); got < want+batchSpans {
			t.Errorf("full batch: got %d exported spans, want %d or more", got, want+batchSpans)
		}
	})
}

// TestSilentCollectorIsBounded exports to a collector that does not answer: one request, and more
// requests than the queue holds. Each span is counted once, also those that Close gives up.
func TestSilentCollectorIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x, log := startPiped(t, ignore)
		o := request(x)
		spans := o.spans()
		x.Export(o)
		time.Sleep(batchDelay + exportTimeout)
		synctest.Wait()
		if n := countsOf(x); n != (counts{collector: spans}) {
			t.Errorf("got %+v, want %d dropped spans", n, spans)
		}
		const operations = batchSpans + 3*queueLength
		for range operations {
			x.Export(request(x)) // does not wait
		}
		const flush = 2 * time.Second
		began := time.Now()
		x.Close(flush)
		if d := time.Since(began); d != flush {
			t.Errorf("Close took %v of fake time, want %v", d, flush)
		}
		n := countsOf(x)
		if n.exported != 0 || n.queue == 0 || n.queue+n.collector != (operations+1)*spans {
			t.Errorf("got %+v, want %d dropped spans", n, (operations+1)*spans)
		}
		if s := log.String(); strings.Count(s, "\n") != 1 || !strings.Contains(s, "no answer within 5s") {
			t.Errorf("log: got %q, want one line with the timeout", s)
		}
	})
}

func TestSampleKeepsTheRatio(t *testing.T) {
	for _, ratio := range []float64{1e-9, 0.25, 1} {
		x, err := New(Config{Endpoint: "http://127.0.0.1:1", Ratio: ratio, Log: hclog.NewNullLogger()})
		if err != nil {
			t.Fatal(err)
		}
		x.Close(flushTimeout)
		const all = 100_000
		sampled := 0
		for range all {
			if o := x.Sample(testMount); o != nil {
				sampled++
			}
		}
		if d := math.Abs(float64(sampled)/all - ratio); d > 0.01 || ratio == 1 && sampled != all {
			t.Errorf("ratio %v: got %d samples of %d", ratio, sampled, all)
		}
		if n := testing.AllocsPerRun(100, func() { x.Sample(testMount) }); ratio < 1e-6 && n != 0 {
			t.Errorf("allocations of an operation that is not sampled: got %v, want 0", n)
		}
	}
}

func TestCheckEndpoint(t *testing.T) {
	for s, want := range map[string]string{
		"http://127.0.0.1:4318":           "",
		"https://otel.example":            "",
		"http://[2001:db8::1]:4318":       "",
		"":                                "such as http://127.0.0.1:4318",
		"127.0.0.1:4318":                  "such as",
		"grpc://127.0.0.1:4317":           "such as",
		"http://:4318":                    "such as",
		"http://h:0":                      "such as",
		"http://u:p@h":                    "no user",
		"http://h?x=1":                    "no user, query",
		"http://h#x":                      "fragment",
		"http://127.0.0.1:4318/v1/traces": "/v1/traces",
	} {
		err := CheckEndpoint(s)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got error %v, want %q", s, err, want)
		}
	}
	for r, ok := range map[float64]bool{1: true, 1e-9: true, 0: false, -1: false, 1.1: false} {
		if err := CheckRatio(r); (err == nil) != ok {
			t.Errorf("ratio %v: got error %v", r, err)
		}
	}
	if CheckRatio(math.NaN()) == nil {
		t.Error("ratio NaN: got no error")
	}
	for _, c := range []Config{{Endpoint: "x", Ratio: 1}, {Endpoint: "http://h"}} {
		if _, err := New(c); err == nil {
			t.Errorf("New(%+v): got no error", c)
		}
	}
}
