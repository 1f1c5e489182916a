package verbs

import (
	"context"
	"net/netip"
)

// A Provider reaches RDMA peers in one way: the embedded softiwarp, or rdma-core. A Provider is
// safe for concurrent use.
type Provider interface {
	// Name returns the provider's name as users write it: "softiwarp", "rdmacore".
	Name() string
	// Resolve finds the device that reaches raddr and prepares a connection to it
	// (rdma_resolve_addr and rdma_resolve_route). Resolve sends nothing to the peer's RDMA port,
	// because a connect that only probes can disable a stock siw listener.
	Resolve(ctx context.Context, raddr netip.AddrPort) (ActiveID, error)
	// Listen accepts RDMA connections on laddr.
	Listen(ctx context.Context, laddr netip.AddrPort) (Listener, error)
}

// A Listener accepts incoming connections.
type Listener interface {
	// Accept waits for the next connection request. Accept returns net.ErrClosed after Close.
	Accept(ctx context.Context) (ConnRequest, error)
	Addr() netip.AddrPort
	// Close stops listening. Accepted connections stay open.
	Close() error
}

// A ConnID is one end of a connection, before and during the connection, like rdma_cm_id. The
// device of a ConnID is known from the start. Create the QP and post Receives before the handshake,
// so that a Receive is posted for every message of the peer.
type ConnID interface {
	Device() Device
	// CreateQP creates the queue pair of this connection, once per ConnID.
	CreateQP(pd PD, attr QPInitAttr) (QP, error)
	LocalAddr() netip.AddrPort
	RemoteAddr() netip.AddrPort
	// Peer returns the parameters in the peer's connection request or reply. The parameters are
	// valid after Connect returned nil, and from the start on a ConnRequest.
	Peer() ConnParam
	// Close ends the connection if there is one, drains the QP, and releases both the QP and the
	// ConnID. Close must not be called from a completion handler. Further calls have no effect.
	Close() error
}

// An ActiveID is the ConnID of the side that connects. Resolve returns one.
type ActiveID interface {
	ConnID
	// Connect performs the handshake, and returns at the latest when ctx ends. Errors are
	// *ConnError. Connect may be called once per ConnID.
	Connect(ctx context.Context, param ConnParam) error
}

// A ConnRequest is the ConnID of the side that accepts.
type ConnRequest interface {
	ConnID
	// Accept performs the handshake. Errors are *ConnError.
	Accept(ctx context.Context, param ConnParam) error
	// Reject refuses the request and closes the ConnID.
	Reject(privateData []byte) error
}

// ConnParam holds the fields of rdma_conn_param that this project uses.
type ConnParam struct {
	// PrivateData is the consumer's part of the private data: at most 508 bytes on enhanced MPA.
	// siw accepts at most 252 bytes.
	PrivateData []byte
	// ResponderResources is how many RDMA Read Requests of the peer this side answers at a time
	// (IRD). A stock Linux server rejects 0, and rounds up to a power of two.
	ResponderResources uint16
	// InitiatorDepth is how many RDMA Read Requests this side may have outstanding (ORD).
	InitiatorDepth uint16
}

// Transport is the wire protocol of a device.
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

// Caps are capabilities that only some devices have.
type Caps uint32

// Capabilities.
const (
	// CapFastReg: native fast registration work requests (IB_DEVICE_MEM_MGT_EXTENSIONS).
	CapFastReg Caps = 1 << iota
	// CapGaps: a fast registration may gather segments with gaps between them, at any alignment
	// (IB_DEVICE_SG_GAPS_REG).
	CapGaps
	// CapChosenIOVA: the consumer chooses the registered address.
	CapChosenIOVA
	// CapRegisterAny: any memory of the process may be registered, not only that of membuf.Alloc.
	CapRegisterAny
	// CapMemWindow2B: a fast registration binds a type-2B memory window. The registration covers
	// one contiguous range of memory, and its NewKey must differ from the previous one.
	CapMemWindow2B
	// CapRemoteInv: the peer's Send With Invalidate may invalidate an MR, and the completion
	// reports it.
	CapRemoteInv
	// CapPerIOReg: the device has neither fast registration nor windows, so memory is registered
	// for each use, which is slower. The MRs are PerIOMRs. Each MR covers one contiguous range
	// of memory. The device chooses the key, which is valid on every QP of the protection domain.
	CapPerIOReg
	// CapTerminates: the cause of a lost connection and QPStats report Terminate messages.
	CapTerminates
	// CapLiveStats: QPStats counts a completion when it enters the completion queue, before its
	// handler is called.
	CapLiveStats
)

