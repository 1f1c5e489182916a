//go:build rdmacore && cgo && linux

package rdmacore

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// Flags of ibv_wc.wc_flags that report a Send With Invalidate.
const (
	wcWithInv = 1 << 3
	// wcWithInvRXE is the kernel's value (IB_WC_WITH_INVALIDATE). rxe writes it into the completion
	// queue of a user program.
	wcWithInvRXE = 1 << 2
)

// rxeVendor is the vendor id of the kernel's soft RoCE device (RXE_VENDOR_ID).
const rxeVendor = 0xffffff

// siwVendor is the vendor id of the kernel's soft iWARP device (SIW_VENDOR_ID).
const siwVendor = 0x626d74

// errnoKind returns the kind of a connection error for the errno of a failed call.
func errnoKind(err error) verbs.ConnErrorKind {
	switch {
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.EHOSTUNREACH),
		errors.Is(err, syscall.ENETUNREACH), errors.Is(err, syscall.EHOSTDOWN),
		errors.Is(err, syscall.ENETDOWN), errors.Is(err, syscall.ENODEV):
		return verbs.ConnUnreachable
	case errors.Is(err, syscall.ETIMEDOUT):
		return verbs.ConnTimeout
	}
	return verbs.ConnLocal
}

// An asyncKind is a value of enum ibv_event_type.
type asyncKind int32

// Asynchronous events (verbs.h).
const (
	asyncCQErr       asyncKind = 0
	asyncQPFatal     asyncKind = 1
	asyncQPReqErr    asyncKind = 2
	asyncQPAccessErr asyncKind = 3
	asyncCommEst     asyncKind = 4
	asyncDeviceFatal asyncKind = 8
	asyncPortActive  asyncKind = 9
	asyncPortErr     asyncKind = 10
)

var asyncNames = map[asyncKind]string{
	asyncCQErr:       "completion queue error",
	asyncQPFatal:     "queue pair error",
	asyncQPReqErr:    "peer sent an invalid request",
	asyncQPAccessErr: "peer accessed memory without the right",
	asyncCommEst:     "communication established",
	asyncDeviceFatal: "device failed",
	asyncPortActive:  "port is up",
	asyncPortErr:     "port is down",
}

func (k asyncKind) String() string {
	if s, ok := asyncNames[k]; ok {
		return s
	}
	return fmt.Sprintf("asynchronous event %d", int32(k))
}
