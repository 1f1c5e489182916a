package mount

import (
	"context"
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

// A caller distributes RPCs over the transports of one mount (option nconnect) in turn. all does
// not change once the mount is complete. Its methods may be called concurrently.
type caller struct {
	all  []*xprt.Transport
	next atomic.Uint32
}

// Call implements nfs3.Caller. A call that an earlier process made goes to the same transport.
func (c *caller) Call(ctx context.Context, m *sunrpc.Message) error {
	if id, ok := sunrpc.KeptCall(ctx, m); ok && int64(id.Conn) < int64(len(c.all)) {
		return c.all[id.Conn].Repeat(ctx, m, id.XID)
	}
	return c.inTurn().CallNew(ctx, m)
}

// inTurn returns the transport of the next new call.
func (c *caller) inTurn() *xprt.Transport {
	if len(c.all) == 1 {
		return c.all[0]
	}
	return c.all[int(c.next.Add(1)%uint32(len(c.all)))]
}

func (c *caller) close() {
	for _, t := range c.all {
		_ = t.Close()
	}
}

// Snapshot implements mountInstance.
func (s *mountStack) Snapshot() metrics.Snapshot {
	snap := metrics.Snapshot{Mount: s.dir, Server: s.address.String(), Provider: s.provider.Name()}
	_, snap.Faults = injected(s.provider)
	for _, t := range s.transports.all {
		st := t.Stats()
		snap.Transport.Add(&st.Transport)
	}
	snap.Front, _ = s.front()
	if s.fs != nil {
		snap.Files = &s.fs.Counters
	}
	if s.keeper.keeps() {
		snap.State = s.keeper.state.Stats()
	}
	if s.locks != nil {
		snap.Locks = &s.locks.Counters
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

// Describe implements mountInstance.
func (s *mountStack) Describe(i *control.MountInfo) {
	i.Server, i.Provider, i.ProviderReason = s.address.String(), s.provider.Name(), s.reason
	name, refused := s.front()
	if i.Front = name; refused != nil {
		i.FrontReason = control.OneLine(refused.Error())
	}
	i.FaultInjection, _ = injected(s.provider)
	i.Failure = s.fs.Failure()
}

// Rings implements mountInstance.
func (s *mountStack) Rings() []*trace.Ring {
	var rings []*trace.Ring
	for _, t := range s.transports.all {
		rings = append(rings, t.Trace())
	}
	return rings
}

// Status implements mountInstance.
func (s *mountStack) Status() control.MountStatus {
	snap := s.Snapshot()
	st := control.MountStatus{
		Transport: snap.Transport, XprtLine: metrics.XprtLine(&snap.Transport), RPCs: make(map[string]uint64),
		Calls: s.pendingCalls(), History: s.history(), FaultsInjected: snap.Faults, Trace: s.opts.TraceEvents,
	}
	s.Describe(&st.MountInfo)
	st.Locks = s.lockStatus()
	st.MaxRead, st.MaxWrite = s.fs.IOSizes()
	for i := range snap.Procs {
		st.RPCs[snap.Procs[i].Name] = snap.Procs[i].Count
	}
	var since time.Time
	for _, tr := range s.transports.all { // show the connection that changed last
		if x := tr.Stats(); !x.Since.Before(since) {
			st.Connection, st.LastError, since = x.State, x.LastError, x.Since
		}
	}
	return st
}
