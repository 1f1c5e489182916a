package lab

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A forwarder accepts the host's RDMA connections and forwards them to QEMU's port. QEMU's own
// forwarding is not enough: QEMU accepts a connection while the guest cannot be reached. QEMU
// passes this connection to the guest later, even if the client has already closed it. siw loses
// its listener when a connection ends right after its start, although no client did this. The
// forwarder holds these connections back, and drops those that end before the guest can be reached
// again. As on a real network, the guest never sees them.
type forwarder struct {
	addr, to netip.AddrPort
	life     time.Duration // least life of a connection to QEMU

	mu       sync.Mutex
	listener net.Listener      // guarded by mu; nil while the guest is off
	gate     chan struct{}     // guarded by mu; closed while the guest can be reached
	open     bool              // guarded by mu: gate is closed
	conns    map[net.Conn]bool // guarded by mu; both sides of each
	ended    bool              // guarded by mu
	work     sync.WaitGroup
}

func newForwarder(addr, to netip.AddrPort) *forwarder {
	return &forwarder{addr: addr, to: to, gate: make(chan struct{}), conns: make(map[net.Conn]bool)}
}

// listen begins to accept connections, which are held back. It does nothing if f already listens.
func (f *forwarder) listen() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.listener != nil {
		return nil
	}
	l, err := net.Listen("tcp", f.addr.String())
	if err != nil {
		return err
	}
	f.listener = l
	f.work.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			f.work.Go(func() { f.serve(client.(*net.TCPConn)) })
		}
	})
	return nil
}

// refuse ends listen: connects are refused, and all connections are reset.
func (f *forwarder) refuse() {
	f.hold()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.listener != nil {
		f.listener.Close()
		f.listener = nil
	}
	for conn := range f.conns {
		reset(conn.(*net.TCPConn))
	}
}

// hold holds new connections back until release.
func (f *forwarder) hold() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.open {
		f.open, f.gate = false, make(chan struct{})
	}
}

// release forwards new connections, and the held ones that are still open.
func (f *forwarder) release() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.open {
		f.open = true
		close(f.gate)
	}
}

// close closes all connections and waits for the forwarder's goroutines.
func (f *forwarder) close() {
	f.mu.Lock()
	f.ended = true
	f.mu.Unlock()
	f.refuse()
	f.release()
	f.work.Wait()
}

// track records a connection and returns true. After close, track returns false.
func (f *forwarder) track(conn net.Conn) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ended {
		return false
	}
	f.conns[conn] = true
	return true
}

func (f *forwarder) untrack(conn net.Conn) {
	f.mu.Lock()
	delete(f.conns, conn)
	f.mu.Unlock()
	conn.Close()
}

// settleDelay is the time for which a held connection stays open before it is forwarded, and again
// before its data is forwarded. A client that cancels a connection may keep it open for a short
// time, because a server may just have accepted it. The server in the guest has not accepted a held
// connection yet.
const settleDelay = time.Second

// killSafeLife is the least life of a connection with Options.KillSafe, ten times what siw needs.
const killSafeLife = 100 * time.Millisecond

// awaitReachable waits until the guest can be reached. held reports whether it had to wait; ok is
// false if the client closed the connection during the wait.
func (f *forwarder) awaitReachable(client *net.TCPConn) (held, ok bool) {
	f.mu.Lock()
	gate, open := f.gate, f.open
	f.mu.Unlock()
	if open { // the guest now gets the client's FIN or RST directly
		return false, true
	}
	<-gate
	time.Sleep(settleDelay)
	return true, !peerClosed(client)
}

func (f *forwarder) serve(client *net.TCPConn) {
	if !f.track(client) {
		client.Close()
		return
	}
	defer f.untrack(client)
	// A client may end a connection without a FIN or RST. A keepalive probe then gets a reset.
	client.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: time.Second, Interval: time.Second})
	held, ok := f.awaitReachable(client)
	if !ok {
		return
	}
	conn, err := net.Dial("tcp", f.to.String())
	if err != nil {
		reset(client)
		return
	}
	server := conn.(*net.TCPConn)
	if !f.track(server) {
		server.Close()
		return
	}
	defer f.untrack(server)
	if held {
		time.Sleep(settleDelay)
	}
	settled := time.Now().Add(f.life)
	var both sync.WaitGroup
	both.Go(func() { copyOneWay(server, client, settled) })
	both.Go(func() { copyOneWay(client, server, time.Time{}) })
	both.Wait()
}

// copyBuffer is in bytes, a few RDMA messages.
const copyBuffer = 256 << 10

// copyOneWay copies one direction, and ends it with a FIN or an RST as the sender did, but not
// before settled.
func copyOneWay(to, from *net.TCPConn, settled time.Time) {
	// Without the wrappers the kernel copies through pipes that the Go runtime keeps open, and the
	// tests' leak check counts these pipes.
	_, err := io.CopyBuffer(struct{ io.Writer }{to}, struct{ io.Reader }{from}, make([]byte, copyBuffer))
	time.Sleep(time.Until(settled))
	if errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) || errors.Is(err, net.ErrClosed) {
		reset(to)
		reset(from)
		return
	}
	to.CloseWrite()
}

// reset ends a connection with an RST.
func reset(conn *net.TCPConn) {
	conn.SetLinger(0)
	conn.Close()
}

// peerClosed reports whether the peer has closed a connection, even if bytes are unread.
func peerClosed(conn *net.TCPConn) bool {
	raw, err := conn.SyscallConn()
	if err != nil {
		return true
	}
	over := true
	err = raw.Control(func(fd uintptr) {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		_, err := unix.Poll(p, 0)
		over = err != nil || p[0].Revents != 0
	})
	return err != nil || over
}
