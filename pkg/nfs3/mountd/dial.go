package mountd

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"strconv"
	"syscall"
)

// Range of reserved source ports. Like the Linux client, it excludes the ports below 665, which
// most services use.
const (
	minReserved = 665
	maxReserved = 1023
	numReserved = maxReserved - minReserved + 1
)

// dial connects to host:port. With reserved set it uses a reserved source port, because many
// servers require one. It uses any port if no reserved port is free or permitted.
func dial(ctx context.Context, host string, port int, reserved bool) (net.Conn, error) {
	addr := net.JoinHostPort(host, strconv.Itoa(port))
	if reserved {
		// The first port is random. A port in use costs only a failed bind.
		first := rand.IntN(numReserved)
		for i := range numReserved {
			from := minReserved + (first+i)%numReserved
			d := net.Dialer{LocalAddr: &net.TCPAddr{Port: from}, Control: reuseAddr}
			conn, err := d.DialContext(ctx, "tcp", addr)
			if err == nil || !isBindError(err) {
				return conn, err
			}
			if errors.Is(err, syscall.EACCES) {
				break // no privilege for any reserved port
			}
		}
	}
	var d net.Dialer
	return d.DialContext(ctx, "tcp", addr)
}

// DialReserved connects to host:port from a reserved source port, or from any port if no reserved
// port is free or permitted.
func DialReserved(ctx context.Context, host string, port int) (net.Conn, error) {
	return dial(ctx, host, port, true)
}

// isBindError reports whether a connection failed because of its source port.
func isBindError(err error) bool {
	return errors.Is(err, syscall.EADDRINUSE) || errors.Is(err, syscall.EADDRNOTAVAIL) || errors.Is(err, syscall.EACCES)
}

// reuseAddr permits a source port that an earlier connection still holds in TIME-WAIT, which lasts
// one minute. Only a few reserved ports exist, so do not wait for a free one.
func reuseAddr(_, _ string, c syscall.RawConn) error {
	var optErr error
	err := c.Control(func(fd uintptr) {
		optErr = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET,
			syscall.SO_REUSEADDR, 1)
	})
	return errors.Join(err, optErr)
}
