package otlp

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/stats"
)

const (
	// tracesPath is appended to the endpoint (OTLP specification 1.11, "OTLP/HTTP Request").
	tracesPath = "/v1/traces"
	// queueLength bounds the operations that wait for their export.
	queueLength = 1024
	// A batch is sent when it has batchSpans, and at the latest batchDelay after its first span.
	batchSpans = 512
	batchDelay = time.Second
	// exportTimeout bounds one request to the collector.
	exportTimeout = 5 * time.Second
	// warnInterval is the shortest time between two warnings.
	warnInterval = time.Minute
)

// A Config configures an [Exporter].
type Config struct {
	Endpoint string  // see CheckEndpoint
	Ratio    float64 // see CheckRatio
	Version  string  // of the program
	Log      hclog.Logger
}

// An Exporter exports sampled operations. Its methods may be called concurrently, except Close.
type Exporter struct {
	endpoint  string
	log       hclog.Logger
	threshold uint64 // an operation is sampled if a random number of 63 bits is below it
	queue     chan *Operation
	closing   chan struct{}
	cancel    context.CancelCauseFunc // ends requests to the collector
	ended     sync.WaitGroup

	exported, droppedFull, droppedSend atomic.Uint64

	// The fields below belong to run.
	http     *http.Transport
	exporter *otlptrace.Exporter
	tracer   trace.Tracer
	batch    batch
	warned   time.Time // last warning
	warnFull uint64    // droppedFull at that time
	failing  bool      // the log says so
}

// CheckEndpoint returns an error if s is not the base URL of an OTLP/HTTP collector, such as
// http://127.0.0.1:4318.
func CheckEndpoint(s string) error {
	u, err := url.Parse(s)
	switch {
	case err != nil, u.Scheme != "http" && u.Scheme != "https", u.Hostname() == "", !validPort(u.Port()):
		return errors.New("must be a URL such as http://127.0.0.1:4318, or empty")
	case u.User != nil, u.RawQuery != "", u.ForceQuery, u.Fragment != "":
		return errors.New("must have no user, query or fragment")
	case strings.HasSuffix(strings.TrimRight(u.Path, "/"), tracesPath):
		return errors.New("must not end with " + tracesPath + ", which the daemon appends")
	}
	return nil
}

func validPort(s string) bool {
	n, err := strconv.Atoi(s)
	return s == "" || err == nil && n > 0 && n <= math.MaxUint16
}

// CheckRatio returns an error if r is not a share of the operations, above 0 and at most 1.
func CheckRatio(r float64) error {
	if r > 0 && r <= 1 { // not NaN
		return nil
	}
	return errors.New("must be above 0 and at most 1")
}

// New returns an Exporter. The caller ends it with Close. New removes the environment variables
// OTEL_* of this process: they would change the exporter, and only c configures it.
func New(c Config) (*Exporter, error) {
	if err := errors.Join(CheckEndpoint(c.Endpoint), CheckRatio(c.Ratio)); err != nil {
		return nil, err
	}
	for _, v := range os.Environ() {
		if name, _, _ := strings.Cut(v, "="); strings.HasPrefix(name, "OTEL_") {
			_ = os.Unsetenv(name)
		}
	}
	x := &Exporter{endpoint: c.Endpoint, log: c.Log, threshold: uint64(math.Ceil(c.Ratio * (1 << 63))),
		queue: make(chan *Operation, queueLength), closing: make(chan struct{}),
		http: &http.Transport{DialContext: (&net.Dialer{Timeout: exportTimeout}).DialContext,
			ForceAttemptHTTP2: true, MaxIdleConns: 1, IdleConnTimeout: 90 * time.Second}}
	client := &http.Client{Transport: x.http, CheckRedirect: func(*http.Request, []*http.Request) error {
		return http.ErrUseLastResponse // the administrator chose the endpoint
	}}
	var err error
	x.exporter, err = otlptracehttp.New(context.Background(),
		otlptracehttp.WithEndpointURL(strings.TrimRight(c.Endpoint, "/")+tracesPath),
		otlptracehttp.WithHTTPClient(client), otlptracehttp.WithRetry(otlptracehttp.RetryConfig{}))
	if err != nil {
		return nil, fmt.Errorf("OTLP exporter for %s: %w", c.Endpoint, err)
	}
	host, _ := os.Hostname() // an attribute that may be empty
	provider := sdk.NewTracerProvider(sdk.WithSpanProcessor(&x.batch), sdk.WithSampler(sdk.AlwaysSample()),
		sdk.WithResource(resource.NewWithAttributes(semconv.SchemaURL, semconv.ServiceName("nfsrdmad"),
			semconv.ServiceVersion(c.Version), semconv.HostName(host), semconv.ProcessPID(os.Getpid()))))
	x.tracer = provider.Tracer("github.com/nfsrdmad/nfsrdmad", trace.WithInstrumentationVersion(c.Version),
		trace.WithSchemaURL(semconv.SchemaURL))
	ctx, cancel := context.WithCancelCause(context.Background())
	x.cancel = cancel
	x.ended.Go(func() { x.run(ctx) })
	return x, nil
}

