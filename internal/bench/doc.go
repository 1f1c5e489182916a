// Package bench measures a directory on any file system with plain system calls. The command
// `nfsrdmad bench` and `make bench` use it.
//
// [Measure] measures one directory. To measure several directories alternately, use a [Dir] for
// each: [Open] creates a directory for the files, [Dir.Run] runs one workload once, and [Dir.Close]
// removes everything. Run [Workloads] in their order, because later ones use the files of earlier
// ones.
//
// # Files
//
//	measure.go    Measure: all workloads on one directory, and the Report
//	dir.go        Open, Dir: the directory, the deadline of a measurement, the callers
//	workloads.go  the list of workloads
//	data.go       sequential and random I/O on one file
//	names.go      create, stat, list, rename and remove many files
//	caches.go     what empties the client's caches before a measurement
//	process.go    processor time and context switches of other processes
//	result.go     Sample, Result, and the table of results
//
// # How a workload is measured
//
// Each caller is a goroutine on a locked thread, which makes one system call after the other. A
// measurement ends after its work or after [Options.Time], whichever comes first. Before workloads
// that read, Run drops the data of the file, or the names and attributes, from the kernel's caches,
// as far as the user may do that: see [Caches].
//
// The methods of a Dir are not safe for concurrent use.
package bench
