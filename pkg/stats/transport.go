package stats

import (
	"maps"
	"time"
)

// A Transport is a snapshot of the counters and gauges of one connection, or of all connections of
// one mount. The zero value is the sum of no connections. Counters grow until the mount ends.
//
// A field that also exists in /proc/self/mountstats has the same meaning as in the kernel's
// NFS/RDMA client (features.md S23). In JSON each field has the name of its metric without
// "_total".
type Transport struct {
	// Connections are the connections by state.
	Connections     map[string]uint64 `json:"connections,omitempty"`
	Connects        uint64            `json:"connects"`
	ConnectFailures uint64            `json:"connect_failures"`
	// ConnectTime is the time spent connecting, over all attempts.
	ConnectTime time.Duration `json:"connect_nanoseconds"`
	// IdleTime is the time since the last call of a connected transport; 0 if none is connected.
	IdleTime time.Duration `json:"idle_nanoseconds"`

	Sends uint64 `json:"rpc_sends"`
	// Recvs are the messages received, including discarded messages.
	Recvs uint64 `json:"rpc_receives"`
	// BadXIDs are the replies that belong to no call.
	BadXIDs uint64 `json:"bad_xids"`
	// InFlightSum and QueuedSum are sums over calls. When a call asks for a credit, the transport
	// adds the number of calls that hold a credit, and the number of those that wait for one.
	InFlightSum uint64 `json:"inflight_sum"`
	QueuedSum   uint64 `json:"backlog_sum"`

	// Segments encoded.
	ReadChunks  uint64 `json:"read_chunk"`
	WriteChunks uint64 `json:"write_chunk"`
	ReplyChunks uint64 `json:"reply_chunk"`
	// TotalRDMARequest is the memory offered in write and reply chunks, TotalRDMAReply the part of
	// it that servers filled; both in bytes.
	TotalRDMARequest uint64 `json:"rdma_request_bytes"`
	TotalRDMAReply   uint64 `json:"rdma_reply_bytes"`
	PullupCopyBytes  uint64 `json:"pullup_copy_bytes"`
	FixupCopyBytes   uint64 `json:"fixup_copy_bytes"`
	FailedMarshal    uint64 `json:"failed_marshal"`
	BadReply         uint64 `json:"bad_reply"`
	NomsgCall        uint64 `json:"nomsg_call"`
	// EmptySendCtx are the Sends that waited because the send queue was full.
	EmptySendCtx uint64 `json:"empty_sendctx"`
	// ReplyWaitsForSend are the replies that arrived before their Send had completed.
	ReplyWaitsForSend uint64 `json:"reply_waits_for_send"`

	MRsAllocated uint64 `json:"mrs_allocated"`
	// MRsFailed counts memory regions in an unknown state after a flush, an error or a lost
	// connection: the sum of MRsRecovered, MRsRecycled and MRsOrphaned.
	MRsFailed           uint64 `json:"mrs_failed"`
	MRsRecovered        uint64 `json:"mrs_recovered"`
	MRsRecycled         uint64 `json:"mrs_recycled"`
	MRsOrphaned         uint64 `json:"mrs_orphaned"`
	MapErrors           uint64 `json:"map_errors"`
	LocalInvNeeded      uint64 `json:"local_inv_needed"`
	RemoteInvalidations uint64 `json:"remote_invalidations"`

	Timeouts    uint64 `json:"rpc_timeouts"`
	Resends     uint64 `json:"rpc_resends"`
	Interrupted uint64 `json:"rpc_interrupts"`
	KeepAlives  uint64 `json:"liveness_calls"`
	// Nudges are the empty RDMA Writes sent because the first reply was late.
	Nudges     uint64 `json:"nudges"`
	RDMAErrors uint64 `json:"rdma_errors"`
	// RemoteAccessErrors are the RDMA operations of servers that the provider refused.
	RemoteAccessErrors uint64 `json:"remote_access_errors"`
	PostedChains       uint64 `json:"posted_chains"`
	SendCompletions    uint64 `json:"send_completions"`
	TraceDropped       uint64 `json:"trace_events_dropped"`

	// Gauges.
	Credits    uint64 `json:"credits"`
	Slots      uint64 `json:"slots"`
	SlotsInUse uint64 `json:"slots_in_use"`
	// InFlight are the calls that hold a credit, Queued those that wait for a credit or a
	// connection.
	InFlight uint64 `json:"calls_in_flight"`
	Queued   uint64 `json:"calls_queued"`
	MRsFree  uint64 `json:"mrs_free"`
	MRsTotal uint64 `json:"mrs_pooled"`
	// MaxPayload is the largest payload of one call, in bytes.
	MaxPayload uint64 `json:"max_payload_bytes"`
	// MRStates are the memory regions by state (features.md S1 and S12).
	MRStates map[string]uint64 `json:"mrs,omitempty"`
}

