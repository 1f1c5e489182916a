package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/running"
)

const (
	// helperDeviceFD and helperSocketFD are the descriptors that a helper process inherits.
	helperDeviceFD = 3
	helperSocketFD = 4
	// oomAdjust is added to the OOM score of the daemon: the kernel kills the helper first, which
	// the daemon starts again.
	oomAdjust = 100
	// helperComm is the name of the process in ps(1).
	helperComm = "nfsrdmad-notify"
)

// RunHelper runs the helper process: the command of Device.UseHelper calls it, and exits when it
// returns. Only UseHelper starts this command. RunHelper returns nil when the process that started
// it has ended or closed its Device, also while notifications are in progress. Exit at once then:
// the kernel ends the threads of these notifications as soon as it can.
//
// RunHelper ignores SIGHUP, SIGINT and SIGTERM, and closes all inherited descriptors except for
// standard input, output and error, the device and the socket.
func RunHelper() error {
	signal.Ignore(unix.SIGHUP, unix.SIGINT, unix.SIGTERM)
	if err := inheritDescriptors(); err != nil {
		return fmt.Errorf("FUSE notification helper: %w; only the daemon starts the helper", err)
	}
	_ = os.WriteFile("/proc/self/comm", []byte(helperComm), 0)
	_ = running.AdjustOOMScore(oomAdjust)
	b := make([]byte, requestHeader+maxNotification)
	for {
		n, err := unix.Read(helperSocketFD, b)
		switch {
		case err == unix.EINTR:
		case err == unix.ECONNRESET, err == nil && n == 0:
			return nil
		case err != nil:
			return fmt.Errorf("FUSE notification helper: %w", os.NewSyscallError("read", err))
		case n < requestHeader:
			return fmt.Errorf("FUSE notification helper: message of %d bytes", n)
		default:
			request := append(make([]byte, 0, n), b[:n]...)
			go handleNotification(request)
		}
	}
}

// inheritDescriptors checks the device and the socket, and closes other descriptors of the daemon.
func inheritDescriptors() error {
	kind, err := unix.GetsockoptInt(helperSocketFD, unix.SOL_SOCKET, unix.SO_TYPE)
	if err != nil {
		return fmt.Errorf("descriptor %d: %w", helperSocketFD, err)
	}
	if kind != unix.SOCK_SEQPACKET {
		return fmt.Errorf("descriptor %d has socket type %d, want %d", helperSocketFD, kind, unix.SOCK_SEQPACKET)
	}
	var st unix.Stat_t
	if err := unix.Fstat(helperDeviceFD, &st); err != nil {
		return fmt.Errorf("descriptor %d: %w", helperDeviceFD, err)
	}
	unix.CloseOnExec(helperDeviceFD)
	unix.CloseOnExec(helperSocketFD)
	return closeInherited()
}

// closeInherited closes the descriptors without FD_CLOEXEC. These are inherited: descriptors of the
// Go runtime, which close_range(2) would also close, have the flag.
func closeInherited() error {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err
	}
	for _, e := range entries {
		fd, err := strconv.Atoi(e.Name())
		if err != nil || fd <= helperSocketFD {
			continue
		}
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil && flags&unix.FD_CLOEXEC == 0 {
			_ = unix.Close(fd)
		}
	}
	return nil
}

// handleNotification writes one notification to the kernel and replies.
func handleNotification(request []byte) {
	var errno syscall.Errno
	if len(request) > requestHeader {
		flags, message := binary.NativeEndian.Uint32(request[8:]), request[requestHeader:]
		err := writeNotification(helperDeviceFD, message, flags&flagUnreadable != 0)
		if err != nil && !errors.As(err, &errno) {
			errno = unix.EIO
		}
	}
	reply := make([]byte, replySize)
	copy(reply, request[:8])
	binary.NativeEndian.PutUint32(reply[8:], uint32(errno))
	for {
		if _, err := unix.Write(helperSocketFD, reply); err != unix.EINTR {
			return // the reader of the socket handles its end
		}
	}
}
