package memreg

import (
	"fmt"
	"syscall"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// Limits of the transport. The kernel's client uses the same values (docs/features.md S17, S18).
const (
	maxHdrSegs   = 16  // segments in one chunk list
	maxDataPages = 257 // pages of the largest payload, 1 MiB at any alignment
	MinSlots     = 4   // the smallest useful number of RPCs in flight

	chunkPages  = maxDataPages + 3 // pages that a chunk must convey: payload, head, tail, one spare
	backwardWRs = 32               // reserved for the back channel
	drainWRs    = 1                // reserved to drain a queue
	recvBatch   = 7                // extra Receives
	padMRs      = 1                // reserved for the write pad (S20)
	callChunks  = 2                // chunks of one call: of its arguments and of its reply
	sendReserve = backwardWRs + drainWRs
	recvReserve = backwardWRs + recvBatch + drainWRs
	minDepth    = (chunkPages + maxHdrSegs - 1) / maxHdrSegs // the fewest pages of one MR
	minSendSGEs = 3                                          // head, payload, tail
	maxSendSGEs = 1 + 1 + maxHdrSegs + 1                     // the most SGEs of one Send
	// FastReg and LOCAL_INV of head, payload and tail, and the Send
	wrsPerRPC = 7
)

// Params are the parameters of a connection on one device.
type Params struct {
	Depth      int  // pages that one MR maps
	Gaps       bool // an MR may map segments with holes between them
	Contiguous bool // an MR maps only contiguous memory
	PerIO      bool // Map registers the memory, which returns the key (verbs.CapPerIOReg)
	ArenasOnly bool // only memory from membuf.Alloc can be registered
	ChosenIOVA bool // the registered address may carry the XID
	PageSize   int  // bytes
	Slots      int  // RPCs in flight
	SendWRs    int  // depth of the send queue
	RecvWRs    int  // depth of the receive queue
	SendSGEs   int  // most SGEs of one Send
	MaxSegs    int  // most MRs of one chunk
	MaxPayload int  // bytes of the largest chunk

	// WRsPerRPC is the number of send queue entries for each slot. They hold the registrations, the
	// Send and the LOCAL_INVs of a call with one chunk. A call with two chunks may also use entries
	// of other slots.
	WRsPerRPC int
}

// A DeviceError says why a device does not support NFS/RDMA. It wraps EINVAL (no fast registration)
// or ENOMEM (too few resources).
type DeviceError struct {
	Device string
	Reason string
	Errno  syscall.Errno
}

func (e *DeviceError) Error() string {
	return fmt.Sprintf("RDMA device %s does not support NFS: %s; choose another with device= or provider=", e.Device,
		e.Reason)
}

// Unwrap returns the errno.
func (e *DeviceError) Unwrap() error { return e.Errno }

// Query derives the parameters of a connection from the attributes of a device (S17, S18). The
// argument slots is the most RPCs in flight; a small device gets fewer. The error is a
// *DeviceError.
func Query(a verbs.DeviceAttrs, slots int) (Params, error) {
	fail := func(errno syscall.Errno, format string, args ...any) (Params, error) {
		return Params{}, &DeviceError{Device: a.Name, Reason: fmt.Sprintf(format, args...), Errno: errno}
	}
	if !a.Caps.Has(verbs.CapFastReg) || a.MaxFastRegPageListLen <= 0 {
		return fail(syscall.EINVAL, "no fast memory registration")
	}
	if a.PageSize <= 0 || a.PageSize&(a.PageSize-1) != 0 {
		return fail(syscall.EINVAL, "page size of %d bytes, want a power of two", a.PageSize)
	}
	p := Params{
		Gaps:       a.Caps.Has(verbs.CapGaps),
		Contiguous: a.Caps&(verbs.CapMemWindow2B|verbs.CapPerIOReg) != 0,
		PerIO:      a.Caps.Has(verbs.CapPerIOReg),
		ArenasOnly: !a.Caps.Has(verbs.CapRegisterAny),
		ChosenIOVA: a.Caps.Has(verbs.CapChosenIOVA),
		PageSize:   a.PageSize,
		SendSGEs:   min(a.MaxSendSGE, maxSendSGEs),
	}
	if p.SendSGEs < minSendSGEs {
		return fail(syscall.ENOMEM, "a Send takes %d SGEs, want at least %d", p.SendSGEs, minSendSGEs)
	}
	// A device that takes many SGEs in an RDMA Read performs best with MRs of at most that depth.
	p.Depth = a.MaxFastRegPageListLen
	if a.MaxSGERd > maxHdrSegs {
		p.Depth = min(p.Depth, a.MaxSGERd)
	}
	p.Depth = min(p.Depth, maxDataPages)
	if p.Depth < minDepth {
		return fail(syscall.ENOMEM, "page list of %d pages and %d SGEs in an RDMA Read allow MRs of %d pages, "+
			"want at least %d", a.MaxFastRegPageListLen, a.MaxSGERd, p.Depth, minDepth)
	}

	p.WRsPerRPC = wrsPerRPC
	for rest := maxDataPages - p.Depth; rest > 0; rest -= p.Depth {
		p.WRsPerRPC += 2 // FastReg and LOCAL_INV of one more MR
	}
	p.Slots = slots
	for _, limit := range []struct {
		what                  string
		has, reserved, perRPC int
	}{
		{"send queue of %d work requests", a.MaxQPWR, sendReserve, p.WRsPerRPC},
		// All completions of a connection use one queue.
		{"completion queue of %d entries", a.MaxCQE, sendReserve + recvReserve, p.WRsPerRPC + 1},
		{"device of %d MRs", a.MaxMR, padMRs, callChunks * ((chunkPages + p.Depth - 1) / p.Depth)},
	} {
		fits := max(limit.has-limit.reserved, 0) / limit.perRPC
		if fits < MinSlots {
			return fail(syscall.ENOMEM, limit.what+" has room for %d RPCs of %d each, want at least %d", limit.has,
				fits, limit.perRPC, MinSlots)
		}
		p.Slots = min(p.Slots, fits)
	}
	p.SendWRs = p.Slots*p.WRsPerRPC + sendReserve
	// A send queue with room for MinSlots RPCs implies a receive queue of this depth.
	p.RecvWRs = p.Slots + recvReserve

	// A reply chunk needs two more MRs, for its head and tail.
	p.MaxSegs = min((maxDataPages+p.Depth-1)/p.Depth+2, maxHdrSegs)
	// A payload that does not start at a page boundary loses one page of the depth in each MR.
	p.MaxPayload = min(maxDataPages-1, p.MaxSegs*p.Depth-p.MaxSegs) * p.PageSize
	return p, nil
}
