package sunrpc

import "errors"

// callFixedSize is the size of a call header without its credential: xid, msg_type, rpcvers, prog,
// vers, proc, and an AUTH_NONE verifier (RFC 5531 §9).
const callFixedSize = 6*SizeUint32 + AuthNoneSize

// AppendCall appends a call header (RFC 5531 §9) with an encoded credential (see [AppendAuthSys])
// and an AUTH_NONE verifier. The arguments follow the header.
func AppendCall(b []byte, xid, prog, vers, proc uint32, cred []byte) []byte {
	b = AppendUint32(b, xid)
	b = AppendUint32(b, MsgCall)
	b = AppendUint32(b, RPCVersion)
	b = AppendUint32(b, prog)
	b = AppendUint32(b, vers)
	b = AppendUint32(b, proc)
	b = append(b, cred...)
	return AppendAuthNone(b)
}

// CallSize returns the number of bytes that [AppendCall] appends.
func CallSize(cred []byte) int { return callFixedSize + len(cred) }

// CallHeader is the decoded header of a call (RFC 5531 §9). Its slices refer to the message.
type CallHeader struct {
	XID              uint32
	Prog, Vers, Proc uint32
	CredFlavor       uint32
	Cred             []byte // body of the credential, at most 400 bytes
	VerfFlavor       uint32
	Verf             []byte // body of the verifier, at most 400 bytes
}

// ParseCall splits a call into header and arguments. args is a slice of b.
//
// After an error that wraps [ErrMalformed] the server sends no reply, or GARBAGE_ARGS if XID is
// set. A [*DeniedError] with RPCMismatch reports a call of another RPC version. It sets only XID,
// and the server replies with [AppendMismatchReply].
func ParseCall(b []byte) (h CallHeader, args []byte, err error) {
	d := NewDecoder(b)
	h.XID = d.Uint32()
	if d.Uint32() != MsgCall {
		d.Fail(errNotCall)
	}
	vers := d.Uint32()
	if d.err != nil {
		return h, nil, d.err
	}
	if vers != RPCVersion {
		return h, nil, &DeniedError{Stat: RPCMismatch, Low: RPCVersion, High: RPCVersion}
	}
	h.Prog, h.Vers, h.Proc = d.Uint32(), d.Uint32(), d.Uint32()
	h.CredFlavor, h.Cred = d.auth()
	h.VerfFlavor, h.Verf = d.auth()
	if d.err != nil {
		return h, nil, d.err
	}
	return h, d.Rest(), nil
}

// auth decodes an opaque_auth: flavor and body (RFC 5531 §8.2).
func (d *Decoder) auth() (flavor uint32, body []byte) {
	flavor = d.Uint32()
	body = d.Opaque(MaxAuthBody)
	if errors.Is(d.err, errOpaqueLen) {
		d.err = errAuthTooLong
	}
	return flavor, body
}
