package virtiofs

import (
	"bytes"
	"context"
	"encoding/binary"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/server/nfsserve"
	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/server"
)

func TestMain(m *testing.M) {
	runChild()
	server.Main()
	kit.Main(m)
}

// waitingFS makes LOOKUPs of the name "wait" wait for their INTERRUPT.
type waitingFS struct {
	*vfs.FS
	waiting  atomic.Int32
	placed   atomic.Int32 // READs whose data arrived in the guest's memory
	gathered atomic.Int32 // WRITEs from several places of the guest's memory
}

func (f *waitingFS) Read(r *kernel.Request, in *fuse.ReadIn, place [][]byte) (int, [][]byte, fuse.Status) {
	n, data, status := f.FS.Read(r, in, place)
	if place != nil && data == nil && status.Ok() {
		f.placed.Add(1)
	}
	return n, data, status
}

func (f *waitingFS) Write(r *kernel.Request, in *fuse.WriteIn, data [][]byte) (uint32, fuse.Status) {
	if len(data) > 1 {
		f.gathered.Add(1)
	}
	return f.FS.Write(r, in, data)
}

func (f *waitingFS) Lookup(r *kernel.Request, name string, out *fuse.EntryOut) fuse.Status {
	if name != "wait" {
		return f.FS.Lookup(r, name, out)
	}
	f.waiting.Add(1)
	<-r.Done()
	return fuse.EINTR
}

type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// A device is a Server for a directory, over NFS/RDMA.
type device struct {
	dir    string // on the server
	socket string
	fs     *waitingFS
	server *Server
	log    *logBuffer
	// The VMM can truncate the memory of the guest.
	unsealed bool
}

// newDevice serves a directory by NFS/RDMA, and this file system by virtiofs, until the test ends.
func newDevice(t testing.TB) *device {
	t.Helper()
	dir := t.TempDir()
	s, err := nfsserve.Run(context.Background(), nfsserve.Config{Dir: dir, RDMAListen: "127.0.0.1:0",
		TCPListen: "127.0.0.1:0", StateDir: t.TempDir(), NoRootSquash: true,
		Provider: softiwarp.New(softiwarp.Config{})})
	kit.Must(t, err)
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close server: %v", err)
		}
	})
	return newDeviceOf(t, &server.Server{Dir: dir, RDMAAddr: s.RDMAAddr, TCPAddr: s.TCPAddr})
}

// newDeviceOf serves the directory of a server by virtiofs until the test ends.
func newDeviceOf(t testing.TB, s *server.Server) *device {
	t.Helper()
	d := &device{dir: s.Dir, socket: filepath.Join(t.TempDir(), "vfs.sock"), log: &logBuffer{}}
	host, port, err := net.SplitHostPort(s.TCPAddr)
	kit.Must(t, err)
	number, err := strconv.Atoi(port)
	kit.Must(t, err)
	root, err := mountd.Mount(context.Background(), mountd.Args{Host: host, Port: number, Export: d.dir,
		Cred: &sunrpc.AuthSys{Machine: "test"}})
	kit.Must(t, err)
	tr, err := xprt.New(xprt.Config{Provider: softiwarp.New(softiwarp.Config{}), Addr: s.RDMAAddr})
	kit.Must(t, err)
	kit.Must(t, tr.Connect(context.Background()))
	pool := membuf.NewPool(vfs.MaxIOSize, 16)
	opts := vfs.DefaultOptions()
	opts.Guest, opts.ReadInPlace, opts.Buffers = true, true, pool
	fs, err := vfs.New(context.Background(), nfs3.NewServer(nfs3.NewClient(tr)), root.FH, opts)
	kit.Must(t, err)
	d.fs = &waitingFS{FS: fs}
	logger := hclog.New(&hclog.LoggerOptions{Output: d.log, Level: hclog.Debug})
	d.server, err = Listen(Config{Socket: d.socket, FS: d.fs, Log: logger,
		Options: fs.GuestOptions(logger.StandardLogger(nil))})
	kit.Must(t, err)
	t.Cleanup(func() {
		if err := d.server.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
		if _, err := os.Lstat(d.socket); !os.IsNotExist(err) {
			t.Errorf("socket after close: got %v, want no file", err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), kit.Timeout)
		defer cancel()
		fs.Close(ctx)
		if n := pool.Out(); n != 0 {
			t.Errorf("buffers in use after close: got %d, want 0", n)
		}
		pool.Close()
		tr.Close()
		if text := d.log.String(); strings.Contains(text, "panic") {
			t.Errorf("panic in the log:\n%s", text)
		}
	})
	return d
}

