package mountd

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"strconv"
	"syscall"
)

// Reserved source ports that are tried. Below 665 lie the ports of most services; Linux's own clients keep the same distance.
const (
	minReserved   = 665
	maxReserved   = 1023
	reservedTries = 8
)

// dial connects to host:port. With reserved set it comes from a reserved port when it may and one is free, because many servers let
// only those in; otherwise from any port, and the server decides.
func dial(ctx context.Context, host string, port int, reserved bool) (net.Conn, error) {
	addr := net.JoinHostPort(host, strconv.Itoa(port))
	if reserved {
		for range reservedTries {
			from := minReserved + rand.IntN(maxReserved-minReserved+1)
			d := net.Dialer{LocalAddr: &net.TCPAddr{Port: from}}
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
