package verbs

import (
	"context"
	"net/netip"
)

// A Provider is one way to reach RDMA peers: the embedded softiwarp or
// rdma-core. A Provider is safe for concurrent use.
type Provider interface {
	// Name is the provider's name as users write it: "softiwarp", "rdmacore".
	Name() string
	// Resolve finds the device that reaches raddr and prepares a connection
	// to it (rdma_resolve_addr and rdma_resolve_route). It sends nothing to
	// the peer's RDMA port: a probing connect can kill a stock siw listener.
	Resolve(ctx context.Context, raddr netip.AddrPort) (ActiveID, error)
	// Listen accepts RDMA connections on laddr.
	Listen(ctx context.Context, laddr netip.AddrPort) (Listener, error)
}

// A Listener accepts incoming connections.
type Listener interface {
	// Accept waits for the next connection request. It returns net.ErrClosed
	// after Close.
	Accept(ctx context.Context) (ConnRequest, error)
	Addr() netip.AddrPort
	// Close stops listening; connections already accepted live on.
	Close() error
}

// A ConnID is one end of a connection before and while it lives, as
// rdma_cm_id is: it knows its device from the start, is given a QP, and then
// connected. Create the QP and post Receives first, so that nothing that the
// peer sends can arrive too early.
type ConnID interface {
	Device() Device
	// CreateQP makes the queue pair of this connection. Once per ConnID.
	CreateQP(pd PD, attr QPInitAttr) (QP, error)
	LocalAddr() netip.AddrPort
	RemoteAddr() netip.AddrPort
	// Peer is what the peer said in its connection request or reply. Valid
	// after Connect returned nil, and from the start on a ConnRequest.
	Peer() ConnParam
	// Close ends the connection if there is one, and releases the ConnID with its QP,
	// which is drained first. It must not be called from a completion handler. Idempotent.
	Close() error
}

// An ActiveID is the ConnID of the side that connects. Resolve returns one.
type ActiveID interface {
	ConnID
	// Connect performs the handshake. It ends when ctx does; the errors are
	// *ConnError. It is tried at most once for each ConnID.
	Connect(ctx context.Context, param ConnParam) error
}

// A ConnRequest is the ConnID of the side that was connected to.
type ConnRequest interface {
	ConnID
	Accept(ctx context.Context, param ConnParam) error
	// Reject refuses the request and closes the ConnID.
	Reject(privateData []byte) error
}

// ConnParam is rdma_conn_param reduced to what this project uses.
type ConnParam struct {
	// PrivateData is the consumer's part of the private data (at most
	// 508 octets on enhanced MPA; send at most 252 for siw's sake).
	PrivateData []byte
	// ResponderResources is how many RDMA Read Requests of the peer this side answers at a
	// time (IRD). A stock Linux server refuses 0, and rounds other than powers of two up.
	ResponderResources uint16
	// InitiatorDepth is how many RDMA Read Requests this side has outstanding (ORD).
	InitiatorDepth uint16
}

// Transport tells the wire protocol of a device.
type Transport uint8

// Transports.
const (
	TransportIWARP Transport = iota + 1
	TransportIB
)

func (t Transport) String() string {
	switch t {
	case TransportIWARP:
		return "iWARP"
	case TransportIB:
		return "InfiniBand"
	}
	return "unknown"
}

// Caps are abilities that only some devices have.
type Caps uint32

// Capabilities.
const (
	// CapFastReg: native fast registration work requests (IB_DEVICE_MEM_MGT_EXTENSIONS).
	CapFastReg Caps = 1 << iota
	// CapGaps: a fast registration may gather segments with holes between
	// them, at any alignment (IB_DEVICE_SG_GAPS_REG).
	CapGaps
	// CapChosenIOVA: the consumer chooses the registered address.
	CapChosenIOVA
	// CapRegisterAny: any memory of the process may be registered, not only AllocBuffer's.
	CapRegisterAny
	// CapMemWindow2B: a fast registration is a bind of a type-2B memory window: of one piece of
	// memory, and with another NewKey than the time before.
	CapMemWindow2B
	// CapRemoteInv: an MR may be invalidated by the peer's Send With
	// Invalidate, and the completion reports it.
	CapRemoteInv
	// CapPerIOReg: the device has neither fast registration nor windows, so memory is registered
	// for each use, which is slower. Its MRs are PerIOMRs, of one piece of memory, whose key is the
	// device's choice, and good on every QP of the protection domain.
	CapPerIOReg
	// CapTerminates: the cause of a lost connection and QPStats tell of Terminate messages.
	CapTerminates
	// CapLiveStats: QPStats counts a completion when it is on the completion queue, whether or not
	// its handler's turn has come.
	CapLiveStats
)

