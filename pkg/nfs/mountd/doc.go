// Package mountd is a client of a server's MOUNT version 3 service (RFC 1813 §5) and of its port
// mapper (RFC 1833 §3), both over TCP. MOUNT returns the file handle of an export, and the port
// mapper returns the TCP port of MOUNT. RFC 8267 §5.1 keeps both on TCP beside NFS over RDMA.
//
// # Files
//
//	mount.go   Mount, Unmount, Null, Exports, FindPort, GetPort
//	decode.go  the results of MOUNT and of the port mapper
//	errors.go  Error and its kinds, Stat (mountstat3)
//
// # Use of go-nfs-client
//
// The protocol numbers, the encoding of arguments and the decoding of results come from
// github.com/vmware/go-nfs-client. Its decoders trust the peer: they allocate what the message
// claims, and they can panic. File decode.go therefore checks every length first and recovers from
// panics. The calls go through internal/rpctcp, which also checks the reply header.
//
// This package does not use the following parts of go-nfs-client. Its RPC client has no deadline,
// ignores fragments, and panics on a denied call. Its MOUNT client dials NFS over TCP after MNT.
// Its AUTH_SYS encoder adds group 0 to every credential, so the credential comes from package
// sunrpc.
//
// # Promises
//
// Every function returns when its timeout expires or its context ends. No goroutine and no
// connection remains. Every error is an [*Error] that names host, port and export and says what to
// do. The functions share no state and are safe for concurrent use.
package mountd
