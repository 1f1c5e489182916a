package nfsd

import (
	"errors"
	"strconv"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// maxKernelHandle is the longest kernel file handle in bytes that fits into an NFSv3 handle beside
// its header.
const maxKernelHandle = nfsHandleRoom - kernelTypeSize

// A kernelHandle is struct file_handle of name_to_handle_at(2).
type kernelHandle struct {
	size  uint32
	typ   int32
	bytes [maxKernelHandle]byte
}

// nameToHandle reads the kernel's handle of the object that fd refers to.
func nameToHandle(fd int, h *kernelHandle) error {
	var mountID int32
	empty := [1]byte{}
	h.size = maxKernelHandle
	_, _, errno := unix.Syscall6(unix.SYS_NAME_TO_HANDLE_AT, uintptr(fd), uintptr(unsafe.Pointer(&empty[0])),
		uintptr(unsafe.Pointer(h)), uintptr(unsafe.Pointer(&mountID)), unix.AT_EMPTY_PATH, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// openByHandle opens the object of a kernel handle. The calling thread needs CAP_DAC_READ_SEARCH.
func openByHandle(mount int, h *kernelHandle, flags int) (int, error) {
	for {
		fd, _, errno := unix.Syscall(unix.SYS_OPEN_BY_HANDLE_AT, uintptr(mount), uintptr(unsafe.Pointer(h)),
			uintptr(flags|unix.O_CLOEXEC))
		switch errno {
		case 0:
			return int(fd), nil
		case unix.EINTR:
			continue
		}
		return -1, errno
	}
}

// openPath opens a path below dir with O_PATH and never leaves dir, follows a link, or crosses
// into another mount.
func openPath(dir int, name string) (int, error) { return openEntry(dir, name, 0) }

// resolveCached is RESOLVE_CACHED of openat2(2).
const resolveCached = 0x20

// openCached is openPath for names that the kernel has cached. EAGAIN means that the name may need
// the disk, and EINVAL that the kernel is older than Linux 5.12.
func openCached(dir int, name string) (int, error) { return openEntry(dir, name, resolveCached) }

func openEntry(dir int, name string, resolve uint64) (int, error) {
	resolve |= unix.RESOLVE_BENEATH | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV
	how := unix.OpenHow{Flags: unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC, Resolve: resolve}
	return retryFD(func() (int, error) { return unix.Openat2(dir, name, &how) })
}

// openParent opens the parent directory of dir.
func openParent(dir int) (int, error) {
	return retryFD(func() (int, error) {
		return unix.Openat(dir, "..", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	})
}

// reopen opens the object of an O_PATH descriptor for I/O. It must be a regular file or a
// directory: opening a pipe or a device has side effects. EAGAIN means that a local process holds a
// lease on the file (fcntl(2)), and that the kernel has asked for its release.
func reopen(fd, flags int) (int, error) {
	for {
		fd, err := unix.Open(procFD(fd), flags|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
		if err != unix.EINTR {
			return fd, err
		}
	}
}

// reopenPath opens the object of a descriptor with O_PATH.
func reopenPath(fd int) (int, error) {
	return retryFD(func() (int, error) { return unix.Open(procFD(fd), unix.O_PATH|unix.O_CLOEXEC, 0) })
}

// procFD names an open descriptor of this process as a path.
func procFD(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }

func retryFD(f func() (int, error)) (int, error) {
	for {
		fd, err := f()
		if err != unix.EINTR {
			return fd, err
		}
	}
}

func retry(f func() error) error {
	for {
		if err := f(); err != unix.EINTR {
			return err
		}
	}
}

// readNow reads what the page cache holds at off. EAGAIN means that the rest needs the disk.
func readNow(fd int, b []byte, off int64) (int, error) {
	v := unix.Iovec{Base: &b[0], Len: uint64(len(b))}
	n, _, errno := unix.Syscall6(unix.SYS_PREADV2, uintptr(fd), uintptr(unsafe.Pointer(&v)), 1, uintptr(off),
		uintptr(uint64(off)>>32), unix.RWF_NOWAIT)
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}

// readFull reads b at off; fewer bytes mean the end of the file.
func readFull(fd int, b []byte, off int64) (int, error) {
	n := 0
	for n < len(b) {
		m, err := unix.Pread(fd, b[n:], off+int64(n))
		switch {
		case err == unix.EINTR:
			continue
		case err != nil && n == 0:
			return 0, err
		case err != nil || m == 0:
			return n, nil
		}
		n += m
	}
	return n, nil
}

// writeFull writes b at off. An error after part of b was written is dropped: the next WRITE meets
// it again.
func writeFull(fd int, b []byte, off int64) (int, error) {
	n := 0
	for n < len(b) {
		m, err := unix.Pwrite(fd, b[n:], off+int64(n))
		switch {
		case err == unix.EINTR:
			continue
		case err != nil && n == 0:
			return 0, err
		case err != nil:
			return n, nil
		case m == 0:
			return n, unix.EIO
		}
		n += m
	}
	return n, nil
}

// faccess asks the kernel whether the thread's file system identity has the access on fd.
func faccess(fd int, mode uint32) error {
	return retry(func() error { return unix.Faccessat2(fd, "", mode, unix.AT_EACCESS|unix.AT_EMPTY_PATH) })
}

// hasDefaultACL reports whether the directory dir has a default access control list (acl(5)). It
// returns true when that is not known.
func hasDefaultACL(dir int) bool {
	_, err := unix.Getxattr(procFD(dir), "system.posix_acl_default", nil)
	return err != unix.ENODATA && err != unix.EOPNOTSUPP
}

// errnoOf is the error number in err, EIO where it has none.
func errnoOf(err error) syscall.Errno {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno
	}
	return unix.EIO
}
