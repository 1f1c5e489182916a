package membuf

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Sealed are the seals that fix the size of a file, and its seals. No program that has the file can
// then shrink it, which would cause SIGBUS in all programs that map it.
const Sealed = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// CreateFile returns the descriptor of a new file of size bytes in shared memory, with these seals.
// Its content survives the process while another process, for example a descriptor store, has a
// descriptor of the file. The kernel shows the name in /proc/PID/fd as memfd:name. The file cannot
// be executed. It has no memory before AllocateFile. The caller closes the descriptor, which has
// FD_CLOEXEC.
func CreateFile(name string, size int64, seals int) (fd int, err error) {
	// A file above the limit would cause SIGXFSZ.
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &limit); err != nil {
		return -1, os.NewSyscallError("getrlimit", err)
	}
	if uint64(size) > limit.Cur {
		return -1, fmt.Errorf("size of %d bytes exceeds the limit RLIMIT_FSIZE of %d: %w", size, limit.Cur, unix.EFBIG)
	}
	const flags = unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err = unix.MemfdCreate(name, flags|unix.MFD_NOEXEC_SEAL)
	if err == unix.EINVAL { // before Linux 6.3
		fd, err = unix.MemfdCreate(name, flags)
	}
	if err != nil {
		return -1, os.NewSyscallError("memfd_create", err)
	}
	if err = unix.Ftruncate(fd, size); err != nil {
		err = os.NewSyscallError("ftruncate", err)
	} else if _, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		err = os.NewSyscallError("fcntl F_ADD_SEALS", err)
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// AllocateFile gives memory to a range of a file, and keeps its content. Without it, a store to the
// range would cause SIGBUS when the host has no memory.
func AllocateFile(fd int, offset, n int64) error {
	for {
		err := unix.Fallocate(fd, 0, offset, n)
		if err == nil {
			return nil
		}
		if err != unix.EINTR {
			return fmt.Errorf("fallocate of %d bytes: %w", n, err)
		}
	}
}