// Has reports whether all of want are present.
func (c Caps) Has(want Caps) bool { return c&want == want }

// DeviceAttrs is what ibv_query_device tells, in the kernel's names.
type DeviceAttrs struct {
	Name      string
	Transport Transport
	Caps      Caps
	// PageSize in octets; the unit of MaxFastRegPageListLen.
	PageSize              int
	MaxFastRegPageListLen int
	MaxQPWR               int // work requests on one queue
	MaxSendSGE            int
	MaxRecvSGE            int
	// SGEs that an RDMA Read may have; more than 16 marks devices that prefer small MRs
	// (docs/features.md S17)
	MaxSGERd        int
	MaxQPRdAtom     int // largest ResponderResources
	MaxQPInitRdAtom int // largest InitiatorDepth
	MaxCQE          int
	MaxMR           int
}

// A Device is an opened RDMA device. Safe for concurrent use.
type Device interface {
	Attrs() DeviceAttrs
	AllocPD() (PD, error)
	// CreateCQ makes a completion queue for up to depth completions and
	// starts its dispatching goroutine.
	CreateCQ(depth int) (CQ, error)
}

// A PD is a protection domain. Safe for concurrent use.
type PD interface {
	// AllocMR makes an invalid MR for fast registration of up to depth
	// pages. Its STag index is as unpredictable as the device makes it: softiwarp's are random.
	AllocMR(depth int) (MR, error)
	// RegMR registers buf for local use by SGEs, for the life of the MR. It never gives a
	// remote right. A provider without local keys returns an MR with LKey 0.
	RegMR(buf []byte) (MR, error)
	// Dealloc releases the PD; it fails while an MR or QP of it lives.
	Dealloc() error
}

// RKey is a remote key (STag): on iWARP a 24-bit index and an 8-bit key.
type RKey uint32

// WithKey returns the RKey with its low 8 bits, the consumer's key, replaced.
func (r RKey) WithKey(key uint8) RKey { return r&^0xff | RKey(key) }

// Key returns the consumer's 8 bits.
func (r RKey) Key() uint8 { return uint8(r) }

// An MR is a memory region.
type MR interface {
	LKey() uint32
	// RKey is the key as allocated. The index does not change while the MR
	// lives; the low 8 bits in force are those of the last FastReg. (A PerIOMR has others.)
	RKey() RKey
	// Dereg destroys the MR. When it returns nil no octet of the memory is
	// being read or written by the device on the peer's behalf, nor will be. Requests whose
	// SGEs lie in the memory must have completed before (QP.Drain sees to it).
	Dereg() error
}

// A PerIOMR is an MR of a device with CapPerIOReg. RKey is the key in force, or 0 while it is
// invalid.
type PerIOMR interface {
	MR
	// Register registers seg, which is in an arena, at its own address, and returns the key: a
	// consumer that must know it before it posts calls this first. From then on a peer that knows
	// the key can reach the memory. The FastReg that follows on the queue must name the same memory
	// and rights; without Register before it, it registers by itself. An MR that was registered and
	// not posted is made invalid by Unregister, or by Dereg.
	Register(access Access, seg []byte) (RKey, error)
	// Unregister makes the MR invalid. When it returns nil no octet of the memory is being read or
	// written any more.
	Unregister() error
}

// A CQ is a completion queue with its dispatching goroutine.
type CQ interface {
	// Close stops the dispatcher; it fails while a QP uses the CQ.
	Close() error
}

// Opcode of a work request.
type Opcode uint8

// Work request opcodes.
const (
	OpSend Opcode = iota + 1
	OpSendWithInv
	OpRDMAWrite
	OpRDMARead
	OpFastReg
	OpLocalInv
	OpRecv // in completions only
)

var opNames = [...]string{"?", "Send", "SendWithInv", "RDMAWrite", "RDMARead", "FastReg", "LocalInv", "Recv"}

func (o Opcode) String() string {
	if int(o) < len(opNames) {
		return opNames[o]
	}
	return "?"
}

// Access rights of a registration.
type Access uint8

// Access rights.
const (
	AccessLocalWrite Access = 1 << iota
	AccessRemoteWrite
	AccessRemoteRead
)

// SGE is one local buffer. LKey is that of a RegMR that covers it.
type SGE struct {
	Buf  []byte
	LKey uint32
}

