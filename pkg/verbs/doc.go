// Package verbs defines the RDMA vocabulary of this project as small interfaces: device, protection
// domain, memory region, queue pair, completion queue, work request, work completion and connection
// event. Packages softiwarp and rdmacore implement the interfaces. Packages memreg, xprt and
// svcrdma use only the interfaces, not the providers.
//
// # Ownership and ordering
//
// A chain of work requests given to [QP.PostSend] is executed in order. The provider copies each
// [WorkRequest] and its SGE list before PostSend returns, so the caller may reuse the structs at
// once. The memory that they name must not change until the request, or a later signaled one on the
// same queue, has completed. The Segs of a FastReg are an exception: the slice belongs to the
// registration and must not change until the MR is invalidated or destroyed, or the QP is closed.
//
// Each completion carries its handler ([WorkRequest.Done]). One goroutine per CQ calls the handlers
// of that CQ one after the other. A handler must not block, and may post. The goroutines that read
// and write the wire never call a handler, so a handler cannot delay the answer to an RDMA Read.
//
// An unsignaled request produces a completion only when it fails or is flushed. When a QP leaves
// the ready state, every queued request completes with [StatusWRFlushErr] or with the error that
// ended the connection, whether it is signaled or not.
//
// # Memory
//
// Memory that a device accesses comes from membuf.Alloc: anonymous mmap, page aligned, outside the
// Go heap. A provider that can register any memory has [CapRegisterAny].
package verbs
