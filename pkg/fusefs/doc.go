// Package fusefs serves an NFSv3 file system through /dev/fuse.
//
// The package translates the requests of the kernel's FUSE client to NFSv3 procedures (RFC 1813).
// The package keeps the state of an NFS client: the file handle of each node, cached attributes
// with their age, and written data that is not yet stable on the server. The package does not
// depend on a transport: an nfs3.Client makes its calls.
//
// # Files
//
//	fs.go         FS, Options, New, Close
//	mount.go      Mount and Server
//	unmount.go    unmount, abort, and mount points that other programs detached
//	device.go     /dev/fuse, mount(2), the mount table
//	request.go    one kernel request as a context; interrupts end its RPCs
//	cred.go       uid, gid and groups of the calling process as AUTH_SYS (RFC 5531 appendix A)
//	inode.go      the inode table: node number, file handle, lookup count
//	attr.go       attributes: conversion, age, weak cache consistency (RFC 1813 §2.6, §3.3.1)
//	nodes.go      GETATTR, SETATTR, ACCESS, READLINK, FSSTAT
//	names.go      LOOKUP and the procedures that make names (RFC 1813 §3.3.3, §3.3.8 to §3.3.11, §3.3.15)
//	remove.go     REMOVE, RMDIR, RENAME, and the renaming of open files ("silly rename")
//	openremove.go the order of an open and a concurrent removal of the same file
//	file.go       open, create, flush, fsync, release: close-to-open consistency
//	read.go       READ into the buffer that is written to /dev/fuse
//	write.go      write-behind: extents, WRITE
//	commit.go     COMMIT, write verifiers, replay (RFC 1813 §3.3.7, §3.3.21, §4.8)
//	readdir.go    READDIR and READDIRPLUS (RFC 1813 §3.3.16, §3.3.17)
//	owner.go      the process on whose behalf an RPC is made
//	counters.go   counters
//
// # Promises
//
// Consistency is close-to-open. An open gets the file's attributes from the server and drops the
// kernel's cached pages when the attributes changed. A close returns after all written data is on
// stable storage, or returns the write error. A read returns all earlier writes on the same mount.
//
// Data is sent UNSTABLE and kept until a COMMIT returns the verifier of every WRITE. When the
// server restarts in between, the data is sent again in order.
//
// The buffer pool bounds the memory for data. Readers and writers share it. A request that finds
// the pool empty first writes back other files. A pool with a single buffer is slow but correct.
//
// No reply of a server causes a panic or an endless loop. Package nfs3 checks handles, names and
// lengths. This package returns EIO for repeated directory cookies, for reads without progress, and
// for write verifiers that keep changing.
//
// A file that is open on the mount stays usable after this mount removes or replaces it, even when
// the open and the removal run concurrently. A file that another client removes becomes stale.
//
// A signal that does not terminate the process does not interrupt its calls. Local file systems and
// Linux's NFS client behave the same (nfs(5), "intr"). A fatal signal ends the RPC, and the call
// returns EINTR. Data that the process wrote before is written in the background. When the mount is
// aborted, calls return EIO.
//
// After Unmount or ForceUnmount succeeds, this file system is not mounted at the mount point.
// Mounts of other programs there stay. When the connection is ended from outside, the file system
// is unmounted automatically.
//
// # Locks
//
// inodeTable.mu guards the maps, lookup counts, open counts and removals in flight. inode.mu guards
// one node's attributes. writeback.mu (in the inode) guards the node's extents. interrupts.mu
// guards the active requests. reopens.mu, FS.handles and FS.dirty each guard one table.
//
// dirHandle.mu serializes the reads of one open directory. No other lock is held during an RPC.
// Server.mu is held during umount(2), which may wait for the server. Only unmounts take Server.mu.
//
// Lock writeback.mu before FS.dirty and inode.mu, and inodeTable.mu before inode.mu. Take each
// other lock alone.
package fusefs