// Layout of the memory of a test VMM.
const (
	memSize   = 8 << 20
	guestBase = 1 << 30  // guest address of the memory
	userBase  = 0x7f0000 // address of the memory in the VMM
	ringSize  = 64
	ringSpace = 16 << 10 // for the tables of a queue
	slotSize  = 192 << 10
	slots     = 16 // requests in flight of a test
	slotBase  = 1 << 20
	half      = slotSize / 2
)

// A vmm is a VMM and its guest.
type vmm struct {
	t      testing.TB
	conn   *net.UnixConn
	memfd  int
	mem    []byte
	queues [3]*queue
	unique uint64
}

// A queue is the guest's side of a virtqueue. Descriptors are used in pairs, one pair per slot.
type queue struct {
	v               *vmm
	index           int
	kick, call      int
	poll            [1]unix.PollFd
	count           [8]byte // of call
	avail, lastUsed uint16
}

// connect connects a VMM and makes its queues.
func (d *device) connect(t testing.TB) *vmm {
	t.Helper()
	v := d.dial(t)
	v.message(msgSetOwner, nil)
	if f := v.ask(msgGetFeatures); f != features {
		t.Fatalf("features: got %#x", f)
	}
	v.message(msgSetFeatures, le64(features))
	v.message(msgSetProtocolFeatures, le64(protocolFeatures))
	if n := v.ask(msgGetQueueNum); n != maxRings {
		t.Fatalf("queues: got %d", n)
	}
	v.setMemory()
	for i := range v.queues {
		v.queues[i] = v.newQueue(i)
		v.queues[i].start(0)
	}
	return v
}

// dial connects a VMM without queues.
func (d *device) dial(t testing.TB) *vmm {
	t.Helper()
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: d.socket, Net: "unix"})
	kit.Must(t, err)
	kit.Must(t, c.SetDeadline(time.Now().Add(kit.Timeout)))
	v := &vmm{t: t, conn: c, unique: 1000}
	v.memfd, err = unix.MemfdCreate("guest", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	kit.Must(t, err)
	kit.Must(t, unix.Ftruncate(v.memfd, memSize))
	if !d.unsealed { // as memory-backend-memfd of QEMU
		_, err = unix.FcntlInt(uintptr(v.memfd), unix.F_ADD_SEALS, membuf.Sealed)
		kit.Must(t, err)
	}
	v.mem, err = unix.Mmap(v.memfd, 0, memSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	kit.Must(t, err)
	t.Cleanup(func() {
		c.Close()
		unix.Munmap(v.mem)
		unix.Close(v.memfd)
		for _, q := range v.queues {
			if q != nil {
				unix.Close(q.kick)
				unix.Close(q.call)
			}
		}
	})
	return v
}

func le64(v uint64) []byte      { return binary.LittleEndian.AppendUint64(nil, v) }
func state(index, v int) []byte { return le64(uint64(index) | uint64(v)<<32) }

// send sends a message.
func (v *vmm) send(kind, flags uint32, payload []byte, fds ...int) error {
	b := binary.LittleEndian.AppendUint32(nil, kind)
	b = binary.LittleEndian.AppendUint32(b, flags|messageVersion)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(payload)))
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	_, _, err := v.conn.WriteMsgUnix(append(b, payload...), oob, nil)
	return err
}

// receive reads the payload of a reply.
func (v *vmm) receive() ([]byte, error) {
	b := make([]byte, 64)
	n, err := v.conn.Read(b)
	if err != nil || n < messageHeader {
		return nil, err
	}
	return b[messageHeader:n], nil
}

// message sends a message and waits until it is executed.
func (v *vmm) message(kind uint32, payload []byte, fds ...int) {
	v.t.Helper()
	kit.Must(v.t, v.send(kind, flagNeedReply, payload, fds...))
	if kind == msgSetOwner || kind == msgSetFeatures || kind == msgSetProtocolFeatures {
		if kind == msgSetProtocolFeatures {
			_, err := v.receive()
			kit.Must(v.t, err)
		}
		return // before REPLY_ACK is negotiated
	}
	reply, err := v.receive()
	if err != nil || len(reply) != 8 || binary.LittleEndian.Uint64(reply) != 0 {
		v.t.Fatalf("message %d: got %v, %v", kind, reply, err)
	}
}

