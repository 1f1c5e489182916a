package softiwarp

import (
	"io"
	"net"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Sizes of the read-ahead buffer.
const (
	// intakeSize is enough for two of the largest FPDUs.
	intakeSize = 2 * (fpduLenSize + maxULPDU + trailerMax)
	// aheadSmall is enough for a trailer and the next header. A small read-ahead limits how much of
	// a large FPDU is copied.
	aheadSmall = 128
	// largeFPDU is the mean size from which payload is read by a separate system call.
	largeFPDU = 8 << 10
	maxRxIOV  = 64
)

// A sink is the destination of payload: a granted part of a registration, or a buffer of the QP.
type sink struct {
	src grant
	buf []byte
	n   int // remaining bytes
}

// An intake reads the stream. Headers and small FPDUs pass through a read-ahead buffer; large
// payload is read directly into its destination. Only the reader uses it.
type intake struct {
	conn *net.TCPConn
	raw  syscall.RawConn
	cb   func(fd uintptr) bool
	buf  []byte
	r, w int // the unread bytes are buf[r:w]
	mean int // running mean of the FPDU size

	// State of one system call.
	iov   [maxRxIOV]unix.Iovec
	dst   sink
	ahead int // bytes of buf to offer
	got   int
	err   error
}

func (x *intake) init(conn *net.TCPConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	x.conn, x.raw = conn, raw
	x.cb = x.readv
	x.buf = make([]byte, intakeSize)
	return nil
}

// need reads until buf[r:w] has at least n bytes. n is at most half of the buffer.
func (x *intake) need(n int) error {
	if x.w-x.r >= n {
		return nil
	}
	x.compact(n)
	for x.w-x.r < n {
		x.dst = sink{}
		x.ahead = max(n-(x.w-x.r), x.readAhead())
		if err := x.read(); err != nil {
			return err
		}
	}
	return nil
}

// compact moves the unread bytes to the front when n bytes from r on would not fit.
func (x *intake) compact(n int) {
	switch {
	case x.r == x.w:
		x.r, x.w = 0, 0
	case len(x.buf)-x.r < max(n, len(x.buf)/2):
		x.w = copy(x.buf, x.buf[x.r:x.w])
		x.r = 0
	}
}

// readAhead returns how many bytes to request beyond the needed ones.
func (x *intake) readAhead() int {
	if x.mean >= largeFPDU {
		return aheadSmall
	}
	return len(x.buf)
}

// noteSize adds the size of an FPDU to the running mean.
func (x *intake) noteSize(n int) { x.mean += (n - x.mean) / 4 }

// place moves the next s.n bytes of the stream to s. place returns errRevoked when the registration
// has ended.
func (x *intake) place(s sink) error {
	for s.n > 0 {
		n := min(s.n, x.w-x.r)
		if n > 0 {
			p := x.buf[x.r : x.r+n]
			if m := s.src.mr; m != nil {
				m.mu.Lock()
				if m.mu.gen != s.src.gen {
					m.mu.Unlock()
					return errRevoked
				}
				m.copyIn(s.src.off, p)
				m.mu.Unlock()
			} else {
				copy(s.buf, p)
			}
			x.r += n
		} else {
			x.r, x.w = 0, 0
			x.dst, x.ahead = s, max(x.readAhead(), aheadSmall)
			before := x.w
			if err := x.read(); err != nil {
				return err
			}
			n = x.got - (x.w - before)
		}
		s.n -= n
		s.src.off += uint64(n)
		if s.buf != nil {
			s.buf = s.buf[n:]
		}
	}
	return nil
}

// read does one readv into dst and the read-ahead buffer. Afterwards got is the number of bytes,
// and w has advanced by the bytes in buf.
func (x *intake) read() error {
	x.got, x.err = 0, nil
	if err := x.raw.Read(x.cb); err != nil {
		return err
	}
	if x.err != nil {
		return x.err
	}
	if x.got == 0 {
		return io.EOF
	}
	if over := x.got - x.dst.n; over > 0 {
		x.w += over
	}
	return nil
}

// readv runs inside RawConn.Read. The lock of the target MR is held around the system call, and not
// while waiting for the socket.
func (x *intake) readv(fd uintptr) bool {
	m := x.dst.src.mr
	n, full := 0, true
	if m != nil {
		m.mu.Lock()
		if m.mu.gen != x.dst.src.gen {
			m.mu.Unlock()
			x.err = errRevoked
			return true
		}
		n, full = x.vector(m)
	} else if x.dst.n > 0 {
		x.iov[0] = unix.Iovec{Base: &x.dst.buf[0], Len: uint64(x.dst.n)}
		n = 1
	}
	if free := x.buf[x.w:]; full && len(free) > 0 { // only behind the whole payload
		x.iov[n] = unix.Iovec{Base: &free[0], Len: uint64(min(x.ahead, len(free)))}
		n++
	}
	var got uintptr
	var errno syscall.Errno
	for {
		got, _, errno = syscall.Syscall(syscall.SYS_READV, fd, uintptr(unsafe.Pointer(&x.iov[0])), uintptr(n))
		if errno != syscall.EINTR {
			break
		}
	}
	if m != nil {
		m.mu.Unlock()
	}
	switch errno {
	case 0:
		x.got = int(got)
	case syscall.EAGAIN:
		return false
	default:
		x.err = errno
	}
	return true
}

// vector fills iov with the memory of dst and returns the number of elements. full is false when
// iov is too short for all of dst. The caller holds m.mu.
func (x *intake) vector(m *mr) (n int, full bool) {
	seg, in := m.find(x.dst.src.off)
	for left := x.dst.n; left > 0; seg++ {
		if p := m.mu.segs[seg][in:]; len(p) > 0 {
			if n == maxRxIOV-1 {
				return n, false
			}
			p = p[:min(len(p), left)]
			x.iov[n] = unix.Iovec{Base: &p[0], Len: uint64(len(p))}
			n++
			left -= len(p)
		}
		in = 0
	}
	return n, true
}

// discard reads and drops data until the stream ends or its deadline expires.
func (x *intake) discard() {
	for {
		x.r, x.w, x.dst, x.ahead = 0, 0, sink{}, len(x.buf)
		if x.read() != nil {
			return
		}
	}
}
