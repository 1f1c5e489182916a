package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"sync"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// A notification is a message to the kernel: an OutHeader with Unique 0, whose Status is the kind
// of the notification, and a body.
type notification struct {
	message []byte
	// unreadable appends one byte that the kernel cannot read.
	unreadable bool
	waits      waitKind
}

// A waitKind says what the kernel may wait for while it handles a notification.
type waitKind uint8

const (
	waitsNever    waitKind = iota
	waitsForPages          // for READs and WRITEs of the file
	waitsForNames          // for LOOKUPs and changes in the directory
	waitKinds
)

// newNotification encodes a notification.
func newNotification(waits waitKind, kind fuse.Status, parts ...[]byte) *notification {
	size := headerSize
	for _, p := range parts {
		size += len(p)
	}
	n := &notification{message: make([]byte, headerSize, size), waits: waits}
	putHeader(n.message, size, int32(-kind), 0)
	for _, p := range parts {
		n.message = append(n.message, p...)
	}
	return n
}

// InvalInode makes the kernel discard its cached attributes of a node, and its cached pages of
// length bytes from offset off. A length of 0 means all pages from off. A negative off keeps the
// pages. The kernel waits until requests for these pages have ended. A node that the kernel does
// not know is no error.
func (d *Device) InvalInode(node uint64, off, length int64) error {
	var out fuse.NotifyInvalInodeOut
	out.Ino, out.Off, out.Length = node, off, length
	waits := waitsForPages
	if off < 0 {
		waits = waitsNever
	}
	return d.notify(newNotification(waits, fuse.NOTIFY_INVAL_INODE, bytesOf(&out)))
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
	n := newNotification(waitsForPages, fuse.NOTIFY_STORE_CACHE, bytesOf(&out))
	binary.NativeEndian.PutUint32(n.message, uint32(len(n.message)+1))
	n.unreadable = true
	if err := d.notify(n); !errors.Is(err, unix.EFAULT) {
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
	var out fuse.NotifyInvalEntryOut
	out.Parent, out.NameLen, out.Flags = dir, uint32(len(name)), fuse.EXPIRE_ONLY
	return d.notify(newNotification(waitsForNames, fuse.NOTIFY_INVAL_ENTRY, bytesOf(&out), []byte(name), []byte{0}))
}

// resend makes the kernel send the requests again that have no reply. No request may be in
// progress. The kernel does not wait, so resend does not use the helper.
func (d *Device) resend() error { return d.notifyHere(newNotification(waitsNever, notifyResend)) }

// notifyResend is FUSE_NOTIFY_RESEND of include/uapi/linux/fuse.h.
const notifyResend = -7

// notify sends a notification, through the helper if there is one.
func (d *Device) notify(n *notification) error {
	if h := d.helper.Load(); h != nil && len(n.message) <= maxNotification {
		if err := h.notify(n); err != errNoHelper {
			return notifyError(err)
		}
	}
	return d.notifyHere(n)
}

// notifyHere sends a notification from this process.
func (d *Device) notifyHere(n *notification) error {
	var err error
	if closed := d.Use(func(fd int) { err = writeNotification(fd, n.message, n.unreadable) }); closed != nil {
		return closed
	}
	return notifyError(err)
}

// notifyError returns the error of a notification: no error if the kernel does not have the node or
// the name.
func notifyError(err error) error {
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if errno, ok := err.(syscall.Errno); ok {
		return os.NewSyscallError("writev", errno)
	}
	return err
}

// writeNotification writes a message, and one byte that the kernel cannot read if unreadableByte.
func writeNotification(fd int, message []byte, unreadableByte bool) error {
	parts := [][]byte{message}
	if unreadableByte {
		parts = append(parts, unreadable())
	}
	_, err := unix.Writev(fd, parts)
	return err
}
