package sunrpc

import (
	"errors"
	"fmt"
)

// ErrMalformed is wrapped by every error about a message that is too short, or says something that
// RFC 5531 or RFC 4506 does not allow.
var ErrMalformed = errors.New("malformed RPC message")

// Made once: a peer that sends garbage shall not also make work for the allocator.
var (
	errShort        = fmt.Errorf("%w: it ends in the middle of a field", ErrMalformed)
	errOpaqueLen    = fmt.Errorf("%w: an opaque is longer than its maximum", ErrMalformed)
	errBool         = fmt.Errorf("%w: a boolean is neither 0 nor 1", ErrMalformed)
	errNotReply     = fmt.Errorf("%w: not a reply (msg_type is not 1)", ErrMalformed)
	errNotCall      = fmt.Errorf("%w: not a call (msg_type is not 0)", ErrMalformed)
	errReplyStat    = fmt.Errorf("%w: reply_stat is neither accepted nor denied", ErrMalformed)
	errAcceptStat   = fmt.Errorf("%w: accept_stat is out of range", ErrMalformed)
	errRejectStat   = fmt.Errorf("%w: reject_stat is out of range", ErrMalformed)
	errAuthTooLong  = fmt.Errorf("%w: a credential or verifier is longer than 400 octets", ErrMalformed)
	errAuthSysName  = fmt.Errorf("%w: the AUTH_SYS machine name is longer than 255 octets", ErrMalformed)
	errAuthSysGIDs  = fmt.Errorf("%w: AUTH_SYS carries more than 16 groups", ErrMalformed)
	errAuthSysExtra = fmt.Errorf("%w: octets follow the AUTH_SYS credential", ErrMalformed)
)

// An AcceptError is a call that the server accepted and did not execute (RFC 5531 §9, accept_stat).
type AcceptError struct {
	Stat AcceptStat
	// Low and High are the versions that the server serves, for ProgMismatch.
	Low, High uint32
}

func (e *AcceptError) Error() string {
	switch e.Stat {
	case ProgUnavail:
		return "RPC: the server does not serve this program (PROG_UNAVAIL)"
	case ProgMismatch:
		return fmt.Sprintf("RPC: the server serves versions %d to %d of the program only (PROG_MISMATCH)", e.Low,
			e.High)
	case ProcUnavail:
		return "RPC: the server does not know this procedure (PROC_UNAVAIL)"
	case GarbageArgs:
		return "RPC: the server could not decode the arguments (GARBAGE_ARGS)"
	case SystemErr:
		return "RPC: the server failed, for example out of memory (SYSTEM_ERR)"
	}
	return "RPC: accepted with " + e.Stat.String()
}

// A DeniedError is a call that the server refused to look at (RFC 5531 §9, rejected_reply).
type DeniedError struct {
	Stat RejectStat
	// Low and High are the RPC versions that the server speaks, for RPCMismatch.
	Low, High uint32
	// Auth says what is wrong with the credential, for AuthError.
	Auth AuthStat
}

func (e *DeniedError) Error() string {
	switch e.Stat {
	case RPCMismatch:
		return fmt.Sprintf("RPC: denied: the server speaks versions %d to %d of RPC, not %d (RPC_MISMATCH)", e.Low,
			e.High, RPCVersion)
	case AuthError:
		return "RPC: denied: " + authText(e.Auth) + " (" + e.Auth.String() + ")"
	}
	return "RPC: denied with " + e.Stat.String()
}

func authText(s AuthStat) string {
	switch s {
	case AuthBadCred:
		return "the server calls the credential bad"
	case AuthRejectedCred:
		return "the server rejects the credential and asks for a new session"
	case AuthBadVerf:
		return "the server calls the verifier bad"
	case AuthRejectedVerf:
		return "the verifier was expired or replayed"
	case AuthTooWeak:
		return "the server asks for a stronger authentication flavor than AUTH_SYS"
	case GSSCredProblem, GSSCtxProblem:
		return "the server asks for RPCSEC_GSS credentials"
	}
	return "the server does not accept the credential"
}
