// Package control is the daemon's control API: its types, its client and its server.
//
// The API is HTTP with JSON bodies over a unix socket. A command imports this package alone to talk
// to the daemon. The server serves anything that implements [Mounts]; package mount has the table
// of mounts that does.
//
//	api.go     requests and replies
//	client.go  the client
//	server.go  the server: deadlines, peer credentials, errors
//	trace.go   the stream of trace events over HTTP
//	socket.go  the unix socket and its lock: one daemon for each path
//	errors.go  error classes and mount(8)'s exit codes
//
// Every request but a trace carries a deadline. Every error is one line that says what was tried,
// on what, and what to do; its [Code] crosses the socket and becomes mount(8)'s exit code.
package control
