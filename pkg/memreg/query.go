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
	sendReserve = backwardWRs + drainWRs
	recvReserve = backwardWRs + recvBatch + drainWRs
	minSendSGEs = 3                      // head, payload, tail
	maxSendSGEs = 1 + 1 + maxHdrSegs + 1 // the most SGEs of one Send
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
	WRsPerRPC  int  // most send queue entries of one RPC: registrations, Send, LOCAL_INVs
	SendSGEs   int  // most SGEs of one Send
	MaxSegs    int  // most MRs of one chunk
	MaxPayload int  // bytes of the largest chunk
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
	if !a.Caps.Has(verbs.CapFastReg) || a.MaxFastRegPageListLen == 0 {
		return fail(syscall.EINVAL, "no fast memory registration")
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
		p.Depth = a.MaxSGERd
	}
	p.Depth = min(p.Depth, maxDataPages)

	p.WRsPerRPC = wrsPerRPC
	mrs := 1 // per payload
	for rest := maxDataPages - p.Depth; rest > 0; rest -= p.Depth {
		p.WRsPerRPC += 2 // FastReg and LOCAL_INV of one more MR
		mrs++
	}
	p.Slots = slots
	for _, limit := range []struct {
		what                  string
		has, reserved, perRPC int
	}{
		{"send queue of %d work requests", a.MaxQPWR, sendReserve, p.WRsPerRPC},
		// All completions of a connection use one queue.
		{"completion queue of %d entries", a.MaxCQE, sendReserve + recvReserve, p.WRsPerRPC + 1},
		{"device of %d MRs", a.MaxMR, 0, mrs},
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
	if p.MaxSegs*p.Depth < chunkPages {
		return fail(syscall.ENOMEM, "a chunk has %d MRs of %d pages, want at least %d pages", p.MaxSegs, p.Depth,
			chunkPages)
	}
	// A payload that does not start at a page boundary loses one page of the depth in each MR.
	p.MaxPayload = min(maxDataPages-1, p.MaxSegs*p.Depth-p.MaxSegs) * p.PageSize
	return p, nil
}