// Sample returns an Operation of m if it is sampled, and else nil. It allocates only then.
func (x *Exporter) Sample(m *Mount) *Operation {
	if rand.Uint64()>>1 >= x.threshold {
		return nil
	}
	return &Operation{Mount: m}
}

// Export exports o, which the caller must not use afterwards. It does not wait.
func (x *Exporter) Export(o *Operation) {
	select {
	case x.queue <- o:
	default:
		x.droppedFull.Add(o.spans())
	}
}

// Metrics returns the counts of spans. The reason "queue" means that the queue was full, and
// "collector" that the collector did not answer, or did not accept the whole batch.
func (x *Exporter) Metrics() []stats.Metric {
	const dropped = "Spans of traces that were dropped: the queue was full, or the collector did not accept them."
	return []stats.Metric{
		stats.New("otlp_spans_exported_total", "Spans of traces that the OpenTelemetry collector has accepted.",
			&x.exported),
		stats.New("otlp_spans_dropped_total", dropped, &x.droppedFull).With("reason", "queue"),
		stats.New("otlp_spans_dropped_total", dropped, &x.droppedSend).With("reason", "collector"),
	}
}

// Close exports what was passed to Export before, for at most the time flush, and ends the
// Exporter.
func (x *Exporter) Close(flush time.Duration) {
	close(x.closing)
	timer := time.AfterFunc(flush, func() { x.cancel(errClosed) })
	defer timer.Stop()
	x.ended.Wait()
	x.cancel(errClosed)
}

// run makes spans of the operations and sends them, until Close. Canceling ctx ends a request to
// the collector.
func (x *Exporter) run(ctx context.Context) {
	defer x.http.CloseIdleConnections()
	timer := time.NewTimer(batchDelay)
	defer timer.Stop()
	for {
		select {
		case o := <-x.queue:
			if len(x.batch.spans) == 0 {
				timer.Reset(batchDelay)
			}
			x.add(ctx, o)
		case <-timer.C:
			x.send(ctx)
		case <-x.closing:
			for len(x.queue) > 0 {
				x.add(ctx, <-x.queue)
			}
			x.send(ctx)
			_ = x.exporter.Shutdown(ctx) // sends nothing
			return
		}
	}
}

// add makes spans of o, and sends a full batch.
func (x *Exporter) add(ctx context.Context, o *Operation) {
	x.record(o)
	if len(x.batch.spans) >= batchSpans {
		x.send(ctx)
	}
}

// send sends the batch, or drops it.
func (x *Exporter) send(ctx context.Context) {
	n := len(x.batch.spans)
	if n == 0 {
		return
	}
	ctx, cancel := context.WithTimeoutCause(ctx, exportTimeout, errNoAnswer)
	defer cancel()
	err := x.exporter.ExportSpans(ctx, x.batch.spans)
	clear(x.batch.spans)
	x.batch.spans = x.batch.spans[:0]
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		x.droppedSend.Add(uint64(n))
	} else {
		x.exported.Add(uint64(n))
	}
	x.report(err)
}

// Reasons why spans are dropped.
var (
	errFull     = errors.New("the queue was full; reduce otlp_ratio")
	errNoAnswer = fmt.Errorf("no answer within %v", exportTimeout)
	errClosed   = errors.New("no answer before the end of the daemon")
)

// report logs the result of a request to the collector.
func (x *Exporter) report(err error) {
	full := x.droppedFull.Load()
	if err == nil && full > x.warnFull {
		err = errFull
	}
	switch {
	case err == nil && x.failing:
		x.failing = false
		x.log.Info("the collector accepts spans again", "endpoint", x.endpoint)
	case err != nil && (x.warned.IsZero() || time.Since(x.warned) >= warnInterval):
		x.failing, x.warned, x.warnFull = true, time.Now(), full
		x.log.Warn("spans of traces dropped", "endpoint", x.endpoint, "error",
			control.Brief(control.OneLine(err.Error())), "dropped", full+x.droppedSend.Load())
	}
}

// A batch is an SDK span processor that keeps the ended spans. Only run uses it.
type batch struct{ spans []sdk.ReadOnlySpan }

func (*batch) OnStart(context.Context, sdk.ReadWriteSpan) {}
func (b *batch) OnEnd(s sdk.ReadOnlySpan)                 { b.spans = append(b.spans, s) }
func (*batch) Shutdown(context.Context) error             { return nil }
func (*batch) ForceFlush(context.Context) error           { return nil }
