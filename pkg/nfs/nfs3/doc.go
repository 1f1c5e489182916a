// Package nfs3 implements the 22 procedures of NFS version 3 (RFC 1813) as methods of a [Client].
// The Client makes its calls over any RPC transport that satisfies [Caller]. MOUNT and the port
// mapper are in package mountd.
//
// # Files
//
//	rfc1813.go     numbers of the protocol (RFC 1813 §2.4, §2.5)
//	types.go       handles, attributes, times (RFC 1813 §2.5, §2.6)
//	results.go     one struct for the results of each procedure (RFC 1813 §3.3)
//	status.go      nfsstat3, Error, conversion to error numbers (RFC 1813 §2.6)
//	limits.go      maximum size of each result, for transports (RFC 8267 §3)
//	codec.go       XDR encoding and decoding of the types
//	client.go      Client: one call, from the arguments to the status
//	procs_attr.go  NULL, GETATTR, SETATTR, LOOKUP, ACCESS, FSSTAT, FSINFO, PATHCONF
//	procs_data.go  READLINK, READ, WRITE, COMMIT
//	procs_name.go  CREATE, MKDIR, SYMLINK, MKNOD, REMOVE, RMDIR, RENAME, LINK
//	procs_dir.go   READDIR, READDIRPLUS
//	serverargs.go  ParseArgs: the arguments of a call on the server side (RFC 1813 §3.3)
//	serverresults.go  append functions for results on the server side (RFC 1813 §2.5, §2.6)
//
// # Promises
//
// The data of READ and WRITE and the paths of READLINK and SYMLINK travel beside the XDR stream
// (RFC 8267 §4). A transport can therefore place them without a copy, for example by an RDMA Write
// into the buffer of Read. The length in the reply must equal the length of the placed data (RFC
// 8166 §3.4.6.2). Otherwise the call fails and the data is not used.
//
// The Client does not trust the server. It checks every status, type, boolean, enumeration, length
// and directory entry name. A failed check is an error that wraps [ErrMalformed]. The Client checks
// a complete directory listing before it passes on the first entry.
//
// A successful call does not allocate: each call takes its buffers from a pool. The Client holds no
// lock during a call, and any number of calls may run concurrently.
package nfs3
