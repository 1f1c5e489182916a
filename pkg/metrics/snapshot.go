package metrics

import (
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/stats"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

// A Snapshot holds the statistics of one mount.
type Snapshot struct {
	Mount    string // mount point
	Server   string // address of the mount source, with the RDMA port
	Provider string // name of the verbs provider
	// Connections are the connections of the mount, by their number.
	Connections []Connection
	// Transport is the sum over the connections of the mount.
	Transport xprt.Numbers
	// Files are the live counters of the file system; nil leaves them out.
	Files *vfs.Counters
	// State are the statistics of what the next daemon continues the mount from; nil leaves them
	// out.
	State *vfs.StateStats
	// Locks are the live counters of the locks; nil leaves them out.
	Locks *nlm.Counters
	// Procs are the RPC times by procedure of NFSv3 and NFSACL, and Ops the FUSE times by
	// operation. Names without samples may be left out.
	Procs, Ops []NamedTimes
	Stalled    time.Duration
	Stalls     uint64
	// Faults are the injected faults by name; nil without fault injection.
	Faults map[string]uint64
}

// Numbers returns the counters and gauges without labels.
func (s *Snapshot) Numbers() []stats.Metric {
	all := append(s.Transport.Metrics(),
		stats.New("mount_stalled_seconds", "Age of the oldest request without reply of a stalled mount; 0 for other "+
			"mounts.", &s.Stalled),
		stats.New("mount_stalls_total", "How often the mount became stalled.", &s.Stalls))
	if s.Files != nil {
		all = append(all, s.Files.Metrics()...)
	}
	if s.State != nil {
		all = append(all, s.State.Metrics()...)
	}
	if s.Locks != nil {
		all = append(all, s.Locks.Metrics()...)
	}
	return all
}

// A Connection is one connection of a mount.
type Connection struct {
	Address   string // RDMA address HOST:PORT, also of the last attempt to connect
	Connected bool
}
