// Package fusefs serves an NFSv3 file system through /dev/fuse.
//
// It turns the requests of the kernel's FUSE client into NFSv3 procedures (RFC 1813) and keeps what
// a client must keep: which file handle stands behind which node, what attributes were seen when,
// and which written data the server has not made stable yet. It knows no transport: an nfs3.Client
// carries its calls.
//
// # What is where
//
//	fs.go         FS, Options, New, Close
//	mount.go      Mount and Server
//	unmount.go    unmount, abort, and mount points that others left behind
//	device.go     /dev/fuse, mount(2), the mount table
//	request.go    one kernel request as a context: interrupts (RFC 1813 knows none; the RPC is given up)
//	cred.go       uid, gid and groups of the calling process as AUTH_SYS (RFC 5531 appendix A)
//	inode.go      the inode table: node number, file handle, lookup count
//	attr.go       attributes: conversion, age, weak cache consistency (RFC 1813 §2.6, §3.3.1)
//	nodes.go      GETATTR, SETATTR, ACCESS, READLINK, FSSTAT
//	names.go      LOOKUP and the procedures that make names (RFC 1813 §3.3.3, §3.3.8 to §3.3.11, §3.3.15)
//	remove.go     REMOVE, RMDIR, RENAME, and the renaming of open files ("silly rename")
//	openremove.go an open beside a removal of the same file
//	file.go       open, create, flush, fsync, release: close-to-open consistency
//	read.go       READ into the buffer that is written to /dev/fuse
//	write.go      write-behind: extents, WRITE
//	commit.go     COMMIT, write verifiers, replay (RFC 1813 §3.3.7, §3.3.21, §4.8)
//	readdir.go    READDIR and READDIRPLUS (RFC 1813 §3.3.16, §3.3.17)
//	counters.go   what is counted
//
// # Promises
//
// Close-to-open: an open asks the server for the file's attributes and drops the kernel's pages
// when they changed; a close returns when every octet written is on stable storage, or returns the
// error that kept it from there. Data is sent UNSTABLE and kept until a COMMIT returned the
// verifier of every WRITE; a server that restarted in between gets it again, in order. A read of a
// file sees every write made before it on the same mount.
//
// Memory for data is bounded by the buffer pool, which readers and writers share. Who finds it
// empty writes back other files first, so a pool of a single buffer is slow and correct.
//
// Nothing that a server sends panics or loops: handles, names and lengths are checked below in
// nfs3; here, directory cookies that repeat, reads that make no progress, and verifiers that never
// settle end in EIO.
//
// A file that is open on the mount keeps working after this mount removed or replaced it, also when
// the open and the removal run side by side. What other clients remove is stale.
//
// A signal that does not kill a process does not disturb its calls, as on every disk and as in
// Linux's own NFS client (nfs(5), "intr"); a deadly one ends the RPC, and the call returns EINTR.
// What such a process wrote before is written back behind it. When the mount is aborted, calls
// return EIO.
//
// After Unmount and ForceUnmount succeed, nothing of ours is mounted at the mount point; what
// others mounted there stays. A mount whose connection is ended from outside leaves the mount point
// by itself.
//
// # Locks
//
// inodeTable.mu guards the maps, lookup counts, open counts and the removals under way. inode.mu
// guards one node's attributes. writeback.mu (in the inode) guards its extents. dirHandle.mu makes
// the reads of one open directory take turns, and is the only one held during an RPC: it belongs to
// one open directory. Order: writeback.mu before FS.dirtyMu and inode.mu, inodeTable.mu before
// inode.mu; the others are taken alone. interrupts.mu guards the requests under way, reopens.mu and
// FS.handlesMu a table each. Server.mu is held during umount(2), which may wait for the server, and
// only by those who unmount.
package fusefs
