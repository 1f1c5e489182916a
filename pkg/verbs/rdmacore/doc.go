// Package rdmacore is the verbs provider for RDMA devices: InfiniBand, RoCE and iWARP cards, and
// the kernel's soft devices rxe and siw, through libibverbs and librdmacm.
//
// It is built with cgo and -tags rdmacore, from the headers of libibverbs-dev and librdmacm-dev;
// otherwise [New] and [Available] say that it was not. The libraries themselves are opened when the
// provider is first asked for, so one program serves machines with and without them.
//
// # Memory
//
// Each arena of membuf.Alloc is registered once for each protection domain, when it is first used
// there, with local rights and the right to bind windows to it, until the one or the other ends.
// Nothing ever has a remote key for longer than one use of it:
//
//   - A FastReg binds a type-2 memory window to its piece of the arena (BIND_MW), in the chain in front of the Send. LOCAL_INV, or the peer's Send
//     With Invalidate, unbinds it (docs/features.md S4, S7, S9-S11). The upper 24 bits of the key are the window's, the lower 8 the consumer's, who must
//     take others than the time before. Windows that are still bound when their queue pair ends are deallocated before it.
//   - A device without windows gets a registration of its own for each use (verbs.CapPerIOReg): ibv_reg_mr before the
//     chain, as that alone tells the key, and ibv_dereg_mr at the LocalInv, before it completes. That is slower, and fences as well: only the key
//     is good on every QP of the protection domain until then.
//
// Whether a device has windows is found out by trying: one is allocated when the device is opened.
// If the first bind fails all the same, the connection ends and the next one finds a [verbs.Device]
// that registers for each use. Capability bits are not asked.
//
// # Completions
//
// A goroutine of each CQ polls it, a batch in one call, and calls the handlers. While completions
// keep coming it polls an empty queue for some microseconds more (spin.go) before it sleeps on the
// completion channel, in Go's poller. A chain is posted with one call, from C memory that is the
// queue pair's. C keeps no Go pointer.
//
// A device says nothing of an unsignaled request that succeeded, so each QP keeps a ring of what
// was posted (ring.go): a completion ends everything before it. Draining puts a signaled marker
// behind the rest. A device that does not flush in time has its QP destroyed; what is left is then
// flushed here. So Drain and Close always return, also when the device is gone.
//
// # Endings
//
// A connection ends by an event of the connection manager (disconnected, device removal, address
// change), an asynchronous event of the device (its failure, port down, an access that was
// refused), or a completion that failed, whichever comes first; OnDisconnect gets the best reason
// that is known soon. The connection manager's event for a peer that disconnected is io.EOF.
// Terminate messages are the device's secret (no verbs.CapTerminates).
//
// # What devices do not keep
//
// The verbs contract is the device's to keep. The kernel's soft devices, as stock Linux 6.12 has
// them, break some of it, which nothing here can mend:
//
//   - rxe: a window reaches all of the arena that it is bound to, its own bounds are not checked; so keep arenas small. A Read of the peer that was begun
//     goes on after the invalidation. The kernel panics when a window that is not bound is invalidated: none is from here, and for fear of
//     a meeting of the two the device does not get verbs.CapRemoteInv, but a hostile peer needs no leave.
//   - siw: ibv_dereg_mr does not wait for the FPDU that is being placed or sent. A Read without the right gets no answer. A message of a few octets that
//     crosses a page boundary arrives changed. Its library cannot make a queue at one place of a
//     process (siwqueues.go). Its listener does not survive connects that end at once, or many at a time (connectturn.go).
//
// test/lab/rdmacore names the rules of the conformance suite that each breaks. Neither is meant for
// hostile peers.
//
// An rxe or siw peer on this machine must be reached by the machine's own address; network
// namespaces do not work with the kernel's soft devices. Connect returns when its context ends, but
// Close then waits for the kernel, which may still be connecting to a peer that does not answer
// (siw). libsiw tells neither of Sends With Invalidate nor why a request of its own was refused.
// One message of rxe's connection manager that finds no route, as after "ip link set … down", ends
// that manager (its queue pair 1 stays in the error state) until the device is made anew: so
// nothing is begun on a port that is down, but the kernel itself may say good-bye to its peers
// then.
//
// # Devices that go away
//
// A removed device is learned of in three ways: its place in sysfs is gone, which is looked at once
// a second; an asynchronous event says that it has failed; the connection manager says so. The
// first is there for the soft devices: their drivers cannot take a device away from programs that
// have it open (no disassociate_ucontext), the kernel's ib_uverbs waits for those, and where it was
// loaded after rdma_cm, nobody tells them before. Drivers of cards can, and then every call fails
// with EIO.
//
// Then everything of the device is destroyed here, whoever uses it: queue pairs, with what is
// posted on them flushed; completion queues; windows and registrations; protection domains
// (devicecontext.go). What consumers hold are shells, which they close as ever; MRs are as fenced
// as can be, and cannot be made anew. Last, the descriptors of the context are given back to the
// kernel, although librdmacm keeps the context: it closes one only when it lists devices again and
// finds others. From then on the removal of the device can end.
//
// Connecting finds a device that is back by itself.
//
// # Goroutines and locks
//
// One goroutine for the connection events of the process, one for the asynchronous events of a
// device in use, one dispatcher for each CQ. All end with the last object that needs them. Handlers
// run on the dispatcher, OnDisconnect on a goroutine of its own.
//
//	connID.call           the kernel connects or accepts; held over that call
//	connID.mu             what is known of a connection
//	devices.mu            the devices that are open; before device.mu
//	deviceContext.life           whether a device is gone: tried for reading, never waited for, around calls that make something of it
//	device.mu             users, queues and domains of a device; before qp.mu
//	qp.mu                 state, send ring, the chain that is being posted; held around the call that posts it
//	qp.rqMu               receive ring; held around the call that posts
//	window.mu, useMR.mu   one registration; may be taken inside qp.mu
//	completionQueue.mu    the QPs of a CQ; innermost
//	handling              librdmacm uses or destroys a queue pair
//
// # Files
//
//	shim.h, shim.c                what is called of the libraries; the table of functions
//	ring.go, spin.go, piece.go, translate.go, codes.go   what needs no device
//	present.go, absent.go, config.go           whether there is a provider at all
//	channel.go, connid.go, connect.go, listen.go, connectturn.go   connections
//	devicecontext.go                     devices that are open, and their removal
//	device.go, siwqueues.go, domain.go, region.go   devices as connections see them, protection domains, memory
//	qp.go, post.go, cq.go         queues
package rdmacore
