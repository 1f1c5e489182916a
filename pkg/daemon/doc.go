// Package daemon is the room that joins all others: mount options, the table of mounts,
// configuration, the control socket, the metrics listener, and the life from READY to the last
// unmount.
//
// # What is where
//
//	config.go      the configuration file and its keys
//	options.go     the mount options of -o, by nfs(5)'s names
//	spec.go        HOST:/EXPORT
//	mountpoint.go  what can be mounted on, without touching a file system that may hang
//	table.go       the mounts
//	stack.go       one mount: provider, transport, NFS client, file system
//	stackstats.go  what it counted
//	provider.go    which provider carries it, and why
//	api.go         the control API's types (JSON)
//	tracing.go     the stream of trace events
//	waiting.go     the calls that wait, for whom, and the connections' story
//	inject.go      fault injection, and saying so
//	server.go      its server: HTTP on a unix socket
//	client.go      its client, which every command line verb uses
//	socket.go      one daemon for each socket; what a dead one left is replaced
//	daemon.go      the daemon's parts, started and stopped
//	run.go         its life, as systemd hears of it; a mount in the foreground
//	command.go     what the mount and umount verbs do
//	doctor.go      what this host has for mounting
//	explain.go     what to do about a server that does not give a mount
//	errors.go      error classes and mount(8)'s exit codes
//
// # Promises
//
// No call of the control API waits for a server without end: every request but a trace carries a
// deadline, list, and status and trace of a mount by its own name, ask memory alone, and a normal
// unmount that has to wait gives up with advice. One mount never disturbs another. When [Run]
// returns, no mount, socket or goroutine of it is left; the end takes at most the shutdown timeout
// and a few seconds.
//
// Every error is one line that says what was tried, on what, and what to do; its [Code] becomes
// mount(8)'s exit code.
//
// # Life of a mount
//
//	           build ok            umount, or from outside
//	mounting ------------> mounted ----------------------> unmounting ---> (gone)
//	    |                     ^                             |    |
//	    | build failed        +------- busy, not answered --+    | lazy: off the tree, listed as unmounting
//	    v                                                        v until its last file is closed, or forced
//	 (gone)                                                   detached ---> (gone)
//
// The connection to a server is made for one mount after the other, by all mounts of the process,
// and is never dropped in the moments after the server took it, not even at the end of the process:
// stock Linux servers lose their listener of both.
//
// # Locks
//
// The lock of [Table] guards its maps and each entry's state; it is never held while a mount is
// built, unmounted or waited for. The lock of a stack keeps an unmount from beginning once the
// stack closes; it is held for no call.
package daemon
