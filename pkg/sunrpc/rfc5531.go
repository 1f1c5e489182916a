package sunrpc

import "strconv"

// RPCVersion is the version of the RPC protocol itself (RFC 5531 §9, rpcvers).
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
	Success      AcceptStat = 0 // the procedure ran; its results follow
	ProgUnavail  AcceptStat = 1 // the server does not serve this program
	ProgMismatch AcceptStat = 2 // it serves other versions of the program
	ProcUnavail  AcceptStat = 3 // the program has no such procedure
	GarbageArgs  AcceptStat = 4 // the arguments did not decode
	SystemErr    AcceptStat = 5 // out of memory and the like
)

var acceptNames = [...]string{"SUCCESS", "PROG_UNAVAIL", "PROG_MISMATCH", "PROC_UNAVAIL", "GARBAGE_ARGS", "SYSTEM_ERR"}

func (s AcceptStat) String() string { return enumName(uint32(s), acceptNames[:], "accept_stat ") }

// RejectStat is the reason of a denied call (RFC 5531 §9, reject_stat).
type RejectStat uint32

// Values of reject_stat.
const (
	RPCMismatch RejectStat = 0 // the server speaks other versions of RPC
	AuthError   RejectStat = 1 // the server refuses the credential
)

var rejectNames = [...]string{"RPC_MISMATCH", "AUTH_ERROR"}

func (s RejectStat) String() string { return enumName(uint32(s), rejectNames[:], "reject_stat ") }

// AuthStat says what is wrong with a credential or verifier (RFC 5531 §9, auth_stat).
type AuthStat uint32

// Values of auth_stat.
const (
	AuthOK           AuthStat = 0
	AuthBadCred      AuthStat = 1 // bad credential
	AuthRejectedCred AuthStat = 2 // client must begin a new session
	AuthBadVerf      AuthStat = 3 // bad verifier
	AuthRejectedVerf AuthStat = 4 // verifier expired or replayed
	AuthTooWeak      AuthStat = 5 // the server asks for a stronger flavor
	AuthInvalidResp  AuthStat = 6 // bogus response verifier
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
	FlavorDH    = 3
	FlavorGSS   = 6
)

// MaxAuthBody is the largest body of a credential or verifier, in octets (RFC 5531 §8.2).
const MaxAuthBody = 400

func enumName(v uint32, names []string, prefix string) string {
	if int64(v) < int64(len(names)) {
		return names[v]
	}
	return prefix + strconv.FormatUint(uint64(v), 10)
}
