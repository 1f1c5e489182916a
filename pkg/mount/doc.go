// Package mount is the table of mounts and the assembly of one mount: its options, its mount point,
// its provider, transport, NFS client and file system.
//
//	options.go     the mount options of -o, by the names of nfs(5)
//	spec.go        HOST:/EXPORT
//	mountpoint.go  checks of a mount point that never wait for a file system that hangs
//	table.go       the table of mounts; it implements control.Mounts
//	stack.go       the assembly of one mount
//	stackstats.go  the statistics of one mount
//	provider.go    the choice of the provider, and its reason
//	tracing.go     the stream of trace events of one mount
//	waiting.go     pending calls, their owners, and the history of connections
//	inject.go      fault injection
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
