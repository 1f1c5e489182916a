package fdstore

import (
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// kcmpFile compares two open files: KCMP_FILE of linux/kcmp.h.
const kcmpFile = 0

// A descriptor is a descriptor that this process owns.
type descriptor struct {
	fd       int
	dev, ino uint64
}

// describe returns the descriptor fd, which the caller closes after an error.
func describe(fd int) (descriptor, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return descriptor{}, os.NewSyscallError("fstat", err)
	}
	return descriptor{fd: fd, dev: st.Dev, ino: st.Ino}, nil
}

// isSame reports whether two descriptors refer to the same open file description. systemd compares
// descriptors in the same way.
func (d descriptor) isSame(o descriptor) (bool, error) {
	if d.dev != o.dev || d.ino != o.ino {
		return false, nil // saves system calls when there are many memfds
	}
	pid := uintptr(os.Getpid())
	r, _, errno := unix.Syscall6(unix.SYS_KCMP, pid, pid, kcmpFile, uintptr(d.fd), uintptr(o.fd), 0)
	if errno != 0 {
		return false, fmt.Errorf("compare descriptors: %w", os.NewSyscallError("kcmp", errno))
	}
	return r == 0, nil
}

func (d descriptor) close() { unix.Close(d.fd) }

// withFD calls do with the descriptor of c. Unlike f.Fd of an os.File, it does not change the flags
// of the open file.
func withFD(c syscall.Conn, do func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	ctlErr := raw.Control(func(fd uintptr) { err = do(int(fd)) })
	return errors.Join(ctlErr, err)
}

func duplicate(fd int) (int, error) {
	to, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	return to, os.NewSyscallError("fcntl F_DUPFD_CLOEXEC", err)
}

// duplicateOf returns a duplicate of fd.
func duplicateOf(fd int) (descriptor, error) {
	own, err := duplicate(fd)
	if err != nil {
		return descriptor{}, err
	}
	d, err := describe(own)
	if err != nil {
		unix.Close(own)
	}
	return d, err
}

// hungUp reports whether the other end of a socket or pipe is closed. It waits for that for at most
// timeout.
func hungUp(c syscall.Conn, timeout time.Duration) bool {
	closed := false
	err := withFD(c, func(fd int) error {
		for deadline := time.Now().Add(timeout); ; {
			p := []unix.PollFd{{Fd: int32(fd)}} // POLLHUP is always reported
			_, err := unix.Poll(p, int(max(0, time.Until(deadline).Milliseconds())))
			if err != unix.EINTR {
				closed = p[0].Revents&unix.POLLHUP != 0
				return err
			}
		}
	})
	return closed || err != nil
}

// peer returns the credentials of the process that connected, or that listens.
func peer(c *net.UnixConn) (cred *unix.Ucred, err error) {
	err = withFD(c, func(fd int) error {
		cred, err = unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
		return os.NewSyscallError("getsockopt SO_PEERCRED", err)
	})
	return cred, err
}

// receivedFDs returns the descriptors of a control message. The caller closes them, also when
// receivedFDs returns an error.
func receivedFDs(oob []byte) ([]int, error) {
	var all []int
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	for i := range messages {
		if messages[i].Header.Level != unix.SOL_SOCKET || messages[i].Header.Type != unix.SCM_RIGHTS {
			continue
		}
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			return all, err
		}
		all = append(all, fds...)
	}
	return all, nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}
