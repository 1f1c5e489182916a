package softiwarp

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A stock siw listener is lost for good when a connection ends before siw has looked at it. Nobody
// can promise to keep a connection open for so long: the process may be killed, and a peer that is
// slow, or behind something that takes connections in its place, may look at it after minutes. So a
// socket is mute until the peer's first octet is there: should it be closed, by whomever, nothing
// is sent, and the peer learns of it from the reset that its own answer gets. It is the kernel's
// TCP_REPAIR that does this, which takes CAP_NET_ADMIN; without it abandonWait has to do.
//
// A mute socket does all that TCP does, but that data is neither sent nor received by this side:
// the MPA Request goes out between two calls of setTCPRepair.

// setTCPRepair turns a socket's silence on or off.
func setTCPRepair(fd int, on bool) {
	value := unix.TCP_REPAIR_ON
	if !on {
		value = unix.TCP_REPAIR_OFF_NO_WP
	}
	err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR, value)
	if !on && errors.Is(err, unix.EINVAL) { // before Linux 4.19 a window probe has to come with it
		_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR, unix.TCP_REPAIR_OFF)
	}
}

// setConnTCPRepair is mute for a connection.
func setConnTCPRepair(raw syscall.RawConn, on bool) error {
	return raw.Control(func(fd uintptr) { setTCPRepair(int(fd), on) })
}

// awaitOctets waits until something can be read from a connection: its end, too. The connection's
// read deadline holds.
func awaitOctets(raw syscall.RawConn) error {
	return raw.Read(func(fd uintptr) bool {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(p, 0)
		return n > 0 || err != nil && err != unix.EINTR
	})
}

// errSelf is a port without a listener in the range of ephemeral ports that was connected to
// itself.
var errSelf = os.NewSyscallError("connect", unix.ECONNREFUSED)

// dial makes the TCP connection, mute. When the caller gives up while no answer has come yet the
// attempt ends; once there is a connection it is kept for the handshake.
func (t *attempt) dial() (*net.TCPConn, error) {
	f, err := t.dialFile()
	if err != nil {
		return nil, t.id.Fail(dialKind(err), phaseConnect,
			&net.OpError{Op: "dial", Net: "tcp", Addr: net.TCPAddrFromAddrPort(t.id.RemoteAddr()), Err: err})
	}
	c, err := net.FileConn(f)
	f.Close() // FileConn has its own
	if err != nil {
		return nil, t.id.Fail(dialKind(err), phaseConnect, err)
	}
	conn := c.(*net.TCPConn)
	t.reached.Store(true)
	t.id.SetLocalAddr(addrPort(conn.LocalAddr()))
	return conn, nil
}

func (t *attempt) dialFile() (f *os.File, err error) {
	to, family, err := sockaddr(t.id.RemoteAddr())
	if err != nil {
		return nil, err
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	f = os.NewFile(uintptr(fd), "")
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	t.id.dev.tuneSocket(fd)
	connectErr := unix.Connect(fd, to)
	setTCPRepair(fd, true)
	if connectErr != nil && connectErr != unix.EINPROGRESS {
		return nil, os.NewSyscallError("connect", connectErr)
	}
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	f.SetWriteDeadline(time.Now().Add(t.id.dev.cfg.ConnectTimeout))
	finished, watched := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(watched)
		select {
		case <-finished:
		case <-t.givenUp:
			if handshaking(raw) { // otherwise it is about to finish
				f.SetWriteDeadline(time.Unix(1, 0))
			}
		}
	}()
	var result error
	err = raw.Write(func(fd uintptr) bool {
		var connected bool
		connected, result = connectResult(int(fd))
		return connected || result != nil
	})
	close(finished)
	<-watched
	switch {
	case err == nil:
		err = result
	case t.abandoned():
		err = context.Canceled
	}
	return f, err
}

// connectResult tells how a connect stands.
func connectResult(fd int) (connected bool, err error) {
	if n, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR); err != nil || n != 0 {
		if err == nil {
			err = os.NewSyscallError("connect", syscall.Errno(n))
		}
		return false, err
	}
	peer, err := unix.Getpeername(fd)
	if err != nil {
		return false, nil // not yet
	}
	if local, err := unix.Getsockname(fd); err == nil && sameAddr(local, peer) {
		return false, errSelf
	}
	return true, nil
}

func sameAddr(a, b unix.Sockaddr) bool {
	switch a := a.(type) {
	case *unix.SockaddrInet4:
		b, ok := b.(*unix.SockaddrInet4)
		return ok && a.Port == b.Port && a.Addr == b.Addr
	case *unix.SockaddrInet6:
		b, ok := b.(*unix.SockaddrInet6)
		return ok && a.Port == b.Port && a.Addr == b.Addr
	}
	return false
}

func sockaddr(a netip.AddrPort) (sa unix.Sockaddr, family int, err error) {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}, unix.AF_INET, nil
	}
	six := &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
	if zone := a.Addr().Zone(); zone != "" {
		i, err := net.InterfaceByName(zone)
		if err != nil {
			return nil, 0, err
		}
		six.ZoneId = uint32(i.Index)
	}
	return six, unix.AF_INET6, nil
}

// handshaking reports whether the peer has not answered our SYN yet, so that dropping the socket is
// nothing to it.
func handshaking(raw syscall.RawConn) bool {
	waiting := false
	raw.Control(func(fd uintptr) {
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		waiting = err == nil && info.State == unix.BPF_TCP_SYN_SENT
	})
	return waiting
}
