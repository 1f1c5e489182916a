package kit

import (
	"net/netip"
	"os"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

var loopback = netip.AddrFrom4([4]byte{127, 0, 0, 1})

// bind returns a socket with a local TCP port; the kernel chooses one for 0.
func bind(t testing.TB, addr netip.AddrPort) (fd int, err error) {
	t.Helper()
	fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err = unix.Bind(fd, &unix.SockaddrInet4{Addr: addr.Addr().As4(), Port: int(addr.Port())}); err != nil {
		unix.Close(fd)
	}
	return fd, err
}

// ClosedPort returns a TCP port that refuses connections. A socket that does not listen keeps the
// port from other tests until the test ends.
func ClosedPort(t testing.TB) netip.AddrPort {
	t.Helper()
	fd, err := bind(t, netip.AddrPortFrom(loopback, 0))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	name, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	return netip.AddrPortFrom(loopback, uint16(name.(*unix.SockaddrInet4).Port))
}

// The ports of FreePort. Linux chooses the ports of outgoing connections from 32768 on.
const (
	firstFreePort = 21000
	freePorts     = 11000
)

// lastFreePort is different in processes that start at about the same time.
var lastFreePort atomic.Uint32

func init() { lastFreePort.Store(uint32(os.Getpid()) * 100) }

// FreePort returns a TCP port of the loopback address for a server. No outgoing connection takes
// the port, also while the server restarts, and FreePort does not return it again.
func FreePort(t testing.TB) netip.AddrPort {
	t.Helper()
	var err error
	for range freePorts {
		port := uint16(firstFreePort + lastFreePort.Add(1)%freePorts)
		var fd int
		if fd, err = bind(t, netip.AddrPortFrom(netip.IPv4Unspecified(), port)); err == nil {
			unix.Close(fd)
			return netip.AddrPortFrom(loopback, port)
		}
	}
	t.Fatalf("find a free port from %d on: %v", firstFreePort, err)
	return netip.AddrPort{}
}
