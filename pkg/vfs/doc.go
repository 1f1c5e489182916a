// Package vfs serves an NFS file system through package kernel.
//
// The package translates the requests of the kernel's FUSE client to calls of an NFS server.
// The package keeps the state of an NFS client: the file handle of each node, cached attributes
// with their age, and written data that is not yet stable on the server. The package does not
// depend on a version of NFS or on a transport: an nfs.Server makes its calls.
//
// # Files
//
//	fs.go         FS, Options, New, Close
//	mount.go      Mount and Server
//	request.go    what the FS keeps with a kernel.Request: the credential, the record, the target of a READ
//	cred.go       uid, gid and groups of the calling process as AUTH_SYS (RFC 5531 appendix A)
//	inode.go      the inode table: node number, file handle, lookup count
//	handlemap.go  nodes by file handle
//	shrink.go     memory that is returned after the kernel forgot many nodes
//	attr.go       attributes: conversion, GETATTR (RFC 1813 §3.3.1), stale nodes; package attr has what is
//	              known of them
//	pagecache.go  when the kernel drops cached pages
//	stale.go      names in stale directories
//	acl.go        POSIX ACLs (NFSACL), the umask
//	nodes.go      GETATTR, SETATTR, ACCESS, READLINK, FSSTAT
//	names.go      LOOKUP and the procedures that make names (RFC 1813 §3.3.3, §3.3.8 to §3.3.11, §3.3.15)
//	lookupcache.go lookups without a LOOKUP; package name has what is known of names
//	remove.go     REMOVE, RMDIR, RENAME, and the renaming of open files ("silly rename")
//	openremove.go the order of an open and a concurrent removal of the same file
//	file.go       open, flush, fsync, release: close-to-open consistency
//	create.go     CREATE, and the open of a file that another client created first
//	read.go       READ into memory of the connection, or into a buffer that the connection gives to the kernel
//	writebackcache.go writes that the kernel gathers in its pages
//	write.go      writes, and the store of written data, which package data has
//	drain.go      write of all data before the mount ends
//	failure.go    panics
//	busy.go       reads of a busy server
//	invalid.go    replies that break the protocol
//	readdir.go    READDIR and READDIRPLUS (RFC 1813 §3.3.16, §3.3.17)
//	walk.go       attributes that one READDIRPLUS renews for a walk of a directory
//	lock.go       fcntl(2) and flock(2) locks by package nlm
//	state.go      records from which the next process continues the mount
//	restore.go    continues the mount of an earlier process
//	resend.go     requests that the kernel sends again to the next process
//	owner.go      the process on whose behalf an RPC is made
//	counters.go   counters
//
// # Promises
//
// Consistency is close-to-open. An open gets the file's attributes from the server and drops the
// kernel's cached pages when another client changed the file. A close returns after all written
// data is on stable storage, or returns the write error. A read returns all earlier writes on the
// same mount. Changes by this mount keep cached pages and names.
//
// No user gets data or names with the rights of another user. Each open asks the server (ACCESS)
// for the rights of its user before it uses cached pages. Each use of a name is answered by the
// server for this user, or from the name cache when the server has let this user search the
// directory (package name). Besides, the kernel checks mode
// bits (default_permissions): both must allow an access. FIFOs, sockets, device files, chdir(2) and
// access(2) cause no call, so only mode bits protect them.
//
// Written data is kept until it is stable on the server, see package data.
//
// A panic of a request or a goroutine fails the FS. Later requests return EIO and take no lock.
// Data that the server accepts is still written.
//
// No reply of a server causes a panic or an endless loop. Package nfs3 checks handles, names and
// lengths. This package returns EIO for repeated directory cookies, for reads without progress, and
// for write verifiers that keep changing. invalidReply counts these replies.
//
// A file that is open on the mount stays usable after this mount removes or replaces it, even when
// the open and the removal run concurrently. A file that another client removes becomes stale.
//
// A signal that does not terminate the process does not interrupt its calls. Local file systems and
// Linux's NFS client behave the same (nfs(5), "intr"). A fatal signal ends the RPC, and the call
// returns EINTR. Data that the process wrote before is written in the background. When the mount is
// aborted, calls return EIO.
//
// Locks exclude other clients. A lock request first writes the file's data to the server. When the
// lock is granted, the kernel's cached pages of the file are dropped. An unlock first writes the
// data that was written under the lock.
//
// With Options.State, the mount survives the end of the process, also by SIGKILL. All that the next
// process needs is recorded before the kernel or the program can depend on it. Effects happen once,
// although the kernel sends requests without reply again (resend.go). Caches are not recorded: the
// next process asks the server again, and makes the kernel drop the pages of open files.
//
// After Unmount or ForceUnmount succeeds, this file system is not mounted at the mount point.
// Mounts of other programs there stay. When the connection is ended from outside, the file system
// is unmounted automatically.
//
// # Locks
//
// credentials.mu and busyReads.mu each guard their fields.
//
// inodeTable.mu guards the maps, lookup counts, open counts and removals in flight. attr.State,
// attr.Rights, name.Dir, data.File and acl.State of a node have locks. State.mu guards the records of
// requests. handleLocks.mu guards the lock owners of one open file. reopens.mu and
// FS.handles each guard one table. Code that may panic unlocks with defer.
//
// dirHandle.mu serializes the reads of one open directory. No other lock is held during an RPC.
//
// Lock the locks of data.File before FS.handles and attr.State, and inodeTable.mu and FS.handles before
// attr.State and name.Dir. Take each other lock alone.
package vfs
