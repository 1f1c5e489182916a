// Package otlp exports traces of sampled operations to an OpenTelemetry collector, over OTLP/HTTP.
//
// # Operation
//
// An [Operation] is one FUSE request with its RPCs, or one RPC that belongs to no request.
// [Exporter.Sample] decides before the first RPC of an operation is added whether it is sampled.
// The owner of a sampled operation adds its ended RPCs, and passes it to [Exporter.Export] at the
// end. One goroutine, [Exporter.run], makes spans of the operations and sends the spans in batches.
//
//	Sample  -> AddCall ... -> Export -> queue (bounded) -> run: spans -> batch -> POST /v1/traces
//	  nil: not sampled                  full: drop                              error: drop
//
// Export never waits. Spans that are not sent are dropped and counted: there is no retry, because
// the next spans show the same system.
//
// # Spans
//
// A request is a span, its RPCs are children of this span, and the phases of package ledger are
// children of the span that they belong to. A ledger.Times has only the sum of each phase. The
// spans of the phases of an RPC therefore follow one another in the order of the phases. This is
// exact for a call that was sent once. Of a request, only the phases before and after its RPCs have
// spans, queue and reply. The attributes have the times of all phases.
package otlp
