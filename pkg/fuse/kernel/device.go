package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"syscall"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

const devicePath = "/dev/fuse"

// major and minor are the device numbers of /dev/fuse (Documentation/admin-guide/devices.txt).
const (
	deviceMajor = 10
	deviceMinor = 229
)

// A Device is an open descriptor of /dev/fuse. Its methods are safe for concurrent use. After Close
// they return os.ErrClosed.
type Device struct {
	file   *os.File
	conn   syscall.RawConn
	helper atomic.Pointer[helper] // nil before UseHelper
}

// OpenDevice opens /dev/fuse. The Device has no connection before a mount(2) with its descriptor.
func OpenDevice() (*Device, error) {
	fd, err := unix.Open(devicePath, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: devicePath, Err: err}
	}
	return newDevice(fd)
}

// newDevice takes over fd.
func newDevice(fd int) (*Device, error) {
	file := os.NewFile(uintptr(fd), devicePath)
	conn, err := file.SyscallConn()
	if err != nil {
		_ = file.Close()
		return nil, err
	}
	return &Device{file: file, conn: conn}, nil
}

// DeviceOf makes a Device of a descriptor of /dev/fuse, for example one that comes out of a
// descriptor store. The Device has a duplicate. The caller keeps f and may close it.
func DeviceOf(f *os.File) (*Device, error) {
	fd, err := duplicateDevice(f)
	if err != nil {
		return nil, fmt.Errorf("use %s as %s: %w", f.Name(), devicePath, err)
	}
	return newDevice(fd)
}

func duplicateDevice(f *os.File) (fd int, err error) {
	conn, err := f.SyscallConn()
	if err != nil {
		return -1, err
	}
	closed := conn.Control(func(from uintptr) {
		var st unix.Stat_t
		if err = unix.Fstat(int(from), &st); err != nil {
			err = os.NewSyscallError("fstat", err)
			return
		}
		major, minor := unix.Major(st.Rdev), unix.Minor(st.Rdev)
		if st.Mode&unix.S_IFMT != unix.S_IFCHR || major != deviceMajor || minor != deviceMinor {
			err = fmt.Errorf("file has mode %o and device %d:%d, want a character device %d:%d", st.Mode, major, minor,
				deviceMajor, deviceMinor)
			return
		}
		// Workers wait in read(2).
		if err = unix.SetNonblock(int(from), false); err != nil {
			err = os.NewSyscallError("fcntl F_SETFL", err)
			return
		}
		fd, err = unix.FcntlInt(from, unix.F_DUPFD_CLOEXEC, 0)
		err = os.NewSyscallError("fcntl F_DUPFD_CLOEXEC", err)
	})
	return fd, errors.Join(closed, err)
}

// File returns a duplicate of the descriptor, for a descriptor store. The caller closes it. The
// connection does not end before all duplicates are closed.
func (d *Device) File() (*os.File, error) {
	var fd int
	var err error
	closed := d.Use(func(from int) { fd, err = unix.FcntlInt(uintptr(from), unix.F_DUPFD_CLOEXEC, 0) })
	if closed != nil {
		return nil, closed
	}
	if err != nil {
		return nil, os.NewSyscallError("fcntl F_DUPFD_CLOEXEC", err)
	}
	return os.NewFile(uintptr(fd), devicePath), nil
}

// Use calls f with the descriptor. The descriptor stays open until f returns.
func (d *Device) Use(f func(fd int)) error {
	err := d.conn.Control(func(fd uintptr) { f(int(fd)) })
	if err != nil {
		return os.ErrClosed
	}
	return nil
}

// Disconnected reports whether the kernel has ended the connection, or the Device is closed.
// Disconnected does not wait.
func (d *Device) Disconnected() bool {
	var n int
	var err error
	var fds [1]unix.PollFd
	if d.Use(func(fd int) {
		fds[0].Fd = int32(fd)
		n, err = unix.Poll(fds[:], 0) // poll(2) always reports POLLERR
	}) != nil {
		return true
	}
	return err == nil && n == 1 && fds[0].Revents&unix.POLLERR != 0
}

// Close ends the helper of UseHelper, and closes the descriptor when the last call of Use returns.
// The kernel ends the connection when its last descriptor is closed.
//
// Close waits for the helper for at most a second. A helper whose notification waits in the kernel
// has the descriptor until the notification ends. The notification waits for requests, which end
// when Serve replies to them or when the connection ends. Do not close the last descriptor of a
// connection with requests that no Serve handles and a notification in progress: such a connection
// does not end.
func (d *Device) Close() error {
	if h := d.helper.Load(); h != nil {
		h.close()
	}
	return d.file.Close()
}

// headerSize is the size of fuse.OutHeader in bytes.
const headerSize = int(unsafe.Sizeof(fuse.OutHeader{}))

// putHeader encodes a fuse.OutHeader. size includes the header.
func putHeader(b []byte, size int, status int32, unique uint64) {
	binary.NativeEndian.PutUint32(b, uint32(size))
	binary.NativeEndian.PutUint32(b[4:], uint32(status))
	binary.NativeEndian.PutUint64(b[8:], unique)
}

// putError encodes a reply without data, and returns its size.
func putError(b []byte, unique uint64, errno syscall.Errno) int {
	putHeader(b, headerSize, -int32(errno), unique)
	return headerSize
}

// bytesOf returns the memory of a message of the FUSE protocol.
func bytesOf[T any](v *T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(v)), unsafe.Sizeof(*v))
}

// bytesOfWords returns the memory of words, which is aligned to 8 bytes.
func bytesOfWords(words []uint64) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(words))), 8*len(words))
}
