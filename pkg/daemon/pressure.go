package daemon

import (
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// The kernel frees memory by writing dirty pages, also those of files on a mount of this daemon. An
// allocation of the daemon that waited for this write would wait for the daemon itself. Two
// settings prevent that: the kernel must not write files to satisfy an allocation of the daemon
// (PR_SET_IO_FLUSHER), and it must not evict the memory that the daemon needs for the write.

// flusherEnv is set for the program that BecomeIOFlusher executes, so that the program is executed
// again only once.
const flusherEnv = "NFSRDMAD_IO_FLUSHER"

// BecomeIOFlusher makes all threads of the process I/O flushers (prctl(2), PR_SET_IO_FLUSHER, Linux
// 5.6): their allocations do not wait for I/O to a file system. The setting belongs to a thread,
// and execve(2) and new threads inherit it. BecomeIOFlusher therefore executes the program again,
// with the same process ID, arguments and environment. It returns nil in the new program. It
// returns an error, and changes nothing, without CAP_SYS_RESOURCE.
//
// Call BecomeIOFlusher before the process has opened files that it needs.
func BecomeIOFlusher() error {
	again := os.Getenv(flusherEnv) != ""
	if err := os.Unsetenv(flusherEnv); err != nil {
		return err
	}
	switch on, err := isIOFlusher(); {
	case err != nil:
		return flusherError(err)
	case on:
		return nil
	case again:
		return flusherError(errors.New("execve(2) lost the setting"))
	}
	runtime.LockOSThread() // execve keeps the settings of this thread
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_IO_FLUSHER, 1, 0, 0, 0); err != nil {
		return flusherError(err)
	}
	path, err := os.Executable()
	if err == nil {
		err = unix.Exec(path, os.Args, append(os.Environ(), flusherEnv+"=1"))
	}
	_ = unix.Prctl(unix.PR_SET_IO_FLUSHER, 0, 0, 0, 0)
	return flusherError(err)
}

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
