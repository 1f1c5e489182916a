// Package power checks what is left after a power failure of a server.
//
// [Start] runs a process that writes files on a mount. The process records in shared memory what it
// has written, and what fsync, close and rename have confirmed. After a power failure
// [Program.Check] compares the files on the disk of the server with this record.
//
// The process is the test binary itself: a test binary that imports this package becomes the writer
// when the environment variable NFSRDMAD_POWER_CHILD is set. The test must not have open files on
// the mount, because the processes that it starts would close copies of them, and closing needs the
// server.
package power