func (v *vmm) ask(kind uint32) uint64 {
	v.t.Helper()
	kit.Must(v.t, v.send(kind, 0, nil))
	reply, err := v.receive()
	kit.Must(v.t, err)
	return binary.LittleEndian.Uint64(reply)
}

func memTable(regions ...region) []byte {
	b := le64(uint64(len(regions)))
	for _, r := range regions {
		for _, n := range []uint64{r.guest, r.size, r.user, r.offset} {
			b = binary.LittleEndian.AppendUint64(b, n)
		}
	}
	return b
}

// setMemory gives the memory in two regions.
func (v *vmm) setMemory() {
	const first = 2 << 20
	v.message(msgSetMemTable, memTable(region{guestBase, first, userBase, 0},
		region{guestBase + first, memSize - first, userBase + first, first}), v.memfd, v.memfd)
}

func (v *vmm) newQueue(index int) *queue {
	q := &queue{v: v, index: index}
	var err error
	q.kick, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	kit.Must(v.t, err)
	q.call, err = unix.Eventfd(0, unix.EFD_CLOEXEC)
	kit.Must(v.t, err)
	return q
}

func (q *queue) at(off int) int    { return q.index*ringSpace + off }
func (q *queue) desc(i int) []byte { return q.v.mem[q.at(i*descSize):][:descSize] }
func (q *queue) availRing() []byte { return q.v.mem[q.at(4096):][:4096] }
func (q *queue) usedRing() []byte  { return q.v.mem[q.at(8192):][:4096] }

// start starts the queue at an index.
func (q *queue) start(base int) {
	v := q.v
	v.message(msgSetVringNum, state(q.index, ringSize))
	v.message(msgSetVringBase, state(q.index, base))
	addr := le64(uint64(q.index))
	for _, off := range []int{0, 8192, 4096} {
		addr = binary.LittleEndian.AppendUint64(addr, uint64(userBase+q.at(off)))
	}
	v.message(msgSetVringAddr, append(addr, make([]byte, 8)...))
	v.message(msgSetVringCall, le64(uint64(q.index)), q.call)
	v.message(msgSetVringKick, le64(uint64(q.index)), q.kick)
	v.message(msgSetVringEnable, state(q.index, 1))
}

// stop stops the queue and returns its index.
func (q *queue) stop() int {
	q.v.t.Helper()
	kit.Must(q.v.t, q.v.send(msgGetVringBase, 0, state(q.index, 0)))
	reply, err := q.v.receive()
	kit.Must(q.v.t, err)
	return int(binary.LittleEndian.Uint32(reply[4:]))
}

func putDescriptor(b []byte, addr uint64, size, flags, next int) {
	binary.LittleEndian.PutUint64(b, addr)
	binary.LittleEndian.PutUint32(b[8:], uint32(size))
	binary.LittleEndian.PutUint16(b[12:], uint16(flags))
	binary.LittleEndian.PutUint16(b[14:], uint16(next))
}

func slotAt(slot int) int { return slotBase + slot*slotSize }

// prepare puts a request into the descriptors of a slot.
func (q *queue) prepare(slot int, in []byte, out int) {
	at := slotAt(slot)
	copy(q.v.mem[at:at+half], in)
	flags := 0
	if out > 0 {
		flags = descNext
	}
	putDescriptor(q.desc(2*slot), guestBase+uint64(at), len(in), flags, 2*slot+1)
	putDescriptor(q.desc(2*slot+1), guestBase+uint64(at+half), out, descWrite, 0)
}

// offer makes a descriptor available.
func (q *queue) offer(head int) {
	ring := q.availRing()
	binary.LittleEndian.PutUint16(ring[ringHeader+availElement*(int(q.avail)%ringSize):], uint16(head))
	q.avail++
	atomic.StoreUint32((*uint32)(unsafe.Pointer(&ring[0])), uint32(q.avail)<<16)
	_, _ = unix.Write(q.kick, oneInterrupt)
}

// used waits for a request that the device gives back, and returns its first descriptor and size.
// It waits for the interrupt before it looks again, as a guest does.
func (q *queue) used() (head, size int, ok bool) {
	ring := q.usedRing()
	for {
		if uint16(atomic.LoadUint32((*uint32)(unsafe.Pointer(&ring[0])))>>16) != q.lastUsed {
			e := ring[ringHeader+usedElement*(int(q.lastUsed)%ringSize):]
			q.lastUsed++
			return int(binary.LittleEndian.Uint32(e)), int(binary.LittleEndian.Uint32(e[4:])), true
		}
		q.poll[0] = unix.PollFd{Fd: int32(q.call), Events: unix.POLLIN}
		switch n, err := unix.Poll(q.poll[:], int(kit.Timeout.Milliseconds())); {
		case n == 1:
			_, _ = unix.Read(q.call, q.count[:])
		case err == nil:
			return 0, 0, false
		}
	}
}

