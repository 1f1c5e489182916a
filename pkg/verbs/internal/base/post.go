package base

import (
	"fmt"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// PostChecks are the checks of posted requests that need no state of the device.
type PostChecks struct {
	Provider   string // named in errors
	MaxSendSGE int
	MaxMessage uint64 // in bytes; less than 1<<32
}

// Invalid returns an error that wraps verbs.ErrInvalid and says why wr cannot be posted.
func (c *PostChecks) Invalid(wr *verbs.WorkRequest, format string, args ...any) error {
	return fmt.Errorf("%s: post %v: %s: %w", c.Provider, wr.Opcode, fmt.Sprintf(format, args...), verbs.ErrInvalid)
}

// Send checks one request for the send queue and returns the length of its message in bytes, 0 for
// FastReg and LocalInv. ord is how many RDMA Reads may be outstanding. Errors wrap
// verbs.ErrInvalid.
func (c *PostChecks) Send(wr *verbs.WorkRequest, ord int) (uint32, error) {
	if wr.Done == nil {
		return 0, c.Invalid(wr, "no completion handler")
	}
	switch wr.Opcode {
	case verbs.OpFastReg, verbs.OpLocalInv:
		return 0, nil
	case verbs.OpRDMARead:
		switch {
		case len(wr.SGList) != 1:
			return 0, c.Invalid(wr, "%d SGEs, an RDMA Read has one", len(wr.SGList))
		case ord == 0:
			return 0, c.Invalid(wr, "no RDMA Read may be outstanding: "+
				"this side's InitiatorDepth or the peer's ResponderResources is 0")
		}
	case verbs.OpSend, verbs.OpSendWithInv, verbs.OpRDMAWrite:
		if len(wr.SGList) > c.MaxSendSGE {
			return 0, c.Invalid(wr, "%d SGEs, the queue was created for %d", len(wr.SGList), c.MaxSendSGE)
		}
	default:
		return 0, c.Invalid(wr, "unknown opcode %d", wr.Opcode)
	}
	var n uint64
	for i := range wr.SGList {
		n += uint64(len(wr.SGList[i].Buf))
	}
	if n > c.MaxMessage {
		return 0, c.Invalid(wr, "message of %d bytes, the limit is %d", n, c.MaxMessage)
	}
	return uint32(n), nil
}

// Recv checks a Receive for a queue of which closed and full are known. Recv fails with
// verbs.ErrQPState, verbs.ErrInvalid or verbs.ErrQueueFull.
func (c *PostChecks) Recv(rr *verbs.RecvRequest, closed, full bool) error {
	switch {
	case closed:
		return verbs.ErrQPState
	case rr.Done == nil:
		return fmt.Errorf("%s: post Receive: no completion handler: %w", c.Provider, verbs.ErrInvalid)
	case full:
		return verbs.ErrQueueFull
	}
	return nil
}

// CheckMRDepth checks the depth of an MR that is to be allocated. Errors wrap verbs.ErrInvalid.
func CheckMRDepth(provider string, depth, limit int) error {
	if depth <= 0 || depth > limit {
		return fmt.Errorf("%s: allocate MR of depth %d: the depth must be 1 to %d pages: %w", provider, depth, limit,
			verbs.ErrInvalid)
	}
	return nil
}

// CheckCQDepth checks the depth of a completion queue that is to be created. Errors wrap
// verbs.ErrInvalid.
func CheckCQDepth(provider string, depth, limit int) error {
	if depth <= 0 || depth > limit {
		return fmt.Errorf("%s: create completion queue of depth %d: the depth must be 1 to %d: %w", provider, depth,
			limit, verbs.ErrInvalid)
	}
	return nil
}
