package virtiofs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
)

// Messages of the vhost-user protocol ("Front-end message types").
const (
	msgGetFeatures         = 1
	msgSetFeatures         = 2
	msgSetOwner            = 3
	msgResetOwner          = 4
	msgSetMemTable         = 5
	msgSetVringNum         = 8
	msgSetVringAddr        = 9
	msgSetVringBase        = 10
	msgGetVringBase        = 11
	msgSetVringKick        = 12
	msgSetVringCall        = 13
	msgSetVringErr         = 14
	msgGetProtocolFeatures = 15
	msgSetProtocolFeatures = 16
	msgGetQueueNum         = 17
	msgSetVringEnable      = 18
)

const (
	messageHeader  = 12
	maxMessage     = 4096 // bytes of a payload
	messageVersion = 1
	versionMask    = 3
	flagReply      = 1 << 2
	flagNeedReply  = 1 << 3
	ringIndexMask  = 0xff   // of SET_VRING_KICK and the like
	noDescriptor   = 1 << 8 // of the same

	featureIndirect = 1 << 28 // VIRTIO_F_INDIRECT_DESC
	featureProtocol = 1 << 30 // VHOST_USER_F_PROTOCOL_FEATURES
	featureVersion1 = 1 << 32 // VIRTIO_F_VERSION_1
	features        = featureIndirect | featureProtocol | featureVersion1

	protocolMQ       = 1 << 0 // VHOST_USER_PROTOCOL_F_MQ
	protocolReplyAck = 1 << 3 // VHOST_USER_PROTOCOL_F_REPLY_ACK
	protocolFeatures = protocolMQ | protocolReplyAck

	// maxRings bounds the queues: one for FORGET and INTERRUPT, and those for other requests.
	maxRings = 17
	// maxRingSize bounds the descriptors of a queue, and so its requests in progress.
	maxRingSize = 1024
	// maxLarge bounds the requests that have memory for more than largeRequest bytes.
	maxLarge     = 32
	largeRequest = 64 << 10
	// interruptInterval is the interval of the attempts to end requests in progress.
	interruptInterval = 20 * time.Millisecond
)

// drainTimeout is how long the VMM waits for requests in progress when it stops a queue. Then they
// are interrupted. A VMM does nothing else meanwhile. Tests replace drainTimeout.
var drainTimeout = 5 * time.Second

// A conn is the connection of one VMM.
type conn struct {
	s      *Server
	socket *net.UnixConn
	raw    syscall.RawConn // of socket
	ended  chan struct{}   // closed when all is released

	features  uint64 // negotiated
	protocols uint64 // negotiated
	mem       *memory
	rings     [maxRings]*ring

	// A request holds gate for reading. The begin and the end of a session hold it for writing.
	gate    sync.RWMutex
	handler atomic.Pointer[kernel.Handler] // of the FUSE session; nil without one
	large   chan []uint64                  // memory for each large request, nil at first

	idle struct { // requests that have ended, for reuse
		sync.Mutex
		requests []*request
	}
}

func newConn(s *Server, socket *net.UnixConn) *conn {
	c := &conn{s: s, socket: socket, ended: make(chan struct{}), large: make(chan []uint64, maxLarge)}
	c.raw, _ = socket.SyscallConn() // never fails
	for range maxLarge {
		c.large <- nil
	}
	for i := range c.rings {
		c.rings[i] = newRing(c, i)
	}
	return c
}

// serve handles the messages of the VMM until it disconnects or breaks the protocol.
func (c *conn) serve() error {
	err := c.receive()
	if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) || errors.Is(err, unix.ECONNRESET) {
		err = nil
	}
	c.hangUp()
	for _, r := range c.rings {
		r.stop()
	}
	c.endSession() // interrupts the requests
	for _, r := range c.rings {
		r.close()
	}
	if c.mem != nil {
		c.mem.release()
	}
	c.s.state.endConn()
	return err
}

// hangUp ends the connection, of which the State has a descriptor too.
func (c *conn) hangUp() {
	_ = withDescriptor(c.socket, func(fd int) error { return unix.Shutdown(fd, unix.SHUT_RDWR) })
	c.socket.Close()
}