// Connected is the state under which Connections counts the connected transports.
const Connected = "connected"

// Add adds the counters and gauges of o to t, as the mountstats of nfs-utils does over the
// connections of a mount. The sum has the larger MaxPayload, and the shorter IdleTime of the
// connected transports.
func (t *Transport) Add(o *Transport) {
	if o.Connections[Connected] > 0 && (t.Connections[Connected] == 0 || o.IdleTime < t.IdleTime) {
		t.IdleTime = o.IdleTime
	}
	t.MaxPayload = max(t.MaxPayload, o.MaxPayload)
	t.ConnectTime += o.ConnectTime
	t.Connections, t.MRStates = addCounts(t.Connections, o.Connections), addCounts(t.MRStates, o.MRStates)

	t.Connects += o.Connects
	t.ConnectFailures += o.ConnectFailures
	t.Sends += o.Sends
	t.Recvs += o.Recvs
	t.BadXIDs += o.BadXIDs
	t.InFlightSum += o.InFlightSum
	t.QueuedSum += o.QueuedSum
	t.ReadChunks += o.ReadChunks
	t.WriteChunks += o.WriteChunks
	t.ReplyChunks += o.ReplyChunks
	t.TotalRDMARequest += o.TotalRDMARequest
	t.TotalRDMAReply += o.TotalRDMAReply
	t.PullupCopyBytes += o.PullupCopyBytes
	t.FixupCopyBytes += o.FixupCopyBytes
	t.FailedMarshal += o.FailedMarshal
	t.BadReply += o.BadReply
	t.NomsgCall += o.NomsgCall
	t.EmptySendCtx += o.EmptySendCtx
	t.ReplyWaitsForSend += o.ReplyWaitsForSend
	t.MRsAllocated += o.MRsAllocated
	t.MRsFailed += o.MRsFailed
	t.MRsRecovered += o.MRsRecovered
	t.MRsRecycled += o.MRsRecycled
	t.MRsOrphaned += o.MRsOrphaned
	t.MapErrors += o.MapErrors
	t.LocalInvNeeded += o.LocalInvNeeded
	t.RemoteInvalidations += o.RemoteInvalidations
	t.Timeouts += o.Timeouts
	t.Resends += o.Resends
	t.Interrupted += o.Interrupted
	t.KeepAlives += o.KeepAlives
	t.Nudges += o.Nudges
	t.RDMAErrors += o.RDMAErrors
	t.RemoteAccessErrors += o.RemoteAccessErrors
	t.PostedChains += o.PostedChains
	t.SendCompletions += o.SendCompletions
	t.TraceDropped += o.TraceDropped
	t.Credits += o.Credits
	t.Slots += o.Slots
	t.SlotsInUse += o.SlotsInUse
	t.InFlight += o.InFlight
	t.Queued += o.Queued
	t.MRsFree += o.MRsFree
	t.MRsTotal += o.MRsTotal
}

// addCounts returns the sum of a and b by key. It changes neither.
func addCounts(a, b map[string]uint64) map[string]uint64 {
	if a == nil && b == nil {
		return nil
	}
	sum := make(map[string]uint64, len(b))
	maps.Copy(sum, a)
	for key, n := range b {
		sum[key] += n
	}
	return sum
}
