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

	"github.com/nfsrdmad/nfsrdmad/internal/resvport"
)

// A stock siw listener fails permanently when a connection ends before siw has accepted it. This
// side cannot guarantee that a connection stays open until then. The process may be killed. A slow
// peer, or a peer behind a proxy, may accept the connection minutes later. Therefore a socket stays
// in TCP_REPAIR mode until the peer's first byte arrives. When a socket is closed in this mode, the
// kernel sends nothing, and the peer gets a reset only when it answers. TCP_REPAIR requires
// CAP_NET_ADMIN; without it, abandonTimeout reduces the risk.
//
// A socket in repair mode acknowledges packets, but this side can neither send nor receive data.
// The MPA Request is sent between two calls of setTCPRepair.

// setTCPRepair turns repair mode of a socket on or off. Errors are ignored, because the mode needs
// a capability that the process may lack.
func setTCPRepair(fd int, on bool) {
	value := unix.TCP_REPAIR_ON
	if !on {
		value = unix.TCP_REPAIR_OFF_NO_WP
	}
	err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR, value)
	if !on && errors.Is(err, unix.EINVAL) { // before Linux 4.19 the socket must send a window probe
		_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR, unix.TCP_REPAIR_OFF)
	}
	if !on { // the end of the mode clears SO_REUSEADDR, also that of the later TIME-WAIT
		_ = resvport.Share(fd)
	}
}

// setConnTCPRepair is setTCPRepair for a connection.
func setConnTCPRepair(raw syscall.RawConn, on bool) error {
	return raw.Control(func(fd uintptr) { setTCPRepair(int(fd), on) })
}

// awaitReadable waits until data or the end of the stream can be read, or the read deadline
// expires.
func awaitReadable(raw syscall.RawConn) error {
	return raw.Read(func(fd uintptr) bool {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(p, 0)
		return n > 0 || err != nil && err != unix.EINTR
	})
}

// errSelfConnect means that the socket connected to itself: the port has no listener and the kernel
// chose it as the local port.
var errSelfConnect = os.NewSyscallError("connect", unix.ECONNREFUSED)

// dial makes the TCP connection, in repair mode. When the caller is canceled before the peer
// answers, dial ends. An established connection is kept for the handshake.
func (t *attempt) dial() (*net.TCPConn, error) {
	f, err := t.dialFile()
	if err != nil {
		return nil, t.id.Fail(dialKind(err), phaseConnect,
			&net.OpError{Op: "dial", Net: "tcp", Addr: net.TCPAddrFromAddrPort(t.id.RemoteAddr()), Err: err})
	}
	c, err := net.FileConn(f)
	f.Close() // FileConn duplicated the descriptor
	if err != nil {
		return nil, t.id.Fail(dialKind(err), phaseConnect, err)
	}
	conn := c.(*net.TCPConn)
	t.connected.Store(true)
	t.id.SetLocalAddr(addrPort(conn.LocalAddr()))
	return conn, nil
}

// dialFile connects from a reserved source port if it can.
func (t *attempt) dialFile() (*os.File, error) {
	to, family, err := sockaddr(t.id.RemoteAddr())
	if err != nil {
		return nil, err
	}
	if !t.id.dev.cfg.AnySourcePort {
		for from := range resvport.Candidates() {
			f, err := t.dialFrom(from, to, family)
			if errors.Is(err, unix.EACCES) {
				break // no privilege for any reserved port
			}
			if err == nil || !resvport.InUse(err) {
				return f, err
			}
		}
	}
	return t.dialFrom(0, to, family)
}

// dialFrom connects from a source port of the same address family, or from any if from is 0.
func (t *attempt) dialFrom(from int, to unix.Sockaddr, family int) (f *os.File, err error) {
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
	if from != 0 {
		if err := bindSource(fd, from, family); err != nil {
			return nil, err
		}
	}
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
		case <-t.canceled:
			if handshaking(raw) { // otherwise the connect finishes soon
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

// bindSource binds a socket to a source port of any address.
func bindSource(fd, port, family int) error {
	if err := resvport.Share(fd); err != nil {
		return err
	}
	var from unix.Sockaddr = &unix.SockaddrInet4{Port: port}
	if family == unix.AF_INET6 {
		from = &unix.SockaddrInet6{Port: port}
	}
	return os.NewSyscallError("bind", unix.Bind(fd, from))
}

// connectResult reports whether a non-blocking connect has succeeded or failed.
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
		return false, errSelfConnect
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

// handshaking reports whether the peer has not answered the SYN yet. Closing the socket then has no
// effect on the peer.
func handshaking(raw syscall.RawConn) bool {
	waiting := false
	raw.Control(func(fd uintptr) {
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		waiting = err == nil && info.State == unix.BPF_TCP_SYN_SENT
	})
	return waiting
}
