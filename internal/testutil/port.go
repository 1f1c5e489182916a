package testutil

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

// ClosedPort returns a TCP port that refuses connections. A socket that does not listen keeps the
// port from other tests until the test ends.
func ClosedPort(t testing.TB) netip.AddrPort {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	loopback := netip.AddrFrom4([4]byte{127, 0, 0, 1})
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: loopback.As4()}); err != nil {
		t.Fatal(err)
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	return netip.AddrPortFrom(loopback, uint16(name.(*unix.SockaddrInet4).Port))
}
