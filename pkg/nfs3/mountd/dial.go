package mountd

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"strconv"
	"syscall"
)

// Reserved source ports that are tried. Below 665 lie the ports of most services; Linux's own
// clients keep the same distance.
const (
	minReserved = 665
	maxReserved = 1023
	numReserved = maxReserved - minReserved + 1
)

// dial connects to host:port. With reserved set it comes from a reserved port when it may and one
// is free, because many servers let only those in; otherwise from any port, and the server decides.
func dial(ctx context.Context, host string, port int, reserved bool) (net.Conn, error) {
	addr := net.JoinHostPort(host, strconv.Itoa(port))
	if reserved {
		// Each from a random one on: a port that is taken costs no more than a failed bind.
		first := rand.IntN(numReserved)
		for i := range numReserved {
			from := minReserved + (first+i)%numReserved
			d := net.Dialer{LocalAddr: &net.TCPAddr{Port: from}, Control: reuseAddr}
			conn, err := d.DialContext(ctx, "tcp", addr)
			if err == nil || !isBindError(err) {
				return conn, err
			}
			if errors.Is(err, syscall.EACCES) {
				break // no privilege: no other reserved port will do either
			}
		}
	}
	var d net.Dialer
	return d.DialContext(ctx, "tcp", addr)
}

// isBindError tells whether a connection failed for its source port.
func isBindError(err error) bool {
	return errors.Is(err, syscall.EADDRINUSE) || errors.Is(err, syscall.EADDRNOTAVAIL) || errors.Is(err, syscall.EACCES)
}

// reuseAddr lets a socket have a port that an earlier connection, to another server perhaps, still
// keeps in TIME-WAIT: there are too few reserved ports to wait a minute for each.
func reuseAddr(_, _ string, c syscall.RawConn) error {
	var optErr error
	err := c.Control(func(fd uintptr) {
		optErr = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET,
			syscall.SO_REUSEADDR, 1)
	})
	return errors.Join(err, optErr)
}
