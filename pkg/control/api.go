package control

import (
	"runtime"
	"runtime/debug"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/observe/stats"
)

// DefaultSocket is the default path of the control socket.
const DefaultSocket = "/run/nfsrdmad/control.sock"

// FaultBanner is the text before a fault injection plan wherever the plan is shown.
const FaultBanner = "FAULT INJECTION IS ON: "

const (
	// MaxMountTimeout bounds the mount timeout that a daemon may have. Clients wait a little
	// longer.
	MaxMountTimeout = 5 * time.Minute
	// StatusTimeout bounds a request that needs no reply of an NFS server.
	StatusTimeout = 6 * time.Second
)

// A MountRequest requests a mount. It is the body of POST /v1/mount.
type MountRequest struct {
	Spec    string `json:"spec"`    // HOST:/EXPORT
	Dir     string `json:"dir"`     // absolute path
	Options string `json:"options"` // the value of -o
	// Virtiofs makes a Unix socket with the path Dir for a virtual machine, instead of a mount.
	Virtiofs bool `json:"virtiofs,omitempty"`
	// DirFD is a descriptor of Dir in the process Process, or 0. It is necessary where autofs is
	// mounted: while an automounter mounts Dir, only its own processes can open it.
	DirFD int `json:"dir_fd,omitempty"`
	// Process is the process ID of the client. The server sets it.
	Process int `json:"-"`
}

// An UmountMode selects the kind of an unmount.
type UmountMode string

// Modes of an unmount.
const (
	// UmountNormal writes dirty data to the server first. It fails if a file is open.
	UmountNormal UmountMode = ""
	// UmountLazy detaches the mount at once. Processes may go on to use open files.
	UmountLazy UmountMode = "lazy"
	// UmountForce writes dirty data while the server accepts it, and aborts all pending operations.
	// The data that is left is lost.
	UmountForce UmountMode = "force"
)

// An UmountRequest requests an unmount. It is the body of POST /v1/umount.
type UmountRequest struct {
	Dir  string     `json:"dir"` // absolute path
	Mode UmountMode `json:"mode,omitempty"`
}

// A StopRequest requests that the daemon stops. It is the body of POST /v1/stop.
type StopRequest struct {
	// KeepMounts leaves the mounts to the next daemon. Otherwise the daemon unmounts all mounts.
	KeepMounts bool `json:"keep_mounts,omitempty"`
}

// A StopInfo is the reply to a StopRequest. The daemon replies before it stops.
type StopInfo struct {
	// Timeout is the time after which the process has exited at the latest, in seconds.
	Timeout float64 `json:"timeout_seconds"`
}

// A MountState is the state of a mount.
type MountState string

// States of a mount, in the order in which a mount passes them.
const (
	StateMounting   MountState = "mounting"
	StateMounted    MountState = "mounted"
	StateUnmounting MountState = "unmounting"
	// StateStalled replaces StateMounted while a request has had no reply for longer than the mount
	// option stall. MountInfo.Reason says why.
	StateStalled MountState = "stalled"
	// StateFailed replaces StateMounted after an internal error. All operations return EIO.
	StateFailed MountState = "failed"
	// StateRestoring means that the daemon continues the mount of an earlier daemon and waits for
	// the server. MountInfo.Reason says why it waits.
	StateRestoring MountState = "restoring"
	// StateKept means that an earlier daemon kept a mount that this daemon cannot continue.
	// MountInfo.Reason says why: its state is of an unknown version, or damaged.
	StateKept MountState = "kept"
)

// MountStates are all states.
var MountStates = []MountState{StateMounting, StateMounted, StateUnmounting, StateStalled, StateFailed, StateRestoring,
	StateKept}

// A MountInfo describes one mount. The list command shows it.
type MountInfo struct {
	Dir      string     `json:"dir"`
	Spec     string     `json:"spec"`
	State    MountState `json:"state"`
	Since    time.Time  `json:"since"` // time of the mount request
	Options  string     `json:"options"`
	Server   string     `json:"server,omitempty"` // address of the mount source, with the RDMA port
	Provider string     `json:"provider,omitempty"`
	// ProviderReason is the reason for the choice of the provider.
	ProviderReason string `json:"provider_reason,omitempty"`
	// FaultInjection is the fault injection plan of this mount; "" for none.
	FaultInjection string `json:"fault_injection,omitempty"`
	Failure        string `json:"failure,omitempty"` // internal error of a failed mount
	// Reason explains StateStalled, StateRestoring and StateKept.
	Reason string `json:"reason,omitempty"`
	// Stalled is the age of the oldest request without reply in seconds, if the mount is stalled.
	Stalled float64 `json:"stalled_seconds,omitempty"`
	// NotKept is why the mount would end with the daemon now, although keep_mounts is true; "" if
	// the mount would stay.
	NotKept string `json:"not_kept,omitempty"`
}

// NotKept returns the mounts of l that would end with the daemon although they are to be kept.
func NotKept(l []MountInfo) []MountInfo {
	var all []MountInfo
	for _, m := range l {
		if m.NotKept != "" {
			all = append(all, m)
		}
	}
	return all
}

