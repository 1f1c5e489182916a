package mount

import (
	"slices"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/metrics"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfsacl"
	"github.com/nfsrdmad/nfsrdmad/pkg/trace"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

// Snapshot implements mountInstance.
func (s *mountStack) Snapshot() metrics.Snapshot {
	snap := metrics.Snapshot{Mount: s.dir, Server: s.address.String(), Provider: s.provider.Name()}
	_, snap.Faults = injected(s.provider)
	for _, t := range s.transports.all {
		st := t.Stats()
		snap.Transport.Add(&st.Transport)
		snap.Connections = append(snap.Connections, metrics.Connection{Address: st.Address.String(),
			Connected: st.State == xprt.StateConnected})
	}
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
	for _, p := range []nfsacl.Proc{nfsacl.ProcGetACL, nfsacl.ProcSetACL} {
		if d := s.aclProcs[p].Data(); d.Count > 0 {
			snap.Procs = append(snap.Procs, metrics.NamedHistogram{Name: p.String(), HistogramData: d})
		}
	}
	for op := range s.ops {
		if d := s.ops[op].Data(); d.Count > 0 {
			snap.Ops = append(snap.Ops, metrics.NamedHistogram{Name: kernel.Op(op).String(), HistogramData: d})
		}
	}
	snap.ProcPhases = append(named(s.phases.procs[:], nfs3.Proc.String), named(s.phases.aclProcs[:],
		nfsacl.Proc.String)...)
	snap.OpPhases = named(s.phases.ops[:], kernel.Op.String)
	return snap
}

// Describe implements mountInstance.
func (s *mountStack) Describe(i *control.MountInfo) {
	i.Server, i.Provider, i.ProviderReason = s.address.String(), s.provider.Name(), s.reason
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

// Stats implements mountInstance.
func (s *mountStack) Stats() control.MountStats {
	snap := s.Snapshot()
	st := control.MountStats{Uptime: time.Since(s.since).Seconds(), Transport: snap.Transport,
		Procedures: operationStats(snap.Procs, nil)}
	for _, b := range metrics.Bounds {
		st.Bounds = append(st.Bounds, b.Seconds())
	}
	f := &s.fs.Counters
	st.ReadBytes, st.WrittenBytes, st.SentBytes = f.ReadBytes.Load(), f.WrittenBytes.Load(), f.SentBytes.Load()
	failed := make(map[string]uint64)
	for op := range f.Errors {
		failed[kernel.Op(op).String()] = f.Errors[op].Load()
	}
	st.Operations = operationStats(snap.Ops, failed)
	st.Processes, st.Users = s.usage.usages()
	return st
}

// operationStats converts histograms. failed are the errors by name.
func operationStats(l []metrics.NamedHistogram, failed map[string]uint64) []control.OperationStats {
	all := make([]control.OperationStats, 0, len(l))
	for i := range l {
		h := &l[i]
		all = append(all, control.OperationStats{Name: h.Name, Count: h.Count, Errors: failed[h.Name],
			Seconds: h.Sum.Seconds(), Buckets: slices.Clone(h.Buckets[:])})
	}
	return all
}

// Status implements mountInstance.
func (s *mountStack) Status() control.MountStatus {
	snap := s.Snapshot()
	st := control.MountStatus{
		Transport: snap.Transport, XprtLine: metrics.XprtLine(&snap.Transport), RPCs: make(map[string]uint64),
		Addresses: s.connections(), Calls: s.pendingCalls(), History: s.history(),
		FaultsInjected: snap.Faults, Trace: s.opts.TraceEvents,
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
