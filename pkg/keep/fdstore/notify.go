package fdstore

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// A notifier sends messages to the notification socket of systemd: sd_notify(3). systemd executes
// messages in their order.
type notifier struct {
	conn    *net.UnixConn
	timeout time.Duration
}

// dialNotify connects to the notification socket. A name that begins with @ is in the abstract
// namespace.
func dialNotify(socket string, timeout time.Duration) (*notifier, error) {
	if !strings.HasPrefix(socket, "/") && !strings.HasPrefix(socket, "@") {
		return nil, fmt.Errorf("notification socket %q is not supported; want a path or an abstract name", socket)
	}
	c, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		return nil, fmt.Errorf("notify systemd: %w", err)
	}
	return &notifier{conn: c, timeout: timeout}, nil
}

func (n *notifier) close() { n.conn.Close() }

// send sends assignments. fd is the descriptor of the message, or -1.
func (n *notifier) send(fd int, assignments ...string) error {
	var oob []byte
	if fd >= 0 {
		oob = unix.UnixRights(fd)
	}
	_ = n.conn.SetWriteDeadline(time.Now().Add(n.timeout))
	raw, err := n.conn.SyscallConn()
	if err != nil {
		return err
	}
	message := []byte(strings.Join(assignments, "\n"))
	// WriteMsgUnix does not support a connected datagram socket. Only with a connected socket, the
	// poller learns when systemd has read messages from a full queue.
	waitErr := raw.Write(func(socket uintptr) bool {
		for {
			err = unix.Sendmsg(int(socket), message, oob, nil, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT)
			if err != unix.EINTR {
				return err != unix.EAGAIN
			}
		}
	})
	if waitErr != nil {
		err = waitErr
	}
	if err != nil {
		return fmt.Errorf("notify systemd: %w", os.NewSyscallError("sendmsg", err))
	}
	return nil
}

// barrier waits until systemd has executed all messages: sd_notify_barrier(3). systemd closes the
// descriptor of the message when it has read the message. The message must have no other
// assignment.
func (n *notifier) barrier() error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	err = withFD(w, func(fd int) error { return n.send(fd, "BARRIER=1") })
	w.Close()
	if err != nil {
		return err
	}
	_ = r.SetReadDeadline(time.Now().Add(n.timeout))
	_, err = r.Read(make([]byte, 1))
	switch {
	case errors.Is(err, io.EOF), hungUp(r, 0): // also if this process was stopped for longer than the timeout
		return nil
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("systemd did not read the notifications in %v: %w", n.timeout, err)
	default:
		return fmt.Errorf("wait for systemd: %w", err)
	}
}
