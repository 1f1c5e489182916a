package sunrpc

// AcceptedReplySize is the size in bytes of the header of an accepted reply with an AUTH_NONE
// verifier: xid, msg_type, reply_stat, verifier, accept_stat (RFC 5531 §9).
const AcceptedReplySize = 4*SizeUint32 + AuthNoneSize

// MaxReplyHeader is the maximum size in bytes of the header of an accepted reply. Its verifier has
// 400 bytes.
const MaxReplyHeader = AcceptedReplySize + MaxAuthBody

// ParseReply returns the XID and the results of a reply. results is a slice of b. xid is valid if b
// has at least four bytes, even with an error, so that a transport can end the call.
//
// The error is a [*DeniedError], an [*AcceptError], or wraps [ErrMalformed]. ParseReply ignores the
// verifier, because AUTH_SYS servers send AUTH_NONE.
func ParseReply(b []byte) (xid uint32, results []byte, err error) {
	d := NewDecoder(b)
	xid = d.Uint32()
	if d.Uint32() != MsgReply {
		d.Fail(errNotReply)
	}
	switch d.Uint32() {
	case MsgAccepted:
		d.parseAccepted()
	case MsgDenied:
		d.parseDenied()
	default:
		d.Fail(errReplyStat)
	}
	if d.err != nil {
		return xid, nil, d.err
	}
	return xid, d.Rest(), nil
}

func (d *Decoder) parseAccepted() {
	d.auth()
	stat := AcceptStat(d.Uint32())
	if d.err != nil || stat == Success {
		return
	}
	e := &AcceptError{Stat: stat}
	switch stat {
	case ProgMismatch:
		e.Low, e.High = d.Uint32(), d.Uint32()
	case ProgUnavail, ProcUnavail, GarbageArgs, SystemErr:
	default:
		d.Fail(errAcceptStat)
	}
	d.Fail(e)
}

func (d *Decoder) parseDenied() {
	e := &DeniedError{Stat: RejectStat(d.Uint32())}
	switch e.Stat {
	case RPCMismatch:
		e.Low, e.High = d.Uint32(), d.Uint32()
	case AuthError:
		e.Auth = AuthStat(d.Uint32())
	default:
		d.Fail(errRejectStat)
	}
	d.Fail(e)
}

// AppendAcceptedReply appends the header of an accepted reply with an AUTH_NONE verifier. The
// results follow the header if stat is Success. For ProgMismatch use [AppendProgMismatchReply].
func AppendAcceptedReply(b []byte, xid uint32, stat AcceptStat) []byte {
	b = AppendUint32(b, xid)
	b = AppendUint32(b, MsgReply)
	b = AppendUint32(b, MsgAccepted)
	b = AppendAuthNone(b)
	return AppendUint32(b, uint32(stat))
}

// AppendProgMismatchReply appends a complete reply with the supported versions of the program.
func AppendProgMismatchReply(b []byte, xid, low, high uint32) []byte {
	b = AppendAcceptedReply(b, xid, ProgMismatch)
	return AppendUint32(AppendUint32(b, low), high)
}

// AppendMismatchReply appends a complete reply that denies a call of an RPC version other than 2.
func AppendMismatchReply(b []byte, xid uint32) []byte {
	b = appendDenied(b, xid, RPCMismatch)
	return AppendUint32(AppendUint32(b, RPCVersion), RPCVersion)
}

// AppendDeniedReply appends a complete reply that denies a call because of its credential.
func AppendDeniedReply(b []byte, xid uint32, stat AuthStat) []byte {
	return AppendUint32(appendDenied(b, xid, AuthError), uint32(stat))
}

func appendDenied(b []byte, xid uint32, stat RejectStat) []byte {
	b = AppendUint32(b, xid)
	b = AppendUint32(b, MsgReply)
	b = AppendUint32(b, MsgDenied)
	return AppendUint32(b, uint32(stat))
}
