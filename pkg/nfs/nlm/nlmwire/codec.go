package nlmwire

import (
	"fmt"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// AppendArgs appends the arguments of a procedure.
func AppendArgs(b []byte, proc Proc, a *Args) []byte {
	b = sunrpc.AppendOpaque(b, a.Cookie)
	switch proc {
	case ProcLock, ProcCancel:
		b = sunrpc.AppendBool(b, a.Block)
		b = sunrpc.AppendBool(b, a.Exclusive)
	case ProcTest, ProcGranted, ProcGrantedMsg:
		b = sunrpc.AppendBool(b, a.Exclusive)
	}
	b = sunrpc.AppendString(b, a.Region.Caller)
	b = sunrpc.AppendOpaque(b, a.Region.FH)
	b = sunrpc.AppendOpaque(b, a.Region.OH)
	b = sunrpc.AppendUint32(b, a.Region.SVID)
	b = sunrpc.AppendUint64(b, a.Region.Offset)
	b = sunrpc.AppendUint64(b, a.Region.Length)
	if proc == ProcLock {
		b = sunrpc.AppendBool(b, a.Reclaim)
		b = sunrpc.AppendUint32(b, a.State)
	}
	return b
}

// ParseArgs decodes the arguments of a procedure.
func ParseArgs(proc Proc, b []byte, a *Args) error {
	d := sunrpc.NewDecoder(b)
	*a = Args{Cookie: d.Opaque(maxCookie)}
	switch proc {
	case ProcLock, ProcCancel:
		a.Block = d.Bool()
		a.Exclusive = d.Bool()
	case ProcTest, ProcGranted, ProcGrantedMsg:
		a.Exclusive = d.Bool()
	}
	a.Region.Caller = string(d.Opaque(MaxName))
	a.Region.FH = d.Opaque(nfs3.FHSize)
	a.Region.OH = d.Opaque(maxOwner)
	a.Region.SVID = d.Uint32()
	a.Region.Offset = d.Uint64()
	a.Region.Length = d.Uint64()
	if proc == ProcLock {
		a.Reclaim = d.Bool()
		a.State = d.Uint32()
	}
	return d.Err()
}

// AppendRes appends the results of a procedure.
func AppendRes(b []byte, proc Proc, r *Res) []byte {
	b = sunrpc.AppendUint32(sunrpc.AppendOpaque(b, r.Cookie), uint32(r.Stat))
	if proc != ProcTest || r.Stat != Denied {
		return b
	}
	b = sunrpc.AppendBool(b, r.Holder.Exclusive)
	b = sunrpc.AppendUint32(b, r.Holder.SVID)
	b = sunrpc.AppendOpaque(b, r.Holder.OH)
	b = sunrpc.AppendUint64(b, r.Holder.Offset)
	return sunrpc.AppendUint64(b, r.Holder.Length)
}

// ParseRes decodes the results of a procedure.
func ParseRes(proc Proc, b []byte, r *Res) error {
	d := sunrpc.NewDecoder(b)
	*r = Res{Cookie: d.Opaque(maxCookie), Stat: Stat(d.Uint32())}
	if proc == ProcTest && r.Stat == Denied {
		r.Holder = Holder{Exclusive: d.Bool(), SVID: d.Uint32(), OH: d.Opaque(maxOwner),
			Span: Span{d.Uint64(), d.Uint64()}}
	}
	if d.Err() == nil && r.Stat > Failed {
		d.Fail(fmt.Errorf("%w: %v", sunrpc.ErrMalformed, r.Stat))
	}
	return d.Err()
}
