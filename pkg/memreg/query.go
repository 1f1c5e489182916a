package memreg

import (
	"fmt"
	"syscall"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// Numbers of the transport, as the kernel's client has them (docs/features.md S17, S18).
const (
	MaxHdrSegs   = 16  // segments in one chunk list
	MaxDataPages = 257 // pages of the largest payload, 1 MiB at any alignment
	// payload, head, tail and one to spare: what a chunk must be able to convey
	maxSegs     = MaxDataPages + 3
	backwardWRs = 32 // reserved for the back channel
	drainWRs    = 1  // for draining a queue
	recvBatch   = 7  // Receives posted beyond those needed
	sendReserve = backwardWRs + drainWRs
	recvReserve = backwardWRs + recvBatch + drainWRs
	MinSlots    = 4                      // fewer are not worth a connection
	minSendSGEs = 3                      // head, payload, tail
	maxSendSGEs = 1 + 1 + MaxHdrSegs + 1 // the most that a Send is given
	// register and invalidate for head, payload and tail, and the Send
	wrsPerRPC = 7
)

// Params is what a connection on a device may count on.
type Params struct {
	Depth    int  // pages that one MR maps
	Gaps     bool // an MR may gather segments with holes between them
	OnePiece bool // an MR maps one piece of memory only
	// memory is registered before the chain is posted, which alone tells its key
	// (verbs.CapPerIOReg)
	PerIO      bool
	ArenasOnly bool // only memory of membuf.Alloc can be registered
	ChosenIOVA bool // the registered address may carry the XID
	PageSize   int
	Slots      int // RPCs at a time
	SendWRs    int // depth of the send queue
	RecvWRs    int // depth of the receive queue
	WRsPerRPC  int // requests that one RPC may need: its registrations, its Send, its LOCAL_INVs
	SendSGEs   int
	MaxSegs    int // MRs that one chunk may take
	MaxPayload int // octets of the largest chunk
}

// A DeviceError says why a device cannot carry NFS/RDMA. It wraps EINVAL (no fast registration) or
// ENOMEM (too small).
type DeviceError struct {
	Device string
	Reason string
	Errno  syscall.Errno
}

func (e *DeviceError) Error() string {
	return fmt.Sprintf("RDMA device %s cannot carry NFS: %s; choose another with device= or provider=", e.Device,
		e.Reason)
}

// Unwrap returns the errno.
func (e *DeviceError) Unwrap() error { return e.Errno }

// Query derives the parameters of a connection with up to slots RPCs at a time from what the device
// can do (S17, S18).
func Query(a verbs.DeviceAttrs, slots int) (Params, error) {
	fail := func(errno syscall.Errno, format string, args ...any) (Params, error) {
		return Params{}, &DeviceError{Device: a.Name, Reason: fmt.Sprintf(format, args...), Errno: errno}
	}
	if !a.Caps.Has(verbs.CapFastReg) || a.MaxFastRegPageListLen == 0 {
		return fail(syscall.EINVAL, "it has no fast memory registration")
	}
	p := Params{
		Gaps:       a.Caps.Has(verbs.CapGaps),
		OnePiece:   a.Caps&(verbs.CapMemWindow2B|verbs.CapPerIOReg) != 0,
		PerIO:      a.Caps.Has(verbs.CapPerIOReg),
		ArenasOnly: !a.Caps.Has(verbs.CapRegisterAny),
		ChosenIOVA: a.Caps.Has(verbs.CapChosenIOVA),
		PageSize:   a.PageSize,
		SendSGEs:   min(a.MaxSendSGE, maxSendSGEs),
	}
	if p.SendSGEs < minSendSGEs {
		return fail(syscall.ENOMEM, "a Send takes only %d SGEs, %d are needed", p.SendSGEs, minSendSGEs)
	}
	// A device that takes many SGEs in an RDMA Read performs best with MRs no deeper than that.
	p.Depth = a.MaxFastRegPageListLen
	if a.MaxSGERd > MaxHdrSegs {
		p.Depth = a.MaxSGERd
	}
	p.Depth = min(p.Depth, MaxDataPages)

	perRPC, mrs := wrsPerRPC, 1
	for left := MaxDataPages - p.Depth; left > 0; left -= p.Depth {
		perRPC += 2 // one more to register, and to invalidate
		mrs++
	}
	p.Slots = slots
	for _, limit := range []struct {
		what                  string
		has, reserved, perRPC int
	}{
		{"a queue of %d work requests", a.MaxQPWR, sendReserve, perRPC},
		// all completions of a connection go there
		{"a completion queue of %d entries", a.MaxCQE, sendReserve + recvReserve, perRPC + 1},
		{"a device of %d MRs", a.MaxMR, 0, mrs},
	} {
		room := max(limit.has-limit.reserved, 0) / limit.perRPC
		if room < MinSlots {
			return fail(syscall.ENOMEM, limit.what+" has room for %d RPCs of %d each, %d are needed", limit.has, room,
				limit.perRPC, MinSlots)
		}
		p.Slots = min(p.Slots, room)
	}
	p.WRsPerRPC = perRPC
	p.SendWRs = p.Slots*perRPC + sendReserve
	// there is room for them where there is for MinSlots in the send queue
	p.RecvWRs = p.Slots + recvReserve

	// Reply chunks have a head and a tail of their own.
	p.MaxSegs = min((MaxDataPages+p.Depth-1)/p.Depth+2, MaxHdrSegs)
	if p.MaxSegs*p.Depth < maxSegs {
		return fail(syscall.ENOMEM, "%d MRs of %d pages cannot hold a payload of %d", p.MaxSegs, p.Depth, maxSegs)
	}
	// One page of the depth is lost to a payload that does not start on a page.
	p.MaxPayload = min(MaxDataPages-1, p.MaxSegs*p.Depth-p.MaxSegs) * p.PageSize
	return p, nil
}
