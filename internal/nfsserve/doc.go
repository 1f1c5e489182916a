// Package nfsserve is what `nfsrdmad serve` runs: an RDMA port in front of an NFSv3 server that is
// reached over TCP. Either that server is given by address ([Config.Backend]), or it is made here
// from a directory ([Config.Dir]).
//
//	RDMA port ── svcrdma ── proxy ──TCP──► the backend
//	                          └────TCP──► the directory's own TCP port ── front ── go-nfs ── exportFS ── os.Root
//
// # What is where
//
//	serve.go   Run, Config, Server: start and orderly end
//	proxy.go   calls from RDMA to the backend, XIDs kept, one small pool of TCP connections per client connection
//	tcp.go     RPC over TCP server (RFC 5531 §11) in front of a directory
//	front.go   what stands before go-nfs: well-formed calls only, credentials, what go-nfs lacks, repair of what it answers
//	args.go    shape of every NFSv3 argument (RFC 1813 §3.3)
//	native.go  SETATTR, LINK, MKNOD, exclusive CREATE, COMMIT, and the procedures of MOUNT and the port mapper
//	worker.go  go-nfs instances, one call each at a time
//	tree.go    file handles: by inode, alive through renames and as long as one of the links lives
//	exportfs.go, creds.go  the directory as go-nfs's file system, under the caller's uid and gid
//
// # What go-nfs is kept from
//
// github.com/willscott/go-nfs decodes lengths unchecked, answers with as many octets as are asked
// for, follows symbolic links, forgets handles on rename, has no LINK that follows RFC 1813, no
// EXCLUSIVE create and no char devices, runs everything as the server's user, says FILE_SYNC
// without fsync, answers most failures with NFS3ERR_IO, and numbers accept_stat wrongly. All that
// is dealt with before or behind it. What stays: atime and ctime are reported as mtime, FSID is 0,
// and pre-operation attributes are often left out.
//
// # Promises and locks
//
// No call reaches outside the directory: every path goes through os.Root, and no operation follows
// a symbolic link. The tree's lock is held shared for the length of a call and exclusively for
// RENAME, REMOVE and RMDIR, so that a handle's path does not change under an operation; it covers
// local file system calls only, never the network. Connections on TCP, and the calls that are under
// way on all of them together, are bounded: small calls ask for large replies.
package nfsserve
