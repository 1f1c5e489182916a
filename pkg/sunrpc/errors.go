package sunrpc

import (
	"errors"
	"fmt"
)

// ErrMalformed is wrapped by every error about a message that is too short or invalid (RFC 5531,
// RFC 4506).
var ErrMalformed = errors.New("malformed RPC message")

// These errors are variables so that invalid messages cause no allocation.
var (
	errShort       = fmt.Errorf("%w: message ends in the middle of a field", ErrMalformed)
	errOpaqueLen   = fmt.Errorf("%w: opaque is longer than its maximum", ErrMalformed)
	errBool        = fmt.Errorf("%w: boolean is not 0 or 1", ErrMalformed)
	errNotReply    = fmt.Errorf("%w: not a reply (msg_type is not 1)", ErrMalformed)
	errNotCall     = fmt.Errorf("%w: not a call (msg_type is not 0)", ErrMalformed)
	errReplyStat   = fmt.Errorf("%w: reply_stat is out of range", ErrMalformed)
	errAcceptStat  = fmt.Errorf("%w: accept_stat is out of range", ErrMalformed)
	errRejectStat  = fmt.Errorf("%w: reject_stat is out of range", ErrMalformed)
	errAuthTooLong = fmt.Errorf("%w: credential or verifier is longer than 400 bytes", ErrMalformed)
)

// An AcceptError is the error of a call that the server accepted but did not execute (RFC 5531 §9,
// accept_stat).
type AcceptError struct {
	Stat AcceptStat
	// Low and High are the program versions of the server; only with ProgMismatch.
	Low, High uint32
}

func (e *AcceptError) Error() string {
	switch e.Stat {
	case ProgUnavail:
		return "RPC: program not available on the server (PROG_UNAVAIL)"
	case ProgMismatch:
		return fmt.Sprintf("RPC: server supports only versions %d to %d of the program (PROG_MISMATCH)", e.Low,
			e.High)
	case ProcUnavail:
		return "RPC: procedure not supported by the server (PROC_UNAVAIL)"
	case GarbageArgs:
		return "RPC: server could not decode the arguments (GARBAGE_ARGS)"
	case SystemErr:
		return "RPC: server failed, for example out of memory (SYSTEM_ERR)"
	}
	return "RPC: call not executed: " + e.Stat.String()
}

// A DeniedError is the error of a call that the server rejected (RFC 5531 §9, rejected_reply).
type DeniedError struct {
	Stat RejectStat
	// Low and High are the RPC versions of the server; only with RPCMismatch.
	Low, High uint32
	// Auth is the reason; only with AuthError.
	Auth AuthStat
}

func (e *DeniedError) Error() string {
	switch e.Stat {
	case RPCMismatch:
		return fmt.Sprintf("RPC: denied: server supports RPC versions %d to %d, not %d (RPC_MISMATCH)", e.Low,
			e.High, RPCVersion)
	case AuthError:
		return "RPC: denied: " + authText(e.Auth) + " (" + e.Auth.String() + ")"
	}
	return "RPC: denied: " + e.Stat.String()
}

func authText(s AuthStat) string {
	switch s {
	case AuthBadCred:
		return "invalid credential"
	case AuthRejectedCred:
		return "credential rejected, new session required"
	case AuthBadVerf:
		return "invalid verifier"
	case AuthRejectedVerf:
		return "verifier expired or replayed"
	case AuthTooWeak:
		return "stronger authentication flavor required"
	case GSSCredProblem, GSSCtxProblem:
		return "RPCSEC_GSS credentials required"
	}
	return "credential not accepted"
}
