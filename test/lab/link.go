package lab

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// linkMTU is the usual one of jumbo frames. It lets rxe use its largest path MTU, 4096, for
	// which 1500 leaves 1024; and every frame costs an emulated guest the same, whatever its size.
	// More than that no network card of a real server takes.
	linkMTU = 9000
	// linkNetdev is the name of the link's network back end in QEMU.
	linkNetdev = "link"
	// ethernetHeader is in octets: two addresses and a type.
	ethernetHeader = 14
	// maxFrame is what a card can send at most: with a VLAN tag, and 64 KiB.
	maxFrame = ethernetHeader + 4 + 65536
	// portBuffer is in octets, of frames on their way into a guest or out of it.
	portBuffer = 4 << 20
	// A port that takes nothing for stallLimit, of a guest that is frozen, loses frames from then
	// on, until there is room for one. Until then whoever sends to it waits, as with Ethernet's
	// flow control, so that a busy host loses nothing. The kernel of a guest warns of a transmit
	// queue that stands still for five seconds.
	stallLimit = 2 * time.Second
)

// linkNet is where addresses on a link come from that nobody chose.
var linkNet = netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 9, 0, 0}), 24)

// A Link is an Ethernet cable between guests, or several with a switch between: each guest that
// Options.Link joins to it has a card eth1 there, and its RDMA device on that. It has no other way
// out. Frames arrive whole and in order, or, where the link is cut or a guest is off, not at all.
// Safe for concurrent use.
type Link struct {
	work sync.WaitGroup // one for each port that has a cable

	mu    sync.Mutex
	ports []*port // guarded by mu; one for each guest that ever was here
	cut   bool    // guarded by mu
}

// A port is a guest's end of a link.
type port struct {
	link *Link
	mac  [6]byte
	addr netip.Prefix

	// Guarded by link.mu:
	conn *net.UnixConn // to QEMU, a datagram for each frame; nil while the guest is off
	cut  bool

	// one frame into the guest at a time; nobody but senders takes it, as they may wait for the
	// guest
	sending sync.Mutex
	stalled bool // guarded by sending: the last frame found no room in time
}

// NewLink makes a link that ends with the test. The guests of it are started after it, and so end
// before.
func NewLink(t testing.TB) *Link {
	l := &Link{}
	t.Cleanup(func() {
		l.mu.Lock()
		ports := l.ports
		l.mu.Unlock()
		for _, p := range ports {
			p.unplug()
		}
		l.work.Wait()
	})
	return l
}

// Cut makes the link lose every frame until Restore. The guests are not told: their cards stay up.
func (l *Link) Cut() { l.set(&l.cut, true) }

// Restore ends Cut.
func (l *Link) Restore() { l.set(&l.cut, false) }

func (l *Link) set(flag *bool, value bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	*flag = value
}

// join adds a port, with the next address of linkNet if there is none.
func (l *Link) join(addr netip.Prefix) (*port, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := byte(len(l.ports) + 1)
	if n == 255 {
		return nil, errors.New("a link has 254 guests at most")
	}
	if !addr.IsValid() {
		host := linkNet.Addr().As4()
		host[3] = n
		addr = netip.PrefixFrom(netip.AddrFrom4(host), linkNet.Bits())
	}
	for _, p := range l.ports {
		if p.addr.Addr() == addr.Addr() {
			return nil, fmt.Errorf("another guest of the link has the address %v", addr.Addr())
		}
	}
	// The prefix is that of QEMU's own cards, which count from 12:34:56.
	p := &port{link: l, mac: [6]byte{0x52, 0x54, 0x00, 0x09, 0x00, n}, addr: addr}
	l.ports = append(l.ports, p)
	return p, nil
}

// arguments are QEMU's, where the cable is descriptor fd.
func (p *port) arguments(fd int) []string {
	return []string{
		"-netdev", "dgram,id=" + linkNetdev + ",local.type=fd,local.str=" + strconv.Itoa(fd),
		"-device", "virtio-net-pci,netdev=" + linkNetdev + ",romfile=,mac=" + net.HardwareAddr(p.mac[:]).String(),
	}
}

// plug returns the descriptor of a new cable, for QEMU. What the last one still had is lost.
func (p *port) plug() (*os.File, error) {
	p.unplug()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socketpair", err)
	}
	own, theirs := os.NewFile(uintptr(fds[0]), "link"), os.NewFile(uintptr(fds[1]), "link")
	defer own.Close() // FileConn has its own
	for _, fd := range fds {
		// only root may go beyond the system's limit
		if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, portBuffer) != nil {
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, portBuffer)
		}
	}
	c, err := net.FileConn(own)
	if err != nil {
		theirs.Close()
		return nil, err
	}
	conn := c.(*net.UnixConn)
	p.link.mu.Lock()
	defer p.link.mu.Unlock()
	p.conn, p.cut = conn, false
	p.link.work.Go(func() {
		frame := make([]byte, maxFrame)
		for {
			n, err := conn.Read(frame)
			if err != nil {
				return
			}
			p.link.forward(p, frame[:n])
		}
	})
	return theirs, nil
}

// unplug takes the cable out.
func (p *port) unplug() {
	p.link.mu.Lock()
	defer p.link.mu.Unlock()
	if p.conn != nil {
		p.conn.Close()
		p.conn = nil
	}
}

// A target is where a frame goes.
type target struct {
	port *port
	conn *net.UnixConn
}

// forward takes a frame from a guest to those that it is for.
func (l *Link) forward(from *port, frame []byte) {
	if len(frame) < ethernetHeader {
		return
	}
	for _, t := range l.route(from, [6]byte(frame)) {
		t.port.send(t.conn, frame)
	}
}

// route returns where a frame to an address goes.
func (l *Link) route(from *port, to [6]byte) []target {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cut || from.cut {
		return nil
	}
	targets := make([]target, 0, 4)
	for _, p := range l.ports {
		// The addresses of the cards are the link's own choice, so it need not learn them; what
		// else there is, such as a broadcast, is for all.
		if p.mac == to {
			targets = append(targets[:0], target{p, p.conn})
			break
		}
		targets = append(targets, target{p, p.conn})
	}
	return slices.DeleteFunc(targets, func(t target) bool { return t.port == from || t.port.cut || t.conn == nil })
}

// send hands a frame to the guest, and waits while the guest has no room, but not for ever.
func (p *port) send(conn *net.UnixConn, frame []byte) {
	p.sending.Lock()
	defer p.sending.Unlock()
	// No deadline that is near: it could pass before the frame was tried at all.
	if p.stalled {
		p.stalled = errors.Is(offer(conn, frame), unix.EAGAIN)
		return
	}
	conn.SetWriteDeadline(time.Now().Add(stallLimit))
	_, err := conn.Write(frame)
	p.stalled = errors.Is(err, os.ErrDeadlineExceeded) // any other error is a guest that went away
}

// offer sends a frame if there is room for it now, and is EAGAIN otherwise.
func offer(conn *net.UnixConn, frame []byte) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	if e := raw.Control(func(fd uintptr) { _, err = unix.Write(int(fd), frame) }); e != nil {
		return e
	}
	return err
}
