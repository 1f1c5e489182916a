// Package mount is the table of mounts and the assembly of one mount: its options, its mount point,
// its provider, transport, NFS client and file system.
//
//	options.go     the mount options of -o, by the names of nfs(5)
//	optionhelp.go  the help of the options
//	spec.go        HOST:/EXPORT
//	allow.go       the mounts that the administrator allows
//	mountpoint.go  checks of a mount point that never wait for a file system that hangs
//	table.go       the table of mounts, and new mounts; it implements control.Mounts
//	umount.go      unmounts, also all of them at the end of the process
//	list.go        what the table tells about its mounts
//	stall.go       mounts that do not answer
//	stack.go       the assembly of one mount
//	caller.go      the choice of the connection of each call
//	addrlist.go    the value of the option remoteports
//	remoteports.go the addresses of one server
//	status.go      the status and the statistics of one mount
//	usage.go       what each process and each user does on one mount
//	slow.go        the phases and the slowest calls of one mount
//	otlp.go        sampled requests for traces
//	provider.go    the choice of the provider, and its reason
//	tracing.go     the stream of trace events of one mount
//	pending.go     pending calls and their owners
//	locks.go       the lock client of one mount
//	losses.go      lost data, and what all mounts share
//	invalid.go     invalid replies of a server
//	guest.go       shares of virtual machines
//	keep.go        what the next process needs to continue a mount
//	restored.go    the mounts of an earlier process
//	faults.go      fault injection
//	explain.go     advice about a server that refuses a mount
//
// # Promises
//
// List, and Status and Trace of a mount by its own name, read memory only. A normal unmount that
// has to wait fails at its deadline and says what else to try. A mount never disturbs another
// mount.
//
// # Life of a mount
//
//	           build ok            umount, or unmounted by another process
//	mounting ------------> mounted ----------------------> unmounting ---> (removed)
//	    |                     ^                             |    |
//	    | build failed        +------- busy or timeout -----+    | lazy: detached, listed as unmounting
//	    v                                                        v until its last file is closed, or forced
//	(removed)                                                 detached ---> (removed)
//
// All mounts of a process connect to one server one after the other. The process never closes a
// connection right after the server accepted it, not even when the process ends. Stock Linux
// servers lose their listener when a client closes a connection at this moment.
//
// # Locks
//
// The lock of [Table] guards its maps and the state of each entry. No goroutine holds it while a
// mount is built, unmounted or waited for. The lock of a mountStack keeps an unmount from beginning
// once the stack closes; no goroutine holds it during a call.
package mount
