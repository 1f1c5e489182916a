package nlmwire

import (
	"fmt"
	"math"
	"strconv"
	"syscall"
)

// NLM version 4 (XNFS chapter 14; RFC 1813 §6).
const (
	Program = 100021
	Version = 4
)

// A Proc is a procedure of NLM version 4. The procedures with the suffix Msg have no results: the
// other side answers with a call of the procedure with the suffix Res.
type Proc uint32

// Procedures.
const (
	ProcNull       Proc = 0
	ProcTest       Proc = 1
	ProcLock       Proc = 2
	ProcCancel     Proc = 3
	ProcUnlock     Proc = 4
	ProcGranted    Proc = 5
	ProcGrantedMsg Proc = 10
	ProcGrantedRes Proc = 15
	// ProcNotify is the callback of a local status monitor. It is no procedure of NLM: Linux's
	// rpc.statd calls only this procedure of the lock manager.
	ProcNotify  Proc = 16
	ProcFreeAll Proc = 23
)

var procNames = map[Proc]string{ProcNull: "NULL", ProcTest: "TEST", ProcLock: "LOCK", ProcCancel: "CANCEL",
	ProcUnlock: "UNLOCK", ProcGranted: "GRANTED", ProcGrantedMsg: "GRANTED_MSG", ProcGrantedRes: "GRANTED_RES",
	ProcNotify: "NSM_NOTIFY", ProcFreeAll: "FREE_ALL"}

func (p Proc) String() string {
	if name := procNames[p]; name != "" {
		return name
	}
	return "procedure " + strconv.FormatUint(uint64(p), 10)
}

// Stat is nlm4_stats.
type Stat uint32

// Values of nlm4_stats.
const (
	Granted           Stat = 0
	Denied            Stat = 1
	DeniedNoLocks     Stat = 2
	Blocked           Stat = 3
	DeniedGracePeriod Stat = 4
	Deadlock          Stat = 5
	ReadOnly          Stat = 6
	StaleFH           Stat = 7
	TooBig            Stat = 8
	Failed            Stat = 9
)

var statNames = [...]string{"NLM4_GRANTED", "NLM4_DENIED", "NLM4_DENIED_NOLOCKS", "NLM4_BLOCKED",
	"NLM4_DENIED_GRACE_PERIOD", "NLM4_DEADLCK", "NLM4_ROFS", "NLM4_STALE_FH", "NLM4_FBIG", "NLM4_FAILED"}

func (s Stat) String() string {
	if int(s) < len(statNames) {
		return statNames[s]
	}
	return fmt.Sprintf("invalid nlm4_stats %d", uint32(s))
}

// Errno returns the error that fcntl(2) and flock(2) return for s.
func (s Stat) Errno() syscall.Errno {
	switch s {
	case Granted:
		return 0
	case Denied, Blocked:
		return syscall.EAGAIN
	case Deadlock:
		return syscall.EDEADLK
	case ReadOnly:
		return syscall.EROFS
	case StaleFH:
		return syscall.ESTALE
	case TooBig:
		return syscall.EFBIG
	}
	return syscall.ENOLCK // as Linux's client
}

// Limits of the protocol in bytes.
const (
	MaxName   = 1024 // LM_MAXSTRLEN and SM_MAXSTRLEN: names of hosts
	maxCookie = 32   // as Linux's server; XNFS allows MAXNETOBJ_SZ
	maxOwner  = 1024 // MAXNETOBJ_SZ
	// MaxMessage is larger than any message of NLM and NSM, with RPC header and credential.
	MaxMessage = 8 << 10
)

// maxOffset is the last offset of a lock: servers have signed offsets.
const maxOffset = math.MaxInt64

// A Span is a range of a file.
type Span struct{ Offset, Length uint64 } // length 0: to the end of the file

// A Region is nlm4_lock: an owner's range of a file.
type Region struct {
	Caller string // name of the client's host
	FH     []byte // file handle
	OH     []byte // owner handle; opaque to the server
	SVID   uint32 // process on the client's host
	Span
}

// Args are the arguments of TEST, LOCK, CANCEL, UNLOCK and GRANTED. A procedure uses only some of
// the fields. After [ParseArgs] the slices refer to the message.
type Args struct {
	Cookie    []byte
	Block     bool // LOCK and CANCEL: wait for the lock
	Exclusive bool // not UNLOCK
	Reclaim   bool // LOCK
	State     uint32
	Region    Region
}

// Res are the results of every procedure except NULL. Holder is set after a TEST with [Denied].
type Res struct {
	Cookie []byte
	Stat   Stat
	Holder Holder
}

// A Holder is the lock that excludes another one.
type Holder struct {
	Exclusive bool
	SVID      uint32
	OH        []byte
	Span
}

// Range returns the first and the last byte.
func (s *Span) Range() (start, end uint64) {
	start = min(s.Offset, maxOffset)
	if s.Length == 0 || s.Length > maxOffset-start {
		return start, maxOffset
	}
	return start, start + s.Length - 1
}

// SetRange sets the first and the last byte.
func (s *Span) SetRange(start, end uint64) {
	s.Offset, s.Length = start, 0
	if end < maxOffset {
		s.Length = end - start + 1
	}
}