// Has reports whether all of want are present.
func (c Caps) Has(want Caps) bool { return c&want == want }

// DeviceAttrs are the results of ibv_query_device, with the kernel's names.
type DeviceAttrs struct {
	Name      string
	Transport Transport
	Caps      Caps
	// PageSize in bytes; the unit of MaxFastRegPageListLen.
	PageSize              int
	MaxFastRegPageListLen int
	MaxQPWR               int // work requests on one queue
	MaxSendSGE            int
	MaxRecvSGE            int
	// MaxSGERd is the maximum number of SGEs of an RDMA Read. A device with more than 16 prefers
	// small MRs (docs/features.md S17).
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
	// CreateCQ creates a completion queue for up to depth completions and starts its dispatcher
	// goroutine.
	CreateCQ(depth int) (CQ, error)
}

// A PD is a protection domain. Safe for concurrent use.
type PD interface {
	// AllocMR allocates an invalid MR for fast registration of up to depth pages. The device
	// chooses the STag index; softiwarp chooses it at random.
	AllocMR(depth int) (MR, error)
	// RegMR registers buf for local use by SGEs until Dereg. RegMR never grants a remote right. A
	// provider without local keys returns an MR with LKey 0.
	RegMR(buf []byte) (MR, error)
	// Dealloc releases the PD. Dealloc fails with ErrBusy while the PD has an MR or a QP.
	Dealloc() error
}

// A PreparingPD is a PD of a device that must pin memory before a FastReg can use it. A FastReg of
// memory that is not prepared pins the memory itself, and a lack of memory is then an error of the
// post.
type PreparingPD interface {
	PD
	// Prepare pins the memory that contains mem, until the owner of the memory releases it.
	Prepare(mem []byte) error
}

// RKey is a remote key (STag). On iWARP it has a 24-bit index and an 8-bit key.
type RKey uint32

// WithKey returns r with its low 8 bits, the consumer's key, set to key.
func (r RKey) WithKey(key uint8) RKey { return r&^0xff | RKey(key) }

// Key returns the low 8 bits, the consumer's key.
func (r RKey) Key() uint8 { return uint8(r) }

// An MR is a memory region.
type MR interface {
	LKey() uint32
	// RKey returns the key as allocated. The index of the key does not change until Dereg. The low
	// 8 bits in force are those of the last FastReg. A PerIOMR differs: see there.
	RKey() RKey
	// Dereg destroys the MR. After it returns nil the device no longer reads or writes the memory
	// for the peer. Requests whose SGEs lie in the memory must have completed before; QP.Drain
	// waits for them.
	Dereg() error
}

// A PerIOMR is an MR of a device with CapPerIOReg. RKey returns the key in force, or 0 while the MR
// is invalid.
type PerIOMR interface {
	MR
	// Register registers seg, which lies in an arena, at its address in memory, and returns the
	// key. A consumer that needs the key before it posts calls Register first. From then on a peer
	// that knows the key can access the memory. The next FastReg of the MR must name the same
	// memory and rights. A FastReg without Register registers the memory itself. Unregister or
	// Dereg invalidates an MR that was registered and not posted.
	Register(access Access, seg []byte) (RKey, error)
	// Unregister invalidates the MR. After it returns nil the device no longer reads or writes the
	// memory.
	Unregister() error
}

// A CQ is a completion queue with its dispatcher goroutine. Handlers run one after the other, on
// the dispatcher unless QPInitAttr.InlineHandlers permits another goroutine.
type CQ interface {
	// Close stops the dispatcher. Close fails with ErrBusy while a QP uses the CQ.
	Close() error
}

// Opcode is the operation of a work request.
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

// Access is a set of access rights of a registration.
type Access uint8

// Access rights.
const (
	AccessLocalWrite Access = 1 << iota
	AccessRemoteWrite
	AccessRemoteRead
)

// An SGE is one local buffer. LKey is the local key of a RegMR that covers the buffer.
type SGE struct {
	Buf  []byte
	LKey uint32
}

