// Package resvport binds and requires reserved source ports. A server that trusts the user IDs of
// AUTH_SYS requires a source port below 1024 (exports(5), option secure; nfs(5), option resvport):
// only a privileged process can bind one, and nothing else proves these IDs.
package resvport

import (
	"context"
	"errors"
	"iter"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/internal/pace"
)

// Limit is the first port that is not reserved (IPPORT_RESERVED).
const Limit = 1024

// Range of source ports. Like the Linux client, it excludes the ports below 665, which most
// services use.
const (
	Min = 665
	Max = Limit - 1
)

// Candidates yields every port from Min to Max once. The first one is random, so that most callers
// find a free port at once.
func Candidates() iter.Seq[int] {
	const n = Max - Min + 1
	first := rand.IntN(n)
	return func(yield func(int) bool) {
		for i := range n {
			if !yield(Min + (first+i)%n) {
				return
			}
		}
	}
}

// InUse reports whether err says that a source port is in use, so that another port may work.
func InUse(err error) bool {
	return errors.Is(err, syscall.EADDRINUSE) || errors.Is(err, syscall.EADDRNOTAVAIL)
}

// Share permits the source port of a socket to be one that other sockets use for other
// destinations, or that an earlier connection holds in TIME-WAIT. Only a few reserved ports exist.
func Share(fd int) error {
	return os.NewSyscallError("setsockopt", syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1))
}

// Dial connects to addr, "host:port", over TCP from a reserved source port, or from any port if no
// reserved port is free or permitted.
func Dial(ctx context.Context, addr string) (net.Conn, error) {
	for from := range Candidates() {
		d := net.Dialer{LocalAddr: &net.TCPAddr{Port: from}, Control: shareConn}
		conn, err := d.DialContext(ctx, "tcp", addr)
		if errors.Is(err, syscall.EACCES) {
			break // no privilege for any reserved port
		}
		if err == nil || !InUse(err) {
			return conn, err
		}
	}
	return DialAny(ctx, addr)
}

// DialAny connects to addr, "host:port", over TCP from a source port that the kernel chooses.
func DialAny(ctx context.Context, addr string) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, "tcp", addr)
}

// shareConn is Share for a net.Dialer.
func shareConn(_, _ string, c syscall.RawConn) (err error) {
	ctlErr := c.Control(func(fd uintptr) { err = Share(int(fd)) })
	return errors.Join(ctlErr, err)
}

// A Rule requires reserved source ports of the clients of a server. It is safe for concurrent use.
type Rule struct {
	off     bool
	log     hclog.Logger
	refusal pace.Limiter
}

// NewRule returns a rule, or one that permits every port if off is set. It warns if every user of
// this host can bind reserved ports.
func NewRule(off bool, log hclog.Logger) *Rule {
	if n := firstUnprivileged(); !off && n < Limit {
		log.Warn("every user of this host can use a source port below 1024, and so act as any user; set the sysctl "+
			"to 1024", "net.ipv4.ip_unprivileged_port_start", n)
	}
	return &Rule{off: off, log: log, refusal: pace.Limiter{Pause: time.Minute}}
}

// Permits reports whether calls of peer may be executed, and logs refusals once a minute.
func (r *Rule) Permits(peer netip.AddrPort) bool {
	if r.off || peer.Port() < Limit {
		return true
	}
	r.refusal.Log(r.log.Warn, "call refused: the source port is not below 1024; mount as root with the option "+
		"resvport, or start the server with --insecure", "peer", peer)
	return false
}

// firstUnprivileged returns the lowest port that every local user may bind: Limit, unless the
// administrator has changed net.ipv4.ip_unprivileged_port_start in this network namespace.
func firstUnprivileged() int {
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_unprivileged_port_start")
	if n, numErr := strconv.Atoi(strings.TrimSpace(string(text))); err == nil && numErr == nil {
		return n
	}
	return Limit
}
