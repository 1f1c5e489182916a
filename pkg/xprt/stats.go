package xprt

import (
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/memreg"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/stats"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// counters of a transport, over all its connections. The names are the kernel's.
type counters struct {
	connects, connectFailures        atomic.Uint64
	sends, recvs, badXIDs            atomic.Uint64
	readChunks, writeChunks, replies atomic.Uint64 // segments encoded
	// bytes offered in write and reply chunks, bytes returned
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

	stats.Transport
}

// Stats returns a snapshot. Safe for concurrent use.
func (t *Transport) Stats() Stats {
	s := Stats{Transport: t.counts(), Address: t.Address(), Preferred: t.Preferred()}
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

// counts reads what needs no lock of t.
func (t *Transport) counts() stats.Transport {
	c, m := &t.stats, &t.mrs
	s := stats.Transport{
		Slots: uint64(t.cfg.Slots), SlotsInUse: t.slotsInUse(), MaxPayload: uint64(t.MaxPayload()),
		Connects: c.connects.Load(), ConnectFailures: c.connectFailures.Load(),
		ConnectTime: time.Duration(c.connectNanos.Load()),
		Sends:       c.sends.Load(), Recvs: c.recvs.Load(), BadXIDs: c.badXIDs.Load(),
		ReadChunks: c.readChunks.Load(), WriteChunks: c.writeChunks.Load(), ReplyChunks: c.replies.Load(),
		TotalRDMARequest: c.totalRequest.Load(), TotalRDMAReply: c.totalReply.Load(),
		PullupCopyBytes: c.pullupBytes.Load(), FixupCopyBytes: c.fixupBytes.Load(),
		FailedMarshal: c.failedMarshal.Load(), BadReply: c.badReply.Load(), NomsgCall: c.nomsg.Load(),
		Nudges: c.nudges.Load(), Timeouts: c.timeouts.Load(), Resends: c.resends.Load(),
		Interrupted: c.interrupts.Load(), RDMAErrors: c.remoteErrs.Load(),
		EmptySendCtx: c.emptySendCtx.Load(), ReplyWaitsForSend: c.replyWaits.Load(), KeepAlives: c.pings.Load(),
		TraceDropped: t.trace.Dropped(),
		MRsFailed:    m.Failed.Load(), MapErrors: m.MapErrors.Load(),
		MRsAllocated: m.Allocated.Load(), MRsRecycled: m.Recycled.Load(),
		MRsOrphaned: m.Orphaned.Load(), MRsRecovered: m.Recovered.Load(),
		LocalInvNeeded: m.LocalInvNeeded.Load(), RemoteInvalidations: m.RemoteInv.Load(),
		MRsFree: gauge(m.Free()), MRsTotal: gauge(m.Total()),
		MRStates: make(map[string]uint64, len(memreg.States)),
	}
	for _, st := range memreg.States {
		s.MRStates[st.String()] = gauge(m.InState(st))
	}
	credits, inFlight, queued, inFlightSum, queuedSum := t.window.snapshot()
	s.Credits, s.InFlight, s.Queued = uint64(credits), uint64(inFlight), uint64(queued)
	s.InFlightSum, s.QueuedSum = inFlightSum, queuedSum
	return s
}

// slotsInUse returns the number of slots with a call.
func (t *Transport) slotsInUse() uint64 {
	idle := t.reserved.idleReserved() // before free, which receives the released slots
	return gauge(int64(t.cfg.Slots - idle - len(t.free.idle)))
}

// gauge is n, or 0 if n is negative: a reader may see the second of two concurrent changes first.
func gauge(n int64) uint64 { return uint64(max(n, 0)) }
