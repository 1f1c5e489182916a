package metrics

import (
	"github.com/nfsrdmad/nfsrdmad/pkg/fusefs"
	"github.com/nfsrdmad/nfsrdmad/pkg/nlm"
	"github.com/nfsrdmad/nfsrdmad/pkg/stats"
)

// A Snapshot holds the statistics of one mount.
type Snapshot struct {
	Mount    string // mount point
	Server   string // RDMA address HOST:PORT
	Provider string // name of the verbs provider
	Front    string // how requests reach the file system; "" leaves it out
	// Transport is the sum over the connections of the mount.
	Transport stats.Transport
	// Files are the live counters of the file system; nil leaves them out.
	Files *fusefs.Counters
	// State are the statistics of what the next daemon continues the mount from; nil leaves them
	// out.
	State *fusefs.StateStats
	// Locks are the live counters of the locks; nil leaves them out.
	Locks *nlm.Counters
	// Procs are the RPC times by NFS procedure, and Ops the FUSE times by operation. Names without
	// samples may be left out.
	Procs, Ops []NamedHistogram
	// Faults are the injected faults by name; nil without fault injection.
	Faults map[string]uint64
}

// A NamedHistogram holds the times of one procedure or operation.
type NamedHistogram struct {
	Name string
	HistogramData
}
