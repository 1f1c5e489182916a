package xprt

import (
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// ErrClosed reports that the transport was closed before the call completed.
var ErrClosed = errors.New("xprt: transport is closed")

// An InterruptedError reports a call that its caller gave up. The memory of the call is fenced. It
// wraps EINTR and the error of the context.
type InterruptedError struct{ Cause error }

func (e *InterruptedError) Error() string { return "RPC interrupted: " + e.Cause.Error() }

// Unwrap returns EINTR and the error of the context.
func (e *InterruptedError) Unwrap() []error { return []error{syscall.EINTR, e.Cause} }

// A TimeoutError reports that the server did not answer a call in time. It ends a call of a soft
// mount, or a connection. It wraps the errno of the recovery mode.
type TimeoutError struct {
	Server string
	After  time.Duration
	Errno  syscall.Errno
	Last   string // last error of the connection, or empty
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

// A ServerError is an RDMA_ERROR message of the server. The server cannot accept the call, so the
// transport does not retry it (RFC 8166 §4.5). It wraps EREMOTEIO.
type ServerError struct {
	Code      rpcrdma.ErrCode
	Low, High uint32
}

func (e *ServerError) Error() string {
	if e.Code == rpcrdma.ErrVers {
		return fmt.Sprintf("NFS server rejected RPC-over-RDMA version %d; it supports versions %d to %d",
			rpcrdma.Version, e.Low, e.High)
	}
	return "NFS server rejected the chunks of the call: RDMA_ERROR ERR_CHUNK"
}

// Unwrap returns EREMOTEIO.
func (e *ServerError) Unwrap() error { return syscall.EREMOTEIO }

// A ProtocolError is a reply that violates RFC 8166, or a call that RFC 8166 cannot convey. It
// wraps EIO.
type ProtocolError struct{ Reason string }

func (e *ProtocolError) Error() string { return "RPC-over-RDMA: " + e.Reason }

// Unwrap returns EIO.
func (e *ProtocolError) Unwrap() error { return syscall.EIO }

// A completionFailure is a failed work request. It ends the connection.
type completionFailure struct {
	what   string
	status verbs.Status
}

func (e *completionFailure) Error() string { return e.what + ": " + e.status.String() }

// A postError is a work request that the provider rejected. It ends the connection.
type postError struct {
	what string
	err  error
}

func (e *postError) Error() string { return "post " + e.what + ": " + e.err.Error() }
func (e *postError) Unwrap() error { return e.err }

// An unmapError is memory that the provider could not unregister. It ends the connection, which
// fences the memory.
type unmapError struct{ err error }

func (e *unmapError) Error() string { return "release memory: " + e.err.Error() }
func (e *unmapError) Unwrap() error { return e.err }

// errIdle ends a connection without calls.
var errIdle = errors.New("xprt: connection is idle")

// errReturn ends a connection without calls to another address than the preferred one, so that the
// next connection can use the preferred address.
var errReturn = errors.New("xprt: return to the preferred address")

// errPanic ends a connection one of whose calls panicked.
var errPanic = errors.New("xprt: internal error in a call")

// followsLoss reports whether err is only a consequence of a lost connection. Such errors do not
// contain the cause of the loss.
func followsLoss(err error) bool {
	var failed *completionFailure
	if errors.As(err, &failed) {
		return failed.status == verbs.StatusWRFlushErr
	}
	return errors.Is(err, verbs.ErrQPState)
}

// localFault reports whether the fault that ended a connection is local. The server needs no time
// to recover from a local fault.
func localFault(err error) bool {
	if followsLoss(err) {
		return false
	}
	var post *postError
	var unmap *unmapError
	if errors.As(err, &post) || errors.As(err, &unmap) || errors.Is(err, errPanic) {
		return true
	}
	var failed *completionFailure
	if !errors.As(err, &failed) {
		return false
	}
	switch failed.status {
	case verbs.StatusLocLenErr, verbs.StatusLocQPOpErr, verbs.StatusLocProtErr, verbs.StatusMWBindErr,
		verbs.StatusLocAccessErr, verbs.StatusFatalErr, verbs.StatusGeneralErr:
		return true
	}
	return false
}
