package verbs

import (
	"errors"
	"fmt"
)

// Errors of posting and of resources.
var (
	// ErrQPState: the state of the QP does not allow this request.
	ErrQPState = errors.New("verbs: queue pair is not ready")
	// ErrQueueFull: the send or receive queue has no free entry for the request.
	ErrQueueFull = errors.New("verbs: work queue is full")
	// ErrInvalid: the request is malformed (no handler, too many SGEs, an MR of another PD…).
	ErrInvalid = errors.New("verbs: invalid work request")
	// ErrBusy: another object still uses this one.
	ErrBusy = errors.New("verbs: object is in use")
	// ErrNoResources: a limit of the device is reached.
	ErrNoResources = errors.New("verbs: no resources left")
)

// ConnErrorKind classifies a failed connection attempt.
type ConnErrorKind uint8

// Kinds of connection errors.
const (
	// ConnUnreachable: no route, no answer to the TCP handshake, or the port is closed.
	ConnUnreachable ConnErrorKind = iota + 1
	// ConnRejected: the peer speaks the protocol and rejected the connection.
	ConnRejected
	// ConnProtocol: the peer's answer does not follow the protocol.
	ConnProtocol
	// ConnTimeout: the peer did not answer before the timeout.
	ConnTimeout
	// ConnLocal: this side failed (no descriptor, no memory, closed).
	ConnLocal
)

func (k ConnErrorKind) String() string {
	switch k {
	case ConnUnreachable:
		return "unreachable"
	case ConnRejected:
		return "rejected"
	case ConnProtocol:
		return "protocol error"
	case ConnTimeout:
		return "timed out"
	case ConnLocal:
		return "local error"
	}
	return "unknown"
}

// PhaseConnect is the Phase of a ConnError before the peer accepted the connection of the transport
// below the RDMA handshake. With rdma-core it also includes the handshake.
const PhaseConnect = "connect"

// A ConnError reports why a connection attempt failed.
type ConnError struct {
	Kind ConnErrorKind
	// Phase names the step that failed: "connect", "send MPA request", "read MPA reply"…
	Phase string
	Addr  string
	// PrivateData is what a rejecting peer sent, if anything.
	PrivateData []byte
	Err         error
}

func (e *ConnError) Error() string {
	return fmt.Sprintf("RDMA connection to %s: %s: %s: %v", e.Addr, e.Phase, e.Kind, e.Err)
}

// Unwrap returns the cause.
func (e *ConnError) Unwrap() error { return e.Err }

// A TerminateError is an RDMAP Terminate message, sent or received (RFC 5040 §4.8).
type TerminateError struct {
	Local bool // this side detected the error and sent the message
	Layer uint8
	EType uint8
	Code  uint8
	// Text explains Layer, EType and Code in the words of the RFCs.
	Text string
}

func (e *TerminateError) Error() string {
	who := "peer"
	if e.Local {
		who = "this side"
	}
	return fmt.Sprintf("stream terminated by %s: %s (layer %d, type %d, code %#02x)", who, e.Text, e.Layer, e.EType,
		e.Code)
}