// do sends a request in slot 0 and returns the data of the reply.
func (q *queue) do(in []byte, out int) ([]byte, syscall.Errno) {
	q.v.t.Helper()
	q.prepare(0, in, out+replySize)
	q.offer(0)
	head, size, ok := q.used()
	if !ok || head != 0 {
		q.v.t.Fatalf("no reply to opcode %d", binary.LittleEndian.Uint32(in[4:]))
	}
	return q.reply(0, size)
}

func (q *queue) reply(slot, size int) ([]byte, syscall.Errno) {
	q.v.t.Helper()
	b := q.v.mem[slotAt(slot)+half:][:size]
	if size < replySize || int(binary.LittleEndian.Uint32(b)) != size {
		q.v.t.Fatalf("reply of %d bytes: % x", size, b[:min(size, 16)])
	}
	want := binary.LittleEndian.Uint64(q.v.mem[slotAt(slot)+8:])
	if got := binary.LittleEndian.Uint64(b[8:]); got != want {
		q.v.t.Fatalf("number of the reply: got %d, want %d", got, want)
	}
	return bytes.Clone(b[replySize:]), syscall.Errno(-int32(binary.LittleEndian.Uint32(b[4:])))
}

// encode encodes a request: a structure that begins with a fuse.InHeader, and data.
func encode[T any](v *vmm, op kernel.Op, node uint64, body T, data ...string) []byte {
	b := append(bytes.Clone(bytesOf(&body)), strings.Join(data, "")...)
	h := (*fuse.InHeader)(unsafe.Pointer(&b[0]))
	v.unique++
	h.Opcode, h.Unique, h.NodeId, h.Length, h.Pid = uint32(op), v.unique, node, uint32(len(b)), 1
	return b
}

func bytesOf[T any](v *T) []byte { return unsafe.Slice((*byte)(unsafe.Pointer(v)), unsafe.Sizeof(*v)) }

// out decodes a reply.
func out[T any](t testing.TB, b []byte, errno syscall.Errno) *T {
	t.Helper()
	var v T
	if errno != 0 || len(b) < int(unsafe.Sizeof(v)) {
		t.Fatalf("reply: got %v, %d bytes", errno, len(b))
	}
	copy(bytesOf(&v), b)
	return &v
}

// mount begins a FUSE session.
func (v *vmm) mount() *fuse.InitOut {
	v.t.Helper()
	b, errno := v.queues[1].do(encode(v, kernel.OpInit, 0, fuse.InitIn{Major: 7, Minor: 39, MaxReadAhead: 1 << 20,
		Flags: fuse.CAP_ASYNC_READ | fuse.CAP_BIG_WRITES | fuse.CAP_MAX_PAGES}), 256)
	return out[fuse.InitOut](v.t, b, errno)
}

func (q *queue) lookup(dir uint64, name string) (*fuse.EntryOut, syscall.Errno) {
	q.v.t.Helper()
	b, errno := q.do(encode(q.v, kernel.OpLookup, dir, fuse.InHeader{}, name, "\x00"), 256)
	if errno != 0 {
		return nil, errno
	}
	return out[fuse.EntryOut](q.v.t, b, errno), 0
}

func (q *queue) create(dir uint64, name string) *fuse.CreateOut {
	q.v.t.Helper()
	in := fuse.CreateIn{Flags: syscall.O_RDWR, Mode: 0o644}
	b, errno := q.do(encode(q.v, kernel.OpCreate, dir, in, name, "\x00"), 256)
	return out[fuse.CreateOut](q.v.t, b, errno)
}

func (q *queue) write(fh, node, off uint64, data string) syscall.Errno {
	q.v.t.Helper()
	in := fuse.WriteIn{Fh: fh, Offset: off, Size: uint32(len(data))}
	_, errno := q.do(encode(q.v, kernel.OpWrite, node, in, data), 64)
	return errno
}

func ptr(b []byte) unsafe.Pointer { return unsafe.Pointer(&b[0]) }

// scribble changes memory that others use.
//
//go:norace
func scribble(b []byte, v byte) {
	for i := 0; i < len(b); i += 512 {
		b[i] += v
	}
}
