// Package control is the control API of the daemon: its types, its client and its server.
//
// The API is HTTP with JSON bodies over a unix socket. A command that talks to the daemon imports
// only this package. The server serves anything that implements [Mounts]; the table of package
// mount does.
//
//	api.go        requests and replies
//	client.go     the client
//	server.go     the server: deadlines, errors
//	access.go     peer credentials, and who may do what
//	connlimit.go  bounds of the connections of a user
//	stop.go       the client's request to stop the daemon
//	trace.go      the stream of trace events over HTTP
//	socket.go     the unix socket and its lock file
//	path.go       paths of mount points
//	errors.go     error classes and exit codes
//
// # Promises
//
// Every request except a trace has a deadline, in the server and in the client. The client waits
// longer than the server, so that the user sees the error of the server. Only root and the user of
// the daemon may use the socket. The members of a [Group] may read: list, status, stats and
// version, on a bounded number of connections. At most one daemon serves a socket path.
//
// Every error is one line: the operation, the object, the cause, and what to do. Its [Code] crosses
// the socket and determines the exit code of the command.
//
// # Locks
//
// The mutex of connCounts guards the numbers of connections. The lock file beside the socket
// (flock(2)) keeps a second daemon away; the kernel releases it when its daemon ends.
package control
