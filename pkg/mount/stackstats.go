package mount

import (
	"context"
	"net"
	"sync/atomic"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/fusefs"
	"github.com/nfsrdmad/nfsrdmad/pkg/metrics"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/trace"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

var resolver net.Resolver

// A caller spreads RPCs over the transports of one mount (nconnect), one after the other. all does
// not change once the mount stands.
type caller struct {
	all  []*xprt.Transport
	next atomic.Uint32
}

// Call implements nfs3.Caller.
func (c *caller) Call(ctx context.Context, m *sunrpc.Message) error {
	if len(c.all) == 1 {
		return c.all[0].Call(ctx, m)
	}
	return c.all[int(c.next.Add(1)%uint32(len(c.all)))].Call(ctx, m)
}

func (c *caller) close() {
	for _, t := range c.all {
		_ = t.Close()
	}
}

// Snapshot implements mountInstance.
func (s *mountStack) Snapshot() metrics.Snapshot {
	snap := metrics.Snapshot{Mount: s.dir, Provider: s.provider.Name()}
	_, snap.Faults = injected(s.provider)
	snap.Transport.MRs, snap.Transport.Connections = make(map[string]uint64), make(map[string]uint64)
	for _, state := range []string{xprt.StateConnected, xprt.StateConnecting, xprt.StateDisconnected, xprt.StateIdle} {
		snap.Transport.Connections[state] = 0
	}
	for _, t := range s.transports.all {
		st := t.Stats()
		snap.Server = st.Server
		addStats(&snap.Transport, &st)
	}
	if s.fs != nil {
		snap.Files = files(&s.fs.Counters)
	}
	for p := range s.procs {
		if d := s.procs[p].Data(); d.Count > 0 {
			snap.Procs = append(snap.Procs, metrics.NamedHistogram{Name: nfs3.Proc(p).String(), HistogramData: d})
		}
	}
	for op := range s.ops {
		if d := s.ops[op].Data(); d.Count > 0 {
			snap.Ops = append(snap.Ops, metrics.NamedHistogram{Name: fusefs.Op(op).String(), HistogramData: d})
		}
	}
	return snap
}

// files reads what a file system counted. Operations that were never asked for are left out.
func files(c *fusefs.Counters) metrics.Files {
	f := metrics.Files{
		ReadBytes: c.ReadBytes.Load(), WrittenBytes: c.WrittenBytes.Load(), SentBytes: c.SentBytes.Load(), Commits: c.Commits.Load(),
		Replays: c.Replays.Load(), ReplayedBytes: c.ReplayedBytes.Load(), WriteErrors: c.WriteErrors.Load(), BufferWaits: c.BufferWaits.Load(),
		SillyRenames: c.SillyRenames.Load(), JukeboxRetries: c.JukeboxRetries.Load(), Interrupts: c.Interrupts.Load(), Stale: c.Stale.Load(),
		CacheDrops: c.CacheDrops.Load(), ReadDirRestarts: c.ReadDirRestarts.Load(),
		Ops: make(map[string]uint64), OpErrors: make(map[string]uint64),
	}
	for op := range c.Ops {
		if n := c.Ops[op].Load(); n > 0 {
			f.Ops[fusefs.Op(op).String()], f.OpErrors[fusefs.Op(op).String()] = n, c.Errors[op].Load()
		}
	}
	return f
}

// Describe implements mountInstance.
func (s *mountStack) Describe(i *control.MountInfo) {
	i.Server, i.Provider, i.ProviderReason = s.address.String(), s.provider.Name(), s.why
	i.FaultInjection, _ = injected(s.provider)
}

// Rings implements mountInstance.
func (s *mountStack) Rings() []*trace.Ring {
	var rings []*trace.Ring
	for _, t := range s.transports.all {
		rings = append(rings, t.Trace())
	}
	return rings
}

// addStats adds one connection's counters, as nfs-utils' mountstats sums them over nconnect.
func addStats(to *metrics.Transport, s *xprt.Stats) {
	to.Connects += s.Connects
	to.ConnectFailures += s.ConnectFailures
	to.ConnectTime += s.ConnectTime
	to.Sends += s.Sends
	to.Receives += s.Recvs
	to.BadXIDs += s.BadXIDs
	to.InflightSum += s.InFlightSum
	to.BacklogSum += s.QueuedSum
	to.ReadChunks += s.ReadChunks
	to.WriteChunks += s.WriteChunks
	to.ReplyChunks += s.ReplyChunks
	to.TotalRDMARequest += s.TotalRDMARequest
	to.TotalRDMAReply += s.TotalRDMAReply
	to.PullupCopyBytes += s.PullupCopyBytes
	to.FixupCopyBytes += s.FixupCopyBytes
	to.FailedMarshal += s.FailedMarshal
	to.BadReply += s.BadReply
	to.NomsgCall += s.NomsgCall
	to.MRsRecovered += s.MRsRecovered
	to.MRsRecycled += s.MRsRecycled
	to.MRsOrphaned += s.MRsOrphaned
	to.MRsAllocated += s.MRsAllocated
	to.LocalInvNeeded += s.LocalInvNeeded
	to.EmptySendctx += s.EmptySendCtx
	to.ReplyWaitsForSend += s.ReplyWaitsForSend
	to.MRsFailed += s.MRsFailed
	to.MapErrors += s.MapErrors
	to.RemoteInvalidations += s.RemoteInvalidations
	to.Timeouts += s.Timeouts
	to.Resends += s.Resends
	to.Interrupts += s.Interrupted
	to.Liveness += s.KeepAlives
	to.Nudges += s.Nudges
	to.RDMAErrors += s.RDMAErrors
	to.RemoteAccessErrors += s.RemoteAccessErrors
	to.PostedChains += s.PostedChains
	to.SendCompletions += s.SendCompletions
	to.TraceDropped += s.TraceDropped
	to.Credits += uint64(s.Credits)
	to.Slots += uint64(s.Slots)
	to.SlotsInUse += uint64(s.SlotsInUse)
	to.InFlight += uint64(s.InFlight)
	to.Queued += uint64(s.Queued)
	to.MRsFree += uint64(max(s.MRsFree, 0))
	to.MRsPooled += uint64(max(s.MRsTotal, 0))
	to.MaxPayload = uint64(s.MaxPayload)
	if s.State == xprt.StateConnected {
		// the mount's last call is that of the connection with the latest one
		if !to.Connected || s.IdleTime < to.Idle {
			to.Idle = s.IdleTime
		}
		to.Connected = true
	}
	to.Connections[s.State]++
	for state, n := range s.MRStates {
		to.MRs[state] += uint64(max(n, 0))
	}
}

// Status implements mountInstance.
func (s *mountStack) Status() control.MountStatus {
	snap := s.Snapshot()
	t := &snap.Transport
	st := control.MountStatus{
		Credits: t.Credits, Slots: t.Slots, SlotsInUse: t.SlotsInUse, Connects: t.Connects, Sends: t.Sends, Receives: t.Receives,
		MRs: t.MRs, XprtLine: metrics.XprtLine(t), RPCs: make(
			map[string]uint64), MRsRecycled: t.MRsRecycled, MRsOrphaned: t.MRsOrphaned,
		MRsRecovered: t.MRsRecovered, MRsFailed: t.MRsFailed, Calls: s.waiting(), History: s.story(), FaultsInjected: snap.Faults, Trace: s.opts.TraceEvents,
	}
	s.Describe(&st.MountInfo)
	st.MaxRead, st.MaxWrite = s.fs.IOSizes()
	for i := range snap.Procs {
		st.RPCs[snap.Procs[i].Name] = snap.Procs[i].Count
	}
	var since time.Time
	for _, tr := range s.transports.all { // the connection that changed last tells the most
		if x := tr.Stats(); !x.Since.Before(since) {
			st.Connection, st.LastError, since = x.State, x.LastError, x.Since
		}
	}
	return st
}
