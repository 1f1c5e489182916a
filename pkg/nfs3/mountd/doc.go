// Package mountd asks a server's MOUNT version 3 service (RFC 1813 §5) for the file handle of an
// export, over TCP, and its port mapper (RFC 1833 §3) for the port of that service. RFC 8267 §5.1
// has both stay on TCP beside NFS over RDMA.
//
// # What is where
//
//	mount.go   Mount, Unmount, Exports, Dump, Null, GetPort
//	decode.go  the results of MOUNT
//	errors.go  Error and its kinds, Stat (mountstat3)
//	fence.go   the relay between go-nfs-client and the server
//	dial.go    connections from reserved source ports
//
// # The fence around go-nfs-client
//
// The calls are made by the RPC client and the port mapper client of
// github.com/vmware/go-nfs-client. That library trusts its peer: its record reader allocates what a
// record mark claims and ignores fragments, its reply parser panics on a short verifier and on a
// denied call, it has no deadline, and it dials by itself. So it never meets the server. It
// connects to a listener of this package on the loopback device, behind which a relay passes one
// call and one reply at a time: records are at most 64 KiB, memory grows with what arrived, and a
// reply reaches the library only when it is a well-formed, accepted, successful answer to the call;
// every other outcome becomes an error of this package. A deadline ends all of it, and a panic is
// recovered from all the same.
//
// Not used are its AUTH_SYS encoder (it claims membership of group 0 for everyone), and its MOUNT
// client with the decoders for opaque data and lists (they allocate by claimed lengths, and
// NewTarget goes on to dial NFS over TCP): those parts are sunrpc's.
//
// The listener takes only a connection from a random source address of 127.0.0.0/8, so that another
// local process cannot slip in. Where the loopback device is down there is no MOUNT.
//
// # Promises
//
// Every function ends in the time given, when its context ends, or before, and leaves no goroutine
// and no connection. Every error is an [*Error] that names host, port and export and says what to
// do. The functions share nothing and may be called concurrently.
package mountd