// execute executes a message. reply is nil for a message without a reply in the protocol.
func (c *conn) execute(m *message) (reply []byte, err error) {
	switch m.kind {
	case msgGetFeatures:
		return binary.LittleEndian.AppendUint64(nil, features), nil
	case msgGetProtocolFeatures:
		return binary.LittleEndian.AppendUint64(nil, protocolFeatures), nil
	case msgGetQueueNum:
		return binary.LittleEndian.AppendUint64(nil, maxRings), nil
	case msgSetFeatures:
		return nil, c.setFeatures(m, &c.features, features)
	case msgSetProtocolFeatures:
		return nil, c.setFeatures(m, &c.protocols, protocolFeatures)
	case msgSetOwner, msgResetOwner:
		return nil, nil
	case msgSetMemTable:
		return nil, c.setMemory(m)
	case msgSetVringKick, msgSetVringCall, msgSetVringErr:
		return nil, c.setDescriptor(m)
	case msgSetVringAddr:
		return nil, c.setAddresses(m)
	case msgSetVringNum, msgSetVringBase, msgGetVringBase, msgSetVringEnable:
		return c.setState(m)
	}
	return nil, errors.New("not supported")
}

func (c *conn) setFeatures(m *message, to *uint64, supported uint64) error {
	if len(m.payload) != 8 {
		return fmt.Errorf("payload of %d bytes, want 8", len(m.payload))
	}
	v := binary.LittleEndian.Uint64(m.payload)
	if v&^supported != 0 {
		return fmt.Errorf("features %#x are not supported", v&^supported)
	}
	if to == &c.features && v&featureVersion1 == 0 {
		return errors.New("the guest does not support virtio 1.0")
	}
	*to = v
	c.s.state.update(func(r *shareRecord) { r.features, r.protocols = c.features, c.protocols })
	if to == &c.features {
		for _, r := range c.rings {
			r.setFeatures(v)
		}
	}
	return nil
}

// setMemory handles SET_MEM_TABLE. The VMM also sends it while queues run, when the guest gets more
// memory.
func (c *conn) setMemory(m *message) error {
	const head, size = 8, 32
	if len(m.payload) < head {
		return fmt.Errorf("payload of %d bytes", len(m.payload))
	}
	n := binary.LittleEndian.Uint32(m.payload)
	if n > maxRegions || len(m.payload) < head+int(n)*size {
		return fmt.Errorf("%d regions in %d bytes", n, len(m.payload))
	}
	regions := make([]region, n)
	for i := range regions {
		b := m.payload[head+i*size:]
		regions[i] = region{guest: binary.LittleEndian.Uint64(b), size: binary.LittleEndian.Uint64(b[8:]),
			user: binary.LittleEndian.Uint64(b[16:]), offset: binary.LittleEndian.Uint64(b[24:])}
	}
	mem, err := newMemory(regions, m.fds)
	if err != nil {
		return err
	}
	if err := c.s.state.setMemory(regions, m.fds); err != nil {
		mem.release()
		return err
	}
	if old := c.mem; old != nil {
		defer old.release()
	}
	c.mem = mem
	for _, r := range c.rings {
		if err := r.setMemory(mem); err != nil {
			return err
		}
	}
	return nil
}

// setDescriptor handles SET_VRING_KICK, SET_VRING_CALL and SET_VRING_ERR.
func (c *conn) setDescriptor(m *message) error {
	if len(m.payload) != 8 {
		return fmt.Errorf("payload of %d bytes, want 8", len(m.payload))
	}
	v := binary.LittleEndian.Uint64(m.payload)
	r, err := c.ring(v & ringIndexMask)
	if err != nil {
		return err
	}
	var f *os.File
	var kept uint64
	if v&noDescriptor == 0 {
		if len(m.fds) != 1 {
			return fmt.Errorf("%d descriptors, want 1", len(m.fds))
		}
		if err := checkEventfd(m.fds[0]); err != nil {
			return err
		}
		if m.kind != msgSetVringErr {
			if kept, err = c.s.state.fds.add(m.fds[0]); err != nil {
				return err
			}
		}
		f = os.NewFile(uintptr(m.fds[0]), "eventfd")
		m.fds = nil
	}
	switch m.kind {
	case msgSetVringKick:
		if f == nil {
			return errors.New("queues without a kick descriptor are not supported")
		}
		return c.keepRing(r, func() error { return r.setKick(f, kept) })
	case msgSetVringCall:
		return c.keepRing(r, func() error {
			r.setCall(f, kept)
			return nil
		})
	default:
		if f != nil {
			f.Close() // an error ends the queue, and the log tells it
		}
	}
	return nil
}

