package base

import (
	"fmt"
	"sync/atomic"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// CheckQPAttr checks the sizes in attr against the limits of the device, and raises MaxSendSGE to
// 1. CheckQPAttr fails with verbs.ErrInvalid.
func CheckQPAttr(provider string, attr *verbs.QPInitAttr, limits verbs.DeviceAttrs) error {
	if attr.MaxSendWR <= 0 || attr.MaxSendWR > limits.MaxQPWR || attr.MaxRecvWR <= 0 ||
		attr.MaxRecvWR > limits.MaxQPWR {
		return fmt.Errorf("%s: create QP with %d send and %d receive requests: both must be 1 to %d: %w", provider,
			attr.MaxSendWR, attr.MaxRecvWR, limits.MaxQPWR, verbs.ErrInvalid)
	}
	if attr.MaxSendSGE < 0 || attr.MaxSendSGE > limits.MaxSendSGE {
		return fmt.Errorf("%s: create QP with %d send SGEs: at most %d: %w", provider, attr.MaxSendSGE,
			limits.MaxSendSGE, verbs.ErrInvalid)
	}
	attr.MaxSendSGE = max(attr.MaxSendSGE, 1)
	return nil
}

// A Reservation is what a QP occupies of other objects: one use of its protection domain, and the
// entries of its two completion queues, which may be one.
type Reservation struct {
	uses             *Uses
	send, recv       *CQEntries
	sendWRs, recvWRs int
}

// Reserve makes the reservation of a QP with attr's sizes. On error nothing is reserved.
func Reserve(uses *Uses, send, recv *CQEntries, attr verbs.QPInitAttr) (Reservation, error) {
	r := Reservation{uses: uses, send: send, recv: recv, sendWRs: attr.MaxSendWR, recvWRs: attr.MaxRecvWR}
	if err := uses.Take(); err != nil {
		return Reservation{}, err
	}
	if err := send.reserve(r.sendWRs); err != nil {
		uses.Drop()
		return Reservation{}, err
	}
	if err := recv.reserve(r.recvWRs); err != nil {
		send.unreserve(r.sendWRs)
		uses.Drop()
		return Reservation{}, err
	}
	return r, nil
}

// Release gives the reservation back, and must be called once.
func (r Reservation) Release() {
	r.send.unreserve(r.sendWRs)
	r.recv.unreserve(r.recvWRs)
	r.uses.Drop()
}

// Counters are the counters behind verbs.QPStats. The fields have the same names and meanings.
// Counters is safe for concurrent use.
type Counters struct {
	PostedChains, PostedSendWRs, PostedRecvWRs atomic.Uint64
	SendCompletions, RecvCompletions           atomic.Uint64
	RemoteAccessErrors, RemoteInvalidates      atomic.Uint64
	BytesSent, BytesReceived                   atomic.Uint64
	ReadRequestsServed                         atomic.Uint64
	TerminatesSent, TerminatesReceived         atomic.Uint64
}

// Stats returns a snapshot of the counters.
func (c *Counters) Stats() verbs.QPStats {
	return verbs.QPStats{
		PostedChains: c.PostedChains.Load(), PostedSendWRs: c.PostedSendWRs.Load(),
		PostedRecvWRs: c.PostedRecvWRs.Load(), SendCompletions: c.SendCompletions.Load(),
		RecvCompletions: c.RecvCompletions.Load(), RemoteAccessErrors: c.RemoteAccessErrors.Load(),
		RemoteInvalidates: c.RemoteInvalidates.Load(), BytesSent: c.BytesSent.Load(),
		BytesReceived: c.BytesReceived.Load(), ReadRequestsServed: c.ReadRequestsServed.Load(),
		TerminatesSent: c.TerminatesSent.Load(), TerminatesReceived: c.TerminatesReceived.Load(),
	}
}
