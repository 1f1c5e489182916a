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

// A forwarder takes the host's RDMA connections and hands them on to QEMU's port. QEMU alone would
// not do: it accepts a connection while the guest cannot be reached, and hands it on when the guest
// can, even if it was closed meanwhile; that end, right after the beginning, takes siw's listener
// away, which no client did. The forwarder holds such connections back, and forgets those that end
// before the guest can be reached again: to the guest they never were, as on a real network.
type forwarder struct {
	addr, to netip.AddrPort

	mu       sync.Mutex
	listener net.Listener      // guarded by mu; nil while the guest has no power
	gate     chan struct{}     // guarded by mu; closed while the guest can be reached
	open     bool              // guarded by mu: gate is closed
	conns    map[net.Conn]bool // guarded by mu; both sides of each
	ended    bool              // guarded by mu
	work     sync.WaitGroup
}

func newForwarder(addr, to netip.AddrPort) *forwarder {
	return &forwarder{addr: addr, to: to, gate: make(chan struct{}), conns: make(map[net.Conn]bool)}
}

// listen begins to take connections, which are held back. It may be called when it listens already.
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

// refuse ends listen: connects are refused, and connections that are held back are reset.
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

// hold holds new connections back.
func (f *forwarder) hold() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.open {
		f.open, f.gate = false, make(chan struct{})
	}
}

// release hands connections on, also those that were held back and are still there.
func (f *forwarder) release() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.open {
		f.open = true
		close(f.gate)
	}
}

// close ends everything.
func (f *forwarder) close() {
	f.mu.Lock()
	f.ended = true
	f.mu.Unlock()
	f.refuse()
	f.release()
	f.work.Wait()
}

// keep remembers a connection, unless all is over.
func (f *forwarder) keep(conn net.Conn) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ended {
		return false
	}
	f.conns[conn] = true
	return true
}

func (f *forwarder) forget(conn net.Conn) {
	f.mu.Lock()
	delete(f.conns, conn)
	f.mu.Unlock()
	conn.Close()
}

// settle is what a connection that was held back is given before it is handed on, and after. A
// client may be about to give it up, and keeps it for a moment only to be polite to a server that
// has just taken it; this server has not, and would see it come and go.
const settle = time.Second

// pass waits until the guest can be reached. held says that there was need to; ok is false for a
// connection that is over by then.
func (f *forwarder) pass(client *net.TCPConn) (held, ok bool) {
	f.mu.Lock()
	gate, open := f.gate, f.open
	f.mu.Unlock()
	if open { // whatever the client does now is its own doing
		return false, true
	}
	<-gate
	time.Sleep(settle)
	return true, !closed(client)
}

func (f *forwarder) serve(client *net.TCPConn) {
	if !f.keep(client) {
		client.Close()
		return
	}
	defer f.forget(client)
	// A client may end a connection without a word; the reset that a probe gets then tells.
	client.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: time.Second, Interval: time.Second})
	held, ok := f.pass(client)
	if !ok {
		return
	}
	conn, err := net.Dial("tcp", f.to.String())
	if err != nil {
		reset(client)
		return
	}
	server := conn.(*net.TCPConn)
	if !f.keep(server) {
		server.Close()
		return
	}
	defer f.forget(server)
	if held {
		time.Sleep(settle)
	}
	var both sync.WaitGroup
	both.Go(func() { carry(server, client) })
	both.Go(func() { carry(client, server) })
	both.Wait()
}

// copyBuffer is in octets, a few RDMA messages.
const copyBuffer = 256 << 10

// carry copies one way, and ends the way as it ended on the other side.
func carry(to, from *net.TCPConn) {
	// Without their wrappers the kernel would do the copying, by pipes that Go keeps open: a test's
	// leak check would count them.
	_, err := io.CopyBuffer(struct{ io.Writer }{to}, struct{ io.Reader }{from}, make([]byte, copyBuffer))
	if errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) || errors.Is(err, net.ErrClosed) {
		reset(to)
		reset(from)
		return
	}
	to.CloseWrite()
}

// reset ends a connection by RST.
func reset(conn *net.TCPConn) {
	conn.SetLinger(0)
	conn.Close()
}

// closed tells whether the peer has ended a connection, unread octets or not.
func closed(conn *net.TCPConn) bool {
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
