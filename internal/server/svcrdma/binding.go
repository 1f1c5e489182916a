package svcrdma

import "github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"

// Programs and procedures of the binding (RFC 8267 §4).
const (
	progNFS   = 100003 // RFC 1813 §3
	progMount = 100005 // RFC 1813 §5
	versNFS3  = 3
	versNFS4  = 4

	procReadlink = 5
	procRead     = 6
	procWrite    = 7
	procSymlink  = 10
)

// Sizes of RFC 1813 §2.5, §2.6.
const (
	maxHandle = 64
	fattrSize = 84
	maxName   = 1 << 16 // the RFC has no limit; the message has
	setTime   = 2       // time_how SET_TO_CLIENT_TIME
)

// An item is a DDP-eligible opaque in an unreduced message: msg[off:off+n] without the pad.
type item struct{ off, n int }

// eligibleArg returns the DDP-eligible argument of a call: the data of WRITE or the path of SYMLINK
// (RFC 8267 §4.1). The arguments start at msg[argsOff].
func eligibleArg(call *sunrpc.CallHeader, msg []byte, argsOff int) (item, bool) {
	if call.Prog != progNFS || call.Vers != versNFS3 {
		return item{}, false
	}
	d := sunrpc.NewDecoder(msg[argsOff:])
	switch call.Proc {
	case procWrite:
		d.Opaque(maxHandle)
		d.Uint64() // offset
		d.Uint32() // count
		d.Uint32() // stable
	case procSymlink:
		d.Opaque(maxHandle)
		d.Opaque(maxName)
		skipSattr(&d)
	default:
		return item{}, false
	}
	return opaqueItem(&d, msg, argsOff)
}

func skipSattr(d *sunrpc.Decoder) {
	for range 3 { // mode, uid, gid
		if d.Bool() {
			d.Uint32()
		}
	}
	if d.Bool() { // size
		d.Uint64()
	}
	for range 2 { // atime, mtime
		if d.Uint32() == setTime {
			d.Uint64()
		}
	}
}

// eligibleResult returns the DDP-eligible result in an unreduced reply: the data of READ or the
// path of READLINK. A reply with an error status has none.
func eligibleResult(call *sunrpc.CallHeader, reply []byte) (item, bool) {
	if call.Prog != progNFS || call.Vers != versNFS3 || (call.Proc != procRead && call.Proc != procReadlink) {
		return item{}, false
	}
	_, results, err := sunrpc.ParseReply(reply)
	if err != nil {
		return item{}, false
	}
	base := len(reply) - len(results)
	d := sunrpc.NewDecoder(results)
	if d.Uint32() != 0 { // nfsstat3
		return item{}, false
	}
	if d.Bool() { // post_op_attr
		d.Fixed(fattrSize)
	}
	if call.Proc == procRead {
		d.Uint32() // count
		d.Uint32() // eof
	}
	return opaqueItem(&d, reply, base)
}

func opaqueItem(d *sunrpc.Decoder, msg []byte, base int) (item, bool) {
	n := int64(d.Uint32())
	off := base + d.Offset()
	if d.Err() != nil || n > int64(len(msg)-off) {
		return item{}, false
	}
	return item{off: off, n: int(n)}, true
}

// checkReduction reports whether each Read chunk at a position other than zero holds a complete
// DDP-eligible argument, with or without its pad (RFC 8166 §3.4.5.2, §6.1). It accepts every NFSv4
// COMPOUND, because only the NFSv4 server can decode it and several WRITEs may be reduced.
func checkReduction(call *sunrpc.CallHeader, msg []byte, argsOff int, chunks []readChunk) bool {
	if call.Prog == progNFS && call.Vers == versNFS4 {
		return true
	}
	for _, c := range chunks {
		if c.pos == 0 {
			continue
		}
		it, ok := eligibleArg(call, msg, argsOff)
		if !ok || it.off != int(c.pos) {
			return false
		}
		if c.length != uint64(it.n) && c.length != uint64(sunrpc.Pad4(it.n)) {
			return false
		}
	}
	return true
}
