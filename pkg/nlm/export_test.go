package nlm

import (
	"net"
	"net/netip"
	"time"
)

// MaxLocks bounds the locks of one mount.
const MaxLocks = maxLocks

// Quick makes the client poll and retry within milliseconds.
func (c *Client) Quick() {
	c.times.silent = pollTimes{time.Millisecond, time.Millisecond}
	c.times.grace = time.Millisecond
	c.link.times.minBackoff, c.link.times.maxBackoff = time.Millisecond, 10*time.Millisecond
	c.link.times.connect, c.link.times.reply = 10*time.Second, 10*time.Second
}

// Patient makes the client poll only when it is called back.
func (c *Client) Patient() {
	c.times.silent = pollTimes{time.Hour, time.Hour}
	c.times.called = c.times.silent
}

// SetPortmap makes the service use another port mapper.
func (c *ServiceConfig) SetPortmap(port int) { c.portmapPort = port }

// Handle executes one call as if it came from the address.
func (s *Service) Handle(from netip.AddrPort, message []byte) []byte { return s.handle(from, message) }

// Admit adds a connection from the peer, or returns false.
func (s *Service) Admit(conn net.Conn, peer netip.Addr) bool { return s.admit(conn, peer) }

// WaitReady returns when the service has started.
func (s *Service) WaitReady() { <-s.ready }

// Active reports whether servers can call the service.
func (s *Service) Active() bool { return s.active() }

// AppendNotify appends the arguments of SM_NOTIFY.
func AppendNotify(b []byte, host string, state uint32) []byte { return AppendFreeAll(b, host, state) }
