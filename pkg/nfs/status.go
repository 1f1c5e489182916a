package nfs

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strconv"
	"syscall"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// Status is nfsstat3 (RFC 1813 §2.6). The statuses of NFSv4 that mean the same have the same numbers
// (RFC 8881 §15.1).
type Status uint32

// The statuses.
const (
	OK             Status = 0
	ErrPerm        Status = 1
	ErrNoEnt       Status = 2
	ErrIO          Status = 5
	ErrNXIO        Status = 6
	ErrAcces       Status = 13
	ErrExist       Status = 17
	ErrXDev        Status = 18
	ErrNoDev       Status = 19
	ErrNotDir      Status = 20
	ErrIsDir       Status = 21
	ErrInval       Status = 22
	ErrFBig        Status = 27
	ErrNoSpc       Status = 28
	ErrROFS        Status = 30
	ErrMLink       Status = 31
	ErrNameTooLong Status = 63
	ErrNotEmpty    Status = 66
	ErrDQuot       Status = 69
	ErrStale       Status = 70
	ErrRemote      Status = 71
	ErrBadHandle   Status = 10001
	ErrNotSync     Status = 10002
	ErrBadCookie   Status = 10003
	ErrNotSupp     Status = 10004
	ErrTooSmall    Status = 10005
	ErrServerFault Status = 10006
	ErrBadType     Status = 10007
	ErrJukebox     Status = 10008
)

// statusInfo maps each status to its name in the RFC, the error number of a system call, and a
// short description.
var statusInfo = map[Status]struct {
	name  string
	errno syscall.Errno
	text  string
}{
	OK:             {"NFS3_OK", 0, "no error"},
	ErrPerm:        {"NFS3ERR_PERM", syscall.EPERM, "not owner"},
	ErrNoEnt:       {"NFS3ERR_NOENT", syscall.ENOENT, "no such file or directory"},
	ErrIO:          {"NFS3ERR_IO", syscall.EIO, "I/O error on the server"},
	ErrNXIO:        {"NFS3ERR_NXIO", syscall.ENXIO, "no such device or address"},
	ErrAcces:       {"NFS3ERR_ACCES", syscall.EACCES, "permission denied"},
	ErrExist:       {"NFS3ERR_EXIST", syscall.EEXIST, "file exists"},
	ErrXDev:        {"NFS3ERR_XDEV", syscall.EXDEV, "hard link across devices"},
	ErrNoDev:       {"NFS3ERR_NODEV", syscall.ENODEV, "no such device"},
	ErrNotDir:      {"NFS3ERR_NOTDIR", syscall.ENOTDIR, "not a directory"},
	ErrIsDir:       {"NFS3ERR_ISDIR", syscall.EISDIR, "is a directory"},
	ErrInval:       {"NFS3ERR_INVAL", syscall.EINVAL, "invalid argument"},
	ErrFBig:        {"NFS3ERR_FBIG", syscall.EFBIG, "file too large"},
	ErrNoSpc:       {"NFS3ERR_NOSPC", syscall.ENOSPC, "no space left on the server"},
	ErrROFS:        {"NFS3ERR_ROFS", syscall.EROFS, "read-only file system"},
	ErrMLink:       {"NFS3ERR_MLINK", syscall.EMLINK, "too many hard links"},
	ErrNameTooLong: {"NFS3ERR_NAMETOOLONG", syscall.ENAMETOOLONG, "name too long"},
	ErrNotEmpty:    {"NFS3ERR_NOTEMPTY", syscall.ENOTEMPTY, "directory not empty"},
	ErrDQuot:       {"NFS3ERR_DQUOT", syscall.EDQUOT, "quota exceeded"},
	ErrStale:       {"NFS3ERR_STALE", syscall.ESTALE, "stale file handle"},
	ErrRemote:      {"NFS3ERR_REMOTE", syscall.EREMOTE, "too many levels of remote in path"},
	ErrBadHandle:   {"NFS3ERR_BADHANDLE", syscall.ESTALE, "illegal file handle"},
	ErrNotSync:     {"NFS3ERR_NOT_SYNC", syscall.EAGAIN, "the object has changed since the guard was read"},
	ErrBadCookie:   {"NFS3ERR_BAD_COOKIE", syscall.EINVAL, "directory cookie is stale"},
	ErrNotSupp:     {"NFS3ERR_NOTSUPP", syscall.EOPNOTSUPP, "operation not supported by the server"},
	ErrTooSmall:    {"NFS3ERR_TOOSMALL", syscall.EINVAL, "buffer or request too small"},
	ErrServerFault: {"NFS3ERR_SERVERFAULT", syscall.EREMOTEIO, "server fault"},
	ErrBadType:     {"NFS3ERR_BADTYPE", syscall.EOPNOTSUPP, "object type not supported by the server"},
	ErrJukebox:     {"NFS3ERR_JUKEBOX", syscall.EAGAIN, "server is busy; retry later"},
}