// A MountKey identifies a mount of a daemon. Two mounts can have one directory: one that umount
// --lazy has detached, and a new one.
type MountKey struct {
	Dir   string
	Since int64 // nanoseconds since 1970
}

// Key identifies the mount.
func (i *MountInfo) Key() MountKey { return MountKey{i.Dir, i.Since.UnixNano()} }

// Key identifies the mount.
func (s *MountStats) Key() MountKey { return MountKey{s.Dir, s.Since.UnixNano()} }

// Key identifies the mount.
func (s *SlowCalls) Key() MountKey { return MountKey{s.Dir, s.Since.UnixNano()} }

// A MountStatus is the complete status of one mount. The status command shows it.
type MountStatus struct {
	MountInfo
	Connection string `json:"connection,omitempty"` // state of the connection that changed last
	LastError  string `json:"last_error,omitempty"` // of the same connection
	MaxRead    int    `json:"rsize,omitempty"`      // bytes
	MaxWrite   int    `json:"wsize,omitempty"`      // bytes
	// Addresses are the connections of the mount, by their number.
	Addresses []Connection `json:"addresses,omitempty"`
	Numbers
	XprtLine string            `json:"xprt,omitempty"` // the xprt line of the kernel's mountstats
	RPCs     map[string]uint64 `json:"rpcs,omitempty"` // calls by procedure
	Calls    []PendingCall     `json:"calls"`          // all pending calls, the oldest first
	// History are the latest events of the connections, the oldest first.
	History []ConnEvent `json:"history"`
	// FaultsInjected counts the injected faults by name.
	FaultsInjected map[string]uint64 `json:"faults_injected,omitempty"`
	Trace          int               `json:"trace_events"` // events kept per connection
	Locks          LockStatus        `json:"locks"`
}

// Numbers are the counters and gauges of one mount.
type Numbers struct {
	// Metrics are the values of the metrics of the mount that have no further label, by name
	// without "nfsrdmad_". docs/reference.md says what they are.
	Metrics     stats.Values      `json:"metrics"`
	Connections map[string]uint64 `json:"connections,omitempty"` // by state
	MRs         map[string]uint64 `json:"mrs,omitempty"`         // by state
}

// A MountStats holds the counters of one mount. They grow from the time of the mount, or from the
// start of a daemon that continues the mount.
type MountStats struct {
	Dir   string     `json:"dir"`
	Since time.Time  `json:"since"` // as in MountInfo
	Spec  string     `json:"spec"`
	State MountState `json:"state"`
	// Uptime is the time that the counters cover.
	Uptime float64 `json:"uptime_seconds"`

	// Bounds are the upper bounds of the buckets of each latency in seconds.
	Bounds     []float64        `json:"bounds_seconds"`
	Operations []OperationStats `json:"operations"` // FUSE requests
	Procedures []OperationStats `json:"procedures"` // RPCs
	Numbers
	// Processes are those with requests in the last ten minutes, and Users all. Those with the most
	// time are first. The daemon drops the least recent ones when there are too many.
	Processes []Usage `json:"processes"`
	Users     []Usage `json:"users"`
}

// An OperationStats describes the calls of one procedure or the requests of one operation.
type OperationStats struct {
	Name    string  `json:"name"`
	Count   uint64  `json:"count"`
	Errors  uint64  `json:"errors"`  // of FUSE requests, including lookups of missing names
	Seconds float64 `json:"seconds"` // sum of their times
	// Buckets count the times up to each bound and above the bound before it. Times above the last
	// bound are in Count only.
	Buckets []uint64 `json:"buckets"`
}

// A Usage describes what one process or one user did.
type Usage struct {
	PID     uint32 `json:"pid,omitempty"` // 0 for a user, the kernel, and processes of another PID namespace
	Command string `json:"command,omitempty"`
	UID     uint32 `json:"uid"`

	Requests     uint64  `json:"requests"`
	ReadBytes    uint64  `json:"read_bytes"`
	WrittenBytes uint64  `json:"written_bytes"`
	Seconds      float64 `json:"seconds"` // sum of the times of the requests
}

// A Connection describes one connection of a mount.
type Connection struct {
	State string `json:"state"`
	// Address is the RDMA address of the connection, or of the last attempt to connect.
	Address string `json:"address"`
	// Preferred is the address to which the connection returns when it can.
	Preferred string `json:"preferred"`
}

// A LockStatus describes the locks of a mount.
type LockStatus struct {
	// Local are the kinds of locks that the kernel of this host keeps: all, flock, posix or none.
	Local string `json:"local_lock"`
	// Notices says how servers reach this host.
	Notices   string `json:"notices,omitempty"`
	LastError string `json:"last_error,omitempty"` // of the last attempt to reach the lock service
}

