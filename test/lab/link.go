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
	// linkMTU is the usual MTU of jumbo frames, the largest that real network cards support. rxe
	// needs it for its largest path MTU, 4096; an MTU of 1500 allows only 1024. An emulated guest
	// pays for frames, not for their size.
	linkMTU = 9000
	// linkNetdev is QEMU's name for the guest's end of the link.
	linkNetdev = "link"
	// ethernetHeader is the size in bytes of two addresses and a type.
	ethernetHeader = 14
	// maxFrame is the largest frame in bytes that a card can send: 64 KiB and a VLAN tag.
	maxFrame = ethernetHeader + 4 + 65536
	// portBuffer is the size in bytes of the buffer for frames, in each direction of a port.
	portBuffer = 4 << 20
	// stallLimit is how long a sender waits for a port without room, as with Ethernet's flow
	// control, so that a busy host loses nothing. After it the port, for example of a frozen guest,
	// drops frames until it has room again. A guest's kernel reports a transmit queue that is
	// blocked for five seconds as an error.
	stallLimit = 2 * time.Second
)

// linkNet is the network of the addresses that a link assigns.
var linkNet = netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 9, 0, 0}), 24)

// A Link is an Ethernet between guests, with a switch. Each guest that Options.Link joins to it has
// a card eth1 there, which carries its RDMA device. The link has no connection to other networks.
// Frames arrive complete and in order, or not at all if the link is cut or a guest is off. A Link
// is safe for concurrent use.
type Link struct {
	work sync.WaitGroup // one for each port that is plugged in

	mu    sync.Mutex
	ports []*port // guarded by mu; one for each guest that was ever connected
	cut   bool    // guarded by mu
}

// A port is a guest's end of a link.
type port struct {
	link *Link
	mac  [6]byte
	addr netip.Prefix

	// conn and cut are guarded by link.mu.
	conn *net.UnixConn // to QEMU, one datagram for each frame; nil while the guest is off
	cut  bool

	// sending is held while a frame is sent to the guest. Only senders take it, because they may
	// wait for the guest.
	sending sync.Mutex
	stalled bool // guarded by sending; the last frame found no room in time
}

// NewLink returns a link that ends with the test. Its guests start later, and so end earlier.
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

// Cut makes the link drop every frame until Restore. The guests' cards stay up.
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
		return nil, errors.New("join link: it has its maximum of 254 guests")
	}
	if !addr.IsValid() {
		host := linkNet.Addr().As4()
		host[3] = n
		addr = netip.PrefixFrom(netip.AddrFrom4(host), linkNet.Bits())
	}
	for _, p := range l.ports {
		if p.addr.Addr() == addr.Addr() {
			return nil, fmt.Errorf("join link: another guest has the address %v", addr.Addr())
		}
	}
	// QEMU's cards have this prefix, and count from 12:34:56.
	p := &port{link: l, mac: [6]byte{0x52, 0x54, 0x00, 0x09, 0x00, n}, addr: addr}
	l.ports = append(l.ports, p)
	return p, nil
}

// arguments returns QEMU's arguments for a cable with descriptor fd.
func (p *port) arguments(fd int) []string {
	return []string{
		"-netdev", "dgram,id=" + linkNetdev + ",local.type=fd,local.str=" + strconv.Itoa(fd),
		"-device", "virtio-net-pci,netdev=" + linkNetdev + ",romfile=,mac=" + net.HardwareAddr(p.mac[:]).String(),
	}
}

// plug connects a new cable and returns its other end, for QEMU. Frames on the old cable are lost.
func (p *port) plug() (*os.File, error) {
	p.unplug()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socketpair", err)
	}
	own, theirs := os.NewFile(uintptr(fds[0]), "link"), os.NewFile(uintptr(fds[1]), "link")
	defer own.Close() // FileConn duplicates it
	for _, fd := range fds {
		// Only root can exceed the system's limit.
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

// unplug disconnects the cable.
func (p *port) unplug() {
	p.link.mu.Lock()
	defer p.link.mu.Unlock()
	if p.conn != nil {
		p.conn.Close()
		p.conn = nil
	}
}

// A target is a port to which a frame goes.
type target struct {
	port *port
	conn *net.UnixConn
}

// forward sends a frame from a guest to its targets.
func (l *Link) forward(from *port, frame []byte) {
	if len(frame) < ethernetHeader {
		return
	}
	for _, t := range l.route(from, [6]byte(frame)) {
		t.port.send(t.conn, frame)
	}
}

// route returns the targets of a frame to an address.
func (l *Link) route(from *port, to [6]byte) []target {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cut || from.cut {
		return nil
	}
	targets := make([]target, 0, 4)
	for _, p := range l.ports {
		// The link assigns the cards' addresses and need not learn them. Frames to other addresses,
		// such as broadcasts, go to every port.
		if p.mac == to {
			targets = append(targets[:0], target{p, p.conn})
			break
		}
		targets = append(targets, target{p, p.conn})
	}
	return slices.DeleteFunc(targets, func(t target) bool { return t.port == from || t.port.cut || t.conn == nil })
}

// send sends a frame to the guest, and waits at most stallLimit for room.
func (p *port) send(conn *net.UnixConn, frame []byte) {
	p.sending.Lock()
	defer p.sending.Unlock()
	// Do not use a short deadline here: it could pass before the first attempt to send.
	if p.stalled {
		p.stalled = errors.Is(offer(conn, frame), unix.EAGAIN)
		return
	}
	conn.SetWriteDeadline(time.Now().Add(stallLimit))
	_, err := conn.Write(frame)
	p.stalled = errors.Is(err, os.ErrDeadlineExceeded) // with any other error the guest is off
}

// offer sends a frame if there is room for it, or returns EAGAIN.
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