// Valid reports whether s is a value of nfsstat3.
func (s Status) Valid() bool {
	_, ok := statusInfo[s]
	return ok
}

// Errno returns the error number of a system call for s: 0 for OK, and EIO for a value that is not
// an nfsstat3. It is EAGAIN for ErrJukebox; a caller that can wait should retry later instead.
func (s Status) Errno() syscall.Errno {
	if info, ok := statusInfo[s]; ok {
		return info.errno
	}
	return syscall.EIO
}

func (s Status) String() string {
	if info, ok := statusInfo[s]; ok {
		return info.name
	}
	return "nfsstat3 " + strconv.FormatUint(uint64(s), 10)
}

// ErrMalformed is wrapped by every error about an invalid reply. Examples are a short
// reply, an invalid length, an unknown enumeration value and an invalid name.
var ErrMalformed = errors.New("malformed NFS reply")

// An Error is the failure of a procedure. The server returned a status other than NFS3_OK, or the
// client refused to send invalid arguments. In the second case What is the reason.
type Error struct {
	Op     string // version and procedure, for example "NFSv3 LOOKUP"
	Status Status
	What   string // reason, or ""
}

func (e *Error) Error() string {
	s := e.Op + ": "
	if info, ok := statusInfo[e.Status]; ok {
		s += info.text + " (" + info.name + ")"
	} else {
		s += "server returned invalid status " + strconv.FormatUint(uint64(e.Status), 10)
	}
	if e.What != "" {
		s += ": " + e.What
	}
	return s
}

// Unwrap returns ErrMalformed for a status that is not an nfsstat3, and otherwise the error number
// of the status, for example syscall.ENOENT.
func (e *Error) Unwrap() error {
	if !e.Status.Valid() {
		return ErrMalformed
	}
	return e.Status.Errno()
}

// Errno returns the error number of a system call for an error of this package or of its transport:
// 0 for nil, the number of the status for an [*Error], and EIO for an invalid reply and for any
// other error.
func Errno(err error) syscall.Errno {
	if err == nil {
		return 0
	}
	var nfsErr *Error
	if errors.As(err, &nfsErr) {
		return nfsErr.Status.Errno()
	}
	var denied *sunrpc.DeniedError
	var accept *sunrpc.AcceptError
	switch {
	case errors.Is(err, context.Canceled):
		return syscall.EINTR
	case errors.Is(err, context.DeadlineExceeded):
		return syscall.ETIMEDOUT
	case errors.As(err, &denied) && denied.Stat == sunrpc.AuthError:
		return syscall.EACCES
	case errors.As(err, &accept) && accept.Stat == sunrpc.ProcUnavail:
		return syscall.EOPNOTSUPP
	}
	return syscall.EIO
}

// Statuses returns all values of nfsstat3.
func Statuses() []Status { return slices.Collect(maps.Keys(statusInfo)) }
