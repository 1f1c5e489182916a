//go:build rdmacore && cgo && linux

package rdmacore

/*
#include "shim.h"
*/
import "C"

// libsiw identifies the queues of a process by their mmap offsets. The kernel assigns these offsets
// from 0 in pages. libsiw reads the offset 0x90000 as "no offset", so creating the queue pair or
// completion queue at this offset fails. Therefore the first queue is a CQ that extends beyond this
// offset.

// brokenOffsetCQE is the depth of this CQ. An entry has 32 bytes (struct siw_cqe), and siw rounds
// the depth up to a power of two. The CQ is therefore larger than 0x91000 bytes.
const brokenOffsetCQE = 0x91000/32 + 1

// reserveBrokenOffset creates the CQ that covers the offset. Without it, most queues can still be
// created. Caller holds the lock of devices and has acquired o.
func (o *deviceContext) reserveBrokenOffset() {
	if err := errnoOf(C.rc_create_cq_without_channel(o.c, brokenOffsetCQE, &o.brokenOffsetCQ)); err != nil {
		o.log.Warn("reserve mmap offset 0x90000 of siw device; creating a queue may fail later",
			"device", o.name, "error", err)
	}
}

// releaseBrokenOffset destroys this CQ. Caller holds the lock of devices.
func (o *deviceContext) releaseBrokenOffset() {
	if o.brokenOffsetCQ == nil {
		return
	}
	if err := errnoOf(C.rc_destroy_cq_without_channel(o.brokenOffsetCQ)); err != nil {
		o.log.Debug("destroy CQ at mmap offset 0x90000 of siw device", "device", o.name, "error", err)
	}
	o.brokenOffsetCQ = nil
}
