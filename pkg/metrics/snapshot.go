package metrics

import "time"

// A Snapshot is what one mount counted up to now.
type Snapshot struct {
	// Mount is the mount point, Server the RDMA address HOST:PORT, Provider the verbs provider's
	// name.
	Mount, Server, Provider string
	Transport               Transport
	Files                   Files
	// Procs are the RPC times by NFS procedure, Ops the FUSE times by operation. Names without
	// samples may be left out.
	Procs, Ops []NamedHistogram
	// Faults are the faults injected, by name; none where no fault injection is on.
	Faults map[string]uint64
}

// A NamedHistogram is the times of one procedure or operation.
type NamedHistogram struct {
	Name string
	HistogramData
}

// Transport holds a transport's counters since it was made, summed over its connections, in the
// kernel's terms (docs/features.md S23).
type Transport struct {
	Connects uint64
	// ConnectTime is the time spent in connecting.
	ConnectTime     time.Duration
	ConnectFailures uint64
	// Idle is the time since the last call; 0 while not connected.
	Idle time.Duration

	Sends, Receives uint64 // RPC calls sent, messages received
	BadXIDs         uint64
	InflightSum     uint64 // sum over calls of those in flight when each asked for a credit
	BacklogSum      uint64 // sum over calls of those that waited for a credit then

	ReadChunks, WriteChunks, ReplyChunks uint64 // segments encoded, as the kernel counts them
	TotalRDMARequest                     uint64 // octets offered in write and reply chunks
	TotalRDMAReply                       uint64 // octets that came back by RDMA Write
	PullupCopyBytes                      uint64
	FixupCopyBytes                       uint64
	HardwayRegister                      uint64
	FailedMarshal                        uint64
	BadReply                             uint64
	NomsgCall                            uint64

	MRsRecovered, MRsRecycled, MRsOrphaned, MRsAllocated uint64
	LocalInvNeeded                                       uint64
	EmptySendctx                                         uint64
	ReplyWaitsForSend                                    uint64

	// What the kernel does not count.
	MRsFailed, MapErrors, RemoteInvalidations   uint64
	Timeouts, Resends, Interrupts, Liveness     uint64
	Nudges, RDMAErrors, RemoteAccessErrors      uint64
	PostedChains, SendCompletions, TraceDropped uint64

	// Gauges.
	Credits, Slots, SlotsInUse uint64
	// calls that hold a credit, calls that wait for one or for the connection
	InFlight, Queued   uint64
	MRsFree, MRsPooled uint64
	MaxPayload         uint64 // octets
	// Connected tells whether a connection stands.
	Connected bool
	// Connections counts connections by state.
	Connections map[string]uint64
	// MRs counts memory regions by state (docs/features.md S1, S12).
	MRs map[string]uint64
}

// Files holds what a mount's file system counted since it was mounted.
type Files struct {
	ReadBytes, WrittenBytes uint64 // octets given to the kernel, and taken from it
	SentBytes               uint64 // octets that servers took by WRITE
	Commits                 uint64
	// Replays are the times that a write verifier changed, ReplayedBytes the octets that were sent
	// again.
	Replays, ReplayedBytes uint64
	WriteErrors            uint64
	BufferWaits            uint64
	SillyRenames           uint64
	JukeboxRetries         uint64
	Interrupts             uint64
	Stale                  uint64
	CacheDrops             uint64
	ReadDirRestarts        uint64

	// Ops counts requests by operation, OpErrors those of them that were answered with an error.
	Ops, OpErrors map[string]uint64
}
