//go:build rdmacore && cgo && linux

package rdmacore

/*
#include "shim.h"
*/
import "C"

// libsiw knows the queues of a process by their place in it, which the kernel gives out in pages
// from 0 on, and takes the place 0x90000 for none: the queue pair or completion queue that comes to
// lie there cannot be made. So the first queue of all is a completion queue that reaches beyond
// that place.

// brokenOffsetCQE is its depth: 32 octets each (struct siw_cqe) are more than 0x91000, with the
// power of two that siw makes of it.
const brokenOffsetCQE = 0x91000/32 + 1

// reserveBrokenOffset makes that queue. If it cannot be made, everything else still may. Caller
// holds devices.mu, and uses o.
func (o *deviceContext) reserveBrokenOffset() {
	if err := errnoOf(C.rc_create_bare_cq(o.c, brokenOffsetCQE, &o.brokenOffsetCQ)); err != nil {
		o.log.Warn("the first pages of an RDMA device could not be filled: a queue of this process may fail to be made", "device", o.name, "error", err)
	}
}

// releaseBrokenOffset takes it away. Caller holds devices.mu.
func (o *deviceContext) releaseBrokenOffset() {
	if o.brokenOffsetCQ == nil {
		return
	}
	if err := errnoOf(C.rc_destroy_bare_cq(o.brokenOffsetCQ)); err != nil {
		o.log.Debug("completion queue could not be released", "device", o.name, "error", err)
	}
	o.brokenOffsetCQ = nil
}
