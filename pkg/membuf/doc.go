// Package membuf allocates page-aligned buffers outside the Go heap and pools them with a hard
// limit.
//
// RDMA devices read and write memory that the Go garbage collector must not move, free or scan.
// [Alloc] maps anonymous memory for such buffers. Each allocation is an [Arena]: a provider that
// registers a whole allocation once attaches the registration to the arena, and [Free] releases the
// registration before it unmaps the memory.
//
// A [Pool] takes its buffers from Alloc, or from a file in shared memory ([NewFilePool]). The
// content of that file survives the end of the process, also by SIGKILL, while a descriptor store
// has the file. The next process calls [OpenFilePool], and [Pool.Take] for each buffer whose data
// matters. Which buffers these are is not in the file: the owner of the pool records the numbers
// that [Pool.Index] returns. The file is memory and does not survive a restart of the host.
//
// Calls that wait for a buffer of a Pool share it fairly by user ([Pool.Get]).
//
// The package does not depend on RDMA. All functions and methods are safe for concurrent use. Each
// change replaces the list of arenas as a whole, so [ArenaOf] takes no lock.
package membuf
