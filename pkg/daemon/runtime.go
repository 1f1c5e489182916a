package daemon

import (
	"os"
	"runtime"
)

// SetProcs sets GOMAXPROCS to one more than the processors that this process may use, unless the
// environment variable GOMAXPROCS is set. Call SetProcs at the start of a process that serves
// mounts or clients.
//
// A goroutine that sleeps in a blocking system call, for example a read of /dev/fuse, keeps its P
// until the scheduler takes the P away, some ten microseconds later. With one P for each processor,
// a processor is idle meanwhile although a goroutine is ready to run.
//
// The number of processors that Go finds at the start respects the affinity of the process and the
// CPU limit of its cgroup. Go no longer follows changes of them after SetProcs.
func SetProcs() {
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + extraProcs)
	}
}

// extraProcs is the number of Ps beyond the processors.
const extraProcs = 1
