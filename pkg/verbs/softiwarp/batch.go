package softiwarp

import (
	"errors"
	"hash/crc32"
	"net"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Limits of one sendmsg.
const (
	maxIOV = 256
	// arenaSize holds headers, trailers and small payload of one batch.
	arenaSize = 16 << 10
	// batchBytes is the size at which a batch ends. The size also bounds how long one system call
	// can hold an MR's lock.
	batchBytes = 256 << 10
	maxFPDUs   = 128
	// copyBelow is the largest payload that is copied next to its header, which costs less than
	// another element of the vector.
	copyBelow = 256
	// trailerMax is the largest size of pad and CRC.
	trailerMax = fpduAlign - 1 + fpduCRCSize
)

// errRevoked means that the registration ended while its memory was read or written.
var errRevoked = errors.New("softiwarp: memory was invalidated in the middle of a message")

// errSocketFull means that a batch with nowait set was not sent in full.
var errSocketFull = errors.New("softiwarp: the socket is full")

// A boundary is the end of an FPDU within a batch.
type boundary struct {
	end     int    // bytes of the batch up to the end of the FPDU
	payload uint32 // payload bytes of the batch up to there
}

// A batch gathers whole FPDUs and sends them with one vectored system call, or with several when
// the socket is full. Only the goroutine that sends uses it.
type batch struct {
	raw     syscall.RawConn
	cb      func(fd uintptr) bool
	attempt func() // called before each system call; nil for none
	crc     bool
	arena   [arenaSize]byte
	used    int
	iov     [maxIOV]unix.Iovec
	niov    int
	inArena bool // the last vector element ends at arena[used]
	total   int
	payload uint32
	sum     uint32 // CRC of the current FPDU so far
	hdr     []byte // header of the current FPDU, which the caller fills in
	ends    [maxFPDUs]boundary
	nends   int
	src     grant // the registration that the payload comes from, if any

	msg    unix.Msghdr
	next   int // first vector element not sent in full
	sent   int
	nowait bool // do not wait while the socket is full
	err    error
}

func (b *batch) init(conn *net.TCPConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	b.raw = raw
	b.cb = b.sendmsg
	return nil
}

// begin empties the batch.
func (b *batch) begin() {
	b.used, b.niov, b.inArena, b.total, b.payload, b.nends, b.next, b.sent = 0, 0, false, 0, 0, 0, 0, 0
	b.src, b.err = grant{}, nil
}

// fits reports whether the batch has space for an FPDU with up to pieces payload pieces. With CRCs
// a batch is one FPDU, so that a TCP segment starts with it.
func (b *batch) fits(pieces int) bool {
	if b.crc && b.nends > 0 {
		return false
	}
	return b.total < batchBytes && b.room(1, pieces)
}

// room reports whether there is space for so many FPDUs, each with up to pieces payload pieces.
func (b *batch) room(fpdus, pieces int) bool {
	return b.nends+fpdus <= maxFPDUs && b.niov+fpdus*(pieces+2) <= maxIOV &&
		b.used+fpdus*(maxHeaderSize+trailerMax+pieces*copyBelow) <= arenaSize
}

// extend appends n bytes of the arena to the vector and returns them.
func (b *batch) extend(n int) []byte {
	p := b.arena[b.used : b.used+n : b.used+n]
	b.used += n
	b.total += n
	if b.inArena {
		b.iov[b.niov-1].Len += uint64(n)
	} else {
		b.iov[b.niov] = unix.Iovec{Base: &p[0], Len: uint64(n)}
		b.niov++
		b.inArena = true
	}
	return p
}

// header starts an FPDU and returns its n header bytes. The caller fills them in before it adds
// payload.
func (b *batch) header(n int) []byte {
	b.hdr = b.extend(n)
	b.sum = 0
	return b.hdr
}

// closeHeader adds the header to the CRC.
func (b *batch) closeHeader() {
	if b.crc {
		b.sum = crc32.Update(0, castagnoli, b.hdr)
	}
}

// addCopy appends a copy of p as payload.
func (b *batch) addCopy(p []byte) {
	if len(p) == 0 {
		return
	}
	b.account(p)
	copy(b.extend(len(p)), p)
}

// addRef appends p itself as payload; p must not change before the batch is sent.
func (b *batch) addRef(p []byte) {
	if len(p) == 0 {
		return
	}
	b.account(p)
	b.iov[b.niov] = unix.Iovec{Base: &p[0], Len: uint64(len(p))}
	b.niov++
	b.inArena = false
	b.total += len(p)
}

func (b *batch) account(p []byte) {
	b.payload += uint32(len(p))
	if b.crc {
		b.sum = crc32.Update(b.sum, castagnoli, p)
	}
}

// trailer ends an FPDU with its pad and its CRC, which is zero when CRCs are off.
func (b *batch) trailer(ulpdu int) {
	pad := padding(ulpdu)
	t := b.extend(pad + fpduCRCSize)
	clear(t)
	if b.crc {
		putCRC(t[pad:], crc32.Update(b.sum, castagnoli, t[:pad]))
	}
	b.ends[b.nends] = boundary{b.total, b.payload}
	b.nends++
}

// send writes the rest of the batch. After an error, atBoundary reports whether the stream ends
// with an FPDU. After errSocketFull, the next call continues.
func (b *batch) send() error {
	if b.sent == b.total {
		return nil
	}
	b.err = nil
	b.msg = unix.Msghdr{Iov: &b.iov[b.next], Iovlen: uint64(b.niov - b.next)}
	if err := b.raw.Write(b.cb); err != nil {
		return err
	}
	return b.err
}

// sendmsg runs inside RawConn.Write. The lock of the source MR is held around each system call, and
// not while waiting for the socket.
func (b *batch) sendmsg(fd uintptr) bool {
	flags := uintptr(unix.MSG_NOSIGNAL | unix.MSG_DONTWAIT)
	if b.crc {
		flags |= unix.MSG_EOR // later data must not share the TCP segment
	}
	for b.sent < b.total {
		if m := b.src.mr; m != nil {
			m.mu.Lock()
			if m.mu.gen != b.src.gen {
				m.mu.Unlock()
				b.err = errRevoked
				return true
			}
		}
		if b.attempt != nil {
			b.attempt()
		}
		n, _, errno := syscall.Syscall(syscall.SYS_SENDMSG, fd, uintptr(unsafe.Pointer(&b.msg)), flags)
		if b.src.mr != nil {
			b.src.mr.mu.Unlock()
		}
		switch errno {
		case 0:
			b.advance(int(n))
		case syscall.EINTR:
		case syscall.EAGAIN:
			if !b.nowait {
				return false
			}
			b.err = errSocketFull
			return true
		default:
			b.err = errno
			return true
		}
	}
	return true
}

// advance moves the vector past n sent bytes.
func (b *batch) advance(n int) {
	b.sent += n
	for n > 0 {
		v := &b.iov[b.next]
		if k := int(v.Len); n >= k {
			n -= k
			b.next++
			continue
		}
		v.Base = (*byte)(unsafe.Add(unsafe.Pointer(v.Base), n))
		v.Len -= uint64(n)
		n = 0
	}
	if b.next < b.niov {
		b.msg.Iov, b.msg.Iovlen = &b.iov[b.next], uint64(b.niov-b.next)
	}
}

// atBoundary reports whether the sent bytes end with a whole FPDU, and how many payload bytes they
// hold.
func (b *batch) atBoundary() (payload uint32, ok bool) {
	if b.sent == 0 {
		return 0, true
	}
	for _, e := range b.ends[:b.nends] {
		if e.end == b.sent {
			return e.payload, true
		}
	}
	return 0, false
}
