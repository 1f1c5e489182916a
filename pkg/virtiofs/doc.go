// Package virtiofs serves a file system to a virtual machine: it is the back-end of a
// vhost-user-fs device (virtio 1.2 §5.11; QEMU, docs/interop/vhost-user.rst).
//
// The virtual machine monitor (VMM) connects to a Unix socket, passes descriptors of the guest's
// memory and of eventfds, and tells the addresses of the virtqueues. The guest's kernel then puts
// FUSE requests into the queues. This package copies each request from the guest's memory, checks
// it, and gives it to a front.Handler.
//
// # Files
//
//	listen.go   the socket
//	server.go   Server: accepts one VMM at a time
//	conn.go     vhost-user messages of one VMM
//	memory.go   the guest's memory
//	ring.go     split virtqueue (virtio 1.2 §2.7)
//	request.go  one FUSE request
//	check.go    checks of FUSE requests that the kernel makes for /dev/fuse
//
// # Trust
//
// The guest is hostile. It can change its memory at any time, so each descriptor and each request
// is read once, into memory of this process. A guest that breaks the rules of virtio loses its
// queue: it is stopped, and the log has the reason. FUSE requests with invalid names, nodes or
// sizes get an error. The VMM is trusted as far as its user is: the mode of the socket is 0600. Its
// messages are checked nevertheless, and an invalid one ends the connection.
//
// The memory of the guest is a file of the VMM, which can be truncated while it is mapped. A fault
// in an access to this memory becomes an error (debug.SetPanicOnFault). No code outside memory.go
// gets a slice of the guest's memory.
//
// # Sessions
//
// A FUSE session begins with an INIT request and ends with DESTROY, with the next INIT, or with the
// connection. Then FileSystem.EndSession closes what the guest had open. A VMM that stops the
// queues and starts them again, for example to pause the guest, does not end the session.
//
// # Goroutines
//
// One goroutine accepts connections, one reads the messages of the VMM, and one for each queue
// waits for kicks. Each request has a goroutine, so that a lock that waits delays no other request.
// The size of the queue bounds the requests in progress. FORGET and INTERRUPT have no goroutine.
package virtiofs
