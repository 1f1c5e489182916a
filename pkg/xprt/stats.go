package xprt

import (
	"maps"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/memreg"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/stats"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// Counters count what a transport does, over all its connections. The names are the kernel's;
// Metrics says what each counts. N is atomic.Uint64 in a Transport, and uint64 in a copy.
type Counters[N atomic.Uint64 | uint64] struct {
	Connects, ConnectFailures                                              N
	Sends, Recvs, BadXIDs, Timeouts, Resends, Interrupted                  N
	ReadChunks, WriteChunks, ReplyChunks, TotalRDMARequest, TotalRDMAReply N
	PullupCopyBytes, FixupCopyBytes                                        N
	FailedMarshal, BadReply, NomsgCall, RDMAErrors                         N
	EmptySendCtx, ReplyWaitsForSend, KeepAlives, Nudges                    N
}

// Metrics returns the counters.
func (c *Counters[N]) Metrics() []stats.Metric {
	return []stats.Metric{
		stats.New("connects_total", "RDMA connections established.", &c.Connects),
		stats.New("connect_failures_total", "Connection attempts that failed.", &c.ConnectFailures),
		stats.New("rpc_sends_total", "RPC calls sent.", &c.Sends),
		stats.New("rpc_receives_total", "Messages received from servers, including discarded messages.", &c.Recvs),
		stats.New("bad_xids_total", "Replies whose XID belongs to no call.", &c.BadXIDs),
		stats.New("rpc_timeouts_total", "Calls whose timeout dropped their connection.", &c.Timeouts),
		stats.New("rpc_resends_total", "Calls sent again on a new connection.", &c.Resends),
		stats.New("rpc_interrupts_total", "Calls canceled by their caller.", &c.Interrupted),
		stats.New("read_chunk_total", "Read segments encoded, including position-zero chunks.", &c.ReadChunks),
		stats.New("write_chunk_total", "Write segments encoded.", &c.WriteChunks),
		stats.New("reply_chunk_total", "Reply chunk segments encoded.", &c.ReplyChunks),
		stats.New("rdma_request_bytes_total", "Bytes offered in write and reply chunks.", &c.TotalRDMARequest),
		stats.New("rdma_reply_bytes_total", "Bytes returned by servers with RDMA Write.", &c.TotalRDMAReply),
		stats.New("pullup_copy_bytes_total", "Bytes copied before a Send to make a message contiguous.",
			&c.PullupCopyBytes),
		stats.New("fixup_copy_bytes_total", "Bytes copied out of receive buffers.", &c.FixupCopyBytes),
		stats.New("failed_marshal_total", "Calls that could not be marshaled.", &c.FailedMarshal),
		stats.New("bad_reply_total", "Invalid replies: malformed transport header, chunk not offered, or RDMA_ERROR.",
			&c.BadReply),
		stats.New("nomsg_call_total", "Calls sent as RDMA_NOMSG.", &c.NomsgCall),
		stats.New("rdma_errors_total", "RDMA_ERROR messages received.", &c.RDMAErrors),
		stats.New("empty_sendctx_total", "Sends that waited for a send context.", &c.EmptySendCtx),
		stats.New("reply_waits_for_send_total", "Replies that waited for the completion of their Send.",
			&c.ReplyWaitsForSend),
		stats.New("liveness_calls_total", "Keepalive NULL calls.", &c.KeepAlives),
		stats.New("nudges_total", "Empty RDMA Writes sent because the first reply was late.", &c.Nudges),
	}
}

// Numbers are the counters and gauges of a transport at one time, or the totals of several
// transports. The zero value is the total of none.
//
// A number that also exists in /proc/self/mountstats has the same meaning as in the kernel's
// NFS/RDMA client (features.md S23).
type Numbers struct {
	Counters[uint64]
	memreg.Counts[uint64]

	RemoteAccessErrors, PostedChains, SendCompletions uint64 // of the queue pairs
	// When a call asks for a credit, the transport adds the number of calls that hold a credit to
	// InFlightSum, and the number of those that wait for one to QueuedSum.
	InFlightSum, QueuedSum uint64
	TraceDropped           uint64
	ConnectTime            time.Duration

	// Gauges.
	Slots, SlotsInUse, Credits, InFlight, Queued uint64
	MRsFree, MRsTotal, MaxPayload                uint64
	Connected                                    uint64
	IdleTime                                     time.Duration
	Connections                                  map[string]uint64 // by state
	MRStates                                     map[string]uint64 // MRs by state (features.md S1 and S12)
}

// Metrics returns the numbers without Connections and MRStates.
func (n *Numbers) Metrics() []stats.Metric {
	return append(append(n.Counters.Metrics(), n.Counts.Metrics()...),
		stats.New("remote_access_errors_total", "RDMA operations of servers that were refused: unknown key, wrong "+
			"direction, or out of bounds.", &n.RemoteAccessErrors),
		stats.New("posted_chains_total", "Chains of work requests posted.", &n.PostedChains),
		stats.New("send_completions_total", "Work completions of the send queue.", &n.SendCompletions),
		stats.New("inflight_sum_total", "Sum over calls of the calls in flight when each call asked for a credit.",
			&n.InFlightSum),
		stats.New("backlog_sum_total", "Sum over calls of the calls that waited for a credit or a connection when "+
			"each call asked for a credit.", &n.QueuedSum),
		stats.New("trace_events_dropped_total", "Trace events that were not recorded.", &n.TraceDropped),
		stats.New("connect_seconds_total", "Time spent connecting.", &n.ConnectTime),
		stats.New("slots", "RPC slots.", &n.Slots),
		stats.New("slots_in_use", "RPC slots in use by a call.", &n.SlotsInUse),
		stats.New("credits", "Credits granted by the server: calls that may be in flight.", &n.Credits),
		stats.New("calls_in_flight", "Calls that hold a credit.", &n.InFlight),
		stats.New("calls_queued", "Calls that wait for a credit or a connection.", &n.Queued),
		stats.New("mrs_free", "Free memory regions.", &n.MRsFree),
		stats.New("mrs_pooled", "Memory regions allocated now.", &n.MRsTotal),
		stats.New("max_payload_bytes", "Largest payload of one call.", &n.MaxPayload).Largest(),
		stats.New("connected", "1 while at least one RDMA connection is established.", &n.Connected).Largest(),
		stats.New("idle_seconds", "Time since the last call; 0 while not connected.", &n.IdleTime).Smallest(),
	)
}

// Add adds the numbers of another transport, as the mountstats of nfs-utils does over the
// connections of a mount.
func (n *Numbers) Add(o *Numbers) {
	stats.Add(n.Metrics(), o.Metrics())
	n.Connections, n.MRStates = addCounts(n.Connections, o.Connections), addCounts(n.MRStates, o.MRStates)
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

// qpTotals are the counters of queue pairs.
type qpTotals struct{ accessErrs, posts, completions uint64 }

func (q *qpTotals) add(s verbs.QPStats) {
	q.accessErrs += s.RemoteAccessErrors
	q.posts += s.PostedChains
	q.completions += s.SendCompletions
}

// Stats is a snapshot of a transport. Its counters only grow while the Transport exists.
type Stats struct {
	State     string    // one of the State constants
	Since     time.Time // when State began
	LastError string    // why the last connection ended or failed

	// Address is that of the connection, or of the last attempt to connect. Preferred is the
	// address that the transport prefers.
	Address, Preferred netip.AddrPort

	// Inline thresholds of the current connection, in bytes.
	InlineSend, InlineRecv int

	Numbers
}

// Stats returns a snapshot. Safe for concurrent use.
func (t *Transport) Stats() Stats {
	s := Stats{Numbers: t.numbers(), Address: t.Address(), Preferred: t.Preferred()}
	t.status.Lock()
	defer t.status.Unlock()
	q := t.status.ended
	if cn := t.conn.Load(); cn != nil {
		q.add(cn.qp.Stats())
		s.InlineSend, s.InlineRecv = cn.inlineSend, cn.inlineRecv
	}
	s.RemoteAccessErrors, s.PostedChains, s.SendCompletions = q.accessErrs, q.posts, q.completions
	s.State, s.Since = t.status.state, t.status.since
	s.Connections = map[string]uint64{StateConnected: 0, StateConnecting: 0, StateDisconnected: 0, StateIdle: 0}
	s.Connections[s.State]++
	if s.State == StateConnected {
		s.Connected = 1
		s.IdleTime = time.Duration(t.now() - t.lastCall.Load())
	}
	if t.status.lastErr != nil {
		s.LastError = t.status.lastErr.Error()
	}
	return s
}

// Lost reports whether there is no connection although one is wanted, and why the last one ended or
// failed. A transport that waits for Config.ConnectLimits is not lost. Safe for concurrent use; it
// costs less than Stats.
func (t *Transport) Lost() (lost bool, why error) {
	t.status.Lock()
	defer t.status.Unlock()
	state := t.status.state
	return state != StateConnected && state != StateIdle && !t.waitsForTurn.Load(), t.status.lastErr
}

// A Link describes a connection: what its handshake decided.
type Link struct {
	Device verbs.DeviceAttrs
	// Peer is the private data of the server (RFC 8797), or its default if the server sent none and
	// PeerFound is false.
	Peer      rpcrdma.Private
	PeerFound bool
	// Inline thresholds in bytes.
	InlineSend, InlineRecv int
}

// Link returns the latest connection, which may have ended. It returns nil before the first one.
// Safe for concurrent use.
func (t *Transport) Link() *Link { return t.link.Load() }

// numbers reads what needs no lock of t.
func (t *Transport) numbers() (n Numbers) {
	stats.Add(n.Counters.Metrics(), t.stats.Metrics())
	stats.Add(n.Counts.Metrics(), t.mrs.Metrics())
	n.ConnectTime, n.TraceDropped = time.Duration(t.connectNanos.Load()), t.trace.Dropped()
	n.Slots, n.SlotsInUse, n.MaxPayload = uint64(t.cfg.Slots), t.slotsInUse(), uint64(t.MaxPayload())
	n.MRsFree, n.MRsTotal = gauge(t.mrs.Free()), gauge(t.mrs.Total())
	n.MRStates = make(map[string]uint64, len(memreg.States))
	for _, st := range memreg.States {
		n.MRStates[st.String()] = gauge(t.mrs.InState(st))
	}
	credits, inFlight, queued, inFlightSum, queuedSum := t.window.snapshot()
	n.Credits, n.InFlight, n.Queued = uint64(credits), uint64(inFlight), uint64(queued)
	n.InFlightSum, n.QueuedSum = inFlightSum, queuedSum
	return n
}

// slotsInUse returns the number of slots with a call.
func (t *Transport) slotsInUse() uint64 {
	idle := t.reserved.idleReserved() // before free, which receives the released slots
	return gauge(int64(t.cfg.Slots - idle - len(t.free.idle)))
}

// gauge is n, or 0 if n is negative: a reader may see the second of two concurrent changes first.
func gauge(n int64) uint64 { return uint64(max(n, 0)) }
