package rdmacore

import (
	"fmt"
	"io"
	"syscall"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// wcStatus maps enum ibv_wc_status (verbs.h) to verbs.Status. A status that verbs does not have
// becomes StatusGeneralErr.
var wcStatus = [...]verbs.Status{
	0:  verbs.StatusSuccess,
	1:  verbs.StatusLocLenErr,
	2:  verbs.StatusLocQPOpErr,
	3:  verbs.StatusGeneralErr, // LOC_EEC_OP_ERR
	4:  verbs.StatusLocProtErr,
	5:  verbs.StatusWRFlushErr,
	6:  verbs.StatusMWBindErr,
	7:  verbs.StatusBadRespErr,
	8:  verbs.StatusLocAccessErr,
	9:  verbs.StatusRemInvReqErr,
	10: verbs.StatusRemAccessErr,
	11: verbs.StatusRemOpErr,
	12: verbs.StatusRetryExcErr,
	13: verbs.StatusRNRRetryExcErr,
	14: verbs.StatusGeneralErr, // LOC_RDD_VIOL_ERR
	15: verbs.StatusRemInvReqErr,
	16: verbs.StatusGeneralErr, // REM_ABORT_ERR
	17: verbs.StatusGeneralErr, // INV_EECN_ERR
	18: verbs.StatusGeneralErr, // INV_EEC_STATE_ERR
	19: verbs.StatusFatalErr,
	20: verbs.StatusRetryExcErr, // RESP_TIMEOUT_ERR
}

func statusOf(s uint32) verbs.Status {
	if s < uint32(len(wcStatus)) {
		return wcStatus[s]
	}
	return verbs.StatusGeneralErr
}

// Access flags of ibv_reg_mr and of a bind (enum ibv_access_flags).
const (
	accessLocalWrite  = 1 << 0
	accessRemoteWrite = 1 << 1
	accessRemoteRead  = 1 << 2
	accessMWBind      = 1 << 4
)

// windowAccess returns the access flags of a window. Local access follows from the region to which
// the window is bound.
func windowAccess(a verbs.Access) (flags uint32) {
	if a&verbs.AccessRemoteWrite != 0 {
		flags |= accessRemoteWrite
	}
	if a&verbs.AccessRemoteRead != 0 {
		flags |= accessRemoteRead
	}
	return flags
}

// regionAccess returns the access flags of a region that is registered for one use. Remote write
// needs local write.
func regionAccess(a verbs.Access) (flags uint32) {
	flags = windowAccess(a)
	if a&(verbs.AccessRemoteWrite|verbs.AccessLocalWrite) != 0 {
		flags |= accessLocalWrite
	}
	return flags
}

// An eventKind is a value of enum rdma_cm_event_type.
type eventKind int32

// Connection events (rdma_cma.h).
const (
	evAddrResolved    eventKind = 0
	evAddrError       eventKind = 1
	evRouteResolved   eventKind = 2
	evRouteError      eventKind = 3
	evConnectRequest  eventKind = 4
	evConnectResponse eventKind = 5
	evConnectError    eventKind = 6
	evUnreachable     eventKind = 7
	evRejected        eventKind = 8
	evEstablished     eventKind = 9
	evDisconnected    eventKind = 10
	evDeviceRemoval   eventKind = 11
	evAddrChange      eventKind = 14
	evTimewaitExit    eventKind = 15
)

var eventNames = map[eventKind]string{
	evAddrResolved:    "address resolved",
	evAddrError:       "address error",
	evRouteResolved:   "route resolved",
	evRouteError:      "route error",
	evConnectRequest:  "connect request",
	evConnectResponse: "connect response",
	evConnectError:    "connect error",
	evUnreachable:     "unreachable",
	evRejected:        "rejected",
	evEstablished:     "established",
	evDisconnected:    "disconnected",
	evDeviceRemoval:   "device removal",
	evAddrChange:      "address change",
	evTimewaitExit:    "time wait exit",
}

func (k eventKind) String() string {
	if s, ok := eventNames[k]; ok {
		return s
	}
	return fmt.Sprintf("event %d", int32(k))
}

// Reasons of a reject on InfiniBand (IBTA volume 1 §12.6.7.2). They are the status of an
// evRejected.
const (
	rejInvalidServiceID = 8  // no listener
	rejConsumerDefined  = 28 // the listener rejected the connection
)

// An EventError is a connection event that ended a connection or its set-up.
type EventError struct {
	Event  string
	Status int    // 0, a negative errno, or the InfiniBand reason of a reject
	Hint   string // empty, or more about the cause
}

func (e *EventError) Error() string {
	s := e.Event
	switch {
	case e.Status < 0:
		s = fmt.Sprintf("%s: %v", s, syscall.Errno(-e.Status))
	case e.Status > 0:
		s = fmt.Sprintf("%s (reason %d)", s, e.Status)
	}
	if e.Hint != "" {
		s += "; " + e.Hint
	}
	return s
}

// Unwrap returns the errno, or nil if the event has none.
func (e *EventError) Unwrap() error {
	if e.Status < 0 {
		return syscall.Errno(-e.Status)
	}
	return nil
}

// setupError returns the kind and the error of an event that ends a connection attempt.
func setupError(k eventKind, status int) (verbs.ConnErrorKind, error) {
	err := &EventError{Event: k.String(), Status: status}
	switch k {
	case evRejected:
		switch status {
		case rejInvalidServiceID:
			err.Hint = "no RDMA listener on the port"
			return verbs.ConnUnreachable, err
		case rejConsumerDefined:
			err.Hint = "the listener rejected the connection"
		case -int(syscall.ECONNREFUSED):
			err.Hint = "no listener on the port"
			return verbs.ConnUnreachable, err
		}
		return verbs.ConnRejected, err
	case evAddrError, evRouteError:
		err.Hint = "no RDMA device of this machine reaches the peer"
		return verbs.ConnUnreachable, err
	case evUnreachable:
		if status == -int(syscall.ETIMEDOUT) {
			return verbs.ConnTimeout, err
		}
		return verbs.ConnUnreachable, err
	case evDeviceRemoval, evAddrChange:
		return verbs.ConnLocal, err
	}
	return verbs.ConnProtocol, err
}

// disconnectCause returns the cause that an event gives for the end of a connection: io.EOF if the
// peer disconnected.
func disconnectCause(k eventKind, status int) error {
	if k == evDisconnected && status == 0 {
		return io.EOF
	}
	return &EventError{Event: k.String(), Status: status}
}

// A DeviceEventError reports an asynchronous event of the device that ended a connection.
type DeviceEventError struct {
	Device string
	Event  string
}

func (e *DeviceEventError) Error() string {
	return fmt.Sprintf("RDMA device %s: %s", e.Device, e.Event)
}

// A RemovedError reports that a device was removed or is being removed: with its driver, with the
// card, or by "rdma link delete".
type RemovedError struct{ Device string }

func (e *RemovedError) Error() string {
	return fmt.Sprintf("RDMA device %s was removed; load its driver or add it again with \"rdma link\"", e.Device)
}

// Unwrap returns ENODEV.
func (e *RemovedError) Unwrap() error { return syscall.ENODEV }

// A StatusError reports a failed work completion that ended a connection.
type StatusError struct {
	Status    verbs.Status
	VendorErr uint32
}

func (e *StatusError) Error() string {
	return fmt.Sprintf("work request failed: %v (vendor error %#x)", e.Status, e.VendorErr)
}
