package sunrpc

import "strconv"

// RPCVersion is the version of the RPC protocol (RFC 5531 §9, rpcvers).
const RPCVersion = 2

// msg_type (RFC 5531 §9).
const (
	MsgCall  = 0
	MsgReply = 1
)

// reply_stat (RFC 5531 §9).
const (
	MsgAccepted = 0
	MsgDenied   = 1
)

// AcceptStat is the outcome of an accepted call (RFC 5531 §9, accept_stat).
type AcceptStat uint32

// Values of accept_stat.
const (
	Success      AcceptStat = 0 // the procedure was executed; results follow
	ProgUnavail  AcceptStat = 1 // program not available
	ProgMismatch AcceptStat = 2 // program version not supported
	ProcUnavail  AcceptStat = 3 // procedure not supported
	GarbageArgs  AcceptStat = 4 // arguments could not be decoded
	SystemErr    AcceptStat = 5 // system error, for example out of memory
)

var acceptNames = [...]string{"SUCCESS", "PROG_UNAVAIL", "PROG_MISMATCH", "PROC_UNAVAIL", "GARBAGE_ARGS", "SYSTEM_ERR"}

func (s AcceptStat) String() string { return enumName(uint32(s), acceptNames[:], "accept_stat ") }

// RejectStat is the reason why a call was denied (RFC 5531 §9, reject_stat).
type RejectStat uint32

// Values of reject_stat.
const (
	RPCMismatch RejectStat = 0 // RPC version not supported
	AuthError   RejectStat = 1 // credential not accepted
)

var rejectNames = [...]string{"RPC_MISMATCH", "AUTH_ERROR"}

func (s RejectStat) String() string { return enumName(uint32(s), rejectNames[:], "reject_stat ") }

// AuthStat is the reason of an AuthError (RFC 5531 §9, auth_stat).
type AuthStat uint32

// Values of auth_stat.
const (
	AuthOK           AuthStat = 0
	AuthBadCred      AuthStat = 1 // invalid credential
	AuthRejectedCred AuthStat = 2 // new session required
	AuthBadVerf      AuthStat = 3 // invalid verifier
	AuthRejectedVerf AuthStat = 4 // verifier expired or replayed
	AuthTooWeak      AuthStat = 5 // stronger flavor required
	AuthInvalidResp  AuthStat = 6 // invalid response verifier
	AuthFailed       AuthStat = 7 // unknown reason
	AuthKerbGeneric  AuthStat = 8
	AuthTimeExpire   AuthStat = 9
	AuthTktFile      AuthStat = 10
	AuthDecode       AuthStat = 11
	AuthNetAddr      AuthStat = 12
	GSSCredProblem   AuthStat = 13 // no credentials for the user (RPCSEC_GSS)
	GSSCtxProblem    AuthStat = 14 // problem with the context (RPCSEC_GSS)
)

var authStatNames = [...]string{"AUTH_OK", "AUTH_BADCRED", "AUTH_REJECTEDCRED", "AUTH_BADVERF", "AUTH_REJECTEDVERF",
	"AUTH_TOOWEAK", "AUTH_INVALIDRESP", "AUTH_FAILED", "AUTH_KERB_GENERIC", "AUTH_TIMEEXPIRE", "AUTH_TKT_FILE",
	"AUTH_DECODE", "AUTH_NET_ADDR", "RPCSEC_GSS_CREDPROBLEM", "RPCSEC_GSS_CTXPROBLEM"}

func (s AuthStat) String() string { return enumName(uint32(s), authStatNames[:], "auth_stat ") }

// Authentication flavors (RFC 5531 §8.2, §13.4.2).
const (
	FlavorNone  = 0
	FlavorSys   = 1
	FlavorShort = 2
	FlavorGSS   = 6
)

// MaxAuthBody is the maximum size in bytes of the body of a credential or verifier (RFC 5531 §8.2).
const MaxAuthBody = 400

func enumName(v uint32, names []string, prefix string) string {
	if int64(v) < int64(len(names)) {
		return names[v]
	}
	return prefix + strconv.FormatUint(uint64(v), 10)
}
