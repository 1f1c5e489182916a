package daemon

import (
	"errors"
	"fmt"
	"math"

	"golang.org/x/sys/unix"
)

// The kernel frees memory by writing dirty pages, also those of files on a mount of this daemon. An
// allocation of the daemon that waited for this write would wait for the daemon itself. Two
// settings prevent that: the kernel must not write files to satisfy an allocation of the daemon
// (PR_SET_IO_FLUSHER), and it must not evict the memory that the daemon needs for the write.

func isIOFlusher() (bool, error) {
	on, err := unix.PrctlRetInt(unix.PR_GET_IO_FLUSHER, 0, 0, 0, 0)
	return on == 1, err
}

// flusherError describes why the process is no I/O flusher.
func flusherError(err error) error {
	switch {
	case err == nil:
		return errors.New("PR_SET_IO_FLUSHER: not set")
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("PR_SET_IO_FLUSHER: %w; add CAP_SYS_RESOURCE", err)
	}
	return fmt.Errorf("PR_SET_IO_FLUSHER: %w", err)
}

// lockMemory keeps each page of the process in memory from its first use on (mlockall(2),
// MCL_ONFAULT). It returns an error, and changes nothing, unless RLIMIT_MEMLOCK is unlimited: with
// another limit, later allocations would fail.
func lockMemory() error {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &limit); err != nil {
		return fmt.Errorf("lock memory: %w", err)
	}
	if limit.Cur != math.MaxUint64 {
		return fmt.Errorf("lock memory: RLIMIT_MEMLOCK is %d bytes; set LimitMEMLOCK=infinity", limit.Cur)
	}
	if err := unix.Mlockall(unix.MCL_CURRENT | unix.MCL_FUTURE | unix.MCL_ONFAULT); err != nil {
		return fmt.Errorf("lock memory: %w", err)
	}
	return nil
}
