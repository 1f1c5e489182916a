package xprt

import (
	"sync/atomic"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/memreg"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// counters of a transport, over all its connections. The names are the kernel's.
type counters struct {
	connects, connectFailures        atomic.Uint64
	sends, recvs, badXIDs            atomic.Uint64
	readChunks, writeChunks, replies atomic.Uint64 // segments encoded
	// octets offered in write and reply chunks, octets returned
	totalRequest, totalReply        atomic.Uint64
	pullupBytes, fixupBytes         atomic.Uint64
	failedMarshal, badReply, nomsg  atomic.Uint64
	nudges, timeouts, resends       atomic.Uint64
	interrupts, remoteErrs          atomic.Uint64
	emptySendCtx, replyWaits, pings atomic.Uint64
	connectNanos                    atomic.Uint64 // spent connecting
}

// qpTotals are the counters of queue pairs.
type qpTotals struct{ accessErrs, posts, completions uint64 }

func (q *qpTotals) add(s verbs.QPStats) {
	q.accessErrs += s.RemoteAccessErrors
	q.posts += s.PostedChains
	q.completions += s.SendCompletions
}

// Stats is a snapshot of a transport's counters and gauges. Counters only grow while the Transport
// lives.
type Stats struct {
	State     string // one of the State constants
	LastError string // why the last connection ended or was not made
	Since     time.Time
	Server    string
	Provider  string

	Slots, SlotsInUse  int
	Credits, InFlight  int
	InlineSend         int // octets
	InlineRecv         int
	MaxPayload         int
	Connects           uint64
	ConnectFailures    uint64
	Sends, Recvs       uint64
	BadXIDs            uint64
	ReadChunks         uint64
	WriteChunks        uint64
	ReplyChunks        uint64
	TotalRDMARequest   uint64
	TotalRDMAReply     uint64
	PullupCopyBytes    uint64
	FixupCopyBytes     uint64
	FailedMarshal      uint64
	BadReply           uint64
	NomsgCall          uint64
	Nudges             uint64
	Timeouts           uint64
	Resends            uint64
	Interrupted        uint64
	RDMAErrors         uint64 // RDMA_ERROR messages received
	RemoteAccessErrors uint64
	PostedChains       uint64
	SendCompletions    uint64
	EmptySendCtx       uint64 // the send queue was full
	ReplyWaitsForSend  uint64 // replies that came before their Send had completed
	KeepAlives         uint64 // liveness calls
	Queued             int    // calls that wait for a credit or the connection
	// calls in flight, and in the queue, summed over the times at which a call asked for a credit
	InFlightSum  uint64
	QueuedSum    uint64
	ConnectTime  time.Duration // spent connecting, over all attempts
	IdleTime     time.Duration // since the last call
	TraceDropped uint64

	MRsAllocated, MRsRecycled, MRsOrphaned, MRsRecovered uint64
	MRsFailed, MapErrors                                 uint64
	LocalInvNeeded, RemoteInvalidations                  uint64
	MRsFree, MRsTotal                                    int64
	MRStates                                             map[string]int64
}

// Stats returns a snapshot. Safe for concurrent use.
func (t *Transport) Stats() Stats {
	c, m := &t.stats, &t.mrs
	s := Stats{
		Server: t.cfg.Addr.String(), Provider: t.cfg.Provider.Name(),
		Slots: t.cfg.Slots, SlotsInUse: t.cfg.Slots - len(t.free), MaxPayload: t.MaxPayload(),
		Connects: c.connects.Load(), ConnectFailures: c.connectFailures.Load(),
		Sends: c.sends.Load(), Recvs: c.recvs.Load(), BadXIDs: c.badXIDs.Load(),
		ReadChunks: c.readChunks.Load(), WriteChunks: c.writeChunks.Load(), ReplyChunks: c.replies.Load(),
		TotalRDMARequest: c.totalRequest.Load(), TotalRDMAReply: c.totalReply.Load(),
		PullupCopyBytes: c.pullupBytes.Load(), FixupCopyBytes: c.fixupBytes.Load(),
		FailedMarshal: c.failedMarshal.Load(), BadReply: c.badReply.Load(), NomsgCall: c.nomsg.Load(),
		Nudges: c.nudges.Load(), Timeouts: c.timeouts.Load(), Resends: c.resends.Load(),
		Interrupted: c.interrupts.Load(), RDMAErrors: c.remoteErrs.Load(),
		EmptySendCtx: c.emptySendCtx.Load(), ReplyWaitsForSend: c.replyWaits.Load(), KeepAlives: c.pings.Load(),
		ConnectTime: time.Duration(c.connectNanos.Load()), IdleTime: time.Duration(
			t.now() - t.lastCall.Load()), TraceDropped: t.trace.Dropped(),
		MRsFailed: m.Failed.Load(), MapErrors: m.MapErrors.Load(),
		MRsAllocated: m.Allocated.Load(), MRsRecycled: m.Recycled.Load(), MRsOrphaned: m.Orphaned.Load(), MRsRecovered: m.Recovered.Load(),
		LocalInvNeeded: m.LocalInvNeeded.Load(), RemoteInvalidations: m.RemoteInv.Load(),
		MRsFree: m.Free(), MRsTotal: m.Total(), MRStates: map[string]int64{},
	}
	for _, st := range memreg.States {
		s.MRStates[st.String()] = m.InState(st)
	}
	s.Credits, s.InFlight, s.Queued, s.InFlightSum, s.QueuedSum = t.window.snapshot()
	t.stateMu.Lock()
	defer t.stateMu.Unlock()
	q := t.ended
	if cn := t.conn.Load(); cn != nil {
		q.add(cn.qp.Stats())
		s.InlineSend, s.InlineRecv = cn.inlineSend, cn.inlineRecv
	}
	s.RemoteAccessErrors, s.PostedChains, s.SendCompletions = q.accessErrs, q.posts, q.completions
	s.State, s.Since = t.state, t.since
	if t.lastErr != nil {
		s.LastError = t.lastErr.Error()
	}
	return s
}
