package otlp

import (
	"context"
	"fmt"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/ledger"
)

// A clock converts times of package ledger to the wall clock. One operation has one clock, so that
// a step of the wall clock does not move its spans against one another.
type clock struct {
	wall time.Time
	at   ledger.Time
}

func newClock(at ledger.Time) clock { return clock{at.Wall(), at} }

func (c clock) time(t ledger.Time) trace.SpanEventOption {
	return trace.WithTimestamp(c.wall.Add(time.Duration(t - c.at)))
}

// record makes the spans of o.
func (x *Exporter) record(o *Operation) {
	ctx := context.Background()
	r := o.Request
	if r == nil {
		for i := range o.calls {
			c := &o.calls[i]
			x.recordCall(ctx, newClock(c.Times.Start()), o.Mount, c, ownerType(c.Owner))
		}
		return
	}
	clock := newClock(r.Times.Start())
	ctx, span := x.tracer.Start(ctx, "fuse/"+r.Name, clock.time(r.Times.Start()),
		trace.WithSpanKind(trace.SpanKindServer))
	span.SetAttributes(o.Mount.attributes()...)
	span.SetAttributes(o.Mount.owner(r.Owner)...)
	span.SetAttributes(attribute.String("nfsrdmad.fuse.operation", r.Name),
		attribute.Int("nfsrdmad.fuse.bytes", r.Bytes), attribute.Int("nfsrdmad.fuse.rpcs", r.Calls))
	setResult(span, r.Result)
	setPhases(span, &r.Times)
	start, end := r.Times.Start(), r.Times.End()
	x.recordPhase(ctx, clock, ledger.PhaseQueue, start, &r.Times)
	for i := range o.calls {
		x.recordCall(ctx, clock, o.Mount, &o.calls[i])
	}
	x.recordPhase(ctx, clock, ledger.PhaseReply, end-ledger.Time(r.Times.Spent(ledger.PhaseReply)), &r.Times)
	span.End(clock.time(end))
}

// recordCall makes the spans of an RPC.
func (x *Exporter) recordCall(ctx context.Context, clock clock, m *Mount, c *Call, owner ...attribute.KeyValue) {
	method := c.ProgramName + "/" + c.ProcName
	at := c.Times.Start()
	ctx, span := x.tracer.Start(ctx, method, clock.time(at), trace.WithSpanKind(trace.SpanKindClient))
	span.SetAttributes(m.attributes()...)
	span.SetAttributes(owner...)
	span.SetAttributes(semconv.RPCSystemNameKey.String("onc_rpc"), semconv.RPCMethod(method),
		semconv.OncRPCProgramName(c.ProgramName), semconv.OncRPCVersion(int(c.Vers)),
		semconv.OncRPCProcedureName(c.ProcName), semconv.OncRPCProcedureNumber(int(c.Proc)),
		semconv.NetworkPeerAddress(c.Peer.Addr().String()), semconv.NetworkPeerPort(int(c.Peer.Port())),
		attribute.Int("nfsrdmad.rpc.connection", c.Connection), attribute.Int("nfsrdmad.rpc.sends", c.Sends),
		attribute.Int("nfsrdmad.rpc.args.size", c.ArgBytes), attribute.Int("nfsrdmad.rpc.results.size", c.ResultBytes))
	if c.Slot >= 0 {
		span.SetAttributes(attribute.Int("nfsrdmad.rpc.slot", c.Slot),
			attribute.String("nfsrdmad.rpc.xid", fmt.Sprintf("%#x", c.XID)))
	}
	if c.Status != "" {
		span.SetAttributes(semconv.RPCResponseStatusCode(c.Status))
	}
	setResult(span, c.Result)
	setPhases(span, &c.Times)
	for _, p := range callPhases {
		at = x.recordPhase(ctx, clock, p, at, &c.Times)
	}
	span.End(clock.time(c.Times.End()))
}

// recordPhase makes the span of a phase that begins at start, and returns its end. A phase without
// time has no span.
func (x *Exporter) recordPhase(ctx context.Context, clock clock, p ledger.Phase, start ledger.Time,
	t *ledger.Times) (end ledger.Time) {
	d := t.Spent(p)
	if d == 0 {
		return start
	}
	end = start + ledger.Time(d)
	_, span := x.tracer.Start(ctx, p.String(), clock.time(start))
	span.End(clock.time(end))
	return end
}

func (m *Mount) attributes() []attribute.KeyValue {
	return []attribute.KeyValue{attribute.String("nfsrdmad.mount.dir", validUTF8(m.Dir)),
		semconv.ServerAddress(validUTF8(m.Server)), semconv.ServerPort(int(m.Port))}
}

// owner returns the attributes of the owner of a request.
func (m *Mount) owner(o Owner) []attribute.KeyValue {
	a := []attribute.KeyValue{ownerType(o.Type), attribute.Int64("nfsrdmad.owner.uid", int64(o.UID))}
	if o.Type == control.OwnerProcess {
		a = append(a, attribute.Int64("nfsrdmad.owner.pid", int64(m.Process(o.Thread))))
	}
	return a
}

func ownerType(s string) attribute.KeyValue { return attribute.String("nfsrdmad.owner.type", s) }

// validUTF8 returns s with U+FFFD for bytes that are not UTF-8. Protocol buffers do not allow them.
func validUTF8(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

func setResult(span trace.Span, r Result) {
	if r.Error != "" {
		span.SetAttributes(semconv.ErrorTypeKey.String(r.Error))
	}
	if r.Failure {
		span.SetStatus(codes.Error, r.Error)
	}
}

// setPhases sets the seconds in each phase.
func setPhases(span trace.Span, t *ledger.Times) {
	for p := range ledger.NumPhases {
		if d := t.Spent(p); d > 0 {
			span.SetAttributes(attribute.Float64("nfsrdmad.phase."+p.String(), d.Seconds()))
		}
	}
}
