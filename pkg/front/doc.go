// Package front connects a file system to the kernel's FUSE client.
//
// The package owns the connection: it reads requests, writes replies, and sends notifications.
// go-fuse decodes the requests and calls the file system (fuse.ProtocolServer).
//
// # Files
//
//	device.go   Device: the descriptor of /dev/fuse, notifications
//	devfuse.go  DevFuse: reads requests from a Device and handles them
//	read.go     READ, whose data goes from the file system's buffer to the kernel
//
// # Goroutines
//
// The goroutine that reads a request also handles it and writes the reply. At least one goroutine
// waits for the next request while others handle requests: a goroutine that receives a request
// starts another one when no other waits. Goroutines that would wait beside too many others end.
//
// # Takeover
//
// Another process can take over a connection: it needs a descriptor of the connection and the INIT
// request, see Resume. The requests that the first process did not answer are sent again.
//
// # Limits of go-fuse
//
// fuse.ProtocolServer of go-fuse 2.12 has no notifications, does not call RawFileSystem.Init and
// OnUnmount, does not return the settings of the kernel, cannot cancel all requests, allocates a
// request and a channel for each call, and copies the data of a READ. This package therefore sends
// notifications through Device, returns the INIT request with DevFuse.Kernel, calls
// FileSystem.Disconnected, and handles READ and the INTERRUPT of a READ without ProtocolServer.
package front