// checkEventfd checks a descriptor, and makes it non-blocking.
func checkEventfd(fd int) error {
	name, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return err
	}
	if name != "anon_inode:[eventfd]" {
		return fmt.Errorf("descriptor of %s, want an eventfd", name)
	}
	return os.NewSyscallError("fcntl F_SETFL", unix.SetNonblock(fd, true))
}

// keepRing changes a queue and then its record.
func (c *conn) keepRing(r *ring, change func() error) error {
	before := [...]uint64{r.keptKick, r.keptCall}
	err := change()
	rec := r.record()
	c.s.state.rings.Set(c.s.state.ringRefs[r.index], &rec)
	step("record of a queue")
	for i, after := range [...]uint64{r.keptKick, r.keptCall} {
		if before[i] != after {
			c.s.state.fds.drop(maxStale, before[i])
		}
	}
	return err
}

func (c *conn) ring(i uint64) (*ring, error) {
	if i >= maxRings {
		return nil, fmt.Errorf("queue %d; there are %d", i, maxRings)
	}
	return c.rings[i], nil
}

func (c *conn) setAddresses(m *message) error {
	if len(m.payload) != 40 {
		return fmt.Errorf("payload of %d bytes, want 40", len(m.payload))
	}
	r, err := c.ring(uint64(binary.LittleEndian.Uint32(m.payload)))
	if err != nil {
		return err
	}
	u := func(at int) uint64 { return binary.LittleEndian.Uint64(m.payload[at:]) }
	return c.keepRing(r, func() error { return r.setAddresses(addresses{desc: u(8), used: u(16), avail: u(24)}) })
}

// setState handles the messages whose payload is a queue and a number.
func (c *conn) setState(m *message) (reply []byte, err error) {
	if len(m.payload) != 8 {
		return nil, fmt.Errorf("payload of %d bytes, want 8", len(m.payload))
	}
	index, v := binary.LittleEndian.Uint32(m.payload), binary.LittleEndian.Uint32(m.payload[4:])
	r, err := c.ring(uint64(index))
	if err != nil {
		return nil, err
	}
	var base uint16
	err = c.keepRing(r, func() error {
		switch m.kind {
		case msgSetVringNum:
			return r.setSize(v)
		case msgSetVringBase:
			return r.setBase(v)
		case msgSetVringEnable:
			return r.enable(v != 0)
		}
		base = c.drain(r)
		return nil
	})
	if err != nil || m.kind != msgGetVringBase {
		return nil, err
	}
	reply = binary.LittleEndian.AppendUint32(nil, index)
	return binary.LittleEndian.AppendUint32(reply, uint32(base)), nil
}

// drain stops a queue, waits for its requests, and returns the index of its next request.
// Requests that take too long, and locks that wait, are interrupted: the VMM waits.
func (c *conn) drain(r *ring) (base uint16) {
	r.stop()
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.requests.Wait()
	}()
	start := time.Now()
	for {
		select {
		case <-done:
			return r.next
		case <-time.After(interruptInterval):
			late := time.Since(start) > drainTimeout
			c.interruptAll(func(q *request) bool { return q.ring == r && (late || q.op() == kernel.OpSetLkw) })
		}
	}
}

// littleEndian reports whether this host has the byte order of virtio.
func littleEndian() bool { return binary.NativeEndian.Uint16([]byte{1, 0}) == 1 }
