package mount

import (
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/metrics"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfsacl"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/stats"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/trace"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

// Snapshot implements mountInstance.
func (s *mountStack) Snapshot() metrics.Snapshot {
	snap := metrics.Snapshot{Mount: s.dir, Server: s.address.String(), Provider: s.provider.Name()}
	_, snap.Faults = injected(s.provider)
	for _, t := range s.transports.all {
		st := t.Stats()
		snap.Transport.Add(&st.Numbers)
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
	snap.Procs = append(named(s.phases.procs[:], nfs3.Proc.String), named(s.phases.aclProcs[:], nfsacl.Proc.String)...)
	snap.Ops = named(s.phases.ops[:], kernel.Op.String)
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
func (s *mountStack) Stats(snap *metrics.Snapshot) control.MountStats {
	st := control.MountStats{Uptime: time.Since(s.since).Seconds(), Numbers: numbersOf(snap),
		Procedures: operationStats(snap.Procs, nil)}
	for _, b := range metrics.Bounds {
		st.Bounds = append(st.Bounds, b.Seconds())
	}
	failed := make(map[string]uint64)
	for op := range s.fs.Counters.Errors {
		failed[kernel.Op(op).String()] = s.fs.Counters.Errors[op].Load()
	}
	st.Operations = operationStats(snap.Ops, failed)
	st.Processes, st.Users = s.usage.usages()
	return st
}

func numbersOf(snap *metrics.Snapshot) control.Numbers {
	n := control.Numbers{Metrics: make(stats.Values), Connections: snap.Transport.Connections,
		MRs: snap.Transport.MRStates}
	n.Metrics.Add(snap.Numbers())
	return n
}

// operationStats converts durations. failed are the errors by name.
func operationStats(l []metrics.NamedTimes, failed map[string]uint64) []control.OperationStats {
	all := make([]control.OperationStats, 0, len(l))
	for _, named := range l {
		d := named.Durations()
		all = append(all, control.OperationStats{Name: named.Name, Count: d.Count, Errors: failed[named.Name],
			Seconds: d.Sum.Seconds(), Buckets: d.Buckets[:]})
	}
	return all
}

// Status implements mountInstance.
func (s *mountStack) Status(snap *metrics.Snapshot) control.MountStatus {
	st := control.MountStatus{
		Numbers: numbersOf(snap), XprtLine: metrics.XprtLine(&snap.Transport), RPCs: make(map[string]uint64),
		Addresses: s.connections(), Calls: s.pendingCalls(), History: s.history(),
		FaultsInjected: snap.Faults, Trace: s.opts.TraceEvents,
	}
	s.Describe(&st.MountInfo)
	st.Locks = s.lockStatus()
	st.MaxRead, st.MaxWrite = s.fs.IOSizes()
	for _, named := range snap.Procs {
		st.RPCs[named.Name] = named.Durations().Count
	}
	var since time.Time
	for _, tr := range s.transports.all { // show the connection that changed last
		if x := tr.Stats(); !x.Since.Before(since) {
			st.Connection, st.LastError, since = x.State, x.LastError, x.Since
		}
	}
	return st
}
