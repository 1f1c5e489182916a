// Package nfs3 is NFS version 3 (RFC 1813) as typed calls: a [Client] makes all 22 procedures over
// any [Caller], an RPC transport that it knows nothing about. MOUNT and the port mapper are in the
// sub-package mountd.
//
// # What is where
//
//	rfc1813.go     the protocol's numbers (RFC 1813 §2.4, §2.5)
//	types.go       handles, attributes, times (RFC 1813 §2.5, §2.6)
//	results.go     one struct for what each procedure returns (RFC 1813 §3.3)
//	status.go      nfsstat3, Error, and the way to error numbers (RFC 1813 §2.6)
//	limits.go      the maximum results that transports size replies by (RFC 8267 §3)
//	codec.go       XDR of the types, both ways
//	client.go      Client: one call from arguments to status
//	procs_attr.go  NULL, GETATTR, SETATTR, LOOKUP, ACCESS, FSSTAT, FSINFO, PATHCONF
//	procs_data.go  READLINK, READ, WRITE, COMMIT
//	procs_name.go  CREATE, MKDIR, SYMLINK, MKNOD, REMOVE, RMDIR, RENAME, LINK
//	procs_dir.go   READDIR, READDIRPLUS
//
// # Promises
//
// The data of READ and WRITE and the paths of READLINK and SYMLINK go beside the XDR stream (RFC
// 8267 §4), so that a transport can place them without a copy: Read's buffer is where an RDMA Write
// lands. What was placed must have the length that the reply states (RFC 8166 §3.4.6.2); otherwise
// the call fails and no octet of it is used.
//
// The server is never trusted. Each status, type, boolean and enumeration is checked, every length
// is held against the reply and the protocol's bound, names of directory entries are checked to be
// names; what fails is an error that wraps [ErrMalformed], and no directory entry of a reply is
// delivered unless all of it was good.
//
// A call that succeeds allocates nothing here: each borrows its buffers from a pool. The Client
// holds no lock while a call is on its way, and any number of calls may run at once.
package nfs3
