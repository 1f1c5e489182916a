// Package rdmacore is the verbs provider for RDMA devices. It uses libibverbs and librdmacm. It
// supports InfiniBand, RoCE and iWARP cards, and the kernel's soft devices rxe and siw.
//
// Building it needs cgo, -tags rdmacore, and the headers of libibverbs-dev and librdmacm-dev. In a
// program built without them, [New] and [Available] return an [UnavailableError]. The first use
// opens the libraries at run time, so one program runs on machines with and without them.
//
// # Memory
//
// The first use of a membuf arena in a protection domain registers the arena there. The
// registration has local rights and, on devices with windows, the right to bind windows. It ends
// with the arena or with the protection domain. A remote key is valid for one use only:
//
//   - On a device with windows, a FastReg binds a type-2 memory window to its part of the arena
//     (BIND_MW). The bind is in the chain before the Send. LOCAL_INV or the peer's Send With
//     Invalidate unbinds the window (docs/features.md S4, S7, S9-S11). The upper 24 bits of the key
//     belong to the window. The consumer chooses the lower 8 bits and must change them for each
//     use. Windows that are still bound when their queue pair ends are deallocated before it.
//   - On a device without windows, each use has a separate registration (verbs.CapPerIOReg).
//     ibv_reg_mr runs before the chain is built, because only ibv_reg_mr returns the key.
//     ibv_dereg_mr runs at the LocalInv, before the LocalInv completes. This is slower and stops
//     the peer's access just as well, with one difference: until the LocalInv the key is valid on
//     every QP of the protection domain.
//
// Opening a device allocates one window to find out whether the device has windows. The provider
// does not read capability bits. If the first bind fails on a device with windows, the connection
// ends. The next connection then gets a [verbs.Device] that registers memory for each use.
//
// # Completions
//
// Each CQ has one goroutine, its dispatcher. It polls the CQ for a batch in one call and calls the
// handlers. It polls an empty CQ for some microseconds while completions arrive quickly (spin.go).
// Then it sleeps on the completion channel in Go's poller. One call posts a whole chain, from C
// memory of the queue pair. C keeps no Go pointer.
//
// A device does not report an unsignaled request that succeeded. Each QP therefore keeps a ring of
// the posted requests (ring.go), and a completion also completes everything before it. Drain posts
// a signaled marker behind the last request. If a device does not flush in time, its QP is
// destroyed, and this package flushes the remaining requests. Drain and Close therefore always
// return, even after the device was removed.
//
// # End of a connection
//
// The first of these events ends a connection:
//
//   - an event of the connection manager: disconnected, device removal, address change
//   - an asynchronous event of the device: device failure, port down, access without the right
//   - a failed completion
//
// OnDisconnect gets the best cause known after a short wait. The cause is io.EOF if the peer
// disconnected. Devices do not report Terminate messages, so the provider does not have
// verbs.CapTerminates.
//
// # Limits of the soft devices
//
// The device must implement the verbs contract. The kernel's soft devices break parts of it, as of
// stock Linux 6.12, and this package cannot correct that.
//
// rxe:
//
//   - rxe does not check the bounds of a window. The peer can access the whole arena to which
//     the window is bound. Keep arenas small.
//   - An RDMA Read that the peer has started continues after the invalidation.
//   - The kernel panics when a window is invalidated that is not bound. This package never
//     invalidates one. The device does not get verbs.CapRemoteInv, because the peer's Send With
//     Invalidate could meet a LOCAL_INV. A hostile peer can still send a Send With Invalidate.
//   - The connection manager of rxe stops working after one message without a route, for example
//     after "ip link set … down". Its queue pair 1 stays in the error state until the device is made
//     again. This package therefore starts no connection on a port that is down. The kernel
//     may still send disconnect messages at that time.
//
// siw:
//
//   - ibv_dereg_mr does not wait for the FPDU that is being placed or sent.
//   - An RDMA Read without the right gets no answer.
//   - A message of a few bytes that crosses a page boundary arrives changed.
//   - libsiw cannot create a queue at one mmap offset of a process (siwoffset.go).
//   - A siw listener stops working after a connect that ends at once, or after many
//     simultaneous connects (iwarpconnect.go).
//   - Connect returns when its context ends. Close then waits for the kernel, which may still
//     be connecting to a peer that does not answer.
//   - libsiw reports neither a Send With Invalidate nor the cause of a refused local request.
//
// Reach an rxe or siw peer on the same machine by an address of that machine. Network namespaces do
// not work with the kernel's soft devices. test/lab/rdmacore lists the rules of the conformance
// suite that each device breaks. Do not use rxe or siw with hostile peers.
//
// # Device removal
//
// This package detects the removal of a device in three ways:
//
//   - The device's place in sysfs is missing. pollDevices checks this once a second.
//   - An asynchronous event reports that the device failed.
//   - The connection manager sends a removal event.
//
// The check in sysfs is for the soft devices. Their drivers have no disassociate_ucontext, so they
// cannot take a device from the programs that have it open. The kernel's ib_uverbs waits for these
// programs. If ib_uverbs was loaded after rdma_cm, the connection manager sends no removal event
// while ib_uverbs waits. Drivers of cards can take a device away; then every call fails with EIO.
//
// After a removal this package destroys all objects of the device, even those that consumers hold
// (devicecontext.go). The order is: queue pairs, whose requests are flushed; CQs; windows and
// registrations; protection domains. Consumers keep empty objects and close them as usual. The
// peer's access to MRs ends as far as the device supports it. New MRs cannot be made. Last, the
// descriptors of the context are closed, so the removal of the device can finish. librdmacm keeps
// the context. It closes the context only when it lists the devices again and the list has changed.
//
// A device that was added again is used by the next connection. No restart is needed.
//
// # Goroutines and locks
//
// One goroutine reads the connection events of the process. One goroutine per device in use reads
// its asynchronous events. Each CQ has one dispatcher. Each goroutine ends with the last object
// that needs it. Handlers run on the dispatcher, and OnDisconnect runs on a separate goroutine.
//
//	connID.callMu                    the kernel's call that connects or accepts
//	connID.setup                     progress of a connection; before qp.sq
//	sharedChannel                    the event channel of the process and its users
//	eventChannel.handlers            handlers of connection events; innermost
//	eventMu                          librdmacm processes an event, or a queue pair is destroyed
//	                                 whose connection was not established
//	devices                          the open devices; before device.objects
//	deviceContext.useMu              held for reading by calls that create objects of the device,
//	                                 with TryRLock, so they never wait
//	device.objects                   users, queues and protection domains of a device; before qp.sq
//	qp.sq                            state, send ring and chain; held during the call that posts it
//	qp.rq                            receive ring; held during the call that posts to it
//	window.mu, perIOMR.mu            one registration; may be taken inside qp.sq
//	protectionDomain.registrations   arenas of a protection domain; may be taken inside window.mu
//	regionTable.mu                   regions by key; innermost
//	completionQueue.qps              QPs of a CQ; innermost
//
// # Files
//
//	shim.h, shim.c              calls of the libraries, through a table of functions
//	ring.go, spin.go            send and receive rings; polling before a sleep
//	translate.go, codes.go      statuses, events and errors of the libraries
//	contiguous.go               segments of a FastReg
//	provider.go, config.go      the provider and its configuration
//	notbuilt.go                 the provider of a program built without the libraries
//	channel.go                  connection events
//	connid.go                   connection set-up and end on both sides
//	connect.go, listen.go       the connecting side, the accepting side
//	iwarpconnect.go             one connect to an iWARP peer at a time
//	devicecontext.go            open devices and their removal
//	device.go, siwoffset.go     devices as connections see them
//	domain.go, region.go        protection domains and memory
//	qp.go, post.go, cq.go       queues
package rdmacore
