package front

import (
	"fmt"
	"os"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Numbers of io_uring (include/uapi/linux/io_uring.h).
const (
	setupSQE128     = 1 << 10
	setupClamp      = 1 << 4
	featSingleMmap  = 1 << 0
	enterGetEvents  = 1 << 0
	opURingCmd      = 46
	offsetSQEs      = 0x10000000
	sqeSize         = 128
	sqeOpcode       = 0
	sqeFD           = 4
	sqeCommand      = 8
	sqeAddr         = 16
	sqeLen          = 24
	sqeCommandData  = 48 // 80 bytes
	cqeResult       = 8
	sqRingArrayItem = 4
)

// ringParams is struct io_uring_params.
type ringParams struct {
	sqEntries, cqEntries, flags, sqThreadCPU, sqThreadIdle, features, wqFD uint32
	_                                                                      [3]uint32
	sq                                                                     struct {
		head, tail, mask, entries, flags, dropped, array, _ uint32
		_                                                   uint64
	}
	cq struct {
		head, tail, mask, entries, overflow, cqes, flags, _ uint32
		_                                                   uint64
	}
}

// An ioRing is an io_uring with one entry. Only the thread that submits may wait.
type ioRing struct {
	fd             int
	queues, sqes   []byte // of mmap(2)
	sqHead, sqTail *uint32
	cqHead, cqTail *uint32
	cqes           []byte
	cqMask         uint32
}

// newIORing makes an io_uring with one entry of 128 bytes.
func newIORing() (r *ioRing, err error) {
	p := ringParams{flags: setupSQE128 | setupClamp}
	fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, 1, uintptr(unsafe.Pointer(&p)), 0)
	if errno != 0 {
		return nil, os.NewSyscallError("io_uring_setup", errno)
	}
	r = &ioRing{fd: int(fd)}
	defer func() {
		if err != nil {
			r.close()
		}
	}()
	if p.features&featSingleMmap == 0 {
		return nil, fmt.Errorf("io_uring_setup: features %#x lack IORING_FEAT_SINGLE_MMAP", p.features)
	}
	const cqeSize = 16
	size := max(p.sq.array+p.sqEntries*sqRingArrayItem, p.cq.cqes+p.cqEntries*cqeSize)
	if r.queues, err = mapRing(r.fd, 0, int(size)); err != nil {
		return nil, err
	}
	if r.sqes, err = mapRing(r.fd, offsetSQEs, int(p.sqEntries)*sqeSize); err != nil {
		return nil, err
	}
	word := func(off uint32) *uint32 { return (*uint32)(unsafe.Pointer(&r.queues[off])) }
	r.sqHead, r.sqTail = word(p.sq.head), word(p.sq.tail)
	r.cqHead, r.cqTail, r.cqMask = word(p.cq.head), word(p.cq.tail), *word(p.cq.mask)
	r.cqes = r.queues[p.cq.cqes:]
	*word(p.sq.array) = 0 // the only entry
	return r, nil
}

func mapRing(fd int, offset int64, size int) ([]byte, error) {
	b, err := unix.Mmap(fd, offset, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
	return b, os.NewSyscallError("mmap of io_uring", err)
}

// command fills the entry with a command of the driver of fd. data is at most 80 bytes.
func (r *ioRing) command(fd int, command uint32, addr unsafe.Pointer, n uint32, data []byte) {
	clear(r.sqes[:sqeSize])
	r.sqes[sqeOpcode] = opURingCmd
	*(*int32)(unsafe.Pointer(&r.sqes[sqeFD])) = int32(fd)
	*(*uint32)(unsafe.Pointer(&r.sqes[sqeCommand])) = command
	*(*uintptr)(unsafe.Pointer(&r.sqes[sqeAddr])) = uintptr(addr)
	*(*uint32)(unsafe.Pointer(&r.sqes[sqeLen])) = n
	copy(r.sqes[sqeCommandData:], data)
	atomic.StoreUint32(r.sqTail, *r.sqTail+1)
}

// enter submits the entry if it is new. With wait set, it returns when a result is there.
func (r *ioRing) enter(wait bool) error {
	for {
		var flags, want uintptr
		if wait {
			flags, want = enterGetEvents, 1
		}
		pending := *r.sqTail - atomic.LoadUint32(r.sqHead)
		_, _, errno := unix.Syscall6(unix.SYS_IO_URING_ENTER, uintptr(r.fd), uintptr(pending), want, flags, 0, 0)
		switch errno {
		case 0:
			if !wait || r.ready() {
				return nil
			}
		case unix.EINTR, unix.EAGAIN, unix.EBUSY:
		default:
			return os.NewSyscallError("io_uring_enter", errno)
		}
	}
}

func (r *ioRing) ready() bool { return atomic.LoadUint32(r.cqTail) != *r.cqHead }

// result removes the result of the command. ready must be true.
func (r *ioRing) result() syscall.Errno {
	head := *r.cqHead
	at := (head & r.cqMask) * 16
	res := *(*int32)(unsafe.Pointer(&r.cqes[at+cqeResult]))
	atomic.StoreUint32(r.cqHead, head+1)
	return syscall.Errno(max(-res, 0))
}

func (r *ioRing) close() {
	unix.Close(r.fd)
	for _, b := range [][]byte{r.queues, r.sqes} {
		if b != nil {
			_ = unix.Munmap(b)
		}
	}
}
