// Package verbs is the RDMA vocabulary of this project: device, protection
// domain, memory region, queue pair, completion queue, work requests, work
// completions and connection events, as small interfaces in the field's own
// terms. It holds no provider; softiwarp and rdmacore implement it and every
// room above (memreg, xprt, svcrdma) speaks only this.
//
// # Ownership and ordering
//
// A chain of work requests given to [QP.PostSend] is executed in order. The
// provider copies each [WorkRequest] and its SGE list before PostSend returns, so the
// structs may be reused at once; the memory that they name may not, until the
// request (or a later signaled one on the same queue) has completed. The Segs
// of a FastReg are the exception that every FRWR consumer knows from its page
// list: the slice itself belongs to the registration and must not change until
// the MR is invalidated, or destroyed, or the QP has been closed.
//
// Each completion carries its own handler ([WorkRequest.Done]). Handlers of one
// CQ are called one after the other from one goroutine that belongs to the CQ;
// a handler must not block, and may post. The goroutines that read and write the wire never
// call a handler, so nothing a handler does delays an answer to an RDMA Read.
//
// An unsignaled request produces a completion only when it fails or is flushed.
// When a QP leaves the ready state every request still queued, signaled or
// not, completes with [StatusWRFlushErr] (or with the error that ended the connection).
//
// # Memory
//
// Memory that a device touches comes from [AllocBuffer]: anonymous mmap, page
// aligned, outside the garbage collector's reach. A provider that can register
// any memory says so with [CapRegisterAny].
package verbs
