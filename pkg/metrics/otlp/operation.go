package otlp

import (
	"net/netip"

	"github.com/nfsrdmad/nfsrdmad/pkg/observe/ledger"
)

// maxCalls bounds the RPCs of one request that become spans.
const maxCalls = 64

// An Operation is a sampled FUSE request with its RPCs, or one sampled RPC that belongs to no
// request. One goroutine at a time may use it.
type Operation struct {
	Mount   *Mount
	Request *Request // nil: an RPC without a request
	calls   []Call
}

// A Mount describes the mount of an operation. It does not change.
type Mount struct {
	Dir    string
	Server string // host or address, as the user wrote it
	Port   uint16
	// Process returns the process of a thread. The goroutine of the exporter calls it.
	Process func(thread uint32) (pid uint32)
}

// An Owner is the caller of a request.
type Owner struct {
	Type   string // control.OwnerProcess or control.OwnerKernel
	Thread uint32 // of the process
	UID    uint32
}

// A Request describes a FUSE request that has ended.
type Request struct {
	Name   string
	Owner  Owner
	Bytes  int // file bytes that were read or written
	Calls  int // RPCs
	Result Result
	Times  ledger.Times
}

// A Call describes an RPC that has ended.
type Call struct {
	ProgramName, ProcName string
	Vers, Proc            uint32
	XID                   uint32 // 0 if the call had no slot
	Slot                  int    // -1 if the call had no slot
	Connection            int
	Sends                 int
	Peer                  netip.AddrPort
	ArgBytes, ResultBytes int    // XDR of the arguments and of the results
	Status                string // of the reply, "" without a reply
	Owner                 string // of an RPC without a request: a constant of package control
	Result                Result
	Times                 ledger.Times
}

// A Result is how an operation ended.
type Result struct {
	Error   string // kind of the error, such as EIO; "" for none
	Failure bool   // the error is not a usual answer, such as that to a lookup of a missing name
}

// AddCall adds an RPC that has ended. Beyond maxCalls it has no effect.
func (o *Operation) AddCall(c *Call) {
	if len(o.calls) < maxCalls {
		o.calls = append(o.calls, *c)
	}
}

// spans returns the number of spans of o.
func (o *Operation) spans() (n uint64) {
	if r := o.Request; r != nil {
		n += 1 + phaseSpans(&r.Times, requestPhases[:])
	}
	for i := range o.calls {
		n += 1 + phaseSpans(&o.calls[i].Times, callPhases[:])
	}
	return n
}

// requestPhases and callPhases are the phases that have spans, in their order.
var (
	requestPhases = [...]ledger.Phase{ledger.PhaseQueue, ledger.PhaseReply}
	callPhases    = [...]ledger.Phase{ledger.PhaseSlot, ledger.PhaseReconnect, ledger.PhaseCredit, ledger.PhaseRegister,
		ledger.PhaseSend, ledger.PhaseServer, ledger.PhaseCompletion, ledger.PhaseInvalidation, ledger.PhaseReturn}
)

func phaseSpans(t *ledger.Times, phases []ledger.Phase) (n uint64) {
	for _, p := range phases {
		if t.Spent(p) > 0 {
			n++
		}
	}
	return n
}
