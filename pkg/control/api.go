package control

import (
	"runtime"
	"runtime/debug"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/stats"
)

// A MountRequest asks for a mount. It is the body of POST /v1/mount.
type MountRequest struct {
	Spec    string `json:"spec"`    // HOST:/EXPORT
	Dir     string `json:"dir"`     // absolute
	Options string `json:"options"` // as after -o
}

// UmountMode is how hard an unmount tries.
type UmountMode string

// Modes of umount.
const (
	UmountNormal UmountMode = ""
	// UmountLazy detaches the mount at once and lets users of open files finish.
	UmountLazy UmountMode = "lazy"
	// UmountForce aborts every operation first; data not yet written to the server is lost.
	UmountForce UmountMode = "force"
)

// An UmountRequest asks for the end of a mount. It is the body of POST /v1/umount.
type UmountRequest struct {
	Dir  string     `json:"dir"`
	Mode UmountMode `json:"mode,omitempty"`
}

// MountState is where a mount is in its life.
type MountState string

// States of a mount, in their order.
const (
	StateMounting   MountState = "mounting"
	StateMounted    MountState = "mounted"
	StateUnmounting MountState = "unmounting"
)

// A MountInfo describes one mount; "list" shows it.
type MountInfo struct {
	Dir      string     `json:"dir"`
	Spec     string     `json:"spec"`
	State    MountState `json:"state"`
	Since    time.Time  `json:"since"`
	Options  string     `json:"options"`
	Server   string     `json:"server,omitempty"` // RDMA address
	Provider string     `json:"provider,omitempty"`
	// ProviderReason says why it is this provider.
	ProviderReason string `json:"provider_reason,omitempty"`
	// FaultInjection is the plan of the faults that are injected into this mount, "" for none.
	FaultInjection string `json:"fault_injection,omitempty"`
}

// A MountStatus is the complete state of one mount; "status" shows it.
type MountStatus struct {
	MountInfo
	Connection string `json:"connection,omitempty"` // state of the transport that changed last
	LastError  string `json:"last_error,omitempty"` // of that transport
	MaxRead    int    `json:"rsize,omitempty"`      // bytes
	MaxWrite   int    `json:"wsize,omitempty"`      // bytes
	// Transport is the sum over the connections of the mount.
	stats.Transport
	XprtLine string            `json:"xprt,omitempty"` // as in the kernel's mountstats
	RPCs     map[string]uint64 `json:"rpcs,omitempty"` // calls by procedure
	Calls    []PendingCall     `json:"calls"`          // all pending calls, the oldest first
	History  []ConnEvent       `json:"history"`        // the last events of the connections, the oldest first
	// FaultsInjected are the faults injected into this mount, by name.
	FaultsInjected map[string]uint64 `json:"faults_injected,omitempty"`
	Trace          int               `json:"trace_events"` // events kept for each connection
}

// A PendingCall is an RPC that has not ended.
type PendingCall struct {
	// hexadecimal, as in the trace; "" before the call has a slot
	XID        string  `json:"xid,omitempty"`
	Procedure  string  `json:"procedure"`
	Connection int     `json:"connection"` // from 0, with nconnect
	Slot       int     `json:"slot"`       // -1 before it has one
	Age        float64 `json:"age_seconds"`
	// SinceSent is the time since it was last sent, in seconds; -1 if the present connection has
	// not seen it.
	SinceSent float64 `json:"since_sent_seconds"`
	// WaitsFor is slot, credit, reconnect, send, reply, invalidation, or "late reply" after the
	// caller has gone.
	WaitsFor string `json:"waits_for"`
	// Owner is for whom it is made: "process", "write-back", "liveness" (the daemon's own question
	// whether the server lives), "daemon", "gone", or "kernel" (the kernel's own, or a process of
	// another PID namespace).
	Owner   string `json:"owner"`
	PID     uint32 `json:"pid,omitempty"`     // of a process
	Command string `json:"command,omitempty"` // its name; "" when it has ended
	UID     uint32 `json:"uid"`               // of a process, and the kernel
}

// Owners of a PendingCall.
const (
	OwnerProcess   = "process"
	OwnerWriteBack = "write-back"
	OwnerLiveness  = "liveness"
	OwnerDaemon    = "daemon"
	OwnerGone      = "gone"
	OwnerKernel    = "kernel"
)

// A ConnEvent is one event of a connection.
type ConnEvent struct {
	Time       time.Time `json:"time"`
	Connection int       `json:"connection"` // from 0, with nconnect
	Event      string    `json:"event"`
	Cause      string    `json:"cause,omitempty"`
	Times      int       `json:"times"` // in a row, the last one at Time
}

// A TraceRequest asks for the trace events of a mount. It is the query of GET /v1/trace; the answer
// is a line for each event, without end while Follow holds.
type TraceRequest struct {
	Dir    string // absolute
	JSON   bool
	Follow bool // go on with new events until the mount ends
	Last   int  // begin with so many of the newest events that are kept; -1: all of them
}

// VersionInfo is the answer to GET /v1/version.
type VersionInfo struct {
	Version string `json:"version"`
	Go      string `json:"go"`
	PID     int    `json:"pid,omitempty"` // of the daemon
	// FaultInjection is the plan of the faults that the daemon injects into each mount, "" for
	// none.
	FaultInjection string `json:"fault_injection,omitempty"`
}

// FaultBanner is what everything says first that shows a plan of faults.
const FaultBanner = "FAULT INJECTION IS ON: "

// DefaultSocket is where the daemon listens and its clients look.
const DefaultSocket = "/run/nfsrdmad/control.sock"

const (
	// MaxMountTimeout is the most that a daemon may let a mount take: what a client waits for.
	MaxMountTimeout = 5 * time.Minute
	// StatusTimeout bounds a request that asks no server.
	StatusTimeout = 6 * time.Second
)

// Version of this program, from the build.
func Version() VersionInfo {
	v := VersionInfo{Version: "devel", Go: runtime.Version()}
	if bi, ok := debug.ReadBuildInfo(); ok && bi.Main.Version != "" && bi.Main.Version != "(devel)" {
		v.Version = bi.Main.Version
	}
	return v
}

// errorReply is the body of every answer that is no success.
type errorReply struct {
	Code  Code   `json:"code"`
	Error string `json:"error"`
}

// Paths of the control API.
const (
	pathMount   = "/v1/mount"
	pathUmount  = "/v1/umount"
	pathMounts  = "/v1/mounts"
	pathStatus  = "/v1/status"
	pathTrace   = "/v1/trace"
	pathVersion = "/v1/version"
)