// A PendingCall is an RPC that has not ended.
type PendingCall struct {
	// XID is hexadecimal, as in the trace; "" before the call has a slot.
	XID        string  `json:"xid,omitempty"`
	Procedure  string  `json:"procedure"`
	Connection int     `json:"connection"` // number of the connection, from 0
	Slot       int     `json:"slot"`       // -1 before the call has a slot
	Age        float64 `json:"age_seconds"`
	// SinceSent is the time since the last Send of the call on the current connection; -1 if the
	// call was not sent there.
	SinceSent float64 `json:"since_sent_seconds"`
	// WaitsFor is slot, credit, reconnect, send, reply, invalidation, or "late reply" if the caller
	// has returned.
	WaitsFor string `json:"waits_for"`
	CallOwner
}

// A CallOwner is the process or the part of the daemon that makes a call.
type CallOwner struct {
	Owner   string `json:"owner"`             // one of the Owner constants
	PID     uint32 `json:"pid,omitempty"`     // for OwnerProcess
	Command string `json:"command,omitempty"` // name of the process; "" if the process has ended
	UID     uint32 `json:"uid"`               // for OwnerProcess and OwnerKernel
}

// Values of CallOwner.Owner.
const (
	OwnerProcess   = "process"    // a process that uses the mount
	OwnerWriteBack = "write-back" // the daemon, to write dirty data
	OwnerLiveness  = "liveness"   // the daemon, for a keepalive call
	OwnerDaemon    = "daemon"     // the daemon, for another purpose
	OwnerGone      = "gone"       // a caller that has returned
	OwnerKernel    = "kernel"     // the kernel, or a process of another PID namespace
)

// A ConnEvent is an event of a connection.
type ConnEvent struct {
	Time       time.Time `json:"time"`
	Connection int       `json:"connection"` // number of the connection, from 0
	Event      string    `json:"event"`
	Cause      string    `json:"cause,omitempty"`
	Times      int       `json:"times"` // consecutive repetitions; Time is that of the last one
}

// The SlowCalls of a mount are its slowest FUSE requests and RPCs of the last ten minutes, the
// slowest first, at most 32 of each. The reply to GET /v1/slow is a list of SlowCalls.
type SlowCalls struct {
	Dir      string     `json:"dir"`
	Since    time.Time  `json:"since"` // as in MountInfo
	Requests []SlowCall `json:"requests"`
	Calls    []SlowCall `json:"calls"`
}

// A SlowCall is a FUSE request or an RPC that has ended.
type SlowCall struct {
	Name       string    `json:"name"` // operation of a request, procedure of an RPC
	Ended      time.Time `json:"ended"`
	Total      float64   `json:"total_seconds"`
	Calls      int       `json:"calls,omitempty"`   // RPCs of a request
	XID        string    `json:"xid,omitempty"`     // of an RPC; hexadecimal, as in the trace
	Connection int       `json:"connection"`        // of an RPC, from 0
	Resends    int       `json:"resends,omitempty"` // of an RPC, each after a lost connection
	Error      string    `json:"error,omitempty"`   // kind of the error; "" for success
	CallOwner
	// Phases are the seconds in each phase: queue, slot, reconnect, credit, register, send, server,
	// completion, invalidation, return, local, reply. Their sum is Total. A request has the sum
	// over its RPCs. A phase without time is left out.
	Phases map[string]float64 `json:"phases"`
}

// A TraceRequest requests the trace events of a mount. It is the query of GET /v1/trace. The reply
// has one line per event; it does not end before the mount if Follow is set.
type TraceRequest struct {
	Dir    string // absolute path
	JSON   bool
	Follow bool // continue with new events until the mount ends
	Last   int  // number of kept events to begin with, the newest; -1 for all
}

// A VersionInfo is the reply to GET /v1/version.
type VersionInfo struct {
	Version string `json:"version"`
	Go      string `json:"go"`
	PID     int    `json:"pid,omitempty"` // of the daemon
	// FaultInjection is the fault injection plan of the daemon; "" for none.
	FaultInjection string `json:"fault_injection,omitempty"`
	// MetricsError is why the daemon does not serve metrics; "" if it serves them or they are off.
	MetricsError string `json:"metrics_error,omitempty"`
}

// Version returns the version of this program from its build information, "devel" if the build has
// none.
func Version() VersionInfo {
	v := VersionInfo{Version: "devel", Go: runtime.Version()}
	if bi, ok := debug.ReadBuildInfo(); ok && bi.Main.Version != "" && bi.Main.Version != "(devel)" {
		v.Version = bi.Main.Version
	}
	return v
}

// errorReply is the body of a reply whose status is not 200.
type errorReply struct {
	Code  Code   `json:"code"`
	Error string `json:"error"`
}

// Paths of the control API.
const (
	pathMount   = "/v1/mount"
	pathUmount  = "/v1/umount"
	pathStop    = "/v1/stop"
	pathMounts  = "/v1/mounts"
	pathStatus  = "/v1/status"
	pathStats   = "/v1/stats"
	pathSlow    = "/v1/slow"
	pathTrace   = "/v1/trace"
	pathVersion = "/v1/version"
)
