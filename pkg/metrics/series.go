package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/nfsrdmad/nfsrdmad/pkg/stats"
)

// A series is one metric of a mount that is a single number of a T.
type series[T any] struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(*T) float64
}

// A short name for the table below.
type transport = stats.Transport

func counter[T any](name, help string, value func(*T) uint64) series[T] {
	return series[T]{desc(name, help), prometheus.CounterValue, func(t *T) float64 { return float64(value(t)) }}
}

func gauge(name, help string, value func(*transport) uint64) series[transport] {
	return series[transport]{desc(name, help), prometheus.GaugeValue,
		func(t *transport) float64 { return float64(value(t)) }}
}

var transportSeries = []series[transport]{
	counter("connects_total", "RDMA connections established.", func(t *transport) uint64 { return t.Connects }),
	{desc("connect_seconds_total", "Time spent connecting."), prometheus.CounterValue,
		func(t *transport) float64 { return t.ConnectTime.Seconds() }},
	counter("connect_failures_total", "Connection attempts that failed.",
		func(t *transport) uint64 { return t.ConnectFailures }),
	counter("rpc_sends_total", "RPC calls sent.", func(t *transport) uint64 { return t.Sends }),
	counter("rpc_receives_total", "Messages received from servers, including discarded messages.",
		func(t *transport) uint64 { return t.Recvs }),
	counter("bad_xids_total", "Replies whose XID belongs to no call.", func(t *transport) uint64 { return t.BadXIDs }),
	counter("inflight_sum_total", "Sum over calls of the calls in flight when each call asked for a credit.",
		func(t *transport) uint64 { return t.InFlightSum }),
	counter("backlog_sum_total", "Sum over calls of the calls that waited for a credit or a connection when each call "+
		"asked for a credit.", func(t *transport) uint64 { return t.QueuedSum }),
	counter("read_chunk_total", "Read segments encoded, including position-zero chunks.",
		func(t *transport) uint64 { return t.ReadChunks }),
	counter("write_chunk_total", "Write segments encoded.", func(t *transport) uint64 { return t.WriteChunks }),
	counter("reply_chunk_total", "Reply chunk segments encoded.", func(t *transport) uint64 { return t.ReplyChunks }),
	counter("rdma_request_bytes_total", "Bytes offered in write and reply chunks.",
		func(t *transport) uint64 { return t.TotalRDMARequest }),
	counter("rdma_reply_bytes_total", "Bytes returned by servers with RDMA Write.",
		func(t *transport) uint64 { return t.TotalRDMAReply }),
	counter("pullup_copy_bytes_total", "Bytes copied before a Send to make a message contiguous.",
		func(t *transport) uint64 { return t.PullupCopyBytes }),
	counter("fixup_copy_bytes_total", "Bytes copied out of receive buffers.",
		func(t *transport) uint64 { return t.FixupCopyBytes }),
	counter("failed_marshal_total", "Calls that could not be marshaled.",
		func(t *transport) uint64 { return t.FailedMarshal }),
	counter("bad_reply_total", "Invalid replies: malformed transport header, chunk not offered, or RDMA_ERROR.",
		func(t *transport) uint64 { return t.BadReply }),
	counter("nomsg_call_total", "Calls sent as RDMA_NOMSG.", func(t *transport) uint64 { return t.NomsgCall }),
	counter("mrs_recovered_total", "Memory regions replaced after a lost connection.",
		func(t *transport) uint64 { return t.MRsRecovered }),
	counter("mrs_recycled_total", "Memory regions destroyed because their invalidation failed.",
		func(t *transport) uint64 { return t.MRsRecycled }),
	counter("mrs_orphaned_total", "Memory regions that could not be destroyed or replaced.",
		func(t *transport) uint64 { return t.MRsOrphaned }),
	counter("mrs_allocated_total", "Allocations of memory regions.",
		func(t *transport) uint64 { return t.MRsAllocated }),
	counter("local_inv_needed_total", "Memory regions that the client had to invalidate.",
		func(t *transport) uint64 { return t.LocalInvNeeded }),
	counter("empty_sendctx_total", "Sends that waited for a send context.",
		func(t *transport) uint64 { return t.EmptySendCtx }),
	counter("reply_waits_for_send_total", "Replies that waited for the completion of their Send.",
		func(t *transport) uint64 { return t.ReplyWaitsForSend }),
	counter("mrs_failed_total", "Memory regions in an unknown state after a flush, an error or a lost connection: "+
		"sum of recovered, recycled and orphaned.", func(t *transport) uint64 { return t.MRsFailed }),
	counter("map_errors_total", "Registrations that failed: refused by the device, or no memory region left.",
		func(t *transport) uint64 { return t.MapErrors }),
	counter("remote_invalidations_total", "Memory regions invalidated by servers with Send With Invalidate.",
		func(t *transport) uint64 { return t.RemoteInvalidations }),
	counter("rpc_timeouts_total", "Calls whose timeout dropped their connection.",
		func(t *transport) uint64 { return t.Timeouts }),
	counter("rpc_resends_total", "Calls sent again on a new connection.",
		func(t *transport) uint64 { return t.Resends }),
	counter("rpc_interrupts_total", "Calls canceled by their caller.",
		func(t *transport) uint64 { return t.Interrupted }),
	counter("liveness_calls_total", "Keepalive NULL calls.", func(t *transport) uint64 { return t.KeepAlives }),
	counter("nudges_total", "Empty RDMA Writes sent because the first reply was late.",
		func(t *transport) uint64 { return t.Nudges }),
	counter("rdma_errors_total", "RDMA_ERROR messages received.", func(t *transport) uint64 { return t.RDMAErrors }),
	counter("remote_access_errors_total", "RDMA operations of servers that were refused: unknown key, wrong "+
		"direction, or out of bounds.", func(t *transport) uint64 { return t.RemoteAccessErrors }),
	counter("posted_chains_total", "Chains of work requests posted.",
		func(t *transport) uint64 { return t.PostedChains }),
	counter("send_completions_total", "Work completions of the send queue.",
		func(t *transport) uint64 { return t.SendCompletions }),
	counter("trace_events_dropped_total", "Trace events that were not recorded.",
		func(t *transport) uint64 { return t.TraceDropped }),

	gauge("credits", "Credits granted by the server: calls that may be in flight.",
		func(t *transport) uint64 { return t.Credits }),
	gauge("slots", "RPC slots.", func(t *transport) uint64 { return t.Slots }),
	gauge("slots_in_use", "RPC slots in use by a call.", func(t *transport) uint64 { return t.SlotsInUse }),
	gauge("calls_in_flight", "Calls that hold a credit.", func(t *transport) uint64 { return t.InFlight }),
	gauge("calls_queued", "Calls that wait for a credit or a connection.",
		func(t *transport) uint64 { return t.Queued }),
	gauge("mrs_free", "Free memory regions.", func(t *transport) uint64 { return t.MRsFree }),
	gauge("mrs_pooled", "Memory regions allocated now.", func(t *transport) uint64 { return t.MRsTotal }),
	gauge("max_payload_bytes", "Largest payload of one call.", func(t *transport) uint64 { return t.MaxPayload }),
	{desc("idle_seconds", "Time since the last call; 0 while not connected."), prometheus.GaugeValue,
		func(t *transport) float64 { return t.IdleTime.Seconds() }},
	gauge("connected", "1 while at least one RDMA connection is established.",
		func(t *transport) uint64 { return min(t.Connections[stats.Connected], 1) }),
}
