package xprt

import (
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// ErrClosed: the transport was closed while, or before, the call waited.
var ErrClosed = errors.New("xprt: transport is closed")

// An InterruptedError ends a call that its caller gave up. Its memory is fenced. It wraps EINTR and
// the context's error.
type InterruptedError struct{ Cause error }

func (e *InterruptedError) Error() string { return "RPC interrupted: " + e.Cause.Error() }

// Unwrap returns EINTR and the context's error.
func (e *InterruptedError) Unwrap() []error { return []error{syscall.EINTR, e.Cause} }

// A TimeoutError ends a call of a soft mount, or says why a connection was dropped. It wraps the
// errno that the recovery mode asks for.
type TimeoutError struct {
	Server string
	After  time.Duration
	Errno  syscall.Errno
	Last   string // the connection's last error, if any
}

func (e *TimeoutError) Error() string {
	s := fmt.Sprintf("NFS server %s did not answer for %v", e.Server, e.After.Round(time.Millisecond))
	if e.Last != "" {
		s += " (last connection error: " + e.Last + ")"
	}
	return s
}

// Unwrap returns the errno.
func (e *TimeoutError) Unwrap() error { return e.Errno }

// A ServerError is an RDMA_ERROR message of the server: the call cannot be conveyed, and is not
// tried again (RFC 8166 §4.5). It wraps EREMOTEIO.
type ServerError struct {
	Code      rpcrdma.ErrCode
	Low, High uint32
}

func (e *ServerError) Error() string {
	if e.Code == rpcrdma.ErrVers {
		return fmt.Sprintf("NFS server refused RPC-over-RDMA version %d: it speaks %d to %d", rpcrdma.Version, e.Low,
			e.High)
	}
	return "NFS server could not use the call's chunks (RDMA_ERROR ERR_CHUNK)"
}

// Unwrap returns EREMOTEIO.
func (e *ServerError) Unwrap() error { return syscall.EREMOTEIO }

// A ProtocolError is a reply that breaks RFC 8166, or a call that does not fit it. It wraps EIO.
type ProtocolError struct{ Reason string }

func (e *ProtocolError) Error() string { return "RPC-over-RDMA: " + e.Reason }

// Unwrap returns EIO.
func (e *ProtocolError) Unwrap() error { return syscall.EIO }

// A completionFailure says which request of a connection failed. It ends the connection.
type completionFailure struct {
	what   string
	status verbs.Status
}

func (e *completionFailure) Error() string { return e.what + ": " + e.status.String() }

// A postError is a request that the provider would not take. It ends the connection.
type postError struct {
	what string
	err  error
}

func (e *postError) Error() string { return "post " + e.what + ": " + e.err.Error() }
func (e *postError) Unwrap() error { return e.err }

// errIdle ends a connection that nobody needs.
var errIdle = errors.New("xprt: connection was idle")

// followsLoss reports whether err is what happens to a request on a connection that is lost
// already, so that it says nothing of the reason.
func followsLoss(err error) bool {
	var failed *completionFailure
	if errors.As(err, &failed) {
		return failed.status == verbs.StatusWRFlushErr
	}
	return errors.Is(err, verbs.ErrQPState)
}

// ours reports whether a connection ended by something on this side, so that there is no reason to
// spare the server.
func ours(err error) bool {
	if followsLoss(err) {
		return false
	}
	var post *postError
	if errors.As(err, &post) {
		return true
	}
	var failed *completionFailure
	if !errors.As(err, &failed) {
		return false
	}
	switch failed.status {
	case verbs.StatusLocLenErr, verbs.StatusLocQPOpErr, verbs.StatusLocProtErr, verbs.StatusMWBindErr, verbs.StatusLocAccessErr,
		verbs.StatusFatalErr, verbs.StatusGeneralErr:
		return true
	}
	return false
}
