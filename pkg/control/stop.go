package control

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// keepTimeout bounds the time in which the daemon checks that its mounts are kept.
	keepTimeout = time.Minute
	// stopMargin is how much longer than StopInfo.Timeout a client waits.
	stopMargin = 5 * time.Second
	// stopInterval is the time between two checks whether the daemon has exited.
	stopInterval = 50 * time.Millisecond
)

// Stop requests that the daemon stops, and returns when its process has exited. If the process of
// the daemon is not visible, because it is in another PID namespace or the kernel is older than
// Linux 5.3, Stop returns when the daemon has removed its socket.
func (c *Client) Stop(ctx context.Context, r StopRequest) error {
	p := daemonProcess{socket: c.socket}
	defer p.close()
	var info StopInfo
	timeout := requestTimeout
	if r.KeepMounts {
		timeout = keepTimeout
	}
	if err := newClient(c.socket, p.find).do(ctx, timeout, http.MethodPost, pathStop, r, &info); err != nil {
		return err
	}
	wait := time.Duration(info.Timeout*float64(time.Second)) + stopMargin
	limited, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	for !p.hasExited() {
		select {
		case <-limited.Done():
			if errors.Is(ctx.Err(), context.Canceled) {
				return c.noReply(ctx, pathStop, ctx.Err())
			}
			return Errorf(CodeSystem, "daemon at %s: still running %v after the request to stop; see its log", c.socket,
				wait)
		case <-time.After(stopInterval):
		}
	}
	return nil
}

// A daemonProcess is the process that listens on a control socket.
type daemonProcess struct {
	socket string
	named  os.FileInfo // the socket file
	pidfd  *os.File    // nil if the process is not visible
}

// find finds the process at the other end of conn.
func (p *daemonProcess) find(conn net.Conn) {
	p.named, _ = os.Lstat(p.socket)
	peer, err := peerOf(conn)
	if err != nil || peer.pid <= 0 || p.pidfd != nil {
		return
	}
	if fd, err := unix.PidfdOpen(peer.pid, 0); err == nil {
		p.pidfd = os.NewFile(uintptr(fd), "pidfd")
	}
}

func (p *daemonProcess) hasExited() bool {
	if p.pidfd == nil {
		now, err := os.Lstat(p.socket)
		return err != nil || p.named == nil || !os.SameFile(p.named, now)
	}
	fds := []unix.PollFd{{Fd: int32(p.pidfd.Fd()), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n > 0
}

func (p *daemonProcess) close() {
	if p.pidfd != nil {
		p.pidfd.Close()
	}
}
