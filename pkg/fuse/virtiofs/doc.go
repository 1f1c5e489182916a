// Package virtiofs serves a file system to a virtual machine: it is the back-end of a
// vhost-user-fs device (virtio 1.2 §5.11; QEMU, docs/interop/vhost-user.rst).
//
// The virtual machine monitor (VMM) connects to a Unix socket, passes descriptors of the guest's
// memory and of eventfds, and tells the addresses of the virtqueues. The guest's kernel then puts
// FUSE requests into the queues. This package copies each request from the guest's memory and gives
// it to a kernel.Request, which checks it. The data of READ and WRITE is not copied, see Data.
//
// # Files
//
//	listen.go       the socket
//	server.go       Server: accepts one VMM at a time
//	conn.go         vhost-user messages of one VMM: what they do
//	message.go      vhost-user messages: each is handled once
//	memory.go       the guest's memory
//	ring.go         split virtqueue (virtio 1.2 §2.7)
//	request.go      one FUSE request
//	state.go        State: records of a share for the next process
//	descriptors.go  descriptors of a share for the next process
//	resume.go       the continuation of a share of an earlier process
//
// # Trust
//
// The guest is hostile. It can change its memory at any time, so each descriptor and each request
// is read once, into memory of this process. A guest that breaks the rules of virtio loses its
// queue: it is stopped, and the log has the reason. FUSE requests with invalid names, nodes or
// sizes get an error (package kernel). The VMM is trusted as far as its user is: the mode of the
// socket is 0600. Its messages are checked nevertheless, and an invalid one ends the connection.
//
// The memory of the guest is a file of the VMM, which can be truncated while it is mapped. A fault
// in an access to this memory becomes an error (debug.SetPanicOnFault). No code outside memory.go
// gets a slice of this memory.
//
// # Data
//
// Memory that cannot fault is an exception: its file is a memfd with a sealed size (F_SEAL_SHRINK)
// and without huge pages, and the host has no strict overcommit. QEMU's memory-backend-memfd
// makes such files. Other packages get slices of this memory for data only:
//
//   - The data of a READ arrives there: softiwarp reads it from its socket into the guest's pages.
//     The request ends after the registration of the pages is invalidated, as for any buffer. The
//     pages must be pieces that meet at page boundaries, and the file system must have
//     vfs.Options.ReadInPlace. Otherwise the data is copied from a buffer (request.Send).
//   - The data of a WRITE is copied from there to an extent.
//
// The guest can change data at any time. No code decides anything by data there: sizes come from
// the descriptors and from the reply of the server, which are in memory of this process.
//
// # Memory of requests
//
// A connection reuses the memory of its requests. The most frequent requests do not allocate in
// this package and in package kernel, except for a name that is not among the last ones.
//
// # Sessions
//
// A FUSE session begins with an INIT request and ends with DESTROY, with the next INIT, or with the
// connection. Then FileSystem.EndSession closes what the guest had open. A VMM that stops the
// queues and starts them again, for example to pause the guest, does not end the session.
//
// # The end of the process
//
// A share with a State in a descriptor store continues in another process, however this one ends.
// The VMM and the guest see a pause. The package works the same without a store.
//
// The lock of a ring orders all changes of its records, so one operation at most is incomplete:
//
//	take      record the request, then the next index
//	          in between: the request is in progress, and also the next one; see skipTaken
//	complete  record the completion, write the used element and the index, remove the request,
//	          remove the completion
//	          in between: the next process repeats all of it, with the same result
//
// The file system learns that a request has its reply (Replied) after it was completed. A request
// that was in progress is read again from the guest's memory, and handled again with the same
// number and kernel.Message.Resent. The guest may have changed it meanwhile, which harms only the
// guest. FORGET is completed before it is handled, because it must not be handled twice: if the
// process is killed in between, the file system keeps the node until the end of the session.
//
// The State has counters and records in shared memory (package slotfile). Descriptors in use are in
// the queue of a socket before a record refers to them, and leave it after no record does.
//
// accept(2) is the exception: a connection ends if the process is killed before it is in the queue.
//
// # Goroutines
//
// One goroutine accepts connections, one reads the messages of the VMM, and one for each queue
// waits for kicks. Each request has a goroutine, so that a lock that waits delays no other request.
// The size of the queue bounds the requests in progress. FORGET and INTERRUPT have no goroutine.
package virtiofs
