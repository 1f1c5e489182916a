// Package kernel connects a file system to the kernel's FUSE client.
//
// The package owns the connection: it reads requests, checks and decodes them, calls the file
// system, writes replies, and sends notifications. The types of the messages are those of go-fuse.
//
// # Files
//
//	device.go      Device: the descriptor of /dev/fuse
//	notify.go      notifications to the kernel
//	helper.go      sends notifications through a helper process
//	helpermain.go  RunHelper: the helper process
//	init.go        Options, INIT: versions, capabilities and limits
//	filesystem.go  FileSystem: what the requests ask for
//	operations.go  the table of operations: sizes, names, and methods of the FileSystem
//	request.go     Request: one request from its arrival to its reply, whatever transports it
//	requests.go    Requests: those in progress, INTERRUPT, fatal signals
//	devfuse.go     DevFuse: reads requests from a Device and writes replies
//	reqmem.go      the memory of requests, for kernels that cannot send them again
//
// # Goroutines
//
// The goroutine that reads a request also handles it and writes the reply. At least one goroutine
// waits for the next request while others handle requests: a goroutine that receives a request
// starts another one when no other waits. Goroutines that would wait beside too many others end.
//
// Two goroutines belong to each run of a helper: one receives replies, and one waits for the end of
// the process.
//
// # The end of requests
//
// A Request is the context of the calls that are made for it. INTERRUPT tells that the calling
// thread has a signal, and not which one. While interrupted requests are in progress, a timer
// therefore looks for fatal signals in /proc/PID/status, and closes Request.Done of those that have
// one. The end of the connection and Requests.Abort close it for all requests, and any signal for
// the wait for a lock.
//
// # Takeover
//
// Another process can take over a connection: it needs a descriptor of the connection and the INIT
// request, see Resume. The requests that the first process did not answer are sent again, and so
// are their INTERRUPTs. These have Request.Resent, and keep their number, Request.Unique.
// FileSystem.Replied tells that a request will not be sent again.
//
// The process that takes over must have the state of all nodes and open files before Serve: a
// request may name any of them. A descriptor store keeps the connection meanwhile: Device.File
// returns a descriptor for it, and DeviceOf makes a Device of one.
//
// Linux before 6.9 cannot send requests again. With DevFuse.KeepRequests, the buffers of read(2)
// are in shared memory. The next process handles the requests there again for which the kernel
// still waits.
//
// # Helper process
//
// In write(2) of a notification, the kernel may wait for requests that the daemon must answer: for
// the READ of a page that it drops, or for a LOOKUP in the directory of a name. The wait cannot be
// interrupted. A process that is killed with a thread there does not exit, so a service manager
// does not start the next process, and the request has no answer.
//
// Device.UseHelper therefore starts a process that sends the notifications. It has only the
// device and a socket. When the daemon ends, the socket is closed, and the helper ends, except for
// threads that wait in the kernel. These end after the next daemon has answered the requests.
//
// A helper that is killed while a thread waits keeps its socket open. The daemon therefore sends a
// ping each second while notifications are in progress, and gives the helper up without reply.
//
// A helper adds about 50 us to a notification.
//
// # Checks
//
// A request gets EINVAL if its sizes, strings or names are invalid, and ENOSYS if the table does
// not have the operation. A request of a virtual machine can be anything, see package virtiofs. A
// panic of the file system gets the status of Options.Panicked.
//
// The package allocates nothing for the most frequent operations, except a name that is not among
// the last ones.
package kernel
