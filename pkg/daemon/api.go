package daemon

import "time"

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
}

// A MountStatus is all that is known about one mount; "status" shows it.
type MountStatus struct {
	MountInfo
	Connection  string            `json:"connection,omitempty"` // state of the transport
	LastError   string            `json:"last_error,omitempty"` // of the transport
	MaxRead     int               `json:"rsize,omitempty"`
	MaxWrite    int               `json:"wsize,omitempty"`
	Credits     uint64            `json:"credits"`
	Slots       uint64            `json:"slots"`
	SlotsInUse  uint64            `json:"slots_in_use"`
	Connects    uint64            `json:"connects"`
	Sends       uint64            `json:"rpc_sends"`
	Receives    uint64            `json:"rpc_receives"`
	MRs         map[string]uint64 `json:"mrs,omitempty"`
	XprtLine    string            `json:"xprt,omitempty"` // as in the kernel's mountstats
	RPCs        map[string]uint64 `json:"rpcs,omitempty"` // calls by procedure
	MRsRecycled uint64            `json:"mrs_recycled"`
	MRsOrphaned uint64            `json:"mrs_orphaned"`
}

// VersionInfo is the answer to GET /v1/version.
type VersionInfo struct {
	Version string `json:"version"`
	Go      string `json:"go"`
	PID     int    `json:"pid,omitempty"` // of the daemon
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
	pathVersion = "/v1/version"
)
