package daemon

import (
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// executedEnv is set for the program that PrepareProcess executes, so that the program is executed
// again only once.
const executedEnv = "NFSRDMAD_EXECUTED"

// PrepareProcess gives all threads of the process the settings of a daemon: they are I/O flushers
// (prctl(2), PR_SET_IO_FLUSHER, Linux 5.6), so that their allocations do not wait for I/O to a file
// system, and they have only the capabilities that a daemon needs. These settings belong to a
// thread, and execve(2) and new threads inherit them. PrepareProcess therefore executes the program
// again, with the same process ID, arguments and environment. This also works for a program with
// C libraries, which have threads that Go does not know.
//
// PrepareProcess returns in the new program, and in the old one if nothing has to be changed or
// execve(2) fails. Settings that the kernel refuses stay as they are; [Run] logs them.
//
// Call PrepareProcess before the process has opened files that it needs.
func PrepareProcess() error {
	executed := os.Getenv(executedEnv) != ""
	if err := os.Unsetenv(executedEnv); err != nil {
		return err
	}
	flusher, _ := isIOFlusher()
	unneeded, err := unneededCapabilities()
	if executed || err != nil || flusher && unneeded == 0 {
		return err
	}
	runtime.LockOSThread() // execve keeps the settings of this thread
	defer runtime.UnlockOSThread()
	_ = unix.Prctl(unix.PR_SET_IO_FLUSHER, 1, 0, 0, 0)
	_ = dropCapabilities()
	path, err := os.Executable()
	if err == nil {
		err = unix.Exec(path, os.Args, append(os.Environ(), executedEnv+"=1"))
	}
	return err
}

// ForbidCoreDumps makes the process undumpable (prctl(2), PR_SET_DUMPABLE): it writes no core dump,
// which would contain data of files, and other processes of its user cannot trace it. execve(2)
// makes a process dumpable again.
func ForbidCoreDumps() error { return unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0) }
