// Package nfsd is an NFS server for one directory: the 22 procedures of NFS version 3 and MOUNT
// version 3 (RFC 1813), NFSACL version 3, the port mapper (RFC 1833), and the locks of package
// nlmd. It knows no transport. A [Server] gets each call as an RPC message, from svcrdma or from a
// TCP connection, and returns the reply.
//
// # What is where
//
//	server.go   Config, New, Close; handles to objects; fsync and the write verifier
//	call.go     one call from its RPC header to the status of its reply
//	rpc.go      MOUNT and the port mapper
//	acl.go      NFSACL: GETACL, SETACL
//	lock.go     which files a caller may lock
//	attr.go     GETATTR, SETATTR, ACCESS, permissions
//	data.go     READ, WRITE, COMMIT, READLINK, FSSTAT, FSINFO, PATHCONF
//	names.go    LOOKUP, CREATE, MKDIR, SYMLINK, MKNOD, REMOVE, RMDIR, RENAME, LINK
//	readdir.go  READDIR, READDIRPLUS
//	handle.go   layout and signature of file handles, their key
//	paths.go    files by inode number, where the kernel cannot open them by handle
//	object.go   table of objects in use with their descriptors; shared fsyncs; cached permissions
//	cred.go     credentials, squashing, the identity of threads
//	sys.go      system calls
//
// # File handles
//
// A handle holds the kernel's own handle of the file (name_to_handle_at(2)) and a signature (MAC)
// over it and the identity of the export. The key of the signature is kept in Config.StateDir, so
// that handles survive a restart of the server. A client cannot reach a file outside the export by
// inventing a handle, because it cannot sign it; a directory that was moved out of the export is
// found by walking up from it. A file that a local process moves out of the export stays reachable
// by the handles that clients have, as with the kernel's server and no_subtree_check (exports(5)).
// The server cannot tell where a file is: the kernel opens it by its handle without its name, the
// path of such a descriptor is "/" until somebody looks the name up, and a file can have several
// names. A handle with the directory of the file, as subtree_check uses it, becomes stale when the
// file moves inside the export.
//
// Where the kernel does not open files by handle (the file system has no export support, or the
// process lacks CAP_DAC_READ_SEARCH), a handle holds the inode number and the creation time. The
// server remembers the path of each file that it has shown to a client. After a restart it reads
// the whole export once, at most 1,048,576 files and 10 seconds, and then knows the paths again. A
// handle that is not found is stale; while the server may not search again, the status is
// NFS3ERR_JUKEBOX. On file systems that do not report a creation time, a reused inode number cannot
// be told from the file that had it before.
//
// # Identity
//
// The server runs as root, and each change of the file system runs as the caller: fsuid, fsgid and
// groups of the thread are the caller's, and the capabilities that bypass permissions, quotas and
// reserved blocks are off. Every switch is verified, and the call is refused when the kernel does
// not take it. Whether a caller may read, search or look up is also decided by the kernel
// (faccessat2(2) as the caller); the decision is kept while ctime, mode and owner stay. A server
// that does not run as root does everything as its own user.
//
// A thread has the caller's identity only between runtime.LockOSThread and UnlockOSThread in
// [identity.as].
//
// # Durability
//
// CREATE, MKDIR, SYMLINK, MKNOD, REMOVE, RMDIR, RENAME, LINK and SETATTR are on disk before the
// reply. Concurrent calls share fsyncs ([syncer]). The write verifier is new with each start of the
// server. It changes when an fsync fails, so that every client sends its uncommitted data again. A
// descriptor with uncommitted data is never closed without an fsync, because a later descriptor
// might not see the write error.
//
// # Limits
//
// The server needs /proc: it opens files for I/O by the names of their descriptors there.
// Symbolic links are never followed. File systems mounted below the directory are not exported: a
// LOOKUP of their mount point ends with NFS3ERR_XDEV. The objects table is bounded by the
// descriptors that the process may have; calls in progress are bounded by slowCalls. Over RDMA,
// svcrdma keeps a duplicate request cache. Over TCP, a client that sends a call again on a new
// connection has it executed again, so that for example a repeated REMOVE ends with NFS3ERR_NOENT.
//
// A file that a client has written stays open for writing until some seconds after its COMMIT. A
// local process cannot execute the file during that time (ETXTBSY).
//
// # Locks
//
// objects.mu guards the table and is held for no system call. object.open guards the descriptors,
// and the position of a directory's while a listing is read. object.perms guards the cached
// permissions, object.setting serializes SETATTRs, syncer.mu guards the count of fsyncs.
// pathTable.walk is held during the search of the export, pathTable.state for table accesses only.
package nfsd