// A WorkRequest is one entry for the send queue. Fields that an opcode does not name are ignored.
type WorkRequest struct {
	Next     *WorkRequest
	Opcode   Opcode
	Signaled bool
	// Done is called with the completion: of a signaled request always, of
	// an unsignaled one when it failed or was flushed. Must not be nil.
	Done func(*WorkCompletion)

	// SGList is gathered for OpSend, OpSendWithInv, OpRDMAWrite, and is the
	// sink (exactly one SGE) of OpRDMARead.
	SGList []SGE

	// RemoteAddr and RKey name the peer's memory for OpRDMAWrite and OpRDMARead.
	RemoteAddr uint64
	RKey       RKey

	// InvalidateRKey: the peer's key for OpSendWithInv, our own for OpLocalInv.
	InvalidateRKey RKey

	// MR, NewKey, Access, IOVA and Segs describe an OpFastReg: after it, [IOVA, IOVA+sum of Segs)
	// under MR.RKey().WithKey(NewKey) reaches Segs in order. The MR must be invalid. The
	// registration is good on this QP alone: only there can it be reached by the peer and
	// invalidated. When the QP is lost the MR stays as it is, and can only be deregistered.
	MR     MR
	NewKey uint8
	Access Access
	IOVA   uint64
	Segs   [][]byte
}

// A RecvRequest is one entry for the receive queue. Done is always called.
type RecvRequest struct {
	Next *RecvRequest
	SGE  SGE
	Done func(*WorkCompletion)
}

// Status of a work completion, in ibverbs' terms.
type Status uint8

// Statuses.
const (
	StatusSuccess Status = iota
	StatusLocLenErr
	StatusLocQPOpErr
	StatusLocProtErr
	StatusWRFlushErr
	StatusMWBindErr
	StatusBadRespErr
	StatusLocAccessErr
	StatusRemInvReqErr
	StatusRemAccessErr
	StatusRemOpErr
	StatusFatalErr
	StatusGeneralErr
	StatusRetryExcErr    // the peer's end did not acknowledge
	StatusRNRRetryExcErr // the peer had no Receive posted
)

var statusNames = [...]string{
	"success", "local length error", "local QP operation error", "local protection error",
	"work request flushed", "memory bind operation error", "bad response error",
	"local access error", "remote invalid request error", "remote access error",
	"remote operation error", "fatal error", "general error",
	"transport retry counter exceeded", "RNR retry counter exceeded",
}

func (s Status) String() string {
	if int(s) < len(statusNames) {
		return statusNames[s]
	}
	return "unknown status"
}

// A WorkCompletion tells the end of a work request. Only Status, VendorErr and QP are reliable
// when Status is not StatusSuccess. It is valid during the handler's call only.
type WorkCompletion struct {
	Status    Status
	VendorErr uint32
	Opcode    Opcode
	ByteLen   uint32 // Receive and RDMA Read: octets placed
	// WithInv: the Send that this Receive completes invalidated InvalidatedRKey.
	WithInv         bool
	InvalidatedRKey RKey
	QP              QP
}

// QPInitAttr sizes a queue pair.
type QPInitAttr struct {
	SendCQ, RecvCQ CQ // may be the same
	MaxSendWR      int
	MaxRecvWR      int
	MaxSendSGE     int
	// OnDisconnect, if not nil, is called once when the QP leaves the ready state by itself or by
	// the peer: never for Close. It runs on a goroutine of its own, holds no provider lock, and may
	// call Close. cause is never nil: io.EOF for an orderly end by the peer, a *TerminateError, a
	// *net.OpError…
	OnDisconnect func(cause error)
}

// A QP is a reliable-connection queue pair. Its methods are safe for concurrent use.
type QP interface {
	// PostSend queues a chain in one step. On error bad is the first request that was not queued;
	// those before it were. After the QP left the ready state PostSend fails with ErrQPState.
	PostSend(first *WorkRequest) (bad *WorkRequest, err error)
	// PostRecv queues Receives. Allowed before the connection is made.
	PostRecv(first *RecvRequest) (bad *RecvRequest, err error)
	// Drain moves the QP to the error state and returns when every request
	// posted has completed and its handler has returned (ib_drain_qp). Not from a handler.
	Drain()
	// Stats is a snapshot of the QP's counters.
	Stats() QPStats
}

// QPStats are cumulative counters of one QP.
type QPStats struct {
	PostedChains       uint64 // PostSend calls that queued something
	PostedSendWRs      uint64
	PostedRecvWRs      uint64
	SendCompletions    uint64 // completions delivered for send-queue requests
	RecvCompletions    uint64
	RemoteAccessErrors uint64 // RDMA operations of the peer refused by protection checks
	RemoteInvalidates  uint64
	BytesSent          uint64 // payload octets of Sends, Writes and Read Responses
	BytesReceived      uint64
	ReadRequestsServed uint64
	TerminatesSent     uint64
	TerminatesReceived uint64
}
