package sunrpc

// callFixedSize is a call header without its credential: xid, msg_type, rpcvers, prog, vers, proc,
// and an AUTH_NONE verifier (RFC 5531 §9).
const callFixedSize = 6*SizeUint32 + AuthNoneSize

// AppendCall appends a call header (RFC 5531 §9) with the encoded credential cred, as
// [AppendAuthSys] makes it, and an AUTH_NONE verifier. The arguments follow behind it.
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

// CallSize is the number of octets that [AppendCall] appends.
func CallSize(cred []byte) int { return callFixedSize + len(cred) }

// CallHeader is a call's header as a server sees it (RFC 5531 §9). Its slices are views of the
// message.
type CallHeader struct {
	XID              uint32
	Prog, Vers, Proc uint32
	CredFlavor       uint32
	Cred             []byte // body of the credential, at most 400 octets
	VerfFlavor       uint32
	Verf             []byte // body of the verifier, at most 400 octets
}

// ParseCall splits a call into header and arguments. args is a view of b.
//
// An error that wraps [ErrMalformed] deserves no answer, or GARBAGE_ARGS where XID could be read. A
// [*DeniedError] with RPCMismatch is a call in another version of RPC: only XID is set, and
// [AppendMismatchReply] is the answer.
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

// auth reads an opaque_auth: flavor and body (RFC 5531 §8.2).
func (d *Decoder) auth() (flavor uint32, body []byte) {
	flavor = d.Uint32()
	body = d.Opaque(MaxAuthBody)
	if d.err == errOpaqueLen {
		d.err = errAuthTooLong
	}
	return flavor, body
}
