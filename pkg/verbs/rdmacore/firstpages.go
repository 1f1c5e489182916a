//go:build rdmacore && cgo && linux

package rdmacore

/*
#include "shim.h"
*/
import "C"

// libsiw knows the queues of a process by their place in it, which the kernel gives out in pages from 0 on, and takes the place 0x90000 for none: the
// queue pair or completion queue that comes to lie there cannot be made. So the first queue of all is a completion queue that reaches
// beyond that place.

// firstPagesCQE is its depth: 32 octets each (struct siw_cqe) are more than 0x91000, with the power of two that siw makes of it.
const firstPagesCQE = 0x91000/32 + 1

// fillFirstPages makes that queue. It ends with the opened device; if it cannot be made, everything else still may.
func (d *device) fillFirstPages() {
	if !d.siw {
		return
	}
	var ch *C.struct_ibv_comp_channel
	var cq *C.struct_ibv_cq
	if err := errnoOf(C.rc_create_cq(d.ctx, firstPagesCQE, &ch, &cq)); err != nil {
		d.log.Warn("the first pages of an RDMA device could not be filled: one queue of this process may fail to be made", "device", d.attrs.Name, "error", err)
	}
}
