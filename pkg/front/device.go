package front

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"sync"
	"syscall"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

const devicePath = "/dev/fuse"

// A Device is an open descriptor of /dev/fuse. Its methods are safe for concurrent use. After Close
// they return os.ErrClosed.
type Device struct {
	file *os.File
	conn syscall.RawConn
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
	return &Device{file, conn}, nil
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

// Close closes the descriptor when the last call of Use returns. The kernel ends the connection
// when its last descriptor is closed.
func (d *Device) Close() error { return d.file.Close() }

// InvalInode makes the kernel discard its cached attributes of a node, and its cached pages of
// length bytes from offset off. A length of 0 means all pages from off. A negative off keeps the
// pages. The kernel waits until requests for these pages have ended. A node that the kernel does
// not know is no error.
func (d *Device) InvalInode(node uint64, off, length int64) error {
	var out fuse.NotifyInvalInodeOut
	out.Ino, out.Off, out.Length = node, off, length
	return d.notify(fuse.NOTIFY_INVAL_INODE, bytesOf(&out))
}

// ExtendSize raises the size that the kernel knows of a file to size. It changes nothing if the
// kernel's size is larger or if the kernel does not know the node.
//
// A kernel that gets attributes ignores them when another notification about the node came since it
// asked. It then uses its old size: reads find the end of the file too early. No notification is
// for the size alone. FUSE_NOTIFY_STORE sets it before it copies data to the cache, so ExtendSize
// sends one whose data cannot be read.
func (d *Device) ExtendSize(node, size uint64) error {
	if size == 0 || size > math.MaxInt64 { // of a server that is broken
		return nil
	}
	var out fuse.NotifyStoreOut
	out.Nodeid, out.Offset, out.Size = node, size-1, 1
	if err := d.notify(fuse.NOTIFY_STORE_CACHE, bytesOf(&out), unreadable()); !errors.Is(err, unix.EFAULT) {
		return err
	}
	return nil
}

// unreadable returns one byte of memory that neither this process nor the kernel can read.
var unreadable = sync.OnceValue(func() []byte {
	b, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		panic(fmt.Sprintf("map a page without access: %v", err))
	}
	return b[:1]
})

// ExpireEntry makes the kernel look the name of a directory up again before it next uses the name.
// A kernel without CAP_HAS_EXPIRE_ONLY removes the name instead. A name that the kernel does not
// know is no error.
func (d *Device) ExpireEntry(dir uint64, name string) error {
	return d.notifyEntry(dir, name, fuse.EXPIRE_ONLY)
}

// InvalEntry makes the kernel remove the name of a directory from its cache. A name that the kernel
// does not know is no error.
func (d *Device) InvalEntry(dir uint64, name string) error { return d.notifyEntry(dir, name, 0) }

func (d *Device) notifyEntry(dir uint64, name string, flags uint32) error {
	var out fuse.NotifyInvalEntryOut
	out.Parent, out.NameLen, out.Flags = dir, uint32(len(name)), flags
	return d.notify(fuse.NOTIFY_INVAL_ENTRY, bytesOf(&out), []byte(name), []byte{0})
}

// resend makes the kernel send the requests again that have no reply. No request may be in
// progress.
func (d *Device) resend() error { return d.notify(notifyResend) }

// notifyResend is FUSE_NOTIFY_RESEND of include/uapi/linux/fuse.h.
const notifyResend = -7

// notify sends a notification: an OutHeader with Unique 0, whose Status is the kind of the
// notification, and the parts of the message.
func (d *Device) notify(kind fuse.Status, parts ...[]byte) error {
	header := make([]byte, headerSize)
	size := headerSize
	for _, p := range parts {
		size += len(p)
	}
	putHeader(header, size, int32(-kind), 0)
	var err error
	if closed := d.Use(func(fd int) { _, err = unix.Writev(fd, append([][]byte{header}, parts...)) }); closed != nil {
		return closed
	}
	if errors.Is(err, unix.ENOENT) {
		return nil // the kernel does not have the node or the name
	}
	return os.NewSyscallError("writev", err)
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