// A WorkRequest is one entry of the send queue. Fields that an opcode does not use are ignored.
type WorkRequest struct {
	Next     *WorkRequest
	Opcode   Opcode
	Signaled bool
	// Done is called with the completion: always for a signaled request, and for an unsignaled one
	// only when it failed or was flushed. Done must not be nil.
	Done func(*WorkCompletion)
	// OnWrite, if not nil, is called before each attempt to write a Send to the socket, perhaps
	// before PostSend returns. The last attempt succeeds, unless the connection ends. OnWrite must
	// not block, and must not call the provider. A provider without sockets does not call OnWrite.
	OnWrite func()

	// SGList is the source of OpSend, OpSendWithInv and OpRDMAWrite, and the sink of OpRDMARead,
	// which has exactly one SGE.
	SGList []SGE

	// RemoteAddr and RKey name the peer's memory for OpRDMAWrite and OpRDMARead.
	RemoteAddr uint64
	RKey       RKey

	// InvalidateRKey is the peer's key for OpSendWithInv, and this side's key for OpLocalInv.
	InvalidateRKey RKey

	// MR, NewKey, Access, IOVA and Segs describe an OpFastReg. After it, the key
	// MR.RKey().WithKey(NewKey) maps the addresses [IOVA, IOVA+sum of Segs) to Segs, in order. The
	// MR must be invalid when the request is posted. The registration is valid on this QP only: the
	// peer can access and invalidate it only there. When the QP is lost the MR can only be
	// deregistered.
	MR     MR
	NewKey uint8
	Access Access
	IOVA   uint64
	Segs   [][]byte
}

// A RecvRequest is one entry of the receive queue. Done is always called.
type RecvRequest struct {
	Next *RecvRequest
	SGE  SGE
	Done func(*WorkCompletion)
}

// Status is the result of a work request, with the values of ibverbs.
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
	StatusRetryExcErr    // the peer did not acknowledge
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

// A WorkCompletion reports the end of a work request. When Status is not StatusSuccess, only
// Status, VendorErr and QP are valid. A handler must not keep the WorkCompletion after it returns.
type WorkCompletion struct {
	Status    Status
	VendorErr uint32
	Opcode    Opcode
	ByteLen   uint32 // bytes placed by a Receive or an RDMA Read
	// WithInv reports that the Send that this Receive completes has invalidated InvalidatedRKey.
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
	// InlineHandlers permits the provider to call handlers on the goroutine that receives the
	// peer's data, which saves a switch between goroutines. Handlers still run one after the other.
	// Set it only if no handler of SendCQ and RecvCQ blocks: a handler that blocks delays the
	// peer's data and the end of the connection.
	InlineHandlers bool
	// OnDisconnect, if not nil, is called once when the QP leaves the ready state because of an
	// error or the peer, and never because of Close. OnDisconnect runs on a separate goroutine
	// without any provider lock, and may call Close. cause is never nil: io.EOF when the peer
	// closed the connection in order, a *TerminateError, a *net.OpError…
	OnDisconnect func(cause error)
}

// A QP is a reliable-connection queue pair. The methods of a QP are safe for concurrent use.
type QP interface {
	// PostSend queues a chain. On error, bad is the first request that was not queued, and the
	// requests before bad were queued. PostSend fails with ErrQPState unless the QP is ready.
	PostSend(first *WorkRequest) (bad *WorkRequest, err error)
	// PostRecv queues Receives. PostRecv may be called before the connection is established.
	PostRecv(first *RecvRequest) (bad *RecvRequest, err error)
	// Drain moves the QP to the error state and returns when every posted request has completed and
	// its handler has returned (ib_drain_qp). Drain must not be called from a handler.
	Drain()
	// Stats returns a snapshot of the QP's counters.
	Stats() QPStats
}

// A WithdrawingQP is a QP that can take back a chain that is not on the wire yet. Hardware cannot.
type WithdrawingQP interface {
	QP
	// Withdraw takes back a posted chain of FastRegs that ends with a Send. It fails, changes
	// nothing and returns false if a byte of the Send may be on the wire. After it returned true,
	// the peer never receives the Send and reaches no memory by the FastRegs, and the QP no longer
	// reads the memory of the Send. The requests still complete in the order of the queue, with
	// success unless the connection ends. A LocalInv of a key of the chain succeeds. The
	// WorkRequests must be those of the post, unchanged.
	Withdraw(first *WorkRequest) bool
}

// QPStats are cumulative counters of one QP.
type QPStats struct {
	PostedChains       uint64 // PostSend calls that queued something
	PostedSendWRs      uint64
	PostedRecvWRs      uint64
	SendCompletions    uint64 // completions of send queue requests
	RecvCompletions    uint64
	RemoteAccessErrors uint64 // RDMA operations of the peer that the protection checks refused
	RemoteInvalidates  uint64
	BytesSent          uint64 // payload bytes of Sends, Writes and Read Responses
	BytesReceived      uint64
	ReadRequestsServed uint64
	TerminatesSent     uint64
	TerminatesReceived uint64
}
