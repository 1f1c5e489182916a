package daemon

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Constants and layouts of sock_diag(7), from linux/sock_diag.h and linux/inet_diag.h.
const (
	sockDiagByFamily = 20
	diagRequestSize  = unix.NLMSG_HDRLEN + 56 // struct nlmsghdr, struct inet_diag_req_v2
	diagIDSize       = 48                     // struct inet_diag_sockid
	diagReplySize    = unix.NLMSG_HDRLEN + 4 + diagIDSize + 20
	diagUIDAt        = unix.NLMSG_HDRLEN + 4 + diagIDSize + 12
	tcpEstablished   = 1
)

var errNoSocket = errors.New("no established TCP socket")

// socketUser returns the user of the TCP socket of this host that is bound to local and connected
// to remote. The error is that of the system, or errNoSocket.
func socketUser(local, remote netip.AddrPort) (uid uint32, err error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, unix.NETLINK_INET_DIAG)
	if err != nil {
		return 0, fmt.Errorf("sock_diag: %w", err)
	}
	defer unix.Close(fd)
	kernel := &unix.SockaddrNetlink{Family: unix.AF_NETLINK}
	if err := unix.Sendto(fd, diagRequest(local, remote), 0, kernel); err != nil {
		return 0, fmt.Errorf("sock_diag: %w", err)
	}
	reply := make([]byte, 512)
	n, _, err := unix.Recvfrom(fd, reply, unix.MSG_DONTWAIT) // the kernel replies before Sendto returns
	switch {
	case err != nil:
		return 0, fmt.Errorf("sock_diag: %w", err)
	case n < diagReplySize || binary.NativeEndian.Uint16(reply[4:]) != sockDiagByFamily,
		reply[unix.NLMSG_HDRLEN+1] != tcpEstablished:
		return 0, errNoSocket
	}
	return binary.NativeEndian.Uint32(reply[diagUIDAt:]), nil
}

// diagRequest encodes a request for one TCP socket.
func diagRequest(local, remote netip.AddrPort) []byte {
	family := byte(unix.AF_INET6)
	src, dst := local.Addr().As16(), remote.Addr().As16()
	b := make([]byte, diagRequestSize)
	binary.NativeEndian.PutUint32(b, diagRequestSize)
	binary.NativeEndian.PutUint16(b[4:], sockDiagByFamily)
	binary.NativeEndian.PutUint16(b[6:], unix.NLM_F_REQUEST)
	r := b[unix.NLMSG_HDRLEN:]
	id := r[8:]
	if local.Addr().Unmap().Is4() && remote.Addr().Unmap().Is4() {
		family = unix.AF_INET
		copy(id[4:], src[12:])
		copy(id[20:], dst[12:])
	} else {
		copy(id[4:], src[:])
		copy(id[20:], dst[:])
	}
	r[0], r[1] = family, unix.IPPROTO_TCP
	binary.NativeEndian.PutUint32(r[4:], ^uint32(0)) // all states
	binary.BigEndian.PutUint16(id, local.Port())
	binary.BigEndian.PutUint16(id[2:], remote.Port())
	for i := diagIDSize - 8; i < diagIDSize; i++ { // no cookie
		id[i] = 0xff
	}
	return b
}
